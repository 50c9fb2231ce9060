"""Tensors whose elements lie more than 2^31 elements apart: offsets in 32 bits would wrap.

Views into storage that is mapped and hardly touched, through Triton's interpreter. There a wrapped product of 32-bit
integers raises, whatever lies at the address that it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from flashkernel.core.arguments import near
from flashkernel.core.check import wanted_gradients
from flashkernel.core.op import Case, Op
from flashkernel.ops import registry

BEYOND = (1 << 31) + 4096
OTHERS = ("attention", "attention_varlen", "attention_fp8", "rotary_attention", "decode_attention", "paged_attention")
# Cases with small tensors that have strides of their own, beside the first one of each operator.
NAMED = {
    "linear": ("bias", "some-rows-everything", "fp8-row", "fp8-gate-up", "fp8-activations-block", "int8"),
    "matmul": ("fp8-block", "fp8-gate-block"),
    "grouped_matmul": ("bias", "fp8-column", "swiglu-halves"),
    "mlp": ("everything",),
    "moe_route": ("deepseek", "noisy"),
    "moe_experts": ("few-tokens", "gpt-oss", "inference-gpt-oss", "inference-mxfp4"),
}  # fmt: skip


def _cases() -> Iterator[Any]:
    for op in registry().values():
        if op.name in OTHERS or not any(backend.name == "triton" for backend in op.backends):
            continue
        named = NAMED.get(op.name, ())
        for case in (op.cases[0], *(case for case in op.cases if case.name in named)):
            for dims in ("rows", "columns", "vectors"):
                yield pytest.param(op, case, dims, id=f"{op.name}-{case.name}-{dims}")


def _far(x: Tensor, dims: str) -> Tensor:
    """The values in a view of which "rows" (all dims but the last) or "columns" (all but the one before) lie far apart,
    or the elements of a vector."""
    if not x.numel() or x.ndim == 0 or (dims == "vectors") != (x.ndim == 1):
        return x
    together = {"rows": x.ndim - 1, "columns": x.ndim - 2, "vectors": None}[dims]
    strides, apart = [1] * x.ndim, [dim for dim in reversed(range(x.ndim)) if dim != together]
    count = math.prod([x.shape[dim] for dim in apart])
    step = 0 if count == 1 else (BEYOND // (count - 1) + 63) // 64 * 64
    for dim in apart:
        strides[dim] = step
        step *= x.shape[dim]
    if count == 1:
        return x
    size = 1 + sum([(size - 1) * stride for size, stride in zip(x.shape, strides)])
    return torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def _run(op: Op, case: Case, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    wanted = wanted_gradients(op, case, inputs)
    leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}
    results = op.call(**leaves, **case.options, backend="triton")
    outputs = [one for one in (results if isinstance(results, tuple) else (results,)) if isinstance(one, Tensor)]
    recorded = [one for one in outputs if one.requires_grad]
    gradients = torch.autograd.grad(
        recorded, [leaves[name] for name in wanted], [torch.ones_like(one) for one in recorded], allow_unused=True
    ) if recorded and wanted else ()  # fmt: skip
    return [one.detach() for one in (*outputs, *gradients) if one is not None]


@pytest.fixture
def wrapping_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_mul

    def checked(self: Any, left: Any, right: Any) -> Any:
        product = multiply(self, left, right)
        if product.data.dtype == np.int32:
            exact = left.data.astype(np.int64) * right.data.astype(np.int64)
            if (exact != product.data).any():
                raise OverflowError(f"a 32-bit product is {np.abs(exact).max()}")
        return product

    monkeypatch.setattr(InterpreterBuilder, "create_mul", checked)


@pytest.mark.usefixtures("wrapping_raises")
@pytest.mark.parametrize("op, case, dims", list(_cases()))
def test_elements_that_lie_far_apart(op: Op, case: Case, dims: str) -> None:
    dtype = torch.float16 if torch.float16 in case.dtypes else case.dtypes[0]
    inputs = op.make_inputs(case, dtype)
    views = {name: _far(value, dims) for name, value in inputs.items()}
    if all(views[name] is inputs[name] for name in inputs):
        pytest.skip(f"it has no {dims} that could lie apart")
    try:
        found = _run(op, case, views)
    except ValueError as error:
        pytest.skip(f"declined: {error}")
    except InterpreterError as error:
        if "16-byte aligned" not in str(error):
            raise
        pytest.skip("the interpreter takes no TMA coordinate within 16 bytes, a GPU does")
    for mine, expected in zip(found, _run(op, case, inputs), strict=True):
        torch.testing.assert_close(mine.double(), expected.double(), rtol=1e-2, atol=1e-2, equal_nan=True)


def test_near_copies_what_32_bits_do_not_reach() -> None:
    x = torch.empty(1, dtype=torch.uint8).as_strided((3, 1), (0, 1))
    assert near(x) is x
    memory = torch.empty(2 * (1 << 30) + 1, dtype=torch.uint8)
    inside, beyond = memory.as_strided((3,), ((1 << 30) - 1,)), memory.as_strided((3,), (1 << 30,))
    assert near(inside) is inside
    assert near(beyond).stride() == (1,)
