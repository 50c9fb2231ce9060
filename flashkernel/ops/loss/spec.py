"""The declaration of cross-entropy and of linear + cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashkernel.core import backends
from flashkernel.core.declare import declare
from flashkernel.core.op import Case, Cost, Input, Tolerance, count, integers, normal
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.loss"
_HALF = (torch.bfloat16,)
_TARGET = Input(("*rows",), draw=integers("classes", marker=-100), grad=False)

_VARIANTS = (
    Case("plain", {"rows": 6, "classes": 50, "hidden": 16}),
    Case("leading-dims", {"rows": (2, 3), "classes": 33, "hidden": 24}),
    Case("sum", {"rows": 5, "classes": 40, "hidden": 16}, {"reduction": "sum"}),
    Case("none", {"rows": (2, 4), "classes": 65, "hidden": 16}, {"reduction": "none"}),
    Case("smoothing", {"rows": 7, "classes": 31, "hidden": 16}, {"label_smoothing": 0.1}),
    Case("z-loss", {"rows": 6, "classes": 64, "hidden": 16}, {"z_loss": 1e-2}),
    Case("softcap", {"rows": 6, "classes": 48, "hidden": 16}, {"softcap": 2.0}),
    Case("everything", {"rows": 9, "classes": 77, "hidden": 16},
         {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0, "reduction": "none"}),
    Case("one-class", {"rows": 3, "classes": 1, "hidden": 8}),
    Case("no-rows", {"rows": (0, 2), "classes": 12, "hidden": 8}),
    Case("padded", {"rows": (2, 3), "classes": 36, "hidden": 16}, layout="padded"),
    Case("transposed", {"rows": (3, 2), "classes": 36, "hidden": 16}, layout="transposed"),
)  # fmt: skip


def _cross_entropy_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """The logits are read once forward, and read and written once backward."""
    elements = count(case.axes["rows"]) * case.axes["classes"]
    return {
        "fwd": Cost(4.0 * elements, elements * dtype.itemsize),
        "bwd": Cost(4.0 * elements, 2 * elements * dtype.itemsize),
    }


def _linear_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Three matrix products; x and weight are read, and their gradients written, once."""
    rows, classes, hidden = count(case.axes["rows"]), case.axes["classes"], case.axes["hidden"]
    product = 2.0 * rows * classes * hidden
    operands = (rows + classes) * hidden * dtype.itemsize
    return {"fwd": Cost(product, operands), "fwd+bwd": Cost(3 * product, 2 * operands)}


CROSS_ENTROPY = declare(
    _PACKAGE,
    "cross_entropy",
    "cross-entropy with smoothing, z-loss, softcap",
    inputs={"logits": Input(("*rows", "classes"), draw=normal(2.0)), "target": _TARGET},
    kernels=(backends.triton(f"{_PACKAGE}.triton"),),
    cases=(*_VARIANTS, Case("wide", {"rows": 3, "classes": 20000})),
    benches=tuple(
        Case(f"{rows}x{classes}", {"rows": rows, "classes": classes}, dtypes=_HALF, check_axes={"rows": 1024})
        for rows, classes in ((8192, MODELS["llama-3.1-8b"].vocab), (8192, MODELS["gpt2"].vocab), (16384, 32000))
    ),
    cost=_cross_entropy_cost,
    ranges={"rows": (0, 7, 1), "classes": (2, 200, 1)},
    baselines=("eager", "compile", "liger"),
)

LINEAR_CROSS_ENTROPY = declare(
    _PACKAGE,
    "linear_cross_entropy",
    "linear layer + cross-entropy without the logits",
    inputs={
        "x": Input(("*rows", "hidden")),
        "weight": Input(("classes", "hidden"), draw=normal(0.2)),
        "target": _TARGET,
        "bias": Input(("classes",), draw=normal(0.5), optional=True),
    },
    kernels=(backends.triton(f"{_PACKAGE}.linear"),),
    cases=(*_VARIANTS, Case("bias", {"rows": 5, "classes": 30, "hidden": 16}, present=("bias",))),
    benches=tuple(
        Case(f"{rows}x{hidden}x{classes}", {"rows": rows, "hidden": hidden, "classes": classes}, dtypes=_HALF,
             check_axes={"rows": 2560})
        for rows, hidden, classes in (
            (8192, MODELS["llama-3.1-8b"].hidden, MODELS["llama-3.1-8b"].vocab),
            (8192, MODELS["llama-3.2-1b"].hidden, MODELS["llama-3.2-1b"].vocab),
            (4096, MODELS["gpt-oss-20b"].hidden, MODELS["gpt-oss-20b"].vocab),
        )
    ),
    cost=_linear_cost,
    ranges={"rows": (0, 7, 1), "classes": (2, 90, 1), "hidden": (1, 40, 1)},
    # The logits themselves are rounded to the input's dtype, as torch's linear rounds them.
    tolerance=Tolerance(of_inputs="all"),
    baselines=("eager", "compile", "liger", "cut_cross_entropy"),
)  # fmt: skip

OPS = (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)
