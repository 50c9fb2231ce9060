"""What the table cannot say of the reductions: formulas, special values, long rows, wrong inputs, the CUDA text."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.check import compare, verify
from flashkernel.core.op import Case, Op
from flashkernel.ops.reduce import kinds, spec
from flashkernel.ops.reduce.configs import MAX_TILE, REDUCE, splits_of
from flashkernel.ops.reduce.masks import mask_rows

INF, NAN = float("inf"), float("nan")
PACKAGE = Path(fk.__file__).parent / "ops" / "reduce"
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


def test_cuda_text_and_python_agree() -> None:
    from flashkernel.ops.reduce import cuda

    text = (PACKAGE / "row.cuh").read_text()
    names = re.search(r"enum Kind \{([^}]*)\}", text)[1].replace(",", " ").split()
    assert names == [name for name, _ in sorted(_kinds().items(), key=lambda item: item[1])]
    maskings = re.search(r"enum Masking \{([^}]*)\}", (PACKAGE / "kernel.cu").read_text())[1].replace(",", " ").split()
    assert [getattr(cuda, name) for name in maskings] == [0, 1, 2]
    for name in ("WARP", "IN_FLIGHT", "MAX_THREADS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", text)[1]) == getattr(cuda, name)
    kernels = (PACKAGE / "kernel.cu").read_text()
    for name, arguments in cuda._ARGUMENTS.items():
        parameters = re.search(rf"\b{name}\(([^)]*)\) \{{", kernels)[1].split(",")
        assert [_argument_type(parameter) for parameter in parameters] == arguments.split(", "), name


def _kinds() -> dict[str, int]:
    return {name: value for name, value in vars(kinds).items() if name.isupper()}


def _argument_type(parameter: str) -> str:
    if "*" in parameter:
        return "pointer"
    return {"Index": "int64", "int": "int32", "float": "float32"}[parameter.split()[0]]


def _instances(element: str, vector: int) -> list[str]:
    """One of every kernel and kind for an element type, as the launchers ask for them."""
    names = [
        f"row_reduce<{element}, {element}, {kind}, {raw}, false>"
        for kind in range(kinds.LOGSUMEXP + 1)
        for raw in ("false", "true")
    ]
    names += [f"row_reduce<{element}, {element}, {kinds.SOFTMAX}, true, {masked}>" for masked in ("false", "true")]
    names += [f"finish_rows<{element}, {kind}>" for kind in range(kinds.LOGSUMEXP + 1)]
    for size, values in ((vector, (8, 16, 32)), (1, (8, 16))):
        for count in values:
            names += [f"row_softmax<{element}, {size}, {count // size}, {masking}>" for masking in range(3)]
            names += [f"row_softmax_backward<{element}, {size}, {count // size}>"]
        for kind in range(kinds.MAX, kinds.SOFTMAX_BACKWARD + 1):
            items = 2 if size > 1 and kind != kinds.SOFTMAX_BACKWARD else 1
            masks = ("false", "true") if kind == kinds.SOFTMAX else ("false",)
            names += [f"spread_rows<{element}, {size}, {kind}, {items}, {masked}>" for masked in masks]
        names += [f"weighted_backward<{element}, {element}, {share}, {size}>" for share in {element, "float"}]
    names += [f"weighted_backward<{element}, float, float, {vector}>", f"column_sum<{element}>"]
    return list(dict.fromkeys(names))


@pytest.mark.compile
@pytest.mark.parametrize(
    "element, vector, arch",
    [
        ("float", 4, "sm_90"), ("__half", 8, "sm_75"), ("__nv_bfloat16", 8, "sm_90"),
        pytest.param("float", 4, "sm_75", marks=pytest.mark.every_arch),
        pytest.param("__half", 8, "sm_90", marks=pytest.mark.every_arch),
        pytest.param("__nv_bfloat16", 8, "sm_75", marks=pytest.mark.every_arch),
    ],
)  # fmt: skip
def test_cuda_text_compiles_without_spills(element: str, vector: int, arch: str) -> None:
    from compiled import disassemble

    from flashkernel.core.cuda import can_compile, compile_cubin

    if reason := can_compile():
        pytest.skip(reason)
    source, names = (PACKAGE / "kernel.cu").read_text(), _instances(element, vector)
    compiled = compile_cubin(source, names, arch, include=[PACKAGE, PACKAGE.parents[1] / "blocks" / "cuda"])
    assert set(compiled.names) == set(names)
    assert compiled.spilled_bytes == 0, compiled.log
    assert compiled.log.count("registers") >= len(names), "ptxas reported on fewer kernels than were asked for"
    machine_code = disassemble(compiled.code)
    assert ("ACQBULK" in machine_code) == (arch == "sm_90"), "kernels that start early wait before they read"
    of_rows = {symbol: name for name, symbol in compiled.names.items() if re.match("row_softmax|spread_rows", name)}
    for function in machine_code.split("Function : ")[1:]:
        name = of_rows.get(function.split()[0])
        if name is not None and f"<{element}, {vector}," in name:
            assert "LDG.E.128" in function, f"{name}: no 16-byte loads"
            stores = set(re.findall(r"STG\S*", function))
            assert {store[:9] for store in stores} == {"STG.E.128"}, f"{name} stores by {stores}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192, 16384, 20480])
def test_cuda_sees_what_it_should_at_every_width(width: int, dtype: torch.dtype) -> None:
    """Vectors that the diagonal passes through, masks that come in one load and byte by byte, few rows and many."""
    generator = torch.Generator("cuda").manual_seed(width)
    for batches, queries in ((1, 5), (2, 300), (8, 300)):
        x = torch.randn(batches, queries, width, generator=generator, device="cuda").to(dtype)
        visible = torch.rand(queries, width + 3, generator=generator, device="cuda") < 0.6
        visible[2] = False
        for mask in (None, visible[:, :width].contiguous(), visible[:, 3:], visible[:, :1]):
            for causal in (False, True):
                exact = fk.softmax(x.double(), mask, scale=0.5, causal=causal, backend="reference")
                own = fk.softmax(x, mask, scale=0.5, causal=causal, backend="torch")
                found = fk.softmax(x, mask, scale=0.5, causal=causal, backend="cuda")
                report = compare("softmax", found, exact, own, spec.SOFTMAX.tolerance, dtype)
                assert report.ok, report.message


@pytest.mark.gpu
def test_cuda_kernels_in_a_chain_see_what_came_before() -> None:
    """Small ones start before the one before them has ended; each reads what that one wrote, into reused memory."""
    inputs = [torch.randn(16, 128256, device="cuda").bfloat16() for _ in range(8)]
    hurried = [fk.max(fk.softmax(inputs[turn % 8], backend="cuda"), backend="cuda") for turn in range(200)]
    torch.cuda.synchronize()
    for turn, found in enumerate(hurried):
        y = fk.softmax(inputs[turn % 8], backend="cuda")
        torch.cuda.synchronize()
        assert torch.equal(found, y.amax(-1)), f"turn {turn}"


@pytest.mark.gpu
def test_cuda_spreads_more_rows_than_a_grid_dimension_holds() -> None:
    x = torch.randn(65535 + 700, 24, device="cuda", requires_grad=True)
    dy = torch.randn(x.shape[0], device="cuda")
    found, own = (torch.autograd.grad(fk.logsumexp(x, backend=name), x, dy)[0] for name in ("cuda", "torch"))
    report = compare("dx", found, x.detach().double().softmax(-1) * dy[:, None], own, spec.LOGSUMEXP.tolerance, x.dtype)
    assert report.ok, report.message


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
