"""The one place that launches a Triton kernel, records a launch, or compiles one for a GPU that is not here.

Rooms call `launch(kernel, grid, *args, **constants)`. A `listener` is told of launches and how to repeat them.
Inside `recording()` nothing runs: the launches are kept, and `compile_for(launch, arch)` turns each into machine code
with its registers, stack and shared memory, on any machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flashkernel.core import env, state, versions
from flashkernel.core.device import Device
from flashkernel.core.device import facts as device_facts
from flashkernel.core.driver import Launched, TensorMap

MOST_PDL_BYTES = 8 << 20  # that a row-by-row kernel moves at most to be launched by PDL
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion", "ptx_options")
_recorder: ContextVar[list[Launch] | None] = ContextVar("flashkernel_recorder", default=None)
_listener: ContextVar[Any] = ContextVar("flashkernel_listener", default=None)


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments it would have been launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@dataclass(frozen=True)
class Machine:
    """What the compiler made of a launch."""

    registers: int
    stack: int  # bytes per thread; anything above zero is a spill or a run-time-indexed array
    shared: int  # bytes per block
    cubin: bytes

    @cached_property
    def sass(self) -> str:
        """The disassembly."""
        return disassembled(self.cubin)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the current stream of its first tensor's device; a grid of zero launches nothing."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.append(Launch(kernel, grid, args, constants))
        return
    if 0 in grid:
        return
    launched: Launched | str
    listener = _listener.get()
    if listener is None:
        _run(kernel, grid, args, constants)
        return
    with listener.aside():
        code = _run(kernel, grid, args, constants)
        try:
            launched = _launched(kernel, code, grid, args, constants)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # what a version of triton calls otherwise
            launched = f"what this version of triton launched is not understood ({type(error).__name__}: {error})"
    listener.launched(launched)


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """The compiled kernel, which was launched."""
    first = args[0]
    device = first.device if isinstance(first, torch.Tensor) else first.base.device  # or a tensor descriptor
    if not env.interpreting():
        constants = versions.compile_options(device_facts(device).arch) | constants
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **constants)
    return kernel[grid](*args, **constants)


def _launched(
    kernel: Any, code: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> Launched | str:
    """What it takes to launch this again, or the reason why that is not known."""
    values = {**dict(zip(kernel.arg_names, args)), **constants}
    missing = [name for name in kernel.arg_names if name not in values]
    if missing:
        return f"{kernel.fn.__name__} was launched with a default value for {missing[0]}"
    bound = [values[name] for name in kernel.arg_names]
    if env.interpreting():
        return _interpreted(kernel, grid, bound)
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
    params += [("P", None), ("P", None)]  # scratch memory, of which there is none
    x, y, z = (*grid, 1, 1)[:3]
    launched = Launched(
        code.name, tuple(params), code.function, (x, y, z), (32 * warps, 1, 1), shared,
        bool(metadata.launch_pdl), bool(metadata.launch_cooperative_grid), owner=code,
    )  # fmt: skip
    return launched.mismatch() or launched


def _interpreted(kernel: Any, grid: tuple[int, ...], bound: list[Any]) -> Launched:
    """A launch under Triton's interpreter, which takes tensors, descriptors and tuples of tensors as they are."""
    params: list[tuple[str, Any]] = []
    for value in bound:
        for element in value if isinstance(value, tuple) else (value,):
            params.append(("P", element.base if _is_descriptor(element) else element))

    def rerun(values: Sequence[Any]) -> None:
        rest = iter(values)
        kernel[grid](*[_like(value, rest) for value in bound])

    return Launched(kernel.fn.__name__, tuple(params), rerun=rerun)


def _like(value: Any, rest: Iterator[Any]) -> Any:
    """An argument of the same form, made of the next values."""
    if isinstance(value, tuple):
        return tuple(next(rest) for _ in value)
    return _rebased(value, next(rest)) if _is_descriptor(value) else next(rest)


def _is_descriptor(value: Any) -> bool:
    return isinstance(getattr(value, "base", None), torch.Tensor) and not isinstance(value, torch.Tensor)


