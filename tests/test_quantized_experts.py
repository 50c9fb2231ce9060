"""Experts with weights in tiles, for few tokens: the CUDA C++ kernel in the emulator, against dequantized experts."""

from __future__ import annotations

import pytest
import torch
from cuda_emulator import emulated
from cuda_emulator import unavailable as no_emulator
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight
from flashkernel.core import cuda, tune
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.lab import tuning
from flashkernel.ops import registry
from flashkernel.ops.gemm import few_rows
from flashkernel.ops.gemm.quantized.configs import QuantizedConfig
from flashkernel.ops.moe import products, tiles
from flashkernel.ops.moe.params import Experts

BF16, FP16 = torch.bfloat16, torch.float16
needs_emulator = pytest.mark.skipif(no_emulator() is not None, reason=str(no_emulator()))
needs_nvrtc = pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))


def _stack(experts: int, rows: int, columns: int, format: str, granularity: str, symmetric: bool, seed: int) -> Weight:
    values = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    return Weight.quantize(values, format, granularity, symmetric=symmetric).tiled()


def _experts(
    experts: int, hidden: int, inner: int, format: str, granularity: str, symmetric: bool, bias: bool, activation: str,
    packed: str,
) -> Experts:  # fmt: skip
    wide = inner * (1 if activation == "silu" else 2)
    biases = [torch.randn(experts, size) * 0.3 if bias else None for size in (wide, hidden)]
    gate_up = _stack(experts, wide, hidden, format, granularity, symmetric, 0)
    down = _stack(experts, hidden, inner, format, granularity, symmetric, 1)
    return Experts(gate_up, down, biases[0], biases[1], activation, packed)


def _reference(x: Tensor, routing: fk.Routing, experts: Experts) -> Tensor:
    """In float64, of the dequantized weights."""
    gate_up, down = (
        one.dequantize(torch.float64) for one in (experts.gate_up, experts.down) if isinstance(one, Weight)
    )
    biases = [None if one is None else one.double() for one in (experts.gate_up_bias, experts.down_bias)]
    return fk.moe_experts(
        x.double(), routing, gate_up, down, *biases, activation=experts.activation, packed=experts.packed,
        backend="reference",
    )  # fmt: skip


CASES = [  # tokens, slots, experts, hidden, inner, format, groups, symmetric, bias, activation, packed, dtype
    (1, 2, 6, 128, 64, "mxfp4", "1x32", True, True, "gpt_oss_glu", "interleaved", BF16),
    (21, 2, 3, 192, 128, "mxfp4", "1x32", True, True, "gpt_oss_glu", "interleaved", BF16),
    (5, 1, 9, 64, 64, "mxfp4", "1x32", True, False, "swiglu", "halves", FP16),
    (7, 2, 4, 128, 128, "int4", "1x64", False, True, "swiglu", "halves", BF16),
    (6, 2, 4, 64, 128, "int4", "row", True, True, "silu", "halves", FP16),
    (4, 2, 4, 128, 64, "int8", "1x32", True, False, "swiglu", "interleaved", BF16),
]


@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[5]}-{case[0]}-{case[9]}-{case[10]}")
def test_few_tokens_emulated(case: tuple) -> None:
    tokens, slots, count, hidden, inner, format, granularity, symmetric, bias, activation, packed, dtype = case
    torch.manual_seed(0)
    experts = _experts(count, hidden, inner, format, granularity, symmetric, bias, activation, packed)
    logits = torch.randn(tokens, count)
    logits[:, 0] += 4  # an expert with more rows than a product takes at a time, and some without any
    routing = fk.moe_route(logits, fk.Router("softmax", slots), backend="torch")
    x = torch.randn(tokens, hidden).to(dtype)
    exact = _reference(x, routing, experts)
    with emulated(90):
        assert tiles.serves(x, routing, experts, "hopper")
        y, saved = products.forward(x, routing, experts, False, "hopper")
    assert saved is None
    assert y.dtype == dtype
    limit = 3 * torch.finfo(dtype).eps
    assert (y.double() - exact).norm() <= limit * exact.norm()


