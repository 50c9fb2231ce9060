"""The declaration of an operator.

An operator is declared once, as an `Op`, in `spec.py` of its package. The tests, the benchmarks, the roofline points,
the support matrix and the command line are all derived from that declaration; nothing else in the project lists shapes,
tolerances or backends.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flashkernel.core.device import Device

if TYPE_CHECKING:
    from flashkernel.core.random_case import Rng

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "padded", "transposed", "packed", "offset", "expanded")  # of inputs (lay_out)
COLUMNS = "columns"  # a layout of stacks of matrices, where a case names it

Axes = Mapping[str, Any]  # axis name -> size, or a tuple of sizes for an axis used as "*axis"
Draw = Callable[[tuple[int, ...], Axes, torch.Generator], torch.Tensor]


def normal(scale: float = 1.0, shift: float = 0.0) -> Draw:
    """Gaussian values; the default."""
    return lambda shape, axes, generator: (
        torch.randn(shape, generator=generator, device=generator.device) * scale + shift
    )


def integers(axis: str | int, marker: int | None = None, every: int = 7) -> Draw:
    """Integers in [0, axis); with `marker`, one of `every` is replaced by it (e.g. an ignore_index)."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> torch.Tensor:
        high = axes[axis] if isinstance(axis, str) else axis
        values = torch.randint(0, max(1, high), shape, generator=generator, device=generator.device)
        if marker is not None and values.numel():
            values.view(-1)[::every] = marker
        return values

    return draw


_NORMAL = normal()


@dataclass(frozen=True)
class Input:
    """A tensor argument: its dims by axis name ("*rows" stands for a tuple of sizes), dtype and distribution."""

    dims: tuple[str, ...]
    dtype: torch.dtype | None = None  # None: the dtype of the case
    draw: Draw = _NORMAL
    grad: bool = True
    optional: bool = False
    must_vary: bool = False  # gradients vanish where the entries along its first dim are all the same

    def shape(self, axes: Axes) -> tuple[int, ...]:
        sizes: list[int] = []
        for dim in self.dims:
            value = axes[dim.lstrip("*")]
            sizes.extend(value if isinstance(value, tuple) else (value,))
        return tuple(sizes)


@dataclass(frozen=True)
class Case:
    """One call: axis sizes, options, and which optional inputs are present."""

    name: str
    axes: Axes
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    present: tuple[str, ...] = ()  # optional inputs that are given
    layout: str = "contiguous"
    layout_of: Mapping[str, str] = field(default_factory=dict)  # inputs whose layout differs in this case
    dtype_of: Mapping[str, torch.dtype] = field(default_factory=dict)  # inputs whose dtype differs in this case
    gradients: bool = True
    check_axes: Axes = field(default_factory=dict)  # smaller axes for the check of a benchmark too large for float64
    through: torch.dtype | None = None  # as `Tolerance.through`, of this case
    half_rule: bool = True  # float16 results of order one are exact to HALF_LIMIT; not if inputs are rounded to 8 bits

    def at(self, **axes: Any) -> Case:
        return replace(self, axes={**self.axes, **axes})


@dataclass(frozen=True)
class Cost:
    """The minimum work of a direction: floating-point operations, and bytes through device memory."""

    flops: float
    bytes: float


def costs(case: Case, forward: Cost, backward: Cost) -> Mapping[str, Cost]:
    """The costs by direction. A case whose name ends in "-step" is timed forward and backward in one: that is how
    memory is used in training."""
    if case.name.endswith("-step"):
        return {"fwd+bwd": Cost(forward.flops + backward.flops, forward.bytes + backward.bytes)}
    return {"fwd": forward, "bwd": backward}


@dataclass(frozen=True)
class Tolerance:
    """Error allowed: `factor` times torch's own error in the same dtype, plus `floor` roundings of the output's scale.

    Roundings are those of the compared tensor's dtype. `of_inputs` says where intermediate results are rounded to the
    inputs' dtype, so that a wider tensor cannot be better than that: for "gradients", or for "all".
    """

    factor: float = 2.0
    floor: float = 2.0
    floor32: float | None = None  # the floor in float32, where a GPU's exponentials, good to 2 roundings, show
    of_inputs: str = ""
    through: torch.dtype | None = None  # what results are rounded to on the way, where that is narrower than both
    integer_steps: int = 0  # how far integers may be off: 1 where they are rounded results, which fall to either side
    canceling: tuple[str, ...] = ()  # inputs whose gradients are sums of terms that cancel, with a floor32

    def of_gradient(self, name: str) -> Tolerance:
        """The tolerance of an input's gradient.

        Terms that cancel leave a sum much smaller than the scale of their roundings. In float32 nothing else hides
        that, and torch's own error is one draw of it: four times the floor is allowed.
        """
        if name not in self.canceling or self.floor32 is None:
            return self
        return replace(self, floor32=4 * self.floor32)