def _rebased(like: Any, base: torch.Tensor) -> Any:
    """The same tensor descriptor, of other memory."""
    made: Any = object.__new__(type(like))
    made.__dict__.update(vars(like), base=base)
    return made


class _Unsupported(Exception):
    """A parameter whose packing is not known."""


_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


def _flatten(kind: Any, value: Any, maps: Iterator[Any], params: list[tuple[str, Any]]) -> None:
    """Append the parameters that an argument of Triton's type `kind` becomes."""
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
def listener(listening: Any) -> Iterator[None]:
    """Tell `listening.launched` of every launch inside: a `Launched`, or the reason (str) why it cannot be repeated.
    Kernels run within its `aside()`: Triton's interpreter uses torch."""
    token = _listener.set(listening)
    try:
        with state.suspended():
            yield
    finally:
        _listener.reset(token)


def mark_written(x: torch.Tensor) -> None:
    """Let autograd notice a write to an argument that torch did not make."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
    listening = _listener.get()
    if listening is not None:
        listening.written(x)


def heard(launched: Launched | str) -> None:
    """Tell the listener, if there is one, of a launch that was made by other ways than `launch`."""
    listening = _listener.get()
    if listening is not None:
        listening.launched(launched)


def listened() -> bool:
    """Whether anybody listens to launches."""
    return _listener.get() is not None


def pdl_options(facts: Device, moved: int = 0) -> dict[str, bool]:
    """Constants of a kernel that may use programmatic dependent launch (blocks/pdl_triton.py), from sm_90 on.

    A kernel that moves many bytes (`moved`) is launched without: waiting programs would take SM slots from it.
    """
    early = facts.kind == "cuda" and facts.arch >= 90 and moved <= MOST_PDL_BYTES and not env.interpreting()
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        with state.suspended():
            yield launches
    finally:
        _recorder.reset(token)


def compile_for(recorded: Launch, arch: int) -> Machine:
    """Compile a recorded launch for `sm_<arch>`, with the specialisations its real arguments would have had."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    options = versions.compile_options(arch) | {
        name: value for name, value in recorded.constants.items() if name in _OPTIONS
    }
    constants = {name: value for name, value in recorded.constants.items() if name not in _OPTIONS}
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    inner: dict[tuple[int, ...], Any] = {}  # elements of tuples that are compiled in
    values = {**dict(zip(recorded.kernel.arg_names, recorded.args)), **constants}
    for position, name in enumerate(recorded.kernel.arg_names):
        value = values[name]
        if isinstance(value, tuple):
            kinds = [_argument(element, constexpr=False) for element in value]
            signature[name] = tuple(kind for kind, _ in kinds)
            attributes |= {(position, place): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if kind[1]}
            inner |= {(position, place): value[place] for place, kind in enumerate(kinds) if kind[0] == "constexpr"}
            continue
        kind, divisible = _argument(value, constexpr=name in constants)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif divisible:
            attributes[(position,)] = [["tt.divisibility", 16]]
    places: dict[tuple[int, ...], Any] = {
        (recorded.kernel.arg_names.index(name),): value for name, value in constants.items()
    }
    places |= inner
    language = GluonASTSource if recorded.kernel.is_gluon() else ASTSource
    source = language(recorded.kernel, signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = compiled.asm["cubin"]
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", cubin))
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage of {recorded.name}")
    return Machine(int(found[1]), int(found[2]), compiled.metadata.shared, cubin)


def _argument(value: Any, constexpr: bool) -> tuple[str, bool]:
    """Triton's type name of an argument, and whether it counts as divisible by 16."""
    from triton.runtime.jit import mangle_type

    if constexpr or value is None or (type(value) is int and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return mangle_type(value), True  # torch aligns allocations far beyond 16 bytes
    return mangle_type(value), type(value) is int and value % 16 == 0


def disassembled(cubin: bytes) -> str:
    """The SASS of a cubin."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    """What the tool in Triton's wheel prints about a cubin."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