def _check_sums_in_slices(monkeypatch: pytest.MonkeyPatch, experts: Experts) -> None:
    """Six tokens of 256 elements with a config whose blocks share the sums of the first product, two a tile."""
    routing = fk.moe_route(torch.randn(6, 5), fk.Router("softmax", 2), backend="torch")
    x = torch.randn(6, 256).to(BF16)
    exact = _reference(x, routing, experts)

    def pick(tunable: object, device: object, shape: dict[str, int]) -> QuantizedConfig:
        return QuantizedConfig(8, 0, 1, 2, True, 4, 2 if shape["inner"] == 256 else 1)

    monkeypatch.setattr(tiles.tune, "pick", pick)
    with emulated(90):
        y = tiles.forward(x, routing, experts)
    assert (y.double() - exact).norm() <= 3 * torch.finfo(BF16).eps * exact.norm()


@needs_emulator
def test_a_sum_in_slices_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share the sum of a tile, and experts at the same time."""
    torch.manual_seed(1)
    _check_sums_in_slices(monkeypatch, _experts(5, 256, 64, "mxfp4", "1x32", True, True, "gpt_oss_glu", "interleaved"))


@needs_emulator
def test_more_shared_tiles_than_counters_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many experts of a wide layer: a launch then counts in a buffer of its own."""
    torch.manual_seed(2)
    monkeypatch.setattr(few_rows, "MAX_COUNTERS", 4)
    _check_sums_in_slices(monkeypatch, _experts(5, 256, 64, "int4", "1x64", True, False, "swiglu", "halves"))


@pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))
def test_sizes_of_large_models() -> None:
    """DeepSeek-V3's layer has a config for every number of tokens; one without is left to grouped products."""

    def stack(experts: int, rows: int, columns: int, format: str, group: int) -> Weight:
        bits = 4 if format == "mxfp4_tiles" else 8
        kinds = {4: (torch.uint8, torch.uint8), 8: (torch.int8, torch.float16)}[bits]
        data = torch.empty((experts, rows, columns * bits // 8), dtype=kinds[0], device="meta")
        scales = torch.empty((experts, rows, columns // group), dtype=kinds[1], device="meta")
        zeros = None if bits == 4 else torch.empty_like(scales, dtype=torch.int8)
        return Weight(data, scales, zeros, format, (1, group))

    def serves(tokens: int, k: int, experts: Experts) -> bool:
        index = torch.empty((tokens, k), dtype=torch.int32, device="meta")
        counts = torch.empty(experts.count + 1, dtype=torch.int32, device="meta")
        routing = fk.Routing(index, index.float(), index, index.flatten(), counts, counts[1:])
        x = torch.empty((tokens, experts.gate_up.shape[-1]), dtype=BF16, device="meta")
        if not tiles.serves(x, routing, experts, "hopper"):
            return False
        with collect_launches(), cuda.recorded_launches() as launches:
            tiles.forward(x, routing, experts)
        return len(launches) == 2

    deepseek = Experts(stack(256, 4096, 7168, "mxfp4_tiles", 32), stack(256, 7168, 2048, "mxfp4_tiles", 32))
    wide = Experts(stack(2, 512, 28672, "int8_tiles", 32), stack(2, 28672, 256, "int8_tiles", 32))
    with devices.pretend(devices.KNOWN["h200"]):
        assert all(serves(tokens, 8, deepseek) for tokens in (1, 8, 64))
        assert not serves(8, 2, wide)


def test_what_it_does_not_serve() -> None:
    experts = _experts(4, 128, 64, "mxfp4", "1x32", True, False, "swiglu", "halves")
    routing = fk.moe_route(torch.randn(3, 4), backend="torch")
    x = torch.randn(3, 128).half()
    with devices.pretend(devices.KNOWN["h200"]):
        assert tiles.serves(x, routing, experts, "hopper") == (cuda.can_compile() is None)
        assert not tiles.serves(x, routing, experts, "triton")
        assert not tiles.serves(x.float(), routing, experts, "hopper")
        many = fk.moe_route(torch.randn(65, 4), backend="torch")
        assert not tiles.serves(torch.randn(65, 128).half(), many, experts, "hopper")
        rows = Experts(*(Weight.quantize(torch.randn(4, 128, size), "mxfp4") for size in (128, 64)))
        assert not tiles.serves(x, routing, rows, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[5]}-{case[0]}-{case[9]}-{case[10]}")
def test_few_tokens_on_a_gpu(case: tuple) -> None:
    """All configs that a search times; a captured layer follows the router when it is replayed."""
    if devices.properties(torch.device("cuda")).arch != 90:
        pytest.skip("experts in tiles are multiplied on Hopper")
    tokens, slots, count, hidden, inner, format, granularity, symmetric, bias, activation, packed, dtype = case
    made = _experts(count, hidden, inner, format, granularity, symmetric, bias, activation, packed)
    weights = [one.to("cuda") for one in (made.gate_up, made.down)]
    biases = [None if one is None else one.cuda() for one in (made.gate_up_bias, made.down_bias)]
    experts = Experts(*weights, *biases, activation, packed)
    x, logits = torch.randn(tokens, hidden, device="cuda").to(dtype), torch.randn(tokens, count, device="cuda")
    routing = fk.moe_route(logits, fk.Router("softmax", slots))
    exact = _reference(x, routing, experts)
    with tune.collect_picks() as seen:
        first = tiles.forward(x, routing, experts)
    assert len(seen) == 2
    gpu = cuda.target(x.device)
    for (tunable, _), shape in seen.items():
        for config in tunable.space(gpu, shape):
            with tune.override(tunable, config):
                if all(tunable.valid(config, gpu, one) is None for one in seen.values()):
                    y = tiles.forward(x, routing, experts)
                    assert (y.double() - exact).norm() <= 3 * torch.finfo(dtype).eps * exact.norm(), config
    assert torch.equal(first, tiles.forward(x, routing, experts))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tiles.forward(x, fk.moe_route(logits, fk.Router("softmax", slots)), experts)
    logits.copy_(torch.randn(tokens, count))
    graph.replay()
    assert torch.equal(y, tiles.forward(x, fk.moe_route(logits, fk.Router("softmax", slots)), experts))


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_compiled_for_hopper(tokens: int) -> None:
    """gpt-oss's layer: two launches of the kernel without spills, with grids that depend on shapes alone."""

    def packed(rows: int, columns: int) -> Weight:
        data = torch.empty((32, rows, columns // 2), dtype=torch.uint8, device="meta")
        return Weight(data, torch.empty_like(data[..., : columns // 32]), None, "mxfp4_tiles", (1, 32))

    index = torch.empty((tokens, 4), dtype=torch.int32, device="meta")
    counts = torch.empty(33, dtype=torch.int32, device="meta")
    routing = fk.Routing(index, index.float(), index, index.flatten(), counts, counts[1:])
    experts = Experts(packed(5760, 2880), packed(2880, 2880), activation="gpt_oss_glu", packed="interleaved")
    x = torch.empty((tokens, 2880), dtype=BF16, device="meta")
    with devices.pretend(devices.KNOWN["h200"]), collect_launches(), cuda.recorded_launches() as launches:
        tiles.forward(x, routing, experts)
    assert len(launches) == 2
    for launch in launches:
        code = launch.kernel.module.compile(launch.kernel.name, 90)
        assert "0 bytes spill stores" in code.log, launch.kernel.name
        assert launch.shared <= devices.KNOWN["h200"].shared_per_block


@needs_nvrtc
def test_a_search_knows_its_kernels_before_it_runs() -> None:
    """Both products of gpt-oss's layer, for 8 and 16 rows of an expert at a time; few blocks share a sum."""
    op = registry()["moe_experts"]
    case = next(case for case in op.benches if case.name == "gpt-oss-20b-64-mxfp4_tiles")
    names = [one.name for one in tuning.kernels_of_space(op, case, BF16, devices.KNOWN["h200"], None)]
    for part in ("MXFP4, 32, 8, 15, 3", "MXFP4, 32, 16, 15, 3"):
        for gate in ("INTERLEAVED", "NO_GATE"):
            assert any(part in name and f"{gate}, true, false" in name for name in names)
