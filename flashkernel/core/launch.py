"""The only place that launches a Triton kernel.

Launchers call `launch(kernel, grid, *args, **constants)`. Inside `observe(observer)` the observer gets a `LaunchRecord`
of every launch, from which the driver can repeat it (core/recording.py). Inside `collect_launches()` nothing runs: the
launches are returned with their arguments, e.g. to be compiled for a GPU that is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashkernel.core import cache_key, env, replay_switch, versions
from flashkernel.core.context import assigned
from flashkernel.core.device import Device
from flashkernel.core.device import properties as device_properties
from flashkernel.core.driver import LaunchRecord, TensorMap

MAX_PDL_BYTES = 8 << 20  # a row-wise kernel that moves more is launched without PDL
_collected: ContextVar[list[Launch] | None] = ContextVar("flashkernel_collected_launches", default=None)
_observer: ContextVar[LaunchObserver | None] = ContextVar("flashkernel_launch_observer", default=None)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments, collected instead of launched."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class LaunchObserver(Protocol):
    """Learns of every kernel launch inside `observe`."""

    def paused(self) -> AbstractContextManager[None]:
        """A context in which torch operations are not part of the observed call: Triton's interpreter uses torch."""

    def on_launch(self, record: LaunchRecord | str) -> None:
        """A kernel was launched. A string is the reason why the launch cannot be repeated."""

    def on_write(self, x: torch.Tensor) -> None:
        """A kernel wrote to an argument of the call."""

    def on_derived(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """`function(*tensors)` was looked up, or made (core/derived.py)."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on the current stream of its first tensor's device; a grid with a 0 launches nothing.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function.
        grid: Number of programs along up to three dimensions.
        args: The kernel's positional arguments; one of them is a tensor or a tensor descriptor.
        constants: Its constexpr arguments, and Triton's launch options (`num_warps`, `num_stages`, ...).
    """
    collected = _collected.get()
    if collected is not None:
        collected.append(Launch(kernel, grid, args, constants))
        return
    if 0 in grid:
        return
    record: LaunchRecord | str
    observer = _observer.get()
    if observer is None:
        _run(kernel, grid, args, constants)
        return
    with observer.paused():
        code = _run(kernel, grid, args, constants)
        try:
            record = _launch_record(kernel, code, grid, args, constants)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a Triton version with other attributes
            record = f"what this version of triton launched is not understood ({type(error).__name__}: {error})"
    observer.on_launch(record)


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Launch and return the compiled kernel."""
    device = _device(args)
    if not env.interpreting():
        cache_key.compute_cache_keys(kernel)
        constants = versions.compile_options(device_properties(device).arch) | constants
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **constants)
    return kernel[grid](*args, **constants)


def _device(args: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor, or tensor descriptor, among the arguments of a launch."""
    for arg in args:
        first = arg[0] if isinstance(arg, tuple) and arg else arg
        if isinstance(first, torch.Tensor):
            return first.device
        if hasattr(first, "base"):
            return first.base.device
    raise TypeError("launch: no argument is a tensor or a tensor descriptor")


def _launch_record(
    kernel: Any, code: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> LaunchRecord | str:
    """The record that the driver repeats this launch from, or the reason why there is none."""
    values = {**dict(zip(kernel.arg_names, args)), **constants}
    missing = [name for name in kernel.arg_names if name not in values]
    if missing:
        return f"{kernel.fn.__name__} was launched with a default value for {missing[0]}"
    bound = [values[name] for name in kernel.arg_names]
    if env.interpreting():
        return _interpreted_record(kernel, grid, bound)
    metadata = code.metadata
    warps, clusters, shared = code.packed_metadata
    if clusters != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        return f"{code.name} needs a cluster of blocks or scratch memory"
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    params: list[tuple[str, Any]] = []
    try:
        for kind, value in zip(code.src.signature.values(), bound):
            _flatten(kind, value, maps, params)
    except _Unsupported as error:
        return f"{code.name}: {error}"
    params += [("P", None), ("P", None)]  # global and profile scratch memory: none
    x, y, z = (*grid, 1, 1)[:3]
    record = LaunchRecord(
        code.name, tuple(params), code.function, (x, y, z), (32 * warps, 1, 1), shared,
        bool(metadata.launch_pdl), bool(metadata.launch_cooperative_grid), owner=code,
    )  # fmt: skip
    return record.mismatch() or record


def _interpreted_record(kernel: Any, grid: tuple[int, ...], bound: list[Any]) -> LaunchRecord:
    """The record of a launch under Triton's interpreter, which takes tensors, descriptors and tuples of tensors."""
    params: list[tuple[str, Any]] = []
    structure: list[Any] = []  # of the arguments, without their tensors
    for value in bound:
        for element in value if isinstance(value, tuple) else (value,):
            params.append(("P", element.base if _is_descriptor(element) else element))
        if isinstance(value, tuple):
            structure.append(tuple_like(value, [None for _ in value]))
        else:
            structure.append(_rebased(value, None) if _is_descriptor(value) else None)

    def rerun(values: Sequence[Any]) -> None:
        rest = iter(values)
        kernel[grid](*[_rebuild(value, rest) for value in structure])

    return LaunchRecord(kernel.fn.__name__, tuple(params), rerun=rerun)


def _rebuild(value: Any, rest: Iterator[Any]) -> Any:
    """An argument with the structure of `value`, made of the next values of `rest`."""
    if isinstance(value, tuple):
        return tuple_like(value, [next(rest) for _ in value])
    return next(rest) if value is None else _rebased(value, next(rest))


def tuple_like(value: tuple[Any, ...], elements: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of the same type; a NamedTuple keeps the names by which kernels read its fields."""
    return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)


def _is_descriptor(value: Any) -> bool:
    return isinstance(getattr(value, "base", None), torch.Tensor) and not isinstance(value, torch.Tensor)


def _rebased(like: Any, base: torch.Tensor | None) -> Any:
    """The tensor descriptor `like` with another base tensor."""
    made: Any = object.__new__(type(like))
    made.__dict__.update(vars(like), base=base)
    return made


class _Unsupported(Exception):
    """A kernel parameter that cannot be packed."""


_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


def _flatten(kind: Any, value: Any, maps: Iterator[Any], params: list[tuple[str, Any]]) -> None:
    """Append the driver's parameters for one argument of Triton's type `kind`."""
    if isinstance(kind, tuple):
        for inner, element in zip(kind, value):
            _flatten(inner, element, maps, params)
    elif kind.startswith("tensordesc"):
        shape, strides, meta = list(value.shape), list(value.strides), next(maps, None)
        if meta is None or meta["fp4_padded"] or getattr(value, "round_f32_to_tf32", False):
            raise _Unsupported("a tensor descriptor that is no plain tensor map")
        params.append(("M", _tensor_map(value, shape, strides, meta)))
        params.extend(("i", size) for size in shape)
        params.extend(("q", stride) for stride in strides)
    elif kind.startswith("*"):
        params.append(("P", value))
    elif kind in _FORMATS:
        params.append((_FORMATS[kind], value))
    elif kind != "constexpr":
        raise _Unsupported(f"a parameter of type {kind}")


def _tensor_map(descriptor: Any, shape: list[int], strides: list[int], meta: Any) -> TensorMap:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    size = meta["elem_size"]
    return TensorMap(
        descriptor.base, TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], tuple(shape[::-1]),
        tuple(size * stride for stride in strides[-2::-1]), tuple(meta["block_size"][::-1]), meta["swizzle"],
        descriptor.padding == "nan",
    )  # fmt: skip


@contextmanager
def observe(observer: LaunchObserver) -> Iterator[None]:
    """Report every launch inside to `observer`. Kernels run within `observer.paused()`."""
    with replay_switch.scoped(_observer, observer):
        yield


def mark_written(x: torch.Tensor) -> None:
    """Increment the version counter of a tensor that a kernel wrote to, as torch's in-place operators do."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
    observer = _observer.get()
    if observer is not None:
        observer.on_write(x)


def notify_launch(record: LaunchRecord | str) -> None:
    """Report a launch that did not go through `launch` to the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer.on_launch(record)


def observer() -> LaunchObserver | None:
    """The observer inside `observe`."""
    return _observer.get()


def is_observed() -> bool:
    """True inside `observe`."""
    return _observer.get() is not None


def unobserved() -> AbstractContextManager[None]:
    """Launches inside are not reported."""
    return assigned(_observer, None)


def is_collecting() -> bool:
    """True inside `collect_launches`, where nothing runs."""
    return _collected.get() is not None


def pdl_options(device: Device, bytes_moved: int = 0) -> dict[str, bool]:
    """Launch options for programmatic dependent launch (PDL, blocks/pdl_triton.py), which sm_90 introduced.

    Args:
        device: The device to launch on.
        bytes_moved: Bytes the kernel reads and writes. Above MAX_PDL_BYTES it is launched without PDL: programs that
            wait for their predecessor would take SM slots from it.

    Returns:
        The kernel's constexpr `PDL`, and Triton's `launch_pdl` where it is True.
    """
    pdl = device.kind == "cuda" and device.arch >= 90 and bytes_moved <= MAX_PDL_BYTES and not env.interpreting()
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@contextmanager
def collect_launches() -> Iterator[list[Launch]]:
    """Collect the launches inside instead of running them."""
    launches: list[Launch] = []
    with replay_switch.scoped(_collected, launches):
        yield launches
