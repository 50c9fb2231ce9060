"""What the table cannot say of the reductions: formulas, special values, long rows, wrong inputs, the CUDA text."""

from __future__ import annotations

import math

import pytest
import torch

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.op import Case, Op
from flashkernel.ops.reduce import spec
from flashkernel.ops.reduce.configs import MAX_TILE, REDUCE, splits_of
from flashkernel.ops.reduce.masks import mask_rows

INF, NAN = float("inf"), float("nan")
BACKENDS = [
    pytest.param("torch", "cpu"),
    pytest.param("triton", "cpu"),
    *(pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("triton", "cuda", "torch")),
]
on_backends = pytest.mark.parametrize("backend, device", BACKENDS)


def test_reference_against_formulas() -> None:
    x = torch.randn(4, 7, dtype=torch.float64)
    weight = torch.randn(7, dtype=torch.float64)
    for row, values in enumerate(x.tolist()):
        total = math.fsum(math.exp(value) for value in values)
        expected = {
            fk.sum: math.fsum(values),
            fk.mean: math.fsum(values) / 7,
            fk.max: sorted(values)[-1],
            fk.logsumexp: math.log(total),
        }
        for function, value in expected.items():
            assert function(x, backend="reference")[row].item() == pytest.approx(value, rel=1e-12)
        dot = math.fsum(value * factor for value, factor in zip(values, weight.tolist()))
        assert fk.weighted_sum(x, weight, backend="reference")[row].item() == pytest.approx(dot, rel=1e-12)
        softmax = torch.tensor([math.exp(value) / total for value in values], dtype=torch.float64)
        torch.testing.assert_close(fk.softmax(x, backend="reference")[row], softmax)


def test_reference_softmax_sees_what_it_should() -> None:
    """Query q of 2 sees keys up to q + 3 of 5; the mask hides one more."""
    x = torch.randn(2, 5, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, True])
    y = fk.softmax(x, mask, scale=0.5, causal=True, backend="reference")
    for query, seen in enumerate(([0, 2, 3], [0, 2, 3, 4])):
        weights = [math.exp(0.5 * x[query, key].item()) for key in seen]
        expected = torch.zeros(5, dtype=torch.float64)
        expected[seen] = torch.tensor([weight / math.fsum(weights) for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(y[query], expected)


@on_backends
def test_special_values_follow_torch(backend: str, device: str) -> None:
    x = torch.tensor([[1.0, INF, 2.0], [1.0, NAN, 2.0], [-INF, 3.0, -INF], [NAN, NAN, NAN]], device=device)
    for function, expected in ((fk.max, x.amax(-1)), (fk.sum, x.sum(-1)), (fk.mean, x.mean(-1))):
        assert torch.equal(function(x, backend=backend).nan_to_num(123.0), expected.nan_to_num(123.0))
    torch.testing.assert_close(fk.logsumexp(x, backend=backend), torch.logsumexp(x, -1), equal_nan=True)
    torch.testing.assert_close(fk.softmax(x, backend=backend), torch.softmax(x, -1), equal_nan=True)
    rising = fk.softmax(x[2:3], scale=-1.0, backend=backend)  # -inf times a negative scale is +inf
    assert rising.isnan().all()


@on_backends
def test_rows_that_see_nothing(backend: str, device: str) -> None:
    """Zeros and zero gradients, never NaN: hidden by the mask, by causality, or all of it -inf."""
    x = torch.randn(3, 6, device=device)
    x[1] = -INF
    mask = torch.ones(3, 6, dtype=torch.bool, device=device)
    mask[2] = False
    x.requires_grad_()
    y = fk.softmax(x, mask, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.randn(3, 6, device=device))
    assert torch.equal(y[1:], torch.zeros_like(y[1:]))
    assert torch.equal(dx[1:], torch.zeros_like(dx[1:]))
    assert y[0].sum().item() == pytest.approx(1.0)
    causal = fk.softmax(torch.randn(4, 2, device=device), causal=True, backend=backend)
    assert torch.equal(causal[:2], torch.zeros_like(causal[:2]))
    total = fk.logsumexp(x, backend=backend)
    (dx,) = torch.autograd.grad(total.masked_fill(total.isinf(), 0.0).sum() + total[1], x)
    assert total[1].item() == -INF
    assert torch.equal(dx[1], torch.zeros_like(dx[1]))


@on_backends
def test_ties_share_the_gradient(backend: str, device: str) -> None:
    x = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0], [-INF] * 5, [INF, 1.0, INF, 0.0, 0.0]], device=device)
    dy = torch.tensor([3.0, 10.0, 4.0], device=device)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(x.amax(-1), x, dy)
    (dx,) = torch.autograd.grad(fk.max(x, backend=backend), x, dy)
    assert torch.equal(dx, expected)
    assert dx[0].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]