class UnknownFactError(LookupError):
    """A backend asks for a fact that calls of its operator do not have: a mistake in the operator's package."""


class Facts(dict[str, Any]):
    """Static properties of a call by name. `facts["width"]` of a name that is not there raises `UnknownFactError`."""

    def __missing__(self, name: str) -> Any:
        raise UnknownFactError(
            f"the fact {name!r}, which is not among those that the operator's api.py gives to choose(): "
            f"{', '.join(self) or 'none'}"
        )


@dataclass(frozen=True)
class Call:
    """What a backend's `supports` looks at: the device, the dtype, and facts: static properties of the call by name."""

    device: Device
    dtype: torch.dtype
    facts: Mapping[str, Any] = field(default_factory=Facts)
    gradients: bool = False  # autograd records it

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", Facts(self.facts))


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator, imported at first use.

    A composite backend is a plain differentiable function with the reference's signature; any other is a module of
    kernel launchers, with the functions of its operator package's `protocol.py`. A module without a backward function
    is fine: calls that need gradients then go to another backend. An operator lists backends in order of preference.

    Attributes:
        name: "hopper", "triton", "cuda", "cpp", "torch" or "reference".
        target: What to import: "package.module" or "package.module:attribute".
        supports: Given a call: None, or the reason why the backend does not support it.
        composite: A plain function, not a module of launchers.
        auto_devices: Kinds of device on which it is selected automatically.
        deprioritized: Given a call that it supports: None, or the reason why a later backend is preferred.
    """

    name: str
    target: str
    supports: Callable[[Call], str | None]
    composite: bool = False
    auto_devices: tuple[str, ...] = ("cuda",)
    deprioritized: Callable[[Call], str | None] | None = None

    def reason_against(self, call: Call) -> str | None:
        """The reason why a later backend is preferred for a call that this one supports, or None."""
        return None if self.deprioritized is None else self.deprioritized(call)

    def auto_selected(self, call: Call) -> bool:
        """True if it is selected automatically for a call that it supports."""
        return call.device.kind in self.auto_devices and self.reason_against(call) is None

    @cached_property
    def run(self) -> Any:
        return resolve(self.target)

    def offers(self, function: str | None) -> bool:
        """Whether its kernel module has a function; a composite backend, and None, need none."""
        return function is None or self.composite or callable(getattr(self.run, function, None))


@dataclass(frozen=True)
class Baseline:
    """Another library's implementation, timed beside ours.

    `target(op, case)` gives a function of the operator's signature. It may raise ImportError (the library is not
    installed) or ValueError (the library does not support the case).

    A function that computes something more precise has an attribute `checked`: what is compared with the reference.
    """

    name: str
    target: str
    forward_only: bool = False  # it has no backward pass to be checked or timed


@cache
def resolve(target: str) -> Any:
    """Import `package.module` or `package.module:attribute`, once."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


