"""Grouped products on Hopper: schedule, barriers, addresses and arithmetic under an emulator of Gluon; resources."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import gluon_emulator
import pytest
import torch
from compiled import compiled
from emulated_hopper import H200, check_case, emulated, served_cases
from sass import stack_traffic
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate
from flashkernel.blocks.fp8 import FP8
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.launch import Launch, collect_launches, launch
from flashkernel.core.op import Case
from flashkernel.ops.matmul.grouped import gradients, hopper, reference
from flashkernel.ops.matmul.grouped.hopper.configs import HOPPER_GROUPED, HopperGrouped
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors
from flashkernel.ops.matmul.grouped.spec import GROUPED_MATMUL

SMALL = HopperGrouped(64, 64, 2, 3)
CONFIGS = {
    "small": SMALL,
    "wide": HopperGrouped(64, 256, 2, 4),
    "tall": HopperGrouped(128, 128, 2, 2),
    "one-consumer": HopperGrouped(64, 128, 1, 2),
}
# Rows of each group, and behind the last one.
SIZES = {
    "uneven": ([70, 0, 1, 139, 64, 128], 0),
    "one": ([300], 0),
    "all-in-one": ([0, 0, 300, 0], 0),
    "single-rows": ([1] * 5, 0),
    "tail": ([65, 0, 30], 150),
    "only-tail": ([0, 0], 40),
}


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.launch, gradients):
        yield


def _offsets(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def _close(given: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    error = (given.double() - expected).abs()
    allowed = torch.finfo(given.dtype).eps * expected.abs() + 2e-6 * (magnitude + expected.abs()) + 1e-6
    worst = (error / allowed).max()
    assert bool(worst <= 1), f"an error of {float(worst):.2f} times what is allowed"


def _check(
    sizes: str, n: int = 96, k: int = 200, config: HopperGrouped | None = SMALL, dtype: torch.dtype = torch.float16,
    transposed: tuple[bool, bool] = (False, False), gathered: bool = False, scattered: bool = False,
    out_dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> None:  # fmt: skip
    """y of groups of these sizes against float64. What lies around x is NaN: rows behind the last group, too."""
    counts, tail = SIZES[sizes]
    rows = sum(counts) + tail
    tokens = 90 if gathered else rows
    stored = torch.randn((k, tokens) if transposed[0] else (tokens, k), device=device).to(dtype)
    x = stored.T if transposed[0] else stored
    if tail and not gathered:
        x[-tail:] = torch.nan
    shape = (len(counts), n, k) if transposed[1] else (len(counts), k, n)
    weights = torch.randn(shape, device=device).to(dtype)
    weights = weights.transpose(1, 2) if transposed[1] else weights
    gather = torch.randint(0, tokens, (rows,), dtype=torch.int32, device=device) if gathered else None
    scatter = torch.randperm(rows, device=device).to(torch.int32) if scattered else None
    params = GroupedParams(out_dtype, rows)
    with tune.override(HOPPER_GROUPED, config) if config is not None else nullcontext():
        y = hopper.grouped_forward(x, weights, _offsets(counts, device), params, GroupedTensors(gather, scatter))
    exact = {"group_offsets": _offsets(counts, device), "gather": gather, "scatter": scatter}
    clean = x.double().nan_to_num(0)
    expected = reference.grouped_matmul(clean, weights.double(), **exact)
    _close(y, expected, reference.grouped_matmul(clean.abs(), weights.double().abs(), **exact))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_group_sizes(sizes: str, config: HopperGrouped) -> None:
    """More work tiles than programs, edges in N and K, empty groups, rows behind the last group."""
    _check(sizes, n=296, k=136, config=config)


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("size", [(96, 200), (37, 61), (1, 1), (64, 8)], ids=str)
def test_layouts_and_odd_sizes(size: tuple[int, int], transposed: tuple[bool, bool]) -> None:
    _check("uneven", *size, transposed=transposed)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gather_and_scatter(out_dtype: torch.dtype) -> None:
    """Rows that cp.async copies, and rows that are copied ahead: they are no multiples of BLOCK_K."""
    for k in (192, 200):
        _check("tail", k=k, gathered=True, scattered=True, out_dtype=out_dtype)
        for name in ("wide", "tall", "one-consumer"):
            _check("uneven", k=k, gathered=True, scattered=True, out_dtype=out_dtype, config=CONFIGS[name])


def test_many_groups() -> None:
    """More groups than threads: several of the schedule's vectors' elements belong to a thread."""
    chance = random.Random(0)
    counts = [chance.choice((0, 0, 0, 1, 2)) for _ in range(300)]
    x, weights = torch.randn(sum(counts), 16).half(), torch.randn(300, 16, 24).half()
    params = GroupedParams(torch.float32, sum(counts))
    with tune.override(HOPPER_GROUPED, SMALL):
        y = hopper.grouped_forward(x, weights, _offsets(counts), params, GroupedTensors())
    torch.testing.assert_close(y, reference.grouped_matmul(x.float(), weights.float(), _offsets(counts)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_weight_gradient(sizes: str, config: HopperGrouped) -> None:
    """Rows of the next group are not added, be they infinite; an empty group's gradient is zero."""
    counts, tail = SIZES[sizes]
    rows = sum(counts) + tail
    for k, n in ((136, 296), (37, 61)):
        x, dz = torch.randn(rows, k).half(), torch.randn(rows, n).half()
        begins = _offsets(counts)[:-1].tolist()
        for group, (begin, count) in enumerate(zip(begins, counts)):
            x_part, dz_part = x.clone(), dz.clone()
            inside = slice(begin, begin + count)
            for part, given in ((x_part, x), (dz_part, dz)):
                part.fill_(torch.inf)
                part[inside] = given[inside]
            with tune.override(HOPPER_GROUPED, config):
                dw = hopper.grouped_weight_gradient(
                    x_part, dz_part, _offsets(counts), GroupedParams(torch.float32, 0), None
                )
            expected = x[inside].double().T @ dz[inside].double()
            _close(dw[group], expected, x[inside].double().abs().T @ dz[inside].double().abs())
            if group > 2:
                break