@on_backends
def test_rows_without_columns_follow_torch(backend: str, device: str) -> None:
    x = torch.empty(2, 3, 0, device=device)
    assert torch.equal(fk.sum(x, backend=backend), torch.zeros(2, 3, device=device))
    assert fk.mean(x, keepdim=True, backend=backend).isnan().all()
    assert fk.mean(x, keepdim=True, backend=backend).shape == (2, 3, 1)
    assert (fk.logsumexp(x, backend=backend) == -INF).all()
    assert fk.softmax(x, backend=backend).shape == (2, 3, 0)
    with pytest.raises(ValueError, match="without columns"):
        fk.max(x, backend=backend)
    assert fk.max(torch.empty(0, 3, device=device), backend=backend).shape == (0,)


@on_backends
@pytest.mark.parametrize("width, scale", [(64, 1.0), (64, -0.5), (MAX_TILE + 600, 1.0)])
def test_large_logits_keep_their_differences(backend: str, device: str, width: int, scale: float) -> None:
    """The maximum is subtracted before anything is rounded: far from zero, softmax is as exact as near it."""
    x = torch.randn(2, width, device=device) + 4000.0
    y = fk.softmax(x, scale=scale, backend=backend)
    expected = torch.softmax(x.double() * scale, -1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-12)


LONG = [
    (spec.SUM, Case("split", {"rows": 2, "width": 70000})),
    (spec.MEAN, Case("split-odd", {"rows": 2, "width": 70001})),
    (spec.MAX, Case("split", {"rows": 3, "width": 70000})),
    (spec.LOGSUMEXP, Case("split-odd", {"rows": 2, "width": 70001})),
    (spec.LOGSUMEXP, Case("walk", {"rows": 3, "width": 33000})),
    (spec.WEIGHTED_SUM, Case("split", {"rows": 2, "width": 70000})),
    (spec.WEIGHTED_SUM, Case("walkers", {"rows": 900, "width": 24})),
    (spec.SOFTMAX, Case("long", {"rows": 2, "width": 20000})),
    (spec.SOFTMAX, Case("split", {"rows": 2, "width": 70000}, {"scale": -0.5})),
    (spec.SOFTMAX, Case("long-causal", {"rows": (2, 3), "width": 16999}, {"causal": True})),
    (spec.SOFTMAX, Case("long-mask", {"rows": (2, 2), "width": 17000, "mask": (1, 0, 1)}, present=("mask",))),
]


