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
    sass: str

    @property
    def spills_in_loops(self) -> int:
        """Stores to the stack inside the loops where they cost (`_in_loops`)."""
        return self._in_loops("STL")

    @property
    def reloads_in_loops(self) -> int:
        """Loads from the stack there, also of values that were parked outside: cheap while L1 has them, which it has
        not where other traffic pushes them out."""
        return self._in_loops("LDL")

    def _in_loops(self, instruction: str) -> int:
        """How often it stands in the innermost loops, or the innermost of those that issue asynchronous products: a
        small loop that waits for a barrier may lie inside one."""
        if instruction not in self.sass:
            return 0
        code = [(int(found[1], 16), found[2]) for found in re.finditer(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", self.sass)]
        loops = _loops(code)
        multiplying = [loop for loop in loops if any(re.search("[HQ]GMMA", code[place][1]) for place in loop)]
        counted = set[int]().union(*_innermost(loops), *_innermost(multiplying))
        return sum(instruction in code[place][1] for place in counted)


def _innermost(loops: list[set[int]]) -> list[set[int]]:
    return [loop for loop in loops if not any(other < loop for other in loops)]


def _loops(code: list[tuple[int, str]]) -> list[set[int]]:
    """The places of each loop, in code given as addresses and instructions.

    A loop ends in a jump back to a place that every way to the jump leads through. Not every jump back is one: waiting
    for a barrier is compiled out of line, and returns to where it was left.
    """
    place_of = {address: place for place, (address, _) in enumerate(code)}
    after: list[list[int]] = []
    before: list[list[int]] = [[] for _ in code]
    for place, (_, text) in enumerate(code):
        jump = re.search(r"BRA.* (0x[0-9a-f]+)", text)
        ways = [place_of[int(jump[1], 16)]] if jump and int(jump[1], 16) in place_of else []
        if place + 1 < len(code) and not re.match(r"BRA 0x|BRX|EXIT|RET|JMP", text):
            ways.append(place + 1)
        after.append(ways)
        for way in ways:
            before[way].append(place)
    reached: set[int] = set()
    entries = []
    for place in range(len(code)):  # beside the first, only where jumps through a table lead
        if place not in reached:
            entries.append(place)
            reached |= _reachable([place], after)
    loops: dict[int, set[int]] = {}  # of all jumps back to a place
    for place, ways in enumerate(after):
        for head in ways:
            if head <= place and place not in _reachable(entries, after, without=head):
                loops.setdefault(head, {head}).update(_reachable([place], before, without=head))
    return list(loops.values())


def _reachable(starts: list[int], ways: list[list[int]], without: int = -1) -> set[int]:
    """Where `ways` lead from `starts`, themselves included, never through one place."""
    found: set[int] = set()
    waiting = [start for start in starts if start != without]
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting.extend(way for way in ways[place] if way != without)
    return found


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
    registers, stack, sass = _inspect(compiled.asm["cubin"])
    return Machine(registers, stack, compiled.metadata.shared, sass)


def _argument(value: Any, constexpr: bool) -> tuple[str, bool]:
    """Triton's type name of an argument, and whether it counts as divisible by 16."""
    from triton.runtime.jit import mangle_type

    if constexpr or value is None or (type(value) is int and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return mangle_type(value), True  # torch aligns allocations far beyond 16 bytes
    return mangle_type(value), type(value) is int and value % 16 == 0


def _inspect(cubin: bytes) -> tuple[int, int, str]:
    """Registers, stack bytes and disassembly of a cubin, by the tools in Triton's wheel."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage:\n{usage.stdout}{usage.stderr}")
    return int(found[1]), int(found[2]), sass
