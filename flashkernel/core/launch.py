"""The one place that launches a Triton kernel, records a launch, or compiles one for a GPU that is not here.

Rooms call `launch(kernel, grid, *args, **constants)`. A `listener` hears of launches, and how to make them again.
Inside `recording()` nothing runs: the launches are kept, and `compile_for(launch, arch)` turns each into machine code
with its registers, stack and shared memory, on any machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flashkernel.core import env
from flashkernel.core.device import Device

MOST_CHAINED = 8 << 20  # bytes that a row-by-row kernel moves at most to be launched early
_REPEATABLE = ("3.6.",)  # versions of triton whose compiled kernels are launched without asking it anew
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
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


@dataclass(frozen=True)
class Launched:
    """A launch that was made, with its arguments in order; `code` is what ran, None under Triton's interpreter."""

    kernel: Any
    code: Any
    grid: tuple[int, ...]
    bound: tuple[Any, ...]
    settings: Any  # Triton's, where hooks are hung

    def again(self, bound: list[Any], stream: int) -> None:
        """Launch once more, with arguments that the same machine code fits; addresses may stand for tensors."""
        code = self.code
        if code is None:
            self.kernel[self.grid](*bound)
            return
        if _anyone(self.settings.launch_enter_hook) or _anyone(self.settings.launch_exit_hook):  # a profiler listens
            code[self.grid](*bound, stream=stream)
        else:
            code.run(*self.grid, stream, code.function, code.packed_metadata, None, None, None, *bound)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the current stream of its first tensor's device; a grid of zero launches nothing."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.append(Launch(kernel, grid, args, constants))
        return
    if 0 in grid:
        return
    listener = _listener.get()
    if listener is None:
        _run(kernel, grid, args, constants)
        return
    with listener.aside():
        code = _run(kernel, grid, args, constants)
    listener.launched(_launched(kernel, code, grid, args, constants))


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """The compiled kernel, which was launched."""
    first = args[0]
    device = first.device if isinstance(first, torch.Tensor) else first.base.device  # or a tensor descriptor
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **constants)
    return kernel[grid](*args, **constants)


def _launched(
    kernel: Any, code: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> Launched | None:
    """None where it could not be launched again: by a triton whose ways are not known."""
    import triton

    values = {**dict(zip(kernel.arg_names, args)), **constants}
    if any(name not in values for name in kernel.arg_names):
        return None
    bound = tuple([values[name] for name in kernel.arg_names])
    if env.interpreting():
        return Launched(kernel, None, grid, bound, None)
    if not triton.__version__.startswith(_REPEATABLE):
        return None
    return Launched(kernel, code, (*grid, 1, 1)[:3], bound, triton.knobs.runtime)


def _anyone(hook: Any) -> bool:
    """Whether a launch hook of Triton's does something."""
    return hook is not None and bool(getattr(hook, "calls", True))


@contextmanager
def listener(listening: Any) -> Iterator[None]:
    """Tell `listening.launched` of every launch inside; of one that cannot be made again it hears None. Kernels run
    within its `aside()`: Triton's interpreter uses torch."""
    token = _listener.set(listening)
    try:
        yield
    finally:
        _listener.reset(token)


def listening() -> bool:
    """Whether launches are recorded or listened to."""
    return _recorder.get() is not None or _listener.get() is not None


def unrepeatable() -> None:
    """Something is launched by other ways than these."""
    heard = _listener.get()
    if heard is not None:
        heard.launched(None)


def chained(facts: Device, moved: int = 0) -> dict[str, bool]:
    """Constants of a kernel that joins the chain of blocks/chain_triton.py: from sm_90 on it may be launched early.

    One that moves many bytes wants the multiprocessors to itself: programs that wait for it take its seats.
    """
    early = facts.kind == "cuda" and facts.arch >= 90 and moved <= MOST_CHAINED and not env.interpreting()
    return {"CHAINED": True, "launch_pdl": True} if early else {"CHAINED": False}


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def compile_for(recorded: Launch, arch: int) -> Machine:
    """Compile a recorded launch for `sm_<arch>`, with the specialisations its real arguments would have had."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    options = {name: value for name, value in recorded.constants.items() if name in _OPTIONS}
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
