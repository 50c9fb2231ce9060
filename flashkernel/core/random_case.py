"""Random calls of an operator, drawn from its declaration.

A case follows from the operator's name, a seed and a size class alone, on any machine. Sizes lie near the edges of
tiles; options and optional inputs of different declared cases are combined; every input gets a layout of its own.
The operator's `random_case` makes values consistent that depend on each other (heads and kv_heads, a mask and the sizes
it is made for).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from flashkernel.core.op import FLOATS, LAYOUTS, Case, Op

SIZES = ("small", "large")  # for Triton's interpreter, and for a GPU
EDGES = tuple(edge + by for edge in (16, 32, 64, 128, 256, 512, 1024) for by in (-1, 0, 1))
GROUP = 8  # seeds of the large class that share what kernels are compiled for: a compilation takes seconds
_LARGER = 12  # by how much the large class exceeds the declared ranges

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Rng:
    """Where the random choices of a case come from.

    `kernel` decides what a kernel is compiled for (dtypes, head dims, masks, strides that 16 divides) and is the same
    for GROUP neighboring seeds; `call` decides the rest (sizes, tables). `device` is where tensors of options live.
    """

    kernel: random.Random
    call: random.Random
    large: bool
    device: torch.device
    aligned: bool  # sizes are multiples of 16

    @staticmethod
    def seeded(name: str, seed: int, sizes: str, device: torch.device | str) -> Rng:
        if sizes not in SIZES:
            raise ValueError(f"sizes are {sizes!r}; they must be one of {', '.join(SIZES)}")
        large = sizes == "large"
        kernel = random.Random(f"{name} {sizes} kernel {seed // GROUP if large else seed}")
        aligned = kernel.random() < 0.25
        return Rng(kernel, random.Random(f"{name} {sizes} call {seed}"), large, torch.device(device), aligned)

    def one(self, choices: Sequence[Choice]) -> Choice:
        """A choice that a kernel is compiled for."""
        return self.kernel.choice(choices)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.kernel.random() < probability

    def size(self, least: int, most: int, step: int = 1) -> int:
        """A size of this call from least to most, half of the time next to the edge of a tile."""
        steps = 16 if self.aligned and step <= 16 and 16 % step == 0 and most >= 16 and least % step == 0 else step
        low = -(-max(least, steps) // steps) * steps if steps != step else least
        near = [edge for edge in EDGES if low <= edge <= most and (edge - low) % steps == 0]
        if near and self.call.random() < 0.5:
            return self.call.choice(near)
        return self.call.randrange(low, most + 1, steps)

    def empty(self) -> bool:
        """True in 3% of calls: an axis has no elements."""
        return self.call.random() < 0.03

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """A table of an option."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def draw(op: Op, seed: int, sizes: str, device: torch.device | str = "cpu") -> tuple[Case, torch.dtype]:
    """(a random case of the operator, the dtype of its inputs)."""
    rng = Rng.seeded(op.name, seed, sizes, device)
    base = rng.one(op.cases)
    options = _options(rng, op, base)
    present = tuple(name for name, spec in op.inputs.items() if spec.optional and rng.maybe())
    dtype_of = {name: dtype for name, dtype in base.dtype_of.items() if name in present or not op.inputs[name].optional}
    dtype = rng.one(base.dtypes if dtype_of else (FLOATS if rng.large or rng.maybe(0.1) else FLOATS[:2]))
    axes = {**base.axes, **{axis: _axis(rng, op, axis, bounds) for axis, bounds in op.ranges.items()}}
    case = Case(f"random-{seed}", axes, options, (dtype,), present, dtype_of=dtype_of)
    if op.random_case is not None:
        case = op.random_case(rng, case)
    layouts = _layouts(rng, op, case)
    vanishing = any(layout == "expanded" and op.inputs[name].must_vary for name, layout in layouts.items())
    case = replace(case, layout_of=layouts, gradients=case.gradients and not vanishing)
    return case, case.dtypes[0]


def describe(case: Case, dtype: torch.dtype) -> str:
    """The case in a line: sizes, dtypes, options, optional inputs and layouts."""
    parts = [str(dtype).removeprefix("torch.")]
    parts += [f"{axis}={'x'.join(map(str, size)) or '()' if isinstance(size, tuple) else size}"
              for axis, size in case.axes.items()]  # fmt: skip
    parts += [f"{name}={_text(value)}" for name, value in case.options.items()]
    parts += [f"+{name}" for name in case.present]
    parts += [f"{name}:{_text(dtype)}" for name, dtype in case.dtype_of.items()]
    parts += [f"{name}:{layout}" for name, layout in case.layout_of.items()]
    return " ".join(parts + ([] if case.gradients else ["forward only"]))


def _text(value: Any) -> str:
    """Masks and score functions by their names."""
    return str(getattr(value, "name", None) or value).removeprefix("torch.")


def _options(rng: Rng, op: Op, base: Case) -> dict[str, Any]:
    """The options of a case, some of them replaced by those of other cases."""
    seen: dict[str, list[Any]] = {}
    for case in op.cases:
        for name, value in case.options.items():
            seen.setdefault(name, []).append(value)
    options = dict(base.options)
    for name, values in seen.items():
        number = rng.kernel.random()
        if number < 0.35:
            options[name] = rng.one(values)
        elif number < 0.55:
            options.pop(name, None)
    return options


def _axis(rng: Rng, op: Op, axis: str, bounds: tuple[int, int, int]) -> Any:
    least, most, step = bounds
    if least == 0 and rng.empty():
        return 0
    most = most * _LARGER if rng.large else most
    if not any(f"*{axis}" in spec.dims for spec in op.inputs.values()):
        return rng.size(max(least, step), most, step)
    dims = rng.call.randrange(4)  # leading dims, of `most` elements together
    total = rng.size(1, most)
    return tuple(_factors(rng, total, dims))


def _factors(rng: Rng, total: int, dims: int) -> list[int]:
    """`dims` sizes whose product is at most `total`, and near it."""
    sizes: list[int] = []
    for left in range(dims, 0, -1):
        size = total if left == 1 else rng.call.randint(1, max(1, round(total ** (1 / left) * 2)))
        sizes.append(max(1, min(size, total)))
        total //= sizes[-1]
    rng.call.shuffle(sizes)
    return sizes


def _layouts(rng: Rng, op: Op, case: Case) -> dict[str, str]:
    """Layouts by input; none for half of the calls. Tensors that are written are never expanded."""
    if rng.maybe():
        return {}
    layouts = {}
    for name, spec in op.inputs.items():
        layout = rng.one(LAYOUTS)
        if layout == "expanded" and op.written is not None:
            layout = "contiguous"
        if layout != "contiguous" and (not spec.optional or name in case.present):
            layouts[name] = layout
    return layouts
