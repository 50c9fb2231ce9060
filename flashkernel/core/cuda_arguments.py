"""Arguments of CUDA C++ kernels: the types that a launch may declare, and values of them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from flashkernel.core.driver import TensorMap

# Names for kernel parameters, as they are declared: `kernel(name, "pointer, int32, float32")`.
ARGUMENT_TYPES: dict[str, type] = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "bool": ctypes.c_bool,
    "tensor_map": ctypes.c_char * 128,  # a TensorMap of core.driver, for a __grid_constant__ parameter
}


def undeclared(name: str, value: Any, index: int) -> Any:
    """Returns an argument of a kernel that declares none: a tensor's address, or a ctypes or numpy value as it is."""
    if isinstance(value, torch.Tensor) or value is None:
        return declared(name, "pointer", value, index)
    if type(value) in (bool, int, float):
        text = f"{name}: {value!r} has no declared type; pass a ctypes or numpy value, or declare the arguments"
        raise TypeError(f"{text}: kernel({name!r}, 'pointer, int32, ...')")
    return value


def declared(name: str, kind: str, value: Any, index: int) -> Any:
    """Returns an argument as cuda-core takes it: an address, or a ctypes value of the declared type."""
    if kind == "pointer":
        if value is None:
            return 0
        if isinstance(value, torch.Tensor):
            if value.get_device() != index:
                raise ValueError(f"{name}: a tensor is on {value.device} and the launch on cuda:{index}; move one")
            return value.data_ptr()
        if type(value) is int:
            return value
        raise TypeError(f"{name}: a pointer argument takes a tensor, None or an address, not {value!r}")
    if kind == "tensor_map":
        if not isinstance(value, TensorMap) or value.base.get_device() != index:
            raise ValueError(f"{name}: a tensor_map argument takes a TensorMap of a tensor on cuda:{index}")
        return value
    made = ARGUMENT_TYPES[kind](value)
    if made.value != value and kind not in ("float32", "float64"):
        raise OverflowError(f"{name}: {value!r} does not fit {kind}")
    return made