@pytest.mark.parametrize("op, case", LONG, ids=lambda value: value.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_long_rows_under_the_interpreter(op: Op, case: Case, dtype: torch.dtype) -> None:
    """As an H200 would launch them: several tiles a row, several programs a row, several walkers a column."""
    with devices.pretend(devices.KNOWN["h200"]):
        reports = verify(op, case, dtype, lambda **inputs: op.call(**inputs, backend="triton"))
    failures = [report.message for report in reports if not report.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("op, case", LONG, ids=lambda value: value.name)
def test_long_rows_on_the_gpu(op: Op, case: Case, backend: str) -> None:
    for dtype in case.dtypes:
        failures = [report.message for report in verify(op, case, dtype, backend, "cuda") if not report.ok]
        assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_offsets_beyond_two_billion_elements(backend: str) -> None:
    rows, width = 65540, 32768
    if torch.cuda.get_device_properties(0).total_memory < 32 << 30:
        pytest.skip("needs 32 GiB of GPU memory")
    x = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    assert x.numel() > 1 << 31
    x[-1] = 1.0
    assert fk.sum(x, backend=backend)[-2:].tolist() == [0.0, 32768.0]
    assert fk.max(x, backend=backend)[-2:].tolist() == [0.0, 1.0]
    y = fk.softmax(x, backend=backend)
    assert torch.equal(y[-1], torch.full_like(y[-1], 1 / width))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_results_repeat_to_the_bit(backend: str) -> None:
    x = torch.randn(3, 1_000_003, device="cuda", requires_grad=True)
    weight = torch.randn(1_000_003, device="cuda", requires_grad=True)
    runs = []
    for _ in range(3):
        outputs = [fk.sum(x, backend=backend), fk.logsumexp(x, backend=backend), fk.softmax(x, backend=backend)]
        total = fk.weighted_sum(x, weight, backend=backend)
        runs.append([*outputs, total, *torch.autograd.grad(total.sum(), (x, weight))])
    for again in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], again))


