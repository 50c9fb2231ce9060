"""What the table cannot say of matrix products: split-K, persistent programs, layouts, big values, wrong inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashkernel as fk
from flashkernel.blocks.fp8 import FP8
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.launch import collect_launches
from flashkernel.ops.matmul.configs import GROUPED, MATMUL, MatmulConfig

SMALL = MatmulConfig(16, 16, 16, 4, 2, group_m=2)
H200 = devices.KNOWN["h200"]


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("persistent", [False, True])
def test_splits_and_persistent_programs(splits: int, persistent: bool) -> None:
    a, b, bias, residual = torch.randn(2, 37, 70), torch.randn(2, 70, 45), torch.randn(45), torch.randn(2, 37, 45)
    with tune.override(MATMUL, replace(SMALL, splits=splits, persistent=persistent)):
        c = fk.matmul(a, b, bias=bias, residual=residual, activation="silu", scale=0.5, backend="triton")
    _close(c, 0.5 * torch.nn.functional.silu(a @ b + bias) + residual)


def test_split_k_stores_the_preactivation() -> None:
    a, b = torch.randn(20, 50, requires_grad=True), torch.randn(50, 30, requires_grad=True)
    with tune.override(MATMUL, replace(SMALL, splits=2)):
        gradients = torch.autograd.grad(fk.matmul(a, b, activation="gelu", backend="triton").square().sum(), (a, b))
    expected = torch.autograd.grad(torch.nn.functional.gelu(a @ b).square().sum(), (a, b))
    for actual, exact in zip(gradients, expected):
        _close(actual, exact, 1e-4)


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("aligned", [False, True])
def test_all_transposes_of_views(transposed: tuple[bool, bool], aligned: bool) -> None:
    """Slices of larger tensors, by TMA where 16 bytes divide their strides, else by pointers; around them is NaN."""
    m, n, k = (40, 48, 56) if aligned else (37, 45, 51)
    operands = []
    for (rows, columns), turned in zip(((m, k), (k, n)), transposed):
        if turned:
            rows, columns = columns, rows
        storage = torch.full((rows + 3, columns + 16 if aligned else columns + 5), torch.nan, dtype=torch.float16)
        view = storage[1 : 1 + rows, 8 : 8 + columns] if aligned else storage[1 : 1 + rows, 3 : 3 + columns]
        view.copy_(torch.randn(rows, columns))
        operands.append(view.T if turned else view)
    a, b = operands
    with collect_launches() as launches:
        fk.matmul(a, b, backend="triton")
    assert aligned == launches[0].constants["PRODUCT"].A.TMA
    c = fk.matmul(a, b, out_dtype=torch.float32, backend="triton")
    _close(c, a.float() @ b.float(), 1e-4)


def test_sums_are_in_float32() -> None:
    """A sum of 16-bit values that 16 bits cannot hold."""
    a, b = torch.full((16, 512), 300.0, dtype=torch.float16), torch.full((512, 16), 1.0, dtype=torch.float16)
    c = fk.matmul(a, b, out_dtype=torch.float32, backend="triton")
    assert torch.equal(c, torch.full((16, 16), 153600.0))
    scaled = fk.matmul(a, b, scale=1 / 1024, backend="triton")
    assert torch.equal(scaled, torch.full((16, 16), 150.0, dtype=torch.float16))


def test_residuals_and_factors_in_16_bits_are_the_kernels() -> None:
    """Torch would store the product in float32 ahead of them."""
    a, b = (torch.empty(512, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    bias = torch.empty(512, dtype=torch.bfloat16, device="meta")
    with devices.pretend(devices.KNOWN["h200"]):
        assert fk.explain(fk.matmul, a, b, bias=bias).chosen == "torch"
        assert fk.explain(fk.matmul, a, b, residual=a).chosen == "hopper"
        assert fk.explain(fk.matmul, a, b, scale=0.5).chosen == "hopper"
        assert fk.explain(fk.matmul, a.float(), b.float(), residual=a.float()).chosen == "torch"


def test_an_expanded_out_is_refused() -> None:
    a, b = torch.randn(5, 8), torch.randn(8, 6)
    with pytest.raises(ValueError, match=r"out is written to, and is an expanded view"):
        fk.matmul(a, b, out=torch.empty(1, 6).expand(5, 6))
    with pytest.raises(ValueError, match="dz_out is written to, and is an expanded view"):
        fk.matmul_dact(a, b, torch.randn(5, 6), activation="silu", dz_out=torch.empty(5, 1).expand(5, 6))


def test_int8_over_its_whole_range() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((20, 300), (300, 24)))
    a_scale, b_scale = torch.rand(20) / 100, torch.rand(24) / 100
    c = fk.matmul(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32, backend="triton")
    _close(c, (a.double() @ b.double()) * a_scale[:, None].double() * b_scale.double(), 1e-5)


@pytest.mark.parametrize("block_k", [32, 128])
def test_block_scales_by_the_formula(block_k: int) -> None:
    a, b = torch.randn(20, 300).to(FP8), torch.randn(300, 140).to(FP8)
    a_scale, b_scale = torch.rand(20, 3) + 0.5, torch.rand(3, 2) + 0.5
    expected = torch.zeros(20, 140, dtype=torch.float64)
    for k in range(300):
        left = a[:, k].double() * a_scale[:, k // 128].double()
        right = b[k].double() * b_scale[k // 128].double().repeat_interleave(128)[:140]
        expected += left[:, None] * right[None, :]
    with tune.override(MATMUL, replace(SMALL, block_k=block_k, splits=2)):
        c = fk.matmul(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32, backend="triton")
    _close(c, expected, 1e-5)
    _close(fk.matmul(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32, backend="torch"), expected, 5e-5)


def test_the_cost_rule_splits_where_tiles_do_not_fill_the_gpu() -> None:
    def config(m: int, n: int, k: int) -> MatmulConfig:
        shape = {"m": m, "n": n, "k": k, "batch": 1, "bytes": 2, "blocks": False, "aligned": True}
        found = tune.pick(MATMUL, H200, shape)
        assert MATMUL.valid(found, H200, shape) is None
        return found

    assert config(128, 1024, 16384).splits > 1
    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 28672, 4096)):
        found = config(m, n, k)
        assert (found.splits, found.block_m * found.block_n) == (1, 128 * 256)


def test_groups_that_begin_anywhere_in_transposed_rows() -> None:
    """Rows lie side by side in memory, and no group begins at a multiple of 16 bytes."""
    x = torch.randn(16, 64, dtype=torch.float16).t()
    weights = torch.randn(3, 16, 41, dtype=torch.float16)
    offsets = torch.tensor([0, 13, 30, 64], dtype=torch.int32)
    found, expected = [], []
    for backend, results in (("triton", found), ("reference", expected)):
        inputs = [one.detach().requires_grad_() for one in (x, weights)]
        y = fk.grouped_matmul(*inputs, offsets, backend=backend)
        results += [y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.float(), other.float(), atol=0.5, rtol=1e-2)


def test_grouped_gradients_of_repeated_rows_and_counts() -> None:
    """Against a loop over rows, with counts instead of offsets, int64 indices and weights stored (groups, N, K)."""
    x, weights = torch.randn(6, 10, requires_grad=True), torch.randn(3, 7, 10, requires_grad=True)
    bias, factors = torch.randn(3, 7, requires_grad=True), torch.rand(12, requires_grad=True)
    counts, gather, scatter = torch.tensor([5, 0, 7]), torch.randint(0, 6, (12,)), torch.randperm(12)
    group = [0] * 5 + [2] * 7
    y = fk.grouped_matmul(
        x, weights.transpose(1, 2), counts, gather=gather, scatter=scatter, row_weights=factors, bias=bias,
        backend="triton",
    )  # fmt: skip
    rows: list[Any] = [None] * 12
    for row, g in enumerate(group):
        rows[scatter[row]] = factors[row] * (weights[g] @ x[gather[row]] + bias[g])
    expected = torch.stack(rows)
    _close(y, expected)
    cotangent = torch.randn(12, 7)
    given = (x, weights, bias, factors)
    for actual, exact in zip(torch.autograd.grad(y, given, cotangent), torch.autograd.grad(expected, given, cotangent)):
        _close(actual, exact, 1e-4)


@pytest.mark.parametrize("groups", [1, 31, 32, 70])
def test_grouped_schedule_finds_every_tile(groups: int) -> None:
    """More groups than rows, groups of whole tiles, and a tail of rows that belong to no group."""
    generator = torch.Generator().manual_seed(groups)
    counts = (
        torch.randint(0, 4, (groups,), generator=generator)
        * torch.tensor([0, 1, 5, 16])[torch.randint(0, 4, (groups,), generator=generator)]
    )
    rows = int(counts.sum()) + 9
    x, weights = torch.randn(rows, 16), torch.randn(groups, 16, 20)
    with tune.override(GROUPED, replace(SMALL, persistent=True)):
        y = fk.grouped_matmul(x, weights, counts, backend="triton")
    _close(y, fk.grouped_matmul(x, weights, counts, backend="reference"))
    assert not y[-9:].any()


def test_a_grouped_call_does_not_look_at_the_offsets() -> None:
    """The launches are known without values: on meta tensors, where a host sync raises."""
    x = torch.empty(1000, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weights = torch.empty(8, 64, 96, dtype=torch.bfloat16, device="meta", requires_grad=True)
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    with devices.pretend(H200), collect_launches() as launches:
        y = fk.grouped_matmul(x, weights, offsets, backend="triton")
        torch.autograd.grad(y, (x, weights), torch.empty_like(y))
    names = [launch.name for launch in launches]
    assert names == ["grouped_matmul_kernel", "grouped_matmul_kernel", "grouped_weight_gradient_kernel"]
    assert all(launch.grid[0] <= H200.sms for launch in launches)


A, B = torch.randn(4, 6), torch.randn(6, 5)
EIGHT, ONE = torch.ones(4, 6, dtype=torch.int8), torch.ones(())
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"b": torch.randn(5, 6)}, "must be b's last but one"),
    ({"a": torch.randn(6)}, "2 or 3 dims"),
    ({"a": torch.randn(2, 4, 6), "b": torch.randn(3, 6, 5)}, "one of them 1"),
    ({"b": B.half()}, "convert one of them"),
    ({"bias": torch.randn(4)}, r"float \(5,\)"),
    ({"residual": torch.randn(5, 4)}, "residual is"),
    ({"activation": "swish"}, "must be one of"),
    ({"activation": "swiglu"}, "even number of columns, not 5"),
    ({"b": (B, B)}, "b is a list of 2 matrices"),
    ({"b": (B, B[:, :4]), "activation": "swiglu"}, "must have one shape"),
    ({"b": (B, B), "activation": "swiglu", "bias": torch.randn(5)}, "1 biases for 2 matrices"),
    ({"b": (B, B), "activation": "swiglu", "packed": "quarters"}, "'halves' or 'interleaved'"),
    ({"out": torch.empty(4, 6)}, r"out is .* the result is torch.float32 \(4, 5\)"),
    ({"out": torch.empty(4, 5), "a": torch.randn(4, 6, requires_grad=True)}, "out takes no gradients"),
    ({"scale": float("nan")}, "finite"),
    ({"out_dtype": torch.int32}, "float dtype"),
    ({"a_scale": ONE}, "both a_scale and b_scale"),
    ({"a_scale": ONE, "b_scale": ONE}, "8-bit operands"),
    ({"a": EIGHT, "b": EIGHT.T}, "need a_scale"),
    ({"a": EIGHT, "b": EIGHT.T, "a_scale": torch.ones(3), "b_scale": ONE}, "blocks"),
    ({"a": EIGHT, "b": EIGHT.T, "a_scale": ONE.half(), "b_scale": ONE}, "must be float32"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_inputs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"matmul: .*{message}"):
        fk.matmul(**{"a": A, "b": B, **given})


WRONG_GRADIENTS: list[tuple[dict[str, Any], str]] = [
    ({"preactivation": torch.randn(4, 5)}, r"\(4, 10\)"),
    ({"activation": None}, "use matmul"),
    ({"activation": "swish"}, "must be one of"),
    ({"a": torch.randn(4, 6, requires_grad=True)}, "no gradient"),
    ({"dz_out": torch.randn(4, 10).half()}, "dz_out is"),
    ({"a": EIGHT, "b": EIGHT.T}, "16 bits or more"),
]


@pytest.mark.parametrize("given, message", WRONG_GRADIENTS, ids=[message for _, message in WRONG_GRADIENTS])
def test_wrong_gradients(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"matmul_dact: .*{message}"):
        fk.matmul_dact(**{"a": A, "b": B, "preactivation": torch.randn(4, 10), "activation": "swiglu", **given})


X, WEIGHTS, OFFSETS = torch.randn(8, 6), torch.randn(3, 6, 5), torch.tensor([0, 3, 3, 8])
WRONG_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"weights": torch.randn(3, 5, 6)}, "groups, K, N"),
    ({"weights": WEIGHTS.half()}, "one float dtype"),
    ({"group_offsets": OFFSETS[:2]}, r"\(4,\), or \(3,\)"),
    ({"group_offsets": OFFSETS.float()}, "int32 or int64"),
    ({"scatter": torch.arange(5)}, "one for each"),
    ({"row_weights": torch.ones(5)}, "row_weights is"),
    ({"bias": torch.ones(5)}, "bias is"),
    ({"out_rows": 9}, "give a scatter index"),
    ({"out_rows": 7, "scatter": torch.arange(8)}, "at least as many"),
    ({"out_dtype": torch.int32}, "float dtype"),
]


@pytest.mark.parametrize("given, message", WRONG_GROUPS, ids=[message for _, message in WRONG_GROUPS])
def test_wrong_groups(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"grouped_matmul: .*{message}"):
        fk.grouped_matmul(**{"x": X, "weights": WEIGHTS, "group_offsets": OFFSETS, **given})


@pytest.mark.parametrize("bounds", [[0, 3, 9], [0, 3, 2], [-1, 2, 4]])
def test_bounds_of_groups_are_checked_where_the_host_reads_them(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match=r"group_offsets give bounds .* for 4 rows; they must ascend from 0 on"):
        fk.grouped_matmul(
            torch.randn(4, 8), torch.randn(2, 8, 5), torch.tensor(bounds, dtype=torch.int32), backend="torch"
        )