@pytest.mark.parametrize("case", served_cases(GROUPED_MATMUL), ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    """With gradients, where the case has them."""
    check_case(GROUPED_MATMUL, case)


@pytest.mark.parametrize("config", [SMALL, CONFIGS["wide"], CONFIGS["tall"]], ids=["small", "wide", "tall"])
@pytest.mark.parametrize("packed", ["halves", "interleaved"])
@pytest.mark.parametrize("n", [96, 74, 600])
def test_gates(n: int, packed: str, config: HopperGrouped) -> None:
    """Several tiles of gate and up, with the value that the gradient needs."""
    if packed == "halves" and config.rows != 64:
        pytest.skip("gate and up have an accumulator each: 64 rows")
    config = config if packed == "interleaved" or config.block_n > 64 else HopperGrouped(64, 128, 2, 3)
    counts, tail = SIZES["tail"]
    rows = sum(counts) + tail
    x, weights, bias = torch.randn(rows, 72).half() / 4, torch.randn(3, 72, n).half(), torch.randn(3, n)
    row_weights = torch.rand(rows)
    z = torch.full((rows, n), torch.nan)
    params = GroupedParams(torch.float32, rows, activation=Gate("gpt_oss", 1.5, 2.0).text, packed=packed)
    with tune.override(HOPPER_GROUPED, config):
        tensors = GroupedTensors(row_weights=row_weights, bias=bias, preactivation=z)
        y = hopper.grouped_forward(x, weights, _offsets(counts), params, tensors)
    exact: dict[str, Any] = {"group_offsets": _offsets(counts), "bias": bias.double()}
    expected = reference.grouped_matmul(x.double(), weights.double(), **exact)
    _close(z, expected, 20 * torch.ones(()))
    gated = Epilogue.parse(params.activation).pieces[0]
    expected = reference.grouped_matmul(
        x.double(), weights.double(), **exact, row_weights=row_weights.double(), activation=gated, packed=packed
    )
    _close(y, expected, 50 * torch.ones(()))


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other orders of what is asynchronous."""
    counts, _ = SIZES["uneven"]
    rows = sum(counts)
    x, weights, dz = torch.randn(rows, 328).half(), torch.randn(6, 328, 136).half(), torch.randn(rows, 136).half()
    monkeypatch.setattr(hopper.launch, "launch", launch)
    gate = GroupedParams(torch.float32, rows, activation=Gate("silu").text)
    for config in (CONFIGS["wide"], HopperGrouped(64, 128, 2, 3)):
        with tune.override(HOPPER_GROUPED, config), collect_launches() as launches:
            plain = GroupedParams(torch.float32, rows)
            y = hopper.grouped_forward(x, weights, _offsets(counts), plain, GroupedTensors())
            gated = hopper.grouped_forward(x, weights / 16, _offsets(counts), gate, GroupedTensors())
            dw = hopper.grouped_weight_gradient(x, dz, _offsets(counts), plain, None)
        for one in launches:
            gluon_emulator.run(one, seed=seed)
        offsets = _offsets(counts)
        torch.testing.assert_close(
            y, reference.grouped_matmul(x.float(), weights.float(), offsets), atol=1e-3, rtol=1e-5
        )
        torch.testing.assert_close(
            gated, reference.grouped_matmul(x.float(), (weights / 16).float(), offsets, activation="swiglu"),
            atol=1e-3, rtol=1e-5,
        )  # fmt: skip
        bounds = offsets.tolist()
        expected = torch.stack([x[a:b].float().T @ dz[a:b].float() for a, b in itertools.pairwise(bounds)])
        torch.testing.assert_close(dw, expected, atol=1e-3, rtol=1e-5)


def test_the_cost_rule_chooses_valid_configs() -> None:
    chance = random.Random(0)
    for _ in range(300):
        rows, n, k = (chance.choice((1, 17, 64, 500, 4096, 65536)) + chance.randrange(3) for _ in range(3))
        shape = {"rows": rows, "n": n, "k": k, "groups": chance.choice((1, 8, 32, 128, 1000)),
                 "bytes": chance.choice((1, 2)), "weight_gradient": chance.choice((0, 1)), "halves": 0}  # fmt: skip
        shape["halves"] = 0 if shape["weight_gradient"] else chance.choice((0, 1))
        config = HOPPER_GROUPED.heuristic(H200, shape)
        assert HOPPER_GROUPED.valid(config, H200, shape) is None


def _launches(
    rows: int = 65536, groups: int = 32, n: int = 2880, k: int = 2880, activation: str = "", packed: str = "halves",
    dtype: torch.dtype = torch.bfloat16, extras: bool = False, saves: bool = False, scattered: bool = False,
    gathered: bool = False, transposed: bool = False, weight_gradient: bool = False,
    config: HopperGrouped | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> list[Launch]:  # fmt: skip
    """The launches of a call, of which nothing runs."""

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype)

    rows = min(rows, 512)  # kernels are compiled for no number of rows; the config is chosen for the real one
    x = empty(rows, k, dtype=dtype)
    weights = empty(groups, n, k, dtype=dtype).transpose(1, 2) if transposed else empty(groups, k, n, dtype=dtype)
    offsets, index = torch.zeros(groups + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    params = GroupedParams(out_dtype, rows, activation=activation, packed=packed)
    scales = (empty(rows, dtype=torch.float32), empty(groups, n, dtype=torch.float32)) if dtype == FP8 else (None,) * 2
    chosen = tune.override(HOPPER_GROUPED, config) if config is not None else nullcontext()
    with devices.pretend(H200), collect_launches() as launches, chosen:
        if weight_gradient:
            hopper.grouped_weight_gradient(x, empty(rows, n, dtype=dtype), offsets, params, None)
        else:
            tensors = GroupedTensors(
                index if gathered else None, index if scattered else None, torch.ones(rows) if extras else None,
                empty(groups, n) if extras else None, *scales, empty(rows, n) if saves else None,
            )  # fmt: skip
            hopper.grouped_forward(x, weights, offsets, params, tensors)
    return launches


GPT_OSS, SWIGLU = Gate("gpt_oss").text, Gate("silu").text
WIDE, TALL, NARROW = HopperGrouped(64, 256, 2, 4), HopperGrouped(128, 128, 2, 4), HopperGrouped(64, 128, 2, 6)
COMPILED: dict[str, dict[str, Any]] = {
    "plain": {"config": WIDE},
    "transposed": {"config": WIDE, "transposed": True},
    "everything": {"config": WIDE, "extras": True, "scattered": True},
    "tall": {"config": TALL, "extras": True, "scattered": True},
    "narrow": {"config": NARROW, "extras": True},
    "float32-out": {"config": WIDE, "out_dtype": torch.float32},
    "silu": {"config": WIDE, "activation": Activation("silu").text, "saves": True, "extras": True},
    "gpt-oss": {
        "config": WIDE,
        "n": 5760,
        "activation": GPT_OSS,
        "packed": "interleaved",
        "saves": True,
        "extras": True,
    },
    "gpt-oss-tall": {"config": TALL, "n": 5760, "activation": GPT_OSS, "packed": "interleaved", "saves": True},
    "swiglu": {"config": WIDE, "n": 5760, "activation": SWIGLU, "saves": True, "extras": True, "scattered": True},
    "swiglu-narrow": {"config": NARROW, "n": 5760, "activation": SWIGLU},
    "gather": {"config": WIDE, "gathered": True, "extras": True, "scattered": True},
    "gather-gpt-oss": {"config": WIDE, "n": 5760, "activation": GPT_OSS, "packed": "interleaved", "gathered": True,
                       "saves": True, "extras": True},
    "gather-swiglu": {"config": WIDE, "n": 5760, "activation": SWIGLU, "gathered": True, "saves": True},
    "gather-narrow": {"config": NARROW, "gathered": True},
    "gather-fp8": {"config": WIDE, "k": 2816, "dtype": FP8, "transposed": True, "gathered": True},
    "many-groups": {"config": WIDE, "groups": 1000, "n": 256, "k": 256},
    "odd": {"config": WIDE, "n": 2881, "extras": True, "scattered": True, "saves": True},
    "odd-gate": {"config": WIDE, "n": 2882, "activation": GPT_OSS, "packed": "interleaved", "saves": True},
    "fp8": {"config": WIDE, "dtype": FP8, "transposed": True, "extras": True},
    "fp8-swiglu": {"config": WIDE, "dtype": FP8, "transposed": True, "n": 5760, "activation": SWIGLU},
    "gradient": {"config": WIDE, "weight_gradient": True},
    "gradient-tall": {"config": TALL, "weight_gradient": True},
    "gradient-narrow": {"config": NARROW, "weight_gradient": True},
    "gradient-odd": {"config": WIDE, "weight_gradient": True, "n": 2881},
}  # fmt: skip


# Of these another variant has the options, or the tile.
BESIDE = {
    "plain", "transposed", "everything", "silu", "gpt-oss", "gpt-oss-tall", "swiglu-narrow", "gather", "gather-swiglu",
    "gather-narrow", "gather-fp8", "many-groups", "odd-gate", "fp8-swiglu", "gradient-tall", "gradient-narrow",
}  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_config] * (name in BESIDE)) for name in COMPILED]
)
def test_compiled(name: str) -> None:
    """WGMMA, several of them under way, no spills, and shared memory that a block has."""
    options = COMPILED[name]
    (one,) = _launches(**{"groups": 4, **options})
    code = compiled(one, 90)
    columns = options["config"].block_n // (2 if options.get("activation") == SWIGLU else 1)
    assert re.search(rf"(H|Q)GMMA.64x{columns}x", code.sass)
    # ptxas waits for each product on its own where it does not understand the pipeline.
    assert 2 * len(re.findall("WARPGROUP.DEPBAR", code.sass)) <= len(re.findall("[HQ]GMMA", code.sass))
    assert code.stack == 0
    assert stack_traffic(code.sass).stores == 0
    assert code.shared <= H200.shared_per_block


@pytest.mark.compile
@pytest.mark.parametrize("name", ["even", "several-tiles", "fp8-group", "no-columns", "no-k"])
def test_declared_cases_compiled(name: str) -> None:
    """Products of a single tile, and of none, with the configs that the cost rule chooses."""
    case = next(case for case in GROUPED_MATMUL.cases if case.name == name)
    inputs = {key: x.to("meta") for key, x in GROUPED_MATMUL.make_inputs(case, torch.bfloat16, "cpu").items()}
    for x in inputs.values():
        x.requires_grad_(case.gradients and x.is_floating_point() and x.element_size() > 1)
    with devices.pretend(H200), collect_launches() as launches:
        y = GROUPED_MATMUL.call(**inputs, **case.options, backend="hopper")
        if case.gradients:
            y.sum().backward()
    assert launches
    for one in launches:
        assert compiled(one, 90).stack == 0, one.name


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu(name: str, sizes: str) -> None:
    for size in ((296, 136), (2880, 2880), (37, 61)):
        for moved in (False, True):
            _check(sizes, *size, config=CONFIGS[name], dtype=torch.bfloat16, gathered=moved, scattered=moved,
                   device="cuda")  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_weight_gradient_on_a_gpu(sizes: str, name: str) -> None:
    """Descriptors that end with a group: rows of other groups are NaN in turn."""
    counts, tail = SIZES[sizes]
    rows, bounds = sum(counts) + tail, _offsets(counts).tolist()
    x, dz = torch.randn(rows, 328, device="cuda").bfloat16(), torch.randn(rows, 520, device="cuda").bfloat16()
    for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
        x_part, dz_part = torch.full_like(x, torch.nan), torch.full_like(dz, torch.nan)
        x_part[begin:end], dz_part[begin:end] = x[begin:end], dz[begin:end]
        params = GroupedParams(torch.float32, 0)
        with tune.override(HOPPER_GROUPED, CONFIGS[name]):
            dw = hopper.grouped_weight_gradient(x_part, dz_part, _offsets(counts, "cuda"), params, None)
        left, right = x[begin:end].double().T, dz[begin:end].double()
        _close(dw[group], left @ right, left.abs() @ right.abs())
