"""The declaration of the reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from flashkernel.core import backends
from flashkernel.core.declare import declare
from flashkernel.core.op import FLOATS, Axes, Call, Case, Cost, Input, Op, Tolerance, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.reduce"
_HALF = (torch.bfloat16,)
_X = Input(("*rows", "width"), draw=normal(1.0, 0.5))  # shifted: sums that cancel would be tested on their noise


class _Mask(Input):
    """A mask that broadcasts: a case's axis "mask" says of x's dims, the last ones, whether each is there or 1."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        rows, kept = axes["rows"], axes["mask"]
        full = (*(rows if isinstance(rows, tuple) else (rows,)), axes["width"])
        return tuple(size if keep else 1 for size, keep in zip(full[-len(kept) :], kept[-len(full) :]))


def _some_visible(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> torch.Tensor:
    """Two in three visible, and now and then a row that sees nothing."""
    visible = torch.rand(shape, generator=generator, device=generator.device) < 0.67
    if visible.numel():
        visible.view(-1, shape[-1])[2::5] = False
    return visible


_MASK = _Mask((), dtype=torch.bool, draw=_some_visible, grad=False, optional=True)
_CASES = (
    Case("plain", {"rows": 5, "width": 64}),
    Case("odd", {"rows": 7, "width": 33}),
    Case("leading-dims", {"rows": (2, 3), "width": 100}, {"keepdim": True}),
    Case("one-element", {"rows": (), "width": 1}),
    Case("one-column", {"rows": 9, "width": 1}),
    Case("one-row", {"rows": (), "width": 257}),
    Case("padded-rows", {"rows": (2, 4), "width": 40}, layout="padded"),
    Case("transposed", {"rows": (3, 4), "width": 48}, layout="transposed"),
    Case("no-rows", {"rows": (0, 3), "width": 16}),
    Case("wide", {"rows": 3, "width": 5000}),
    Case("many-rows", {"rows": 700, "width": 12}),
)
_NO_COLUMNS = Case("no-columns", {"rows": (2, 3), "width": 0})
_WEIGHTED_CASES = (
    *(replace(case, options={}) for case in (*_CASES, _NO_COLUMNS)),
    Case("float32-weight", {"rows": 6, "width": 72}, dtypes=FLOATS[1:], dtype_of={"weight": torch.float32}),
    Case("half-weight", {"rows": 6, "width": 72}, dtypes=(torch.float32,), dtype_of={"weight": torch.float16}),
)  # fmt: skip
_SOFTMAX_CASES = (
    *(replace(case, options={}) for case in (*_CASES, _NO_COLUMNS)),
    Case("scaled", {"rows": 6, "width": 90}, {"scale": 0.125}),
    Case("negative-scale", {"rows": 6, "width": 90}, {"scale": -2.0}),
    Case("causal-square", {"rows": (2, 20), "width": 20}, {"causal": True}),
    Case("causal-more-keys", {"rows": (2, 5), "width": 37}, {"causal": True, "scale": 0.25}),
    Case("causal-more-queries", {"rows": (2, 12), "width": 7}, {"causal": True}),
    Case("mask", {"rows": 12, "width": 50, "mask": (1, 1)}, present=("mask",)),
    Case("mask-per-column", {"rows": (2, 3), "width": 50, "mask": (1,)}, present=("mask",)),
    Case("mask-per-row", {"rows": (2, 6), "width": 17, "mask": (1, 0)}, present=("mask",)),
    Case("mask-per-batch", {"rows": (3, 2, 4), "width": 24, "mask": (1, 0, 0, 1)}, present=("mask",)),
    Case("mask-heads", {"rows": (2, 3, 6), "width": 33, "mask": (1, 0, 1, 1)}, {"scale": 0.5}, present=("mask",)),
    Case("mask-causal", {"rows": (2, 3, 6), "width": 9, "mask": (1, 0, 1, 1)}, {"causal": True}, present=("mask",)),
    Case("mask-five-dims", {"rows": (2, 2, 2, 3), "width": 20, "mask": (1, 0, 1, 0, 1)}, present=("mask",)),
    Case("mask-padded", {"rows": (2, 5), "width": 30, "mask": (1, 1, 1)}, present=("mask",), layout="padded"),
    Case("mask-no-rows", {"rows": (0, 3), "width": 8, "mask": (1, 1)}, present=("mask",)),
)  # fmt: skip


def _large(gradients: bool) -> tuple[Case, ...]:
    """Large rows, a few huge ones, and what one step of decoding reduces."""
    vocabulary = MODELS["llama-3.1-8b"].vocab
    sizes = [(16384, 4096), (4096, 16384), (1024, 131072), (16, 1 << 24)]
    large = [
        Case(f"{rows}x{width}", {"rows": rows, "width": width}, dtypes=_HALF, gradients=gradients)
        for rows, width in sizes
    ]  # fmt: skip
    decode = [
        Case(f"decode-{rows}x{width}", {"rows": rows, "width": width}, dtypes=_HALF, gradients=False)
        for rows, width in ((16, MODELS["llama-3.1-8b"].hidden), (16, vocabulary))
    ]
    return (*large, *decode)


def _softmax_benches() -> tuple[Case, ...]:
    grid = [
        Case(
            f"{rows}x{width}",
            {"rows": rows, "width": width},
            dtypes=_HALF,
            check_axes={"rows": min(rows, (1 << 28) // width)},
        )
        for width in (1024, 4096, 16384)
        for rows in (1024, 16384, 131072)
    ]
    decode = [
        Case(f"decode-{rows}x{width}", {"rows": rows, "width": width}, dtypes=_HALF, gradients=False)
        for width in (MODELS["llama-3.1-8b"].hidden, MODELS["llama-3.1-8b"].vocab)
        for rows in (1, 16, 64)
    ]
    scores = {"rows": (4, 8, 2048), "width": 2048}
    variants = [
        Case("causal-32x2048x2048", scores, {"causal": True, "scale": 0.125}, dtypes=_HALF),
        Case("mask-32x2048x2048", {**scores, "mask": (1, 0, 1, 1)}, {"scale": 0.125}, _HALF, present=("mask",)),
        Case("4096x131072", {"rows": 4096, "width": 131072}, dtypes=_HALF, check_axes={"rows": 64}),
    ]
    return (*grid, *variants, *decode)


def _elements(case: Case) -> int:
    return count(case.axes["rows"]) * case.axes["width"]


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Forward reads x once. The way back reads it again and writes its gradient."""
    elements, rows = _elements(case), count(case.axes["rows"])
    outputs = rows * dtype.itemsize
    return {
        "fwd": Cost(2.0 * elements, elements * dtype.itemsize + outputs),
        "bwd": Cost(2.0 * elements, 2 * elements * dtype.itemsize + 3 * outputs),
    }


def _expanded_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """The way back of sum and mean is a view of dy: one read and one write per row."""
    rows = count(case.axes["rows"])
    return {"fwd": _cost(case, dtype)["fwd"], "bwd": Cost(rows, 2.0 * rows * dtype.itemsize)}


def _softmax_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """x is read and y written once; y and dy are read and dx written once. What causality hides need not be read."""
    elements, width = _elements(case), case.axes["width"]
    seen = elements
    if case.options.get("causal"):
        queries = case.axes["rows"][-1]
        visible = sum(max(0, min(width, query + 1 + width - queries)) for query in range(queries))
        seen = elements // (queries * width) * visible
    mask = math.prod(_MASK.shape(case.axes)) if "mask" in case.present else 0
    return {
        "fwd": Cost(5.0 * seen, (seen + elements) * dtype.itemsize + mask),
        "bwd": Cost(4.0 * seen, (2 * seen + elements) * dtype.itemsize),
    }


def _random_softmax(rng: Rng, case: Case) -> Case:
    """A causal softmax needs queries before its keys, and a mask says of each dim of x whether it is there."""
    rows = case.axes["rows"]
    rows = rows if isinstance(rows, tuple) else (rows,)
    if case.options.get("causal") and not rows:
        rows = (rng.size(1, 40),)
    dims = rng.call.randint(1, len(rows) + 1)
    return case.at(rows=rows, mask=tuple(rng.call.randrange(2) for _ in range(dims)))


def _weight_dtype(call: Call) -> str | None:
    weight = call.facts["weight"]
    return None if weight in FLOATS else f"weight is {weight}; it reads float32, float16 and bfloat16"


def _anything(call: Call) -> str | None:
    return None


def _op(
    name: str,
    summary: str,
    cases: tuple[Case, ...],
    benches: tuple[Case, ...],
    cost: Callable[[Case, torch.dtype], Mapping[str, Cost]] = _cost,
    x: Input = _X,
    others: Mapping[str, Input] | None = None,
    supports: Callable[[Call], str | None] = _anything,
    tolerance: Tolerance = Tolerance(),
    ranges: Mapping[str, tuple[int, int, int]] | None = None,
    random_case: Callable[[Rng, Case], Case] | None = None,
    backward: str | None = None,
) -> Op:
    return declare(
        _PACKAGE,
        name,
        summary,
        inputs={"x": x, **(others or {})},
        kernels=(backends.triton(f"{_PACKAGE}.triton", supports), backends.cuda(f"{_PACKAGE}.cuda", supports)),
        cases=cases,
        benches=benches,
        cost=cost,
        tolerance=tolerance,
        ranges={"rows": (0, 9, 1), "width": (1, 300, 1)} if ranges is None else ranges,
        random_case=random_case,
        backward=backward,
        baselines=("eager", "compile", "liger") if name == "softmax" else ("eager", "compile"),
    )


SUM = _op("sum", "row sums", (*_CASES, _NO_COLUMNS), _large(False), _expanded_cost)
MEAN = _op("mean", "row means", _CASES, _large(False), _expanded_cost)
MAX = _op("max", "row maxima; ties share the gradient", _CASES, _large(True), backward="reduce_backward")
LOGSUMEXP = _op(
    "logsumexp",
    "log of the row sums of exponentials",
    (*_CASES, _NO_COLUMNS),
    _large(True),
    x=replace(_X, draw=normal(3.0)),
    tolerance=Tolerance(floor32=8.0),
    backward="reduce_backward",
)
SOFTMAX = _op(
    "softmax",
    "softmax: plain, scaled, masked, causal",
    _SOFTMAX_CASES,
    _softmax_benches(),
    _softmax_cost,
    x=replace(_X, draw=normal(3.0)),
    others={"mask": _MASK},
    tolerance=Tolerance(floor=4.0, floor32=8.0),  # the way back starts from y as rounded to its dtype
    ranges={"rows": (0, 40, 1), "width": (1, 90, 1)},
    random_case=_random_softmax,
    backward="softmax_backward",
)
WEIGHTED_SUM = _op(
    "weighted_sum",
    "row sums weighted by column",
    _WEIGHTED_CASES,
    _large(True),
    others={"weight": Input(("width",), draw=normal(0.5, 1.0))},
    supports=_weight_dtype,
    tolerance=Tolerance(floor=8.0),  # the weight's gradient adds as many terms as there are rows, and they cancel
    backward="weighted_backward",
)
OPS = (SUM, MEAN, MAX, LOGSUMEXP, SOFTMAX, WEIGHTED_SUM)
