"""Tensors of a dtype, shape, device or layout that an operator cannot take are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core.check import named
from flashkernel.core.op import Op
from flashkernel.ops import registry

FP8 = torch.float8_e4m3fn
NOT_FLOATS = [torch.int64, torch.int32, torch.bool, torch.complex64, FP8, torch.float8_e5m2]
X, ROW, MATRIX = torch.randn(4, 32), torch.ones(32), torch.randn(8, 32)
WEIGHT = fk.Weight.quantize(MATRIX, "int4", "1x32")
TARGET, OFFSETS = torch.arange(4), torch.tensor([0, 1, 4])
Q, K, V = torch.randn(3, 1, 16, 2, 16)
LENGTH, TABLE = torch.tensor([16], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
PAGES, SLOTS = torch.zeros(2, 16, 2, 16), torch.tensor([0, 1, 2])
NEW = torch.randn(3, 2, 16)
COS = torch.randn(16, 8)
CODES, SCALES = fk.quantize(X, torch.int8)


def _floats(op: Op) -> list[str]:
    case = op.cases[0]
    return [name for name, x in op.make_inputs(case, case.dtypes[0]).items() if x.dtype == case.dtypes[0]]


@pytest.mark.parametrize("dtype", NOT_FLOATS, ids=str)
@pytest.mark.parametrize("op", registry().values(), ids=registry())
def test_an_operator_computes_in_floats_alone(op: Op, dtype: torch.dtype) -> None:
    """Its first tensor alone, and all of its floats, in a dtype that stands for something else."""
    case = op.cases[0]
    given = op.make_inputs(case, case.dtypes[0])
    names = _floats(op)
    if not names or (dtype == FP8 and op.name in ("matmul", "grouped_matmul")):
        return
    for changed in (names[:1], names):
        values = {name: x.detach().to(dtype) if name in changed else x for name, x in given.items()}
        with pytest.raises((ValueError, TypeError), match=r"^\w+: .*(torch\.|float)"):
            op.call(**values, **case.options)


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (fk.rms_norm, {"x": X, "weight": ROW.long()}, "weight is torch.int64"),
    (fk.layer_norm, {"x": X, "bias": ROW.bool()}, "bias is torch.bool"),
    (fk.rms_norm_quantize, {"x": X, "weight": ROW.long()}, "weight is torch.int64"),
    (fk.linear, {"x": X, "weight": MATRIX, "bias": torch.ones(8).to(FP8)}, "a bias is torch.float8_e4m3fn"),
    (fk.linear, {"x": X, "weight": MATRIX, "residual": torch.ones(4, 8).to(FP8)}, "residual is torch.float8_e4m3fn"),
    (fk.rotary_attention, {"q": Q, "k": K, "v": V, "cos": COS.to(FP8), "sin": COS.to(FP8)}, "cos must be a float"),
    (fk.dequantize, {"data": CODES, "scales": SCALES.to(torch.complex64)}, "scales are torch.complex64"),
    (fk.dequantize, {"data": CODES, "scales": SCALES, "zeros": SCALES}, "zeros are torch.float32"),
    (fk.cross_entropy, {"logits": X[:, :0], "target": TARGET}, "without a class"),
    (fk.linear_cross_entropy, {"x": X, "weight": MATRIX[:0], "target": TARGET}, "without a class"),
    (fk.grouped_matmul, {"x": X, "weights": torch.ones(2, 32, 3, device="meta"), "group_offsets": OFFSETS}, "on meta"),
    (fk.grouped_matmul, {"x": X, "weights": torch.ones(2, 32, 3), "group_offsets": OFFSETS, "gather": TARGET[0]},
     r"gather is torch.int64 \(\)"),
    (fk.grouped_weight_gradient, {"x": X, "dz": torch.tensor(1.0), "group_offsets": OFFSETS}, r"dz \(\); they must be"),
    (fk.grouped_weight_gradient, {"x": X, "dz": X, "group_offsets": OFFSETS[0]}, r"group_offsets is torch.int64 \(\)"),
    (fk.grouped_weight_gradient, {"x": X, "dz": X, "group_offsets": OFFSETS[:, None]}, "must be int32 or int64"),
    (fk.grouped_weight_gradient, {"x": X, "dz": X, "group_offsets": OFFSETS, "gather": TARGET[0]}, "gather is torch"),
    (fk.paged_attention, {"q": Q[0], "k": K, "v": V, "cu_seqlens_q": LENGTH, "lengths": LENGTH[0], "page_table": TABLE},
     r"lengths is torch.int32 \(\)"),
    (fk.decode_attention, {"q": Q, "k": K, "v": V, "lengths": LENGTH, "sinks": torch.zeros(2, device="meta")},
     "sinks is torch.float32 .* on meta"),
    (fk.decode_attention, {"q": Q, "k": K, "v": V, "lengths": LENGTH, "sinks": torch.zeros(2, requires_grad=True)},
     "there is no gradient"),
    (fk.append_kv, {"k": NEW, "v": NEW, "k_pages": PAGES.clone().requires_grad_(), "v_pages": PAGES, "slots": SLOTS},
     "k_pages is written to, and needs a gradient"),
    (fk.append_kv, {"k": NEW, "v": NEW, "k_pages": PAGES, "v_pages": PAGES[:1].expand(2, -1, -1, -1), "slots": SLOTS},
     "v_pages is written to, and is an expanded view"),
    (fk.linear, {"x": X, "weight": MATRIX, "out": torch.zeros(1, 8).expand(4, 8)}, "out is written to, and is an exp"),
    (fk.linear, {"x": X, "weight": torch.randn(32, 32), "out": X}, "out is also what is read"),
    (fk.matmul, {"a": X, "b": torch.randn(32, 32), "out": X}, "out is also what is read"),
    (fk.mlp, {"x": X, "gate_up_weight": torch.randn(16, 32), "down_weight": torch.randn(32, 8),
     "out": torch.zeros(1, 32).expand(4, 32)},
     "out is written to"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "message"),
    REFUSED,
    ids=[f"{function.__name__}-{message}" for function, _, message in REFUSED],
)
def test_refused(function: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{function.__name__}: .*{message}"):
        function(**given)


def test_pages_that_are_not_there_are_not_read() -> None:
    table = torch.tensor([[1, 0], [0, 77]], dtype=torch.int32)
    q, pages = torch.randn(2, 1, 2, 16), torch.randn(2, 16, 2, 16)
    lengths = torch.tensor([32, 16], dtype=torch.int32)  # page 77 is behind the last key
    found = fk.decode_attention(q, pages, pages, lengths, table, backend="cpp")
    torch.testing.assert_close(found, fk.decode_attention(q, pages, pages, lengths, table, backend="torch"))
    with pytest.raises(IndexError, match="page_table names page 77; the cache has pages 0 to 1"):
        fk.decode_attention(q, pages, pages, lengths + 1, table, backend="cpp")
    with pytest.raises(IndexError, match="page_table names page -1"):
        fk.decode_attention(q, pages, pages, lengths, table - 1, backend="cpp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_offsets": [1, 2, 4]}, "group_offsets give bounds .1, 2, 4. for 4 rows"),
        ({"group_offsets": [0, 5, 4]}, "they must ascend from 0 on"),
        ({"group_offsets": [0, 2, 5]}, "end within the rows"),
        ({"gather": [0, 1, 2, -1]}, "gather names row -1; there are 4 rows"),
        ({"gather": [0, 1, 2, 4]}, "gather names row 4; there are 4 rows"),
        ({"scatter": [0, 1, 2, 4]}, "scatter names row 4; there are 4 rows"),
        ({"scatter": [0, 1, 2, 2]}, "scatter names a row of the output twice"),
    ],
)
def test_rows_that_are_not_there_are_refused_on_a_cpu(given: dict[str, list[int]], message: str) -> None:
    """They wrapped around, shortened the result, or left a row to chance."""
    tensors = {"group_offsets": torch.tensor([0, 1, 4]), **{name: torch.tensor(one) for name, one in given.items()}}
    with pytest.raises((ValueError, IndexError), match=f"^grouped_matmul: .*{message}"):
        fk.grouped_matmul(X, torch.randn(2, 32, 3), **tensors)
    if "group_offsets" in given:
        with pytest.raises(ValueError, match=f"^grouped_weight_gradient: .*{message}"):
            fk.grouped_weight_gradient(X, X, tensors["group_offsets"])


@pytest.mark.parametrize("of_bias", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_up", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_vectors_of_quantized_layers_have_any_float_dtype(of_bias: torch.dtype, of_up: torch.dtype, wide: bool) -> None:
    """Gate and up with biases of two dtypes; residual, norm weight and output in float64."""
    residual = torch.randn(4, 8, dtype=torch.float64 if wide else torch.float32)
    options = {
        "activation": "swiglu", "residual": residual, "norm_weight": torch.rand(32).to(of_up),
        "out_dtype": torch.float64 if wide else None,
    }  # fmt: skip
    biases = [torch.randn(8).to(of_bias), torch.randn(8).to(of_up)]
    found = fk.linear(X, [WEIGHT, WEIGHT], biases, backend="cpp", **options)
    expected = named(fk.linear(X, [WEIGHT, WEIGHT], biases, backend="reference", **options))["output"]
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
