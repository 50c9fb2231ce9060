"""Runs a recorded Gluon launch on the CPU: warps become threads, and what is asynchronous happens at random times.

Triton has no interpreter for Gluon. This one knows what the kernels of this project use: it checks their arithmetic,
every address, that barriers are neither missed nor overrun, and that a buffer is not overwritten while it is read. A
matrix product reads its operands, and a tile copy moves its bytes, at some moment between issue and wait. When all
threads wait and nothing is under way, that is reported as a deadlock. One thread runs at a time, and the seed decides
which, so that a failure can be repeated. Layouts are not looked at.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.launch import Launch, notify_launch


class Deadlock(AssertionError):
    pass


UNSIGNED = "uint32"  # torch cannot multiply such tensors: they are int64, cut off


class Value(Tensor):
    """A value of the kernel's: assignment operators make a new one, as they do there."""

    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__
    __iand__ = Tensor.__and__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for any subclass of Tensor, without the search for functions whose results are not wrapped."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, (tuple, list)):
            return type(result)(_value(one) if isinstance(one, Tensor) else one for one in result)
        return result.as_subclass(cls) if isinstance(result, Tensor) else result

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        if dtype == UNSIGNED:
            return super().to(torch.int64) & 0xFFFFFFFF
        return self.contiguous().view(dtype) if bitcast else super().to(dtype)


def _value(tensor: Tensor) -> Value:
    return tensor.as_subclass(Value)