@on_backends
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_rows_that_begin_anywhere(backend: str, device: str, offset: int) -> None:
    """A view into a larger buffer is aligned to nothing."""
    storage = torch.randn(3 * 96 + 8, device=device).half()
    x = storage[offset : offset + 288].view(3, 96)[:, 1:90]
    torch.testing.assert_close(fk.sum(x, backend=backend), x.sum(-1), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(fk.softmax(x, backend=backend), x.softmax(-1), rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(fk.logsumexp(x, backend=backend), x.logsumexp(-1), rtol=2e-3, atol=2e-3)


def test_gradients_of_sums_are_views() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for function in (fk.sum, fk.mean):
        (dx,) = torch.autograd.grad(function(x, backend="triton"), x, torch.tensor([1.0, 2.0, 3.0]))
        assert dx.stride() == (1, 0)
        scale = 1.0 if function is fk.sum else 0.2
        torch.testing.assert_close(dx, torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 5) * scale)


def test_weighted_sum_gives_only_the_gradients_asked_for() -> None:
    x, weight = torch.randn(4, 9), torch.randn(9)
    for wanted in (x, weight):
        fresh = [value.clone().requires_grad_(value is wanted) for value in (x, weight)]
        fk.weighted_sum(*fresh, backend="triton").sum().backward()
        expected = weight.expand(4, 9) if wanted is x else x.sum(0)
        torch.testing.assert_close(next(value.grad for value in fresh if value.requires_grad), expected)


def test_inputs_are_left_alone() -> None:
    x, mask = torch.randn(3, 8), torch.rand(3, 8) < 0.5
    kept = x.clone(), mask.clone()
    outputs = [fk.softmax(x, mask, backend="triton"), fk.max(x, backend="triton"), fk.sum(x, backend="triton")]
    assert torch.equal(x, kept[0])
    assert torch.equal(mask, kept[1])
    assert all(output.data_ptr() != x.data_ptr() for output in outputs)


@pytest.mark.parametrize(
    "shape, mask, copied",
    [
        ((2, 3, 4, 5), (5,), False),
        ((2, 3, 4, 5), (4, 1), False),
        ((2, 3, 4, 5), (2, 1, 1, 5), False),
        ((2, 3, 4, 5), (2, 1, 4, 5), False),
        ((2, 3, 4, 5), (2, 3, 4, 5), False),
        ((2, 3, 2, 3, 5), (2, 1, 2, 1, 5), True),
        ((7,), (1,), False),
    ],
)
def test_masks_fold_into_strides(shape: tuple[int, ...], mask: tuple[int, ...], copied: bool) -> None:
    visible = torch.rand(mask) < 0.5
    view = mask_rows(visible, torch.Size(shape))
    assert (view.tensor.data_ptr() != visible.data_ptr()) == copied
    expected = visible.expand(shape).reshape(-1, shape[-1])
    middle, inner, outer_stride, middle_stride, inner_stride, column_stride = view.layout
    bits = view.tensor.as_strided((view.tensor.untyped_storage().nbytes(),), (1,), 0)
    for row in range(expected.shape[0]):
        begin = (
            row // (middle * inner) * outer_stride + row // inner % middle * middle_stride + row % inner * inner_stride
        )
        found = [bool(bits[begin + column * column_stride]) for column in range(shape[-1])]
        assert found == expected[row].tolist()


def test_few_long_rows_are_split_and_many_are_not() -> None:
    h200 = devices.KNOWN["h200"]
    for rows, width, split in ((16, 1 << 24, True), (4, 10_000_000, True), (16384, 4096, False), (64, 4096, False)):
        shape = {"rows": rows, "width": width, "bytes": 2, "aligned": 1, "reads": 1}
        config = REDUCE.heuristic(h200, shape)
        split_columns, splits = splits_of(config, h200, -(-rows // config.rows), width, config.block)
        assert (splits > 1) == split
        assert split_columns * (splits - 1) < width <= split_columns * splits
        assert split_columns % config.block == 0
    assert MAX_TILE == 16384


def test_wrong_inputs() -> None:
    x = torch.randn(4, 6)
    for function in (fk.sum, fk.mean, fk.max, fk.logsumexp, fk.softmax):
        with pytest.raises(ValueError, match="float tensor"):
            function(torch.arange(6))
        with pytest.raises(ValueError, match="one dim"):
            function(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"weight is torch.float32 of shape \(5,\); x has 6 columns"):
        fk.weighted_sum(x, torch.randn(5))
    with pytest.raises(ValueError, match="must be a float tensor"):
        fk.weighted_sum(x, torch.arange(6))
    with pytest.raises(ValueError, match="weight is on meta"):
        fk.weighted_sum(x, torch.randn(6, device="meta"))
    with pytest.raises(fk.BackendError, match=r"weight is torch\.float64"):
        fk.weighted_sum(x, torch.randn(6, dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match=r"must be torch\.bool"):
        fk.softmax(x, torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"\(3, 6\) does not broadcast to x of shape \(4, 6\)"):
        fk.softmax(x, torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not broadcast"):
        fk.softmax(x, torch.ones(2, 4, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask is on meta"):
        fk.softmax(x, torch.ones(4, 6, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="causal needs"):
        fk.softmax(x[0], causal=True)


@pytest.mark.parametrize(
    "width, device",
    [
        *((width, "cpu") for width in (1, 7, 2048, 2049, 9001)),
        *(pytest.param(width, "cuda", marks=pytest.mark.gpu) for width in (1, 7, 2048, 2049, 50257)),
    ],
)
def test_argmax_is_the_first_largest(width: int, device: str) -> None:
    from flashkernel.ops.reduce.triton import argmax as by_parts

    x = torch.randint(-20, 20, (3, width + 5), generator=torch.Generator().manual_seed(0)).float().to(device)
    x = x[:, :width]  # rows that are not neighbors, with many equal values
    x[2] = -torch.inf
    expected = torch.tensor([int((row == row.max()).nonzero()[0]) for row in x.cpu()])
    assert torch.equal(fk.argmax(x).cpu(), expected)
    assert torch.equal(by_parts.argmax(x).cpu(), expected)
    assert torch.equal(fk.argmax(x.view(3, 1, width)).cpu(), expected[:, None])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [1, 7, 2049])
def test_argmax_of_rows_without_a_finite_maximum(width: int, device: str) -> None:
    from flashkernel.ops.reduce.triton import argmax as by_parts

    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(device)
    x[1, width // 2 :] = torch.nan
    x[2, -1] = torch.inf
    x[3] = -torch.inf
    x[4, : width - 1] = -torch.inf
    places = x.cpu().argmax(-1)
    checked = torch.where(torch.tensor([True, False, False, False, True]), places, -7)
    assert places[1] == width // 2
    for argmax in (fk.argmax, by_parts.argmax):
        assert torch.equal(argmax(x).cpu(), places)
        assert torch.equal(argmax(x, invalid=-7).cpu(), checked)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fk.argmax(x, invalid=-7), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x).cpu(), checked)
