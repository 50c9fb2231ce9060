"""The Hopper matrix product: barriers, addresses and arithmetic under an emulator of Gluon; resources when compiled."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch
from compiled import compiled
from emulated_hopper import H200, check_case, emulated, served_cases
from sass import stack_traffic
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Bias, Epilogue, Operands, Residual, Scale
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.launch import Launch, collect_launches, launch
from flashkernel.core.op import Case
from flashkernel.ops.matmul import hopper
from flashkernel.ops.matmul.hopper.configs import HOPPER_MATMUL, HopperMatmul
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.spec import MATMUL

SMALL = HopperMatmul(64, 64, 2, 3)
CONFIGS = {
    "cooperative": SMALL,
    "wide": HopperMatmul(64, 256, 2, 4),
    "two-tiles-of-b": HopperMatmul(64, 192, 2, 3),
    "tall": HopperMatmul(128, 128, 2, 2, group_m=2),
    "one-consumer": HopperMatmul(64, 128, 1, 2),
    "three-consumers": HopperMatmul(64, 128, 3, 3),
    "pingpong": HopperMatmul(64, 64, 2, 3, pingpong=True),
    "pingpong-tall": HopperMatmul(128, 64, 2, 4, pingpong=True, group_m=1),
    "split-k": HopperMatmul(64, 64, 2, 2, num_splits=3),
    "stream-k": HopperMatmul(64, 64, 2, 3, stream_k=True),
    "stream-k-wide": HopperMatmul(64, 256, 2, 4, stream_k=True),
    "stream-k-two-tiles": HopperMatmul(64, 192, 2, 3, stream_k=True),
    "pingpong-split-k": HopperMatmul(64, 64, 2, 3, pingpong=True, num_splits=2),
}


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.launch):
        yield


def _operand(
    shape: tuple[int, int, int], transposed: bool, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> Tensor:
    """A random operand; with `transposed`, its last two dims are stored the other way round."""
    batch, rows, columns = shape
    stored = torch.randn((batch, columns, rows) if transposed else shape, device=device).to(dtype)
    return stored.transpose(1, 2) if transposed else stored


def _check(
    a: Tensor, b: Tensor, config: HopperMatmul | None = SMALL, chain: str = "", bias: Tensor | None = None,
    residual: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, preactivation: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compares with float64. The error is at most that of rounding to the output's dtype, and of a float32 sum."""
    out_dtype = out_dtype or a.dtype
    params = MatmulParams(out_dtype, chain, "" if scales is None else "row", tf32=True)
    with tune.override(HOPPER_MATMUL, config) if config is not None else nullcontext():
        a_scale, b_scale = scales or (None, None)
        c = hopper.forward(
            a, b, params, MatmulTensors(None, bias, None, residual, a_scale, b_scale, None, preactivation)
        )
    product = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs()
    if scales is not None:
        product = product * scales[0].double() * scales[1].double()
        magnitude = magnitude * scales[0].double() * scales[1].double()
    operands = Operands((bias.double(),) if bias is not None else (), None if residual is None else residual.double())
    expected = Epilogue.parse(chain).run((product,), operands)
    assert c.is_contiguous()
    assert c.dtype == out_dtype
    assert c.shape == expected.shape
    _close(c, expected, magnitude)
    if preactivation is not None:
        before = product if bias is None else product + bias.double()
        _close(preactivation, before, magnitude)
    return c


def _close(given: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    error = (given.double() - expected).abs()
    allowed = torch.finfo(given.dtype).eps * expected.abs() + 2e-6 * (magnitude + expected.abs()) + 1e-6
    worst = (error / allowed).max()
    assert bool(worst <= 1), f"an error of {float(worst):.2f} times what is allowed"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_several_tiles(config: HopperMatmul) -> None:
    """More work tiles than programs, edges in M, N and K."""
    _check(_operand((1, 200, 328), False), _operand((1, 328, 296), True), config)


@pytest.mark.parametrize("transposes", [*itertools.product((False, True), repeat=2)], ids=str)
@pytest.mark.parametrize("config", [SMALL, CONFIGS["pingpong"], CONFIGS["wide"]], ids=["coop", "pingpong", "wide"])
def test_transposes(config: HopperMatmul, transposes: tuple[bool, bool]) -> None:
    a, b = _operand((1, 136, 200), transposes[0]), _operand((1, 200, 144), transposes[1])
    _check(a, b, config)


@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 130, 1), (3, 1, 70), (127, 131, 61), (65, 64, 129), (130, 7, 8)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
def test_odd_sizes(size: tuple[int, int, int], transposed: bool) -> None:
    m, n, k = size
    _check(_operand((1, m, k), transposed), _operand((1, k, n), not transposed))


