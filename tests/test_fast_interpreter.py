"""The interpreter that the tests run on computes what Triton's own does: its types, and kernels that use them."""

from __future__ import annotations

import fast_interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

import flashkernel as fk
from flashkernel.core.op import Op
from flashkernel.ops import registry

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(fast_interpreter.VERSIONS) or torch.cuda.is_available(),
    reason="Triton's own interpreter, or none, runs here",
)


def test_a_type_is_kept_by_what_it_is_made_of() -> None:
    kept = tl.block_type(tl.float16, [4, 8])
    again = tl.block_type(tl.float16, (tl.constexpr(4), tl.constexpr(8)))
    assert kept == again
    assert (again.name, again.numel, again.shape.values) == ("<['4', '8'], fp16>", 32, [4, 8])
    assert tl.block_type(tl.bfloat16, [4, 8]) != kept
    assert tl.block_type(tl.float16, [8, 4]) != kept
    assert tl.block_type(tl.uint32, [4]).element_ty.is_int_unsigned()
    assert not tl.block_type(tl.int32, [4]).element_ty.is_int_unsigned()
    near, far = (tl.block_type(tl.pointer_type(tl.float32, space), [4]) for space in (1, 3))
    assert (near.element_ty.address_space, far.element_ty.address_space) == (1, 3)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float16, [3])


def test_a_tuple_has_the_type_of_its_values() -> None:
    found = core.tuple([core.constexpr(2), core.constexpr(3)])
    assert found.type == core._type_for_tuple_values(found.values)
    found._setitem(0, core.constexpr(5))
    assert [one.value for one in found] == [5, 3]
    assert found.type == core._type_for_tuple_values(found.values)


def test_types_have_the_numpy_dtypes_they_are_stored_as() -> None:
    stored = {tl.int1: "bool", tl.int32: "int32", tl.uint8: "uint8", tl.bfloat16: "uint16", tl.float8e4nv: "uint8"}
    for kind, name in stored.items():
        assert interpreter._get_np_dtype(kind).name == name
        assert interpreter._get_np_dtype(tl.block_type(kind, [4])).name == name
    assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(tl.int8), [4])).name == "uint64"


@triton.jit
def _half_of(x, y):
    return (x.to(tl.float32) - y) / 2


@triton.jit
def _kernel(out, x, y, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = row[:, None] * COLUMNS + column
    tile = tl.load(x + places, mask=(row < rows)[:, None], other=0.0)
    half = _half_of(tile, tl.load(y + column)[None, :])
    wrapped = (row.to(tl.uint32) * 0x9E3779B9).to(tl.uint32) >> 28
    tl.store(out + row, tl.max(half, 1) + tl.sum(half, 1) + wrapped.to(tl.float32), mask=row < rows)


def test_a_kernel_with_functions_broadcasts_and_integers_that_wrap() -> None:
    x, y = torch.randn(5, 16).half(), torch.randn(16)
    out = torch.full((8,), torch.nan)
    for _ in range(2):  # the second time on types that are kept
        _kernel[(1,)](out, x, y, 5, ROWS=8, COLUMNS=16)
    half = (x.float() - y) / 2
    wrapped = torch.tensor([(row * 0x9E3779B9) % 2**32 >> 28 for row in range(5)])
    assert torch.allclose(out[:5], half.amax(1) + half.sum(1) + wrapped, atol=1e-5)
    assert out[5:].isnan().all()


@triton.jit
def _composed(a, b, c, d):
    """x -> a x + b, then x -> c x + d: associative, but not commutative."""
    return a * c, b * c + d


@triton.jit
def _reducing_kernel(out, x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = row[:, None] * COLUMNS + column
    factors, terms = tl.load(x + places), tl.load(y + places)
    _, by_row = tl.reduce((factors, terms), 1, _composed)
    tl.store(out + row, by_row)
    _, by_column = tl.reduce((factors, terms), 0, _composed, keep_dims=True)
    tl.store(out + ROWS + column[None, :], by_column)
    tl.store(out + ROWS + COLUMNS, tl.xor_sum(column))


def test_reductions_combine_in_order() -> None:
    x, y = torch.rand(4, 8) + 0.5, torch.randn(4, 8)
    out = torch.full((13,), torch.nan)
    _reducing_kernel[(1,)](out, x, y, ROWS=4, COLUMNS=8)
    for along, found in ((1, out[:4]), (0, out[4:12])):
        expected = torch.zeros(found.shape)
        for factor, term in zip(x.unbind(along), y.unbind(along)):
            expected = expected * factor + term
        assert torch.allclose(found, expected, atol=1e-5)
    assert out[12] == 0  # 0 ^ 1 ^ ... ^ 7


@pytest.mark.parametrize("op", [op for op in registry().values() if "triton" in {one.name for one in op.backends}],
                         ids=lambda op: op.name)  # fmt: skip
def test_operands_in_bfloat16_are_declined(op: Op) -> None:
    """The interpreter multiplies them wrongly (an attention's output of 1 was 10^9) and cuts where it should round."""
    for case in op.cases:
        inputs = op.make_inputs(case, torch.bfloat16)
        if torch.bfloat16 in case.dtypes and all(x.itemsize > 1 for x in inputs.values()):
            verdicts = fk.explain(op.call, **inputs, **case.options).verdicts
            reason = next(one.reason for one in verdicts if one.backend == "triton")
            assert reason is not None, case.name
            assert "Triton's interpreter computes bfloat16 wrongly" in reason or "bfloat16" not in reason, case.name
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(fk.BackendError, match="interpreter computes bfloat16 wrongly"):
        fk.attention(q, q, q, backend="triton")