class Machine:
    """One program: threads that run one at a time, and events that are still to happen."""

    def __init__(self, program: int, programs: int, chance: random.Random) -> None:
        self.program, self.programs, self.chance = program, programs, chance
        self.parked: dict[Any, Callable[[], bool]] = {}  # threads that do not run, and what each waits for
        self.turns: dict[Any, threading.Lock] = {}  # taken while a thread is parked
        self.events: list[tuple[int, Callable[[], None]]] = []  # (thread, what happens)
        self.failure: BaseException | None = None
        self.named: dict[int, set[int]] = {}  # who has come to a named barrier

    def later(self, event: Callable[[], None]) -> None:
        self.events.append((threading.get_ident(), event))

    def happen(self, share: float = 1.0, thread: int | None = None) -> None:
        """Let each event under way take place with a probability; those of one thread in their order."""
        left: list[tuple[int, Callable[[], None]]] = []
        stopped: set[int] = set()
        for owner, event in self.events:
            if owner in stopped or (thread is not None and owner != thread) or self.chance.random() > share:
                stopped.add(owner)
                left.append((owner, event))
            else:
                event()
        self.events = left

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Block the calling thread until `ready`; others run meanwhile."""
        self.happen(0.5)
        if not ready():
            self._park(ready, what)
        self.pause(0.3)

    def pause(self, share: float) -> None:
        """With a probability, let the others go first."""
        if self.chance.random() < share:
            self._park(lambda: True, "its turn")

    def _park(self, ready: Callable[[], bool], what: str) -> None:
        """Hand the turn on, until it comes back to the calling thread; the seed decides who has it when."""
        thread = getattr(_local, "thread", "the program")
        self.parked[thread] = ready
        turn = self.turns.setdefault(thread, _taken())
        try:
            self.hand_on(what)
        except BaseException:
            self.parked.pop(thread, None)
            raise
        turn.acquire()
        if self.failure is not None:
            raise self.failure

    def hand_on(self, what: str = "") -> None:
        """Give the turn to a parked thread that can go on; where none can, all that is under way happens first."""
        able = self._able()
        if not able:
            self.happen()
            able = self._able()
        if not able:
            self.failure = self.failure or Deadlock(f"program {self.program}: all wait, one for {what}")
            able = self._able()
        chosen = self.chance.choice(able)
        del self.parked[chosen]
        self.turns[chosen].release()

    def _able(self) -> list[Any]:
        """The parked threads that can go on: after a failure, all of them can."""
        return [thread for thread, ready in self.parked.items() if self.failure is not None or ready()]


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_local = threading.local()


def _machine() -> Machine:
    return _local.machine


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.ready = False

    def stores_done(self) -> None:
        assert self.ready, "a barrier is used before it is initialized"
        assert self.pending >= 0, "a barrier is arrived at more often than it counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        return self.all[int(place)]


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype = data.dtype

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < self.data.shape[0]
        return Shared(self.data[int(place)])

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.data.view([int(size) for size in shape]))

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def store(self, value: Tensor) -> None:
        assert tuple(value.shape) == tuple(self.data.shape)
        assert value.dtype == self.data.dtype
        self.data.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()


class Boxes(Shared):
    """Tiles [stages, rows, columns] of 16-bit values as they lie in memory: 64 columns side by side, then the next 64.

    Cut into boxes of whole rows of those 64 columns, one behind the other.
    """

    def __init__(self, data: Tensor, shape: list[int]) -> None:
        super().__init__(data)
        assert data.element_size() == 2
        assert shape[-1] == 64
        assert data.shape[2] % 64 == 0
        self.shape = shape
        self.height = torch.empty(shape[1:], device="meta").numel() // 64
        assert self.height % 8 == 0, "a swizzle's pattern spans 8 rows"
        assert shape[0] * self.height * 64 == data.numel(), "another number of bytes"

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < self.shape[0]
        rows, columns = self.data.shape[1:]
        pages, panels = rows // self.height, columns // 64
        stage, panel, page = int(place) // (panels * pages), int(place) // pages % panels, int(place) % pages
        found = self.data[stage, page * self.height : (page + 1) * self.height, panel * 64 : (panel + 1) * 64]
        return Shared(found if len(self.shape) == 3 else found.view(self.shape[1], self.shape[2], self.shape[3], 64))


class Joined(Shared):
    """Pairs of tiles [2 * stages, 1, rows, columns] that lie behind each other, read as one tile each."""

    def __init__(self, data: Tensor, shape: list[int]) -> None:
        super().__init__(data)
        self.dim = next(dim for dim in (1, 2) if shape[1 + dim] == 2 * data.shape[1 + dim])
        assert shape[4 - self.dim] == data.shape[4 - self.dim]
        # Columns are stored in panels of 128 bytes: tiles of whole panels lie side by side.
        assert self.dim == 1 or data.shape[3] * data.element_size() % 128 == 0

    def index(self, place: Any) -> Shared:
        return Shared(torch.cat([self.data[2 * int(place)], self.data[2 * int(place) + 1]], self.dim))


def _reinterpret(memory: Shared, dtype: torch.dtype, shape: Any, layout: Any) -> Shared:
    assert dtype == memory.dtype
    sizes = [int(size) for size in shape]
    if len(sizes) == memory.data.ndim and 2 * sizes[0] == memory.data.shape[0]:
        return Joined(memory.data, sizes)
    return Boxes(memory.data, sizes)


class Pointer:
    def __init__(self, storage: Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    __iadd__ = __add__

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.storage.dtype)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(self.offset)
        wanted = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offset, wanted = torch.broadcast_tensors(offset, wanted)
        inside = (offset >= 0) & (offset < self.storage.numel())
        assert bool((inside | ~wanted).all()), "an address outside its tensor"
        return torch.where(wanted, offset, 0), wanted


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Tensor:
    offset, wanted = pointer.places(mask)
    if pointer.storage.numel() == 0:
        return _value(torch.zeros(offset.shape, dtype=pointer.storage.dtype))
    found = pointer.storage[offset.long()]
    return _value(torch.where(wanted, found, torch.as_tensor(other, dtype=found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, wanted = pointer.places(mask)
    value = torch.as_tensor(value).expand(offset.shape)
    pointer.storage[offset[wanted].long()] = value[wanted].to(pointer.storage.dtype)


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Tensor:
    """Returns what was there. Programs run one after the other: what one waits for has happened, or never will."""
    offset, wanted = pointer.places(mask)
    before = pointer.storage[offset.long()].clone()
    added = torch.as_tensor(value, dtype=pointer.storage.dtype).expand(offset.shape)
    pointer.storage.index_add_(0, offset[wanted].long(), added[wanted])
    return _value(before)


class Descriptor:
    """A tensor in tiles; reads outside it give zero, writes there are dropped."""

    def __init__(self, given: Any) -> None:
        base = given.base.detach()
        if max(given.shape) >= 1 << 30:  # larger than any tensor: addresses modulo 2^64
            size = base.untyped_storage().nbytes() // base.element_size()
            self.memory = torch.as_strided(base, (size,), (1,), 0)
            self.limits, self.strides, self.first = list(given.shape), list(given.strides), base.storage_offset()
        else:
            self.memory = None
            self.view = torch.as_strided(base, given.shape, given.strides, base.storage_offset())
        self.block = self.block_shape = [int(size) for size in given.block_shape]
        self.dtype = given.base.dtype
        self.layout = None
        size = torch.empty(self.block, device="meta").numel() * given.base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=size)

    def _parts(self, place: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        outer, inner = [], []
        for start, length, size in zip(place, self.block, self.view.shape):
            low, high = min(max(start, 0), size), min(max(start + length, 0), size)
            outer.append(slice(low, max(low, high)))
            inner.append(slice(low - start, max(low, high) - start))
        return tuple(outer), tuple(inner)

    def _addresses(self, place: list[int]) -> tuple[Tensor, Tensor]:
        """For each element of a tile: whether its coordinates lie inside the dims, and its place in memory if so."""
        inside, address = torch.ones(self.block, dtype=torch.bool), torch.full(self.block, self.first)
        for dim, (start, length) in enumerate(zip(place, self.block)):
            coordinate = torch.arange(start, start + length).view(
                [-1 if dim == one else 1 for one in range(len(place))]
            )
            inside &= (coordinate >= 0) & (coordinate < self.limits[dim])
            address += coordinate * self.strides[dim]  # int64 wraps
        assert self.memory is not None
        within = (address >= 0) & (address < self.memory.numel())
        assert bool((within | ~inside).all()), "an address outside its tensor"
        return inside, torch.where(inside, address, 0)

    def read(self, place: list[int]) -> Tensor:
        if self.memory is not None:
            inside, address = self._addresses(place)
            return torch.where(inside, self.memory[address].float(), 0).to(self.dtype)
        tile = torch.zeros(self.block, dtype=self.dtype)
        outer, inner = self._parts(place)
        tile[inner] = self.view[outer]
        return tile

    def write(self, place: list[int], tile: Tensor) -> None:
        if self.memory is not None:
            inside, address = self._addresses(place)
            self.memory[address[inside]] = tile.view(self.block)[inside]
            return
        outer, inner = self._parts(place)
        self.view[outer] = tile.view(self.block)[inner]


def _load_tile(source: Descriptor, place: Any, barrier: Barrier, target: Shared) -> None:
    place = [int(x) for x in place]
    target.data.fill_(_poison(target.dtype))  # under way: whoever reads it now reads nothing

    def arrive() -> None:
        target.data.copy_(source.read(place).view(target.data.shape))
        barrier.bytes -= source.block_type.nbytes
        barrier.stores_done()

    _machine().later(arrive)


def _store_tile(target: Descriptor, place: Any, source: Shared) -> None:
    place = [int(x) for x in place]
    _machine().later(lambda: target.write(place, source.data.clone()))


def _add_tile(target: Descriptor, place: Any, source: Shared) -> None:
    place = [int(x) for x in place]
    _machine().later(lambda: target.write(place, target.read(place) + source.data.view(target.block)))


class Product:
    """A matrix product under way."""

    def __init__(self, a: Any, b: Shared, accumulator: Tensor, use: bool) -> None:
        self.operands = (a, b, accumulator, use)
        self.value: Tensor | None = None
        if _machine().chance.random() < 0.5:
            self.finish()

    def finish(self) -> Tensor:
        if self.value is None:
            a, b, accumulator, use = self.operands
            left = (a.data if isinstance(a, Shared) else a).float()
            product = left @ b.data.float()
            if isinstance(accumulator, Product):  # issued before, and so completed before
                accumulator = accumulator.finish()
            self.value = _value(product + accumulator if use else product)
        return self.value


def _mma(a: Any, b: Shared, accumulator: Any, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    product = Product(a.clone() if isinstance(a, Tensor) else a, b, accumulator, bool(use_acc))
    queue = _local.__dict__.setdefault("products", [])
    queue.append(product)
    return product if is_async else product.finish()


def _mma_wait(left: int = 0, deps: Any = ()) -> Any:
    _machine().pause(0.3)
    queue = _local.__dict__.setdefault("products", [])
    while len(queue) > left:
        queue.pop(0).finish()
    values = []
    for product in deps:  # one that is still under way can only be accumulated onto, or awaited again
        under_way = not isinstance(product, Product) or product in queue
        values.append(product if under_way else product.finish())
    return values[0] if len(values) == 1 else tuple(values)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = int(count)
    barrier.ready = True


def _expect(barrier: Barrier, size: int) -> None:
    barrier.pending -= 1
    barrier.bytes += int(size)
    barrier.stores_done()


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        barrier.pending -= int(count)
        barrier.stores_done()
    _machine().happen(0.3)
    _machine().pause(0.3)


def _wait(barrier: Barrier, phase: Any, pred: Any = True, **_: Any) -> None:
    if bool(pred):
        parity = int(phase)
        _machine().wait(lambda: barrier.phase != parity, f"phase {parity} of a barrier")


def _named_barrier_arrive(place: Any, groups: int) -> None:
    machine, name = _machine(), int(place)
    assert 0 <= name < 8, f"there is no named barrier {name}"
    come = machine.named.setdefault(name, set())
    assert threading.get_ident() not in come, f"a warpgroup comes to barrier {name} again before it was awaited"
    come.add(threading.get_ident())
    assert len(come) <= groups, f"more warpgroups come to barrier {name} than it counts"
    machine.happen(0.3)
    machine.pause(0.3)


def _named_barrier_sync(place: Any, groups: int) -> None:
    machine, name = _machine(), int(place)
    come = machine.named.setdefault(name, set())
    machine.wait(lambda: len(come) == groups, f"named barrier {name}")
    come.clear()


def _store_wait(pending: int) -> None:
    """All but the last `pending` stores of this thread have happened."""
    machine, thread = _machine(), threading.get_ident()
    own = [event for event in machine.events if event[0] == thread]
    later = own[len(own) - int(pending) :]
    machine.events = [event for event in machine.events if event not in later]
    machine.happen(1.0, thread)
    machine.events += later


class Copies:
    """cp.async of a thread: groups of copies, each of which happens at some moment up to its wait."""

    @staticmethod
    def copy(target: Shared, source: Pointer, mask: Any = None) -> None:
        offset, wanted = source.places(mask)
        value = torch.where(wanted, source.storage[offset].float(), 0).to(target.dtype)
        target.data.fill_(_poison(target.dtype))
        pending = [lambda: target.data.copy_(value.view(target.data.shape))]

        def finish() -> None:
            while pending:
                pending.pop()()

        _local.__dict__.setdefault("copies", []).append(finish)
        _machine().later(finish)

    @staticmethod
    def commit() -> None:
        _local.__dict__.setdefault("groups", []).append(_local.__dict__.pop("copies", []))

    @staticmethod
    def wait(left: int = 0) -> None:
        groups = _local.__dict__.setdefault("groups", [])
        while len(groups) > left:
            for finish in groups.pop(0):
                finish()


def _specialize(functions: Any, warps: Any, registers: Any) -> None:
    machine = _machine()

    def work(thread: int, function: Callable[..., None], args: Any) -> None:
        _local.machine, _local.thread = machine, thread
        machine.turns[thread].acquire()
        try:
            with torch.no_grad():
                function(*args)
            assert not _local.__dict__.get("products"), "a product is never awaited"
        except BaseException as error:
            machine.failure = machine.failure or error
        while machine.parked:
            try:
                machine.hand_on("those that are done")
                break
            except BaseException as error:  # of what happened meanwhile
                machine.failure = machine.failure or error

    threads = [threading.Thread(target=work, args=(place, *pair)) for place, pair in enumerate(functions)]
    for place, thread in enumerate(threads):
        machine.turns[place] = _taken()
        machine.parked[place] = lambda: True
        thread.start()
    machine.hand_on()
    for thread in threads:
        thread.join()
    if machine.failure is not None:
        raise machine.failure
    assert not any(machine.named.values()), "a named barrier is left half full"
    machine.happen()


def _specialize_warps(
    consumer: Any, consumer_args: Any, num_consumers: int, registers: int, producer: Any, producer_args: Any, *_: int
) -> None:
    consumers = [(consumer, (w, *consumer_args)) for w in range(num_consumers)]
    _specialize([*consumers, (producer, producer_args)], None, None)


def _allocate(dtype: torch.dtype, shape: Any, layout: Any) -> Any:
    sizes = [int(size) for size in shape]
    if layout == "barrier":
        return Barriers(sizes[0])
    return Shared(torch.full(sizes, _poison(dtype), dtype=dtype))


def _poison(dtype: torch.dtype) -> float:
    """What memory holds that was not written: NaN; of integers, a value that tests do not expect."""
    return float("nan") if dtype.is_floating_point else 113


def _tensors(*values: Any) -> list[Tensor]:
    return [torch.as_tensor(value) for value in values]


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    kind = torch.result_type(*_tensors(a, b))
    return torch.where(*_tensors(condition), *(value.to(kind) for value in _tensors(a, b)))


def _inline_asm(text: str, constraints: str, args: Any, dtype: torch.dtype, is_pure: bool, pack: int) -> Tensor:
    if "cp.async.bulk.wait_group 0" in text:
        _store_wait(0)
        return args[0]
    assert "cvt.rn.satfinite.e4m3x2.f32" in text, "of inline assembly, only the conversion to e4m3 is known here"
    return args[0].clamp(-448, 448).to(dtype)


_NAMES = types.SimpleNamespace(
    uint32=UNSIGNED, cast=lambda x, dtype: _value(torch.as_tensor(x)).to(dtype),
    int1=torch.bool,
    float32=torch.float32, int32=torch.int32, int64=torch.int64, bfloat16=torch.bfloat16, float16=torch.float16,
    float8e4nv=torch.float8_e4m3fn, constexpr=None, inline_asm_elementwise=_inline_asm,
    static_range=range, static_assert=lambda *a: None,
    program_id=lambda axis: _value(torch.tensor(_machine().program)),
    num_programs=lambda axis: _value(torch.tensor(_machine().programs)),
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    SliceLayout=lambda *a: None, DotOperandLayout=lambda *a: None, NVMMADistributedLayout=lambda *a, **k: None,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *a, **k: None),
    arange=lambda start, end, layout=None: _value(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout=None: _value(torch.zeros([int(x) for x in shape], dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: _value(torch.full([int(x) for x in shape], value, dtype=dtype)),
    zeros_like=torch.zeros_like, to_tensor=lambda x: _value(torch.as_tensor(x)),
    convert_layout=lambda x, layout: x,
    load=_load, store=_store, atomic_add=_atomic_add,
    where=_where, broadcast=torch.broadcast_tensors,
    minimum=lambda a, b: torch.minimum(*_tensors(a, b)), maximum=lambda a, b: torch.maximum(*_tensors(a, b)),
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
    associative_scan=lambda x, axis, combine: x.cumsum(axis).to(x.dtype), BlockedLayout=lambda *a: None,
    exp2=torch.exp2, log2=torch.log2, exp=torch.exp, abs=torch.abs, sigmoid=torch.sigmoid,
    fma=lambda a, b, c: a * b + c, split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), -1),
)  # fmt: skip
_BARRIER = types.SimpleNamespace(
    init=_init, expect=_expect, arrive=_arrive, wait=_wait, MBarrierLayout=lambda: "barrier"
)
_KNOWN: dict[str, Any] = {
    "gl": _NAMES, "tl": _NAMES, "mbarrier": _BARRIER, "tma": types.SimpleNamespace(store_wait=_store_wait),
    "load_tile": _load_tile, "store_tile": _store_tile, "add_tile": _add_tile,
    "specialize_warps": _specialize_warps,
    "reinterpret": _reinterpret, "fence_async_shared": lambda: None, "synchronize": lambda: None,
    "consumer_release": lambda barrier: _arrive(barrier, 128),
    "copy_async": Copies.copy,
    "async_copy": types.SimpleNamespace(
        commit_group=Copies.commit, wait_group=Copies.wait
    ),
    "named_barrier_sync_warpgroup": _named_barrier_sync,
    "named_barrier_arrive": _named_barrier_arrive, "named_barrier_sync": _named_barrier_sync,
    "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
    "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
}  # fmt: skip


def _plain(function: Any, done: dict[int, Any]) -> Any:
    """The Python function behind a jitted one, over emulated names."""
    if id(function) in done:
        return done[id(function)]
    names: dict[str, Any] = {}
    made = types.FunctionType(function.fn.__code__, names, function.fn.__name__, function.fn.__defaults__)
    done[id(function)] = made
    for name, value in function.fn.__globals__.items():
        if name in _KNOWN:
            names[name] = _KNOWN[name]
        elif hasattr(value, "fn") and hasattr(value, "arg_names"):
            names[name] = _plain(value, done)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
        else:
            names[name] = value
    return made


def _argument(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        elements = [_argument(element, done) for element in value]
        return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)
    if isinstance(value, Tensor):
        # Kernels take addresses, not shapes.
        size = value.untyped_storage().nbytes() // value.element_size()
        return Pointer(torch.as_strided(value.detach(), (size,), (1,), 0), value.storage_offset())
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if hasattr(value, "fn") and hasattr(value, "arg_names"):
        return _plain(value, done)
    return _value(torch.tensor(value)) if type(value) in (int, float) else value


def run(launch: Launch, programs: int | None = None, seed: int = 0) -> None:
    """Execute a recorded launch on its CPU tensors, over its own grid or as many programs as given."""
    notify_launch("the emulator runs it")
    done: dict[int, Any] = {}
    kernel = _plain(launch.kernel, done)
    names = launch.kernel.arg_names
    args = {name: _argument(value, done) for name, value in zip(names, launch.args)}
    constants = {
        name: _plain(value, done) if hasattr(value, "arg_names") else value
        for name, value in launch.constants.items()
        if name in names
    }
    grid = launch.grid[0] if programs is None else min(programs, launch.grid[0])
    assert all(size == 1 for size in launch.grid[1:]), "grids of one dimension only"
    for program in range(grid):
        machine = Machine(program, grid, random.Random(seed * 1009 + program))
        _local.machine = machine
        with torch.no_grad():
            kernel(**args, **constants)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """What a package's `launch` is replaced by: Gluon kernels run here, others in Triton's interpreter."""
    if 0 in grid:
        return
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        run(Launch(kernel, grid, args, constants))
    else:
        kernel[grid](*args, **constants)


def counting_retries(counts: list[Any]) -> Callable[..., None]:
    """`launch`, which also appends for each pass how many items it flagged for a retry; None where it has no flags."""

    def counted(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launch(kernel, grid, *args, **constants)
        if "retry_flags" in kernel.arg_names:
            retry_flags = args[kernel.arg_names.index("retry_flags")]
            counts.append(None if retry_flags is None else int((retry_flags[:, 1:] > 0).sum()))

    return counted