def test_views() -> None:
    """Strides that TMA takes, strides that it does not take, and an odd address."""
    wide = torch.randn(2, 80, 300).half()
    _check(wide[:, :, :144], wide.transpose(1, 2)[:, 8:152])
    _check(wide[:, ::2, 3:67], wide[:, 5:69, 1:151:2])


@pytest.mark.parametrize("batch", [(3, 3), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split-k", "pingpong-split-k"])
def test_batches(name: str, batch: tuple[int, int]) -> None:
    _check(_operand((batch[0], 70, 200), False), _operand((batch[1], 200, 90), True), CONFIGS[name])


@pytest.mark.parametrize("case", served_cases(MATMUL), ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    """With gradients, where the case has them: these are products of the same kernels."""
    check_case(MATMUL, case)


CHAINS: dict[str, tuple[Any, ...]] = {
    "bias": (Bias(),),
    "residual": (Residual(),),
    "all": (Bias(), Activation("gelu_tanh"), Scale(0.5), Residual()),
    "silu": (Activation("silu"),),
    "exact-gelu": (Bias(), Activation("gelu")),
    "squared-relu": (Activation("squared_relu"), Residual()),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    "config", [SMALL, CONFIGS["pingpong"], CONFIGS["split-k"]], ids=["coop", "pingpong", "split-k"]
)
@pytest.mark.parametrize("n", [96, 99, 104])
def test_epilogues(n: int, config: HopperMatmul, name: str) -> None:
    chain = Epilogue(CHAINS[name]).text
    bias = torch.randn(2 * n).half()[::2] if "bias" in chain else None
    residual = torch.randn(2, 70, n) if "residual" in chain else None
    preactivation = torch.full((2, 70, n), float("nan"), dtype=torch.float16) if "activation" in chain else None
    a, b = _operand((2, 70, 200), False) / 8, _operand((2, 200, n), False)
    _check(a, b, config, chain, bias, residual, preactivation=preactivation)


def test_a_residual_for_all_batch_entries() -> None:
    chain = Epilogue((Residual(),)).text
    a, b = _operand((3, 70, 64), False), _operand((3, 64, 96), False)
    for config in (SMALL, replace(CONFIGS["split-k"], num_splits=1)):
        _check(a, b, config, chain, residual=torch.randn(1, 96, 70).transpose(1, 2))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split-k", "wide"])
def test_other_output_dtypes(name: str, out_dtype: torch.dtype) -> None:
    _check(_operand((1, 140, 200), False), _operand((1, 200, 92), True), CONFIGS[name], out_dtype=out_dtype)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split-k"])
def test_fp8(name: str, per_row: bool) -> None:
    """Operands that are not K-major are copied: WGMMA takes no others in fp8."""
    a = _operand((2, 100, 400), True, torch.float8_e4m3fn)
    b = _operand((2, 400, 80), False, torch.float8_e4m3fn)
    scales = (torch.rand(2, 100, 1) + 0.1, torch.rand(1, 1, 80) + 0.1) if per_row else (torch.rand(1, 1, 1),) * 2
    _check(a, b, CONFIGS[name], Epilogue((Bias(),)).text, torch.randn(80), scales=scales, out_dtype=torch.bfloat16)


BLOCK_SCALED = ["cooperative", "one-consumer", "split-k", "stream-k"]


@pytest.mark.parametrize("name", BLOCK_SCALED)
@pytest.mark.parametrize("batch", [(2, 2), (2, 1)], ids=str)
def test_fp8_block_scales(batch: tuple[int, int], name: str) -> None:
    _check_block_scales(batch, (100, 200, 400), CONFIGS[name], "cpu")


def _check_block_scales(
    batch: tuple[int, int], size: tuple[int, int, int], config: HopperMatmul, device: str, dtype=torch.float32
) -> None:
    """A scale for each 1 x 128 of A and 128 x 128 of B; the last ones have fewer elements."""
    m, n, k = size
    blocks, column_blocks = -(-k // 128), -(-n // 128)
    a = _operand((batch[0], m, k), False, torch.float8_e4m3fn, device)
    b = _operand((batch[1], k, n), True, torch.float8_e4m3fn, device)
    a_scale = torch.rand(batch[0], blocks, m, device=device).transpose(1, 2) + 0.1
    b_scale = torch.rand(1, blocks, column_blocks, device=device) + 0.1
    bias = torch.randn(n, device=device)
    with tune.override(HOPPER_MATMUL, config):
        params = MatmulParams(dtype, Epilogue((Bias(),)).text, "block")
        c = hopper.forward(a, b, params, MatmulTensors(bias=bias, a_scale=a_scale, b_scale=b_scale))
    wide_a = a.double() * a_scale.repeat_interleave(128, 2)[:, :, :k]
    wide_b = b.double() * b_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :k, :n]
    expected, magnitude = wide_a @ wide_b + bias, wide_a.abs() @ wide_b.abs()
    # FP8 tensor cores keep about 13 bits of the 128 products of a block.
    _close(c, expected, magnitude * (1 if device == "cpu" else 64))


@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split-k"])
def test_int8(name: str) -> None:
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((2, 100, 400), (2, 400, 80)))
    scales = (torch.rand(2, 100, 1) + 0.1, torch.rand(1, 1, 80) + 0.1)
    _check(a, b, CONFIGS[name], scales=scales, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split-k"])
def test_tf32(name: str) -> None:
    """The emulator multiplies in float32: the layout of 32-bit operands is what this is about."""
    _check(torch.randn(1, 100, 130), torch.randn(1, 130, 90), CONFIGS[name])


def test_no_inner_dimension() -> None:
    """K = 0: the epilogue of zeros."""
    chain = Epilogue((Bias(), Activation("silu"))).text
    _check(torch.empty(2, 5, 0).half(), torch.empty(2, 0, 7).half(), chain=chain, bias=torch.randn(7))
    empty, b = torch.empty(1, 0, 8).half(), torch.empty(1, 8, 7).half()
    assert hopper.forward(empty, b, MatmulParams(torch.float16), MatmulTensors()).shape == (1, 0, 7)


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other orders of what is asynchronous."""
    a, b = _operand((1, 200, 520), False), _operand((1, 520, 136), True)
    for config in (CONFIGS["cooperative"], CONFIGS["pingpong"], CONFIGS["three-consumers"]):
        with tune.override(HOPPER_MATMUL, config), collect_launches() as launches:
            monkeypatch.setattr(hopper.launch, "launch", launch)
            c = hopper.forward(a, b, MatmulParams(torch.float32), MatmulTensors())
        for one in launches:
            gluon_emulator.run(one, seed=seed)
        _close(c, a.double() @ b.double(), a.double().abs() @ b.double().abs())


@pytest.mark.parametrize("k, streamed", [(128, 0), (256, 0), (320, 1), (640, 1)])
def test_stream_k_gives_every_program_a_share(k: int, streamed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles for five programs. A tile with fewer K blocks than programs is not shared out: the program that
    finishes it would wait forever for those without a block."""
    a, b = _operand((1, 300, k), False), _operand((1, k, 100), True)
    with (
        devices.pretend(replace(H200, sms=5)), tune.override(HOPPER_MATMUL, CONFIGS["stream-k"]),
        collect_launches() as launches,
    ):  # fmt: skip
        monkeypatch.setattr(hopper.launch, "launch", launch)
        c = hopper.forward(a, b, MatmulParams(torch.float32), MatmulTensors())
    (one,) = launches
    assert one.args[one.kernel.arg_names.index("num_streamed")] == streamed
    assert (streamed > 0) == one.constants["TRAITS"].STREAM_K
    gluon_emulator.run(one)
    _close(c, a.double() @ b.double(), a.double().abs() @ b.double().abs())


def test_the_cost_rule_chooses_valid_configs() -> None:
    chance = random.Random(0)
    for _ in range(300):
        m, n, k = (chance.choice((1, 17, 64, 500, 4096, 16384, 131072)) + chance.randrange(3) for _ in range(3))
        block_scaled, integer = chance.choice(((0, 0), (1, 0), (0, 1)))
        size = 1 if block_scaled or integer else chance.choice((1, 2, 4))
        shape = {
            "batch": chance.choice((1, 3, 64)), "m": m, "n": n, "k": k, "bytes": size, "block_scaled": block_scaled,
            "integer": integer,
        }  # fmt: skip
        config = HOPPER_MATMUL.heuristic(H200, shape)
        assert HOPPER_MATMUL.valid(config, H200, shape) is None
        assert config.num_splits == 1 or m * n < 132 * 64 * 256 * 2  # K is split only where tiles are few
    large = {"batch": 1, "m": 8192, "n": 8192, "k": 8192, "bytes": 2, "block_scaled": 0, "integer": 0}
    assert replace(HOPPER_MATMUL.heuristic(H200, large), stream_k=False) == HopperMatmul(64, 256, 2, 4)
    assert not HOPPER_MATMUL.heuristic(H200, {**large, "n": 66 * 256}).stream_k  # 32 whole waves
    assert HOPPER_MATMUL.heuristic(H200, {**large, "m": 17 * 128, "n": 16 * 256}).stream_k  # one wave and a bit
    # One tile is left over, of fewer K blocks than there are SMs.
    assert not HOPPER_MATMUL.heuristic(H200, {**large, "m": 23 * 128, "n": 23 * 256, "k": 4096}).stream_k
    assert HOPPER_MATMUL.heuristic(H200, {**large, "m": 64, "n": 512}).num_splits > 1


def _launches(
    m: int, n: int, k: int, transposes: tuple[bool, bool] = (False, True), chain: str = "",
    dtype: torch.dtype = torch.bfloat16, config: HopperMatmul | None = None, scaling: str = "",
) -> tuple[HopperMatmul, list[Launch]]:  # fmt: skip
    """The config and the launches of a product on an H200, of tensors without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    a = empty(1, k, m, dtype=dtype).transpose(1, 2) if transposes[0] else empty(1, m, k, dtype=dtype)
    b = empty(1, n, k, dtype=dtype).transpose(1, 2) if transposes[1] else empty(1, k, n, dtype=dtype)
    blocks, column_blocks = -(-k // 128), -(-n // 128)
    scale_shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "": (), "row": ((1, m, 1), (1, 1, n)), "block": ((1, m, blocks), (1, blocks, column_blocks))
    }  # fmt: skip
    scales = [empty(*size, dtype=torch.float32) for size in scale_shapes[scaling]]
    a_scale, b_scale = scales if scales else (None, None)
    params = MatmulParams(torch.bfloat16, chain, scaling, tf32=True)
    shape = {
        "batch": 1, "m": m, "n": n, "k": k, "bytes": dtype.itemsize, "block_scaled": int(scaling == "block"),
        "integer": int(dtype == torch.int8),
    }  # fmt: skip
    with devices.pretend(H200), collect_launches() as launches:
        chosen: HopperMatmul = tune.pick(HOPPER_MATMUL, H200, shape) if config is None else config
        with tune.override(HOPPER_MATMUL, chosen):
            bias = empty(n) if "bias" in chain else None
            residual = empty(1, m, n) if "residual" in chain else None
            preactivation = empty(1, m, n) if "activation" in chain and not scaling else None
            hopper.forward(
                a, b, params, MatmulTensors(None, bias, None, residual, a_scale, b_scale, None, preactivation)
            )
    return chosen, launches


ALL_PIECES = Epilogue((Bias(), Activation("gelu_tanh"), Scale(0.5), Residual())).text
COMPILED: dict[str, dict[str, Any]] = {
    "4096": {"m": 4096, "n": 4096, "k": 4096},
    "transposed": {"m": 4096, "n": 4096, "k": 4096, "transposes": (True, False)},
    "epilogue": {"m": 4096, "n": 14336, "k": 4096, "chain": ALL_PIECES},
    "few-rows": {"m": 512, "n": 4096, "k": 14336, "chain": ALL_PIECES},
    "odd": {"m": 1000, "n": 4099, "k": 4097, "chain": ALL_PIECES},
    "fp8": {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.float8_e4m3fn, "scaling": "row"},
    "fp8-blocks": {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.float8_e4m3fn, "scaling": "block"},
    "int8": {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.int8, "scaling": "row"},
    "tf32": {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.float32},
    "unaligned": {"m": 4096, "n": 4104, "k": 4096, "chain": ALL_PIECES},
    "odd-pingpong": {"m": 4096, "n": 4099, "k": 4096, "chain": ALL_PIECES,
                     "config": HopperMatmul(128, 128, 2, 6, pingpong=True)},
    "fp8-epilogue": {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.float8_e4m3fn, "scaling": "row",
                     "chain": ALL_PIECES},
    "stream-k": {"m": 1024, "n": 4096, "k": 4096, "chain": ALL_PIECES,
                 "config": HopperMatmul(64, 256, 2, 4, stream_k=True)},
    "fp8-blocks-stream-k": {"m": 1024, "n": 4096, "k": 4096, "dtype": torch.float8_e4m3fn, "scaling": "block",
                            "config": HopperMatmul(64, 128, 2, 6, stream_k=True)},
    "split-k": {"m": 64, "n": 512, "k": 8192, "chain": ALL_PIECES},
    "fp8-split-k": {"m": 64, "n": 512, "k": 8192, "dtype": torch.float8_e4m3fn, "scaling": "row", "chain": ALL_PIECES},
    "int8-split-k": {"m": 64, "n": 512, "k": 8192, "dtype": torch.int8, "scaling": "row"},
}  # fmt: skip


# Of these another variant has the options, or the tile.
BESIDE = {"few-rows", "unaligned", "fp8-epilogue", "fp8-split-k", "int8-split-k"}


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_config] * (name in BESIDE)) for name in COMPILED]
)
def test_compiled(name: str) -> None:
    config, launches = _launches(**COMPILED[name])
    assert len(launches) == (1 if config.num_splits == 1 else 2)
    assert "stream-k" not in name or config.stream_k
    assert "split-k" not in name or config.num_splits > 1
    _assert_lean(config, launches)


def _candidates() -> list[HopperMatmul]:
    """The tiles of the search space, with the most stages each."""
    shape = {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "bytes": 2, "block_scaled": 0, "integer": 0}
    best: dict[tuple[int, int, bool], HopperMatmul] = {}
    for config in HOPPER_MATMUL.space(H200, shape):
        key = (config.rows, config.block_n, config.pingpong)
        best[key] = max(best.get(key, config), config, key=lambda config: config.num_stages)
    return list(best.values())


@pytest.mark.compile
@pytest.mark.every_config
@pytest.mark.parametrize("config", _candidates(), ids=str)
def test_tiles_compiled(config: HopperMatmul) -> None:
    _assert_lean(*_launches(4096, 4096, 4096, chain=ALL_PIECES, config=config))


def _assert_lean(config: HopperMatmul, launches: list[Launch]) -> None:
    """WGMMA, no spills, and shared memory that a block has."""
    code = compiled(launches[0], 90)
    second = launches[0].constants["TRAITS"].SECOND_N
    for columns in {config.block_n - second, second or config.block_n}:
        assert re.search(rf"(H|Q|I)GMMA.64x{columns}x", code.sass)
    assert code.stack == 0
    assert stack_traffic(code.sass).stores == 0
    assert code.shared <= H200.shared_per_block
    for other in launches[1:]:
        assert compiled(other, 90).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("transposes", [*itertools.product((False, True), repeat=2)], ids=str)
def test_on_a_gpu(transposes: tuple[bool, bool], name: str) -> None:
    """Several work tiles per program, edges, and all orders of the operands."""
    chain = Epilogue((Bias(), Activation("gelu_tanh"), Residual())).text
    a = _operand((2, 1800, 1096), transposes[0], torch.bfloat16, "cuda") / 8
    b = _operand((2, 1096, 2504), transposes[1], torch.bfloat16, "cuda")
    preactivation = torch.full((2, 1800, 2504), float("nan"), dtype=torch.bfloat16, device="cuda")
    bias, residual = torch.randn(2504, device="cuda"), torch.randn(2, 1800, 2504, device="cuda")
    _check(a, b, CONFIGS[name], chain, bias, residual, preactivation=preactivation)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 1, 1), (127, 131, 61), (4096, 4096, 4096), (300, 4099, 4097)], ids=str)
def test_sizes_on_a_gpu(size: tuple[int, int, int]) -> None:
    """With the config that the cost rule chooses."""
    m, n, k = size
    a, b = _operand((1, m, k), False, torch.bfloat16, "cuda"), _operand((1, k, n), True, torch.bfloat16, "cuda")
    _check(a, b, config=None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_fp8_block_scales_on_a_gpu(name: str) -> None:
    _check_block_scales((1, 1), (1800, 2504, 1096), CONFIGS[name], "cuda", torch.bfloat16)