@dataclass(frozen=True, eq=False)
class Op:
    """The declaration of an operator."""

    name: str
    summary: str
    function: str  # the public function: all inputs and options by keyword, plus `backend`
    reference: str  # the same without `backend`: plain torch, any precision
    inputs: Mapping[str, Input]
    backends: tuple[Backend, ...]
    cases: tuple[Case, ...]
    benches: tuple[Case, ...]
    cost: Callable[[Case, torch.dtype], Mapping[str, Cost]]  # by direction: "fwd", "bwd"
    tolerance: Tolerance = Tolerance()
    # How many products a sum adds, for the roundings of float32 sums (`tolerance_of`).
    sum_length: Callable[[Case], int] | None = None
    baselines: tuple[Baseline, ...] = ()
    differentiable: bool = True
    backward: str | None = "backward"  # the function of a kernel module that the gradient needs; None: it needs none
    ranges: Mapping[str, tuple[int, int, int]] = field(
        default_factory=dict
    )  # axis -> least, most, step: for random cases
    # For a function that writes to its inputs: the tensors written, to be compared as its outputs are.
    written: Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]] | None = None
    # For axes that follow from others, as those of scales: given a case's axes, and some of them changed, all axes.
    resized: Callable[[Axes, Axes], Axes] | None = None
    # Makes a random case valid, whose axes, options and optional inputs are drawn independently.
    random_case: Callable[[Rng, Case], Case] | None = None
    random_share: int = 1  # random calls for each one of an operator with few options
    declared: ClassVar[dict[str, Op]] = {}

    def __post_init__(self) -> None:
        self.declared[self.name] = self

    @cached_property
    def call(self) -> Callable[..., Any]:
        return resolve(self.function)

    @cached_property
    def plain(self) -> Callable[..., Any]:
        return resolve(self.reference)

    def tolerance_of(self, case: Case, dtype: torch.dtype) -> Tolerance:
        """The tolerance of a case whose inputs have `dtype`.

        Tensor cores add 16 products at a time to a float32 sum and truncate it: half a rounding each time, of a sum
        that has half its final size on average. This shows where the result is not rounded to 16 bits. A float32 sum of
        K float32 products makes K roundings of either sign: a random walk of about sqrt(K) / 8 roundings of the largest
        sum among those of a matrix.
        """
        eight_bits = any(other.itemsize == 1 for other in case.dtype_of.values())
        if self.sum_length is None or (dtype.itemsize == 2 and eight_bits):
            return self.tolerance
        length = self.sum_length(case)
        floor = self.tolerance.floor if self.tolerance.floor32 is None else self.tolerance.floor32
        return replace(self.tolerance, floor32=floor + (length / 64 if dtype.itemsize == 2 else math.sqrt(length) / 8))

    def with_sizes(self, axes: Axes, changed: Axes) -> dict[str, Any]:
        """A case's axes with some of them changed, and with them those that follow from these."""
        return dict({**axes, **changed} if self.resized is None else self.resized(axes, changed))

    def backend(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise ValueError(
            f"{self.name}: unknown backend {name!r}; it has {', '.join(backend.name for backend in self.backends)}"
        )

    def observed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as checks call it: one that writes to its inputs gets copies, and returns them as outputs."""
        if self.written is None:
            return function
        written = self.written

        def observe(**given: Any) -> tuple[Any, ...]:
            copies = {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
            result = function(**copies)
            return (*(result if isinstance(result, tuple) else (result,)), *written(copies))

        return observe

    def make_inputs(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        draw_on: torch.device | str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Random inputs for a case, drawn on the device (or `draw_on`) and laid out as the case says."""
        generator = torch.Generator(draw_on or device).manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, spec in self.inputs.items():
            if spec.optional and name not in case.present:
                continue
            values = spec.draw(spec.shape(case.axes), case.axes, generator)
            wanted = case.dtype_of.get(name, spec.dtype or (dtype if values.is_floating_point() else values.dtype))
            tensors[name] = lay_out(values.to(device, wanted), case.layout_of.get(name, case.layout))
        return tensors


def _copy(values: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)
    return copy.copy_(values.detach())


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides.

    padded: rows 3 elements apart. transposed: the first two dims stored swapped; columns: the last two. packed: the
    middle third of a tensor three times as large, as q, k and v come out of one projection; of a vector, the middle
    column. offset: the storage starts one element early, so that the first address is not aligned. expanded: the first
    entry of the first dim stands for all, at stride 0; not of integers, which may have to differ, nor of vectors: a row
    that is constant has no variance to be normalized by.
    """
    shape = values.shape
    if layout == "contiguous" or values.ndim == 0 or (values.ndim == 1 and layout in ("padded", "transposed")):
        return values
    if layout == "padded":
        storage = torch.full((*shape[:-1], shape[-1] + 3), 0, dtype=values.dtype, device=values.device)
        view = storage[..., : shape[-1]]
        view.copy_(values)
        return view
    if layout == "transposed":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == COLUMNS:
        return values.mT.contiguous().mT
    if layout == "packed":
        around = _unread(shape, values)
        if values.ndim == 1:
            return torch.stack([around, values, around], 1)[:, 1]
        return torch.cat([around, values, around], -2).narrow(-2, shape[-2], shape[-2])
    if layout == "offset":
        return torch.cat([_unread((1,), values), values.reshape(-1)])[1:].view(shape)
    if layout == "expanded":
        return values[:1].expand(shape) if values.is_floating_point() and values.ndim > 1 else values
    raise ValueError(f"unknown layout {layout!r}; it is one of {', '.join((*LAYOUTS, COLUMNS))}")


def _unread(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Values around a tensor in its storage, which no kernel may read: NaN, or the largest integer."""
    if like.is_floating_point():
        return torch.full(shape, math.nan, device=like.device).to(like.dtype)
    largest = True if like.dtype == torch.bool else torch.iinfo(like.dtype).max
    return torch.full(shape, largest, dtype=like.dtype, device=like.device)


def grid_of_cases(op: Op) -> Iterator[tuple[Case, torch.dtype]]:
    """Every (case, dtype) pair of an operator, in declaration order."""
    for case in op.cases:
        for dtype in case.dtypes:
            yield case, dtype


def count(sizes: Any) -> int:
    """Number of elements of an axis: its size, or the product where the axis is a tuple of leading dims."""
    return math.prod(sizes) if isinstance(sizes, tuple) else sizes
