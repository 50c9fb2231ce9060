"""Expressions as CUDA C++ text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.nodes import FLOAT, Constant, Expression, Gather, Operation, Variable, read_dtype

_CUDA = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "(static_cast<float>({}) / static_cast<float>({}))",
    "floordiv": "floor_div({}, {})",
    "mod": "floor_mod({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    # Bitwise: both sides are computed, and no branches keep a tile's conditions in registers.
    "and": "({} & {})",
    "or": "({} | {})",
    "not": "(!{})",
    "bitand": "({} & {})",
    "bitor": "({} | {})",
    "where": "({} ? {} : {})",
    "tanh": "tanhf(static_cast<float>({}))",
    "exp": "expf(static_cast<float>({}))",
}
_TYPES = {
    torch.bool: "bool", torch.uint8: "unsigned char", torch.int8: "signed char", torch.int16: "short",
    torch.int32: "int", torch.int64: "long long", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float", torch.float64: "double",
}  # fmt: skip
_READ = {torch.bool: "bool", torch.int32: "int", torch.int64: "long long", torch.float32: "float"}


def cuda_source(expression: Expression, found: list[Tensor]) -> str:
    """The expression as CUDA C++ over the variables' names and `tables`, a struct of the tensors of `found`."""
    if isinstance(expression, Variable):
        return expression.name
    if isinstance(expression, Constant):
        return _literal(expression.value)
    if isinstance(expression, Gather):
        return _load(expression, found)
    assert isinstance(expression, Operation)
    texts = [cuda_source(arg, found) for arg in expression.args]
    if expression.name == "abs":
        return f"{'fabsf' if expression.kind == FLOAT else 'abs'}({texts[0]})"
    if expression.name in ("min", "max"):
        kind = "float" if expression.kind == FLOAT else "int"
        return f"{expression.name}_{kind}({texts[0]}, {texts[1]})"
    return _CUDA[expression.name].format(*texts)


def table_macros(found: list[Tensor]) -> dict[str, str]:
    """The macros that make the tables kernel parameters and a struct (ops/attention/cuda/scores.cuh)."""
    if not found:
        return {}
    declared = [declaration for index, table in enumerate(found) for declaration in _declarations(index, table)]
    return {
        "TABLE_PARAMETERS": "".join(f", {kind} {name}" for kind, name in declared),
        "TABLE_FIELDS": "".join(f"{kind} {name};" for kind, name in declared),
        "TABLE_VALUES": ", ".join(name for _, name in declared),
    }


def table_arguments(found: list[Tensor]) -> tuple[tuple[Any, ...], str]:
    """(the tables as kernel arguments, their declared types as core/cuda.py takes them)."""
    values = tuple(value for table in found for value in (table, *table.shape, *table.stride()))
    kinds = "".join(f", pointer{', int32' * table.ndim}{', int64' * table.ndim}" for table in found)
    return values, kinds


def _declarations(index: int, table: Tensor) -> list[tuple[str, str]]:
    sizes = [("int", f"t{index}_size{dim}") for dim in range(table.ndim)]
    strides = [("long long", f"t{index}_stride{dim}") for dim in range(table.ndim)]
    return [(f"const {_TYPES[table.dtype]}*", f"t{index}"), *sizes, *strides]


def _literal(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"({value})" if value > -(2**31) else "(-2147483647 - 1)"
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
    return f"({value!r}f)" if "." in repr(value) or "e" in repr(value) else f"({value!r}.f)"


def _load(gather: Gather, found: list[Tensor]) -> str:
    table = next(index for index, one in enumerate(found) if one is gather.table)
    indices = [cuda_source(index, found) for index in gather.indices]
    name = f"tables.t{table}"
    inside = " && ".join(f"({index}) >= 0 && ({index}) < {name}_size{dim}" for dim, index in enumerate(indices))
    offset = " + ".join(f"({index}) * {name}_stride{dim}" for dim, index in enumerate(indices))
    return f"static_cast<{_READ[read_dtype(gather.table)]}>(table_at({name}, {offset}, {inside}))"
