"""Products with quantized weights: tiles by their definition, the schedule, kernels on emulators, gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from compiled import disassemble
from cuda_emulator import emulated
from cuda_emulator import unavailable as no_emulator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.dequantize_triton import dequantize
from flashkernel.blocks.integers import unpack_nibbles
from flashkernel.blocks.weight import Layout
from flashkernel.core import cuda
from flashkernel.core import device as devices
from flashkernel.core.op import Case
from flashkernel.lab import tuning
from flashkernel.ops import registry
from flashkernel.ops.gemm.params import LinearExtras
from flashkernel.ops.gemm.quantized import cuda as kernels
from flashkernel.ops.gemm.quantized.configs import QUANTIZED, QuantizedConfig, few_rows_bytes, stage_bytes
from flashkernel.ops.gemm.quantized.schedule import Schedule, whole_tiles

BF16, FP16 = torch.bfloat16, torch.float16
needs_emulator = pytest.mark.skipif(no_emulator() is not None, reason=str(no_emulator()))
needs_nvrtc = pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))
FORMATS = [
    ("int4", "1x32", True), ("int4", "1x64", False), ("int4", "group", True), ("int4", "row", False),
    ("int8", "row", True), ("int8", "1x32", False), ("mxfp4", "1x32", True),
]  # fmt: skip
EVERY = pytest.mark.parametrize("format, granularity, symmetric", FORMATS)


def _weight(
    shape: Sequence[int], format: str = "int4", granularity: str = "1x32", symmetric: bool = True, seed: int = 0
) -> Weight:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + (0 if symmetric else 0.05)
    return Weight.quantize(matrix, format, granularity, symmetric=symmetric)


@EVERY
def test_tiles_hold_the_same_matrix(format: str, granularity: str, symmetric: bool) -> None:
    weight = _weight((2, 128, 256), format, granularity, symmetric)
    tiles = weight.tiled()
    exact, found = weight.dequantize(torch.float64), tiles.dequantize(torch.float64)
    assert (found - exact).abs().max() <= 2.0**-11 * exact.abs().max()  # scales became float16
    assert tiles.shape == weight.shape
    assert Weight.from_tensors(tiles.tensors, tiles.layout).layout == tiles.layout
    one = tiles[1]
    assert torch.equal(one.rows(slice(64, None)).dequantize(torch.float32), found[1, 64:].float())
    assert torch.equal(one.rows(slice(1, 100, 3)).dequantize(torch.float32), found[1, 1:100:3].float())
    both = Weight.concatenate([tiles[0], one])
    assert torch.equal(both.dequantize(torch.float32), found.flatten(0, 1).float())
    assert torch.equal(dequantize(one, FP16), one.dequantize(FP16))
    assert torch.equal(dequantize(weight[1], torch.float32), weight[1].dequantize(torch.float32))
    assert torch.equal(dequantize(tiles, torch.float32), found.float())
    if weight.group_shape[0] == 1:
        assert torch.equal(dequantize(weight, FP16), weight.dequantize(FP16))


@pytest.mark.parametrize("columns", [5, 77, 130])
def test_groups_that_do_not_divide_a_row_are_dequantized(columns: int) -> None:
    weight = _weight((2, 9, columns), "int8", "1x32", False)
    assert torch.equal(dequantize(weight, torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4"])
def test_a_thread_finds_its_fragments(format: str) -> None:
    """What a thread of a warpgroup loads and extracts, put where wgmma's left operand has it, is the matrix."""
    weight = _weight((64, 128), format, "row" if format == "int8" else "1x32")
    tiles, bits = weight.tiled(), 8 if format == "int8" else 4
    codes = (weight.data if bits == 8 else unpack_nibbles(weight.data)).view(torch.uint8).long()
    stored, found = bytes(tiles.data.contiguous().view(torch.uint8).flatten().tolist()), torch.full_like(codes, -1)
    size = 64 * 64 * bits // 8
    for block in range(2):
        for thread in range(128):
            starts = [block * size + piece * 2048 + thread * 16 for piece in range(size // 2048)]
            words = [int.from_bytes(stored[at + 4 * i : at + 4 * i + 4], "little") for at in starts for i in range(4)]
            warp, g, t = thread // 32, thread % 32 // 4, thread % 4
            for product in range(4):  # of 16 columns
                for i in range(4):  # registers
                    if bits == 4:
                        pair = words[product] >> 4 * i & 0x000F000F
                    else:
                        pair = words[2 * product + i // 2] >> 8 * (i % 2) & 0x00FF00FF
                    row, column = 16 * warp + g + 8 * (i % 2), 64 * block + 16 * product + 2 * t + 8 * (i // 2)
                    found[row, column], found[row, column + 1] = pair & 0xFFFF, pair >> 16
    assert torch.equal(found, codes)
    assert weight.scales is not None
    assert tiles.scales is not None
    scales, flat = weight.scales.to(tiles.scales.dtype), tiles.scales.flatten().tolist()
    for group in range(scales.shape[1]):
        for row in range(64):
            place = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
            assert flat[group * 64 + place] == scales[row, group].item()


def test_tiles_say_what_they_refuse() -> None:
    with pytest.raises(ValueError, match="72 rows, not a multiple of 64"):
        _weight((72, 64)).tiled()
    with pytest.raises(ValueError, match="64 columns, which do not divide 96"):
        _weight((64, 96)).tiled()
    with pytest.raises(ValueError, match="groups of 32, 64 or a multiple of 128"):
        _weight((64, 192), "int8", "1x96").tiled()
    with pytest.raises(ValueError, match="fp8 has no tiles"):
        Weight.quantize(torch.randn(64, 64), "fp8").tiled()
    with pytest.raises(ValueError, match="float16 scales"):
        Weight.quantize(torch.randn(64, 64) * 1e-9, "int4", "1x32").tiled()
    with pytest.raises(ValueError, match="zeros are not given"):
        fk.quantized_linear(torch.ones(1, 64), torch.ones(8, 32), torch.ones(8, 1), layout="int4 row zeros")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 140), st.integers(1, 300), st.integers(1, 20), st.booleans())
def test_every_step_is_one_blocks(blocks: int, tiles: int, steps: int, cut: bool) -> None:
    blocks = min(blocks, tiles * steps)
    schedule = Schedule(blocks, tiles, whole_tiles(blocks, tiles) if cut else tiles, steps)
    seen: set[tuple[int, int]] = set()
    parts: dict[int, list[tuple[int, bool]]] = {}
    for block in range(blocks):
        for segment in schedule.segments(block):
            steps_here = {(segment.tile, step) for step in range(segment.begin, segment.end)}
            assert steps_here
            assert not steps_here & seen
            seen |= steps_here
            if (segment.begin, segment.end) != (0, steps):
                parts.setdefault(segment.tile, []).append((block, segment.begin == 0))
    assert len(seen) == tiles * steps
    for tile, found in parts.items():  # as the last block to arrive looks for them
        unit = (tile - schedule.whole) * steps
        first, last = schedule.block_of(unit), schedule.block_of(unit + steps - 1)
        assert found == [(block, block == first) for block in range(first, last + 1)]


def _check(x: Tensor, weight: Weight, y: Tensor) -> None:
    exact = x.double() @ weight.dequantize(torch.float64).T
    own = (x @ weight.dequantize(x.dtype).T).double()
    error, theirs = ((found - exact).norm() / exact.norm() for found in (y.double(), own))
    assert error <= 2 * theirs


def _few(tokens: int, warps: int, blocks: int, stages: int, slices: int = 1) -> QuantizedConfig:
    """A config of few_rows.cu."""
    return QuantizedConfig(tokens, 0, blocks, stages, True, warps, slices)


EMULATED = [  # rows, columns, inner, format, groups, symmetric, dtype, config
    (3, 320, 192, "int4", "1x32", False, BF16, QuantizedConfig(8, 4, 1, 4)),
    (13, 192, 256, "int4", "group", True, FP16, QuantizedConfig(16, 2, 2, 2)),
    (33, 128, 384, "int8", "row", True, BF16, QuantizedConfig(64, 2, 1, 3)),
    (20, 256, 128, "int8", "1x64", False, FP16, QuantizedConfig(32, 4, 2, 2)),
    (300, 192, 192, "mxfp4", "1x32", True, BF16, QuantizedConfig(128, 2, 1, 3)),
    (150, 320, 256, "int4", "group", True, BF16, QuantizedConfig(128, 2, 1, 3, height=2)),
    (300, 192, 192, "mxfp4", "1x32", True, FP16, QuantizedConfig(128, 2, 1, 2, height=2)),
    (130, 256, 128, "int8", "1x64", False, BF16, QuantizedConfig(128, 2, 1, 2, height=2)),
    (1, 128, 512, "int4", "group", True, BF16, _few(8, 4, 2, 3)),
    (5, 192, 320, "int4", "1x32", False, BF16, _few(8, 4, 2, 2)),
    (8, 64, 64, "int4", "1x64", True, FP16, _few(8, 4, 1, 4)),
    (12, 128, 768, "int4", "group", False, FP16, _few(16, 6, 2, 2)),
    (16, 64, 448, "int8", "row", True, BF16, _few(16, 8, 1, 2)),
    (20, 64, 192, "int8", "1x32", False, FP16, _few(8, 5, 1, 2)),
    (9, 128, 256, "int8", "1x64", False, BF16, _few(16, 4, 1, 2)),
    (30, 64, 320, "mxfp4", "1x32", True, BF16, _few(32, 5, 1, 2)),
    (3, 192, 256, "mxfp4", "1x32", True, FP16, _few(8, 4, 1, 1)),
    (2, 128, 1024, "int4", "group", True, BF16, _few(8, 4, 2, 2, 2)),
    (17, 64, 704, "int4", "row", False, FP16, _few(16, 4, 1, 2, 3)),
]


@needs_emulator
@pytest.mark.parametrize(
    "case", EMULATED, ids=lambda case: f"{case[3]}-{case[0]}-{case[7].warps or case[7].warpgroups * case[7].height}"
)
def test_the_hopper_kernel_emulated(case: tuple) -> None:
    """Barriers, copies, fragments and the sums of tiles that are cut, whatever the order of warps."""
    rows, columns, inner, format, granularity, symmetric, dtype, config = case
    weight = _weight((columns, inner), format, granularity, symmetric).tiled()
    x = torch.randn(rows, inner).to(dtype)
    y = torch.full((rows, columns), torch.nan, dtype=dtype)
    with emulated(90):
        kernels.launch(kernels.Call(x, (weight,), y), config)
    _check(x, weight, y)


GATED_CHAIN = "bias;gate silu 1.0 inf;scale 0.5;residual"


def _gated_reference(x: Tensor, weights: list[Weight], biases: list[Tensor], residual: Tensor) -> Tensor:
    """What GATED_CHAIN makes of two products, in float64."""
    return fk.linear(
        x.double(), weights, [bias.double() for bias in biases], residual.double(), activation="swiglu", scale=0.5,
        backend="reference",
    )  # fmt: skip


@needs_emulator
def test_a_gated_layer_emulated() -> None:
    rows, columns, inner = 40, 192, 128
    gate, up = (_weight((columns, inner), seed=seed).tiled() for seed in range(2))
    x, residual = torch.randn(rows, inner).half(), torch.randn(rows, columns).half()
    biases = [torch.randn(columns).half() for _ in range(2)]
    with emulated(90):
        extras = LinearExtras(residual, None, GATED_CHAIN, "halves", 0.0, 0.0, torch.float32)
        y = kernels.forward(x, [gate, up], biases, extras)
    exact = _gated_reference(x, [gate, up], biases, residual)
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)


def test_operands_that_tma_cannot_read_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at one address, and tiles that begin between multiples of 16 bytes."""
    weight = _weight((128, 128)).tiled()
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in weight.tensors]
    assert any(x.data_ptr() % 16 for x in shifted)
    given: list[kernels.Call] = []
    monkeypatch.setattr(kernels, "launch", given.append)
    x = torch.randn(1, 128).half().expand(40, 128)
    extras = LinearExtras(None, None, "", "halves", 0.0, 0.0, torch.float16)
    kernels.forward(x, [Weight.from_tensors(shifted, weight.layout)], [], extras)
    [call] = given
    assert call.x.stride() == (128, 1)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in call.weights[0].tensors)
    assert torch.equal(call.x, x)
    assert torch.equal(call.weights[0].dequantize(torch.float32), weight.dequantize(torch.float32))


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize("rows, format, symmetric", [(16, "int4", True), (64, "int4", False), (4096, "mxfp4", True)])
def test_compiled_for_hopper(rows: int, format: str, symmetric: bool) -> None:
    weight = Weight.quantize(torch.empty(512, 512, device="meta"), format, "1x32", symmetric=symmetric).tiled()
    x, y = (torch.empty(rows, 512, dtype=BF16, device="meta") for _ in range(2))
    with devices.pretend(devices.KNOWN["h200"]), cuda.recorded_launches() as launches:
        kernels.launch(kernels.Call(x, (weight,), y))
    (launch,) = launches
    code = launch.kernel.module.compile(launch.kernel.name, 90)
    assert "0 bytes spill stores" in code.log
    assert "C75" not in code.log, "wgmma is serialized, or setmaxnreg ignored"
    assert launch.shared <= devices.KNOWN["h200"].shared_per_block
    sass = disassemble(code.code)
    assert re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", sass), "the left operand of wgmma is not in registers"
    assert "LDS.128" in sass
    assert "LDL" not in sass


FEW_COMPILED = [  # rows, columns, inner, format, groups, symmetric
    (1, 28672, 4096, "int4", "group", True), (16, 28672, 4096, "int4", "group", True),
    (32, 28672, 4096, "int4", "group", False), (1, 4096, 14336, "int4", "group", True),
    (16, 4096, 14336, "int4", "group", False), (16, 28672, 4096, "int8", "row", True),
    (16, 28672, 4096, "mxfp4", "1x32", True), (16, 28672, 4096, "int4", "1x32", False),
]  # fmt: skip


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize("case", FEW_COMPILED, ids=lambda case: f"{case[3]}-{case[0]}-{case[2]}")
def test_few_rows_compiled_for_hopper(case: tuple) -> None:
    """The first configs of the search space: without spills, weights copied past the registers, products by mma."""
    rows, columns, inner, format, granularity, symmetric = case
    weight = Weight.quantize(
        torch.empty(columns, inner, device="meta"), format, granularity, symmetric=symmetric
    ).tiled()  # fmt: skip
    x, y = torch.empty(rows, inner, dtype=BF16, device="meta"), torch.empty(rows, columns, dtype=BF16, device="meta")
    call, gpu = kernels.Call(x, (weight,), y), devices.KNOWN["h200"]
    configs = [config for config in QUANTIZED.space(gpu, call.shape) if config.warps][:2]
    assert len(configs) == 2
    for config in configs:
        with devices.pretend(gpu), cuda.recorded_launches() as launches:
            kernels.launch(call, config)
        (launch,) = launches
        code = launch.kernel.module.compile(launch.kernel.name, 90)
        assert "0 bytes spill stores" in code.log, config
        assert launch.shared <= gpu.shared_per_block
        sass = disassemble(code.code)
        assert "LDGSTS.E.BYPASS.128" in sass
        assert "HMMA.16816.F32 " in sass
        assert "LDL" not in sass


@needs_emulator
def test_few_rows_gated_emulated() -> None:
    """Gate and up, biases and a residual, through the kernel for few rows."""
    gate, up = (_weight((128, 192), seed=seed).tiled() for seed in range(2))
    x, residual = torch.randn(5, 192).to(BF16), torch.randn(5, 128).to(BF16)
    biases = [torch.randn(128).to(BF16) for _ in range(2)]
    y = torch.full((5, 128), torch.nan, dtype=torch.float32)
    with emulated(90):
        kernels.launch(kernels.Call(x, (gate, up), y, tuple(biases), residual, GATED_CHAIN), _few(8, 4, 1, 2))
    exact = _gated_reference(x, [gate, up], biases, residual)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)


@needs_emulator
@pytest.mark.parametrize("factor", [1e-20, 1e30])
def test_few_rows_keep_the_range_of_bfloat16(factor: float) -> None:
    """x is multiplied in float16, by a power of two for each row: large and small rows beside each other, and zeros."""
    weight = _weight((64, 256)).tiled()
    x = torch.randn(4, 256)
    x[1] *= factor
    x[2] = 0
    x = x.to(BF16)
    y = torch.full((4, 64), torch.nan, dtype=torch.float32)
    with emulated(90):
        kernels.launch(kernels.Call(x, (weight,), y), _few(8, 4, 1, 2))
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert torch.equal(y[2], torch.zeros(64))
    for row in (0, 1, 3):
        assert (y[row].double() - exact[row]).norm() <= 1e-5 * exact[row].norm()


@needs_emulator
def test_few_rows_show_what_is_not_finite() -> None:
    weight = _weight((64, 256), "mxfp4").tiled()
    scales = weight.scales.clone()
    scales.view(-1)[0] = 255  # NaN, of the first row
    x = torch.randn(3, 256).to(BF16)
    x[1, 7] = torch.inf
    x[2, 9] = torch.nan
    y = torch.zeros((3, 64), dtype=BF16)
    with emulated(90):
        kernels.launch(kernels.Call(x, (replace(weight, scales=scales),), y), _few(8, 4, 1, 2))
    assert y[0, 0].isnan()
    assert y[0, 1:].isfinite().all()
    assert not y[1:].isfinite().any()


def _bench(name: str) -> Case:
    return next(case for case in registry()["quantized_linear"].benches if case.name == name)


@needs_nvrtc
def test_a_search_knows_its_kernels_before_it_runs() -> None:
    """`flashkernel tune` compiles the kernels of all configs side by side, then times them."""
    op, gpu = registry()["quantized_linear"], devices.KNOWN["h200"]
    few = tuning.kernels_of_space(op, _bench("w4a16-4096x6144-1"), BF16, gpu, None)
    assert {one.module.source_path.name for one in few} == {"kernel.cu", "few_rows.cu"}
    assert len(few) == len({one.name for one in few}) > 5
    many = _bench("w4a16-4096x6144-4096")  # dispatch gives it to torch
    assert tuning.kernels_of_space(op, many, BF16, gpu, None) == []
    found = tuning.kernels_of_space(op, many, BF16, gpu, "hopper")
    assert any(one.name.endswith("false, 2>") for one in found), "two tiles of a warpgroup are not searched"
    assert tuning.kernels_of_space(op, many, BF16, devices.KNOWN["a100"], "hopper") == []


@needs_nvrtc
@pytest.mark.compile
def test_a_search_compiles_ahead() -> None:
    op, gpu = registry()["quantized_linear"], devices.KNOWN["h200"]
    work, said = (op, _bench("w4a16-4096x6144-256"), BF16), list[str]()
    kernels_there = tuning.kernels_of_space(*work, gpu, None)
    assert tuning.compile_ahead([work], gpu, None, said.append) == len(kernels_there) > 0
    assert said == [f"compiling {len(kernels_there)} kernels"]
    for one in kernels_there:
        code = one.module.compile(one.name, 90)
        assert "0 bytes spill stores" in code.log
        assert "C75" not in code.log, "wgmma is serialized, or setmaxnreg ignored"
        assert "0 bytes stack frame" in code.log


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 5000])
@pytest.mark.parametrize("bits, group, zeros", [(4, 128, 0), (4, 32, 1), (8, 128, 1)])
def test_configs_are_valid(rows: int, bits: int, group: int, zeros: int) -> None:
    device = devices.KNOWN["h200"]
    for inner in (64, 4096, 2880):
        shape = {"rows": rows, "columns": 4096, "inner": inner, "bits": bits, "group": group, "scale_bytes": 2,
                 "zeros": zeros, "parts": 1}  # fmt: skip
        for config in (QUANTIZED.heuristic(device, shape), *QUANTIZED.space(device, shape)):
            assert QUANTIZED.valid(config, device, shape) is None
            taken = few_rows_bytes(config, shape) if config.warps else config.shared_bytes(stage_bytes(config, shape))
            assert taken <= device.shared_per_block


@EVERY
@pytest.mark.parametrize("rows", [3, 70])
def test_gradients_go_through_a_frozen_weight(format: str, granularity: str, symmetric: bool, rows: int) -> None:
    weight = _weight((64, 128), format, granularity, symmetric)
    x, bias = torch.randn(rows, 128, requires_grad=True), torch.randn(64, requires_grad=True)
    upstream = torch.randn(rows, 64)
    expected = torch.nn.functional.silu(x @ weight.dequantize(torch.float32).T + bias)
    wanted = torch.autograd.grad(expected, [x, bias], upstream)
    for backend in ("triton", "torch"):
        y = fk.linear(x, weight, bias, activation="silu", backend=backend)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        for found, one in zip(torch.autograd.grad(y, [x, bias], upstream), wanted):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("rows", [1, 13, 30, 200])
def test_every_candidate_on_a_gpu(format: str, granularity: str, symmetric: bool, rows: int) -> None:
    """All configs that a search times: right, and bit-equal on repeat."""
    if devices.properties(torch.device("cuda")).arch != 90:
        pytest.skip("weights in tiles are multiplied on Hopper")
    weight = _weight((1088, 1408), format, granularity, symmetric).to("cuda").tiled()
    x = torch.randn(rows, 1408, dtype=BF16, device="cuda")
    y = torch.empty(rows, 1088, dtype=BF16, device="cuda")
    call = kernels.Call(x, (weight,), y)
    gpu = cuda.target(x.device)
    configs = [
        config for config in QUANTIZED.space(gpu, call.shape) if QUANTIZED.valid(config, gpu, call.shape) is None
    ]
    assert any(config.warps for config in configs) == (rows <= 32)
    for config in configs:
        results = []
        for _ in range(3):
            y.fill_(torch.nan)
            kernels.launch(call, config)
            results.append(y.clone())
        _check(x, weight, results[0])
        assert all(torch.equal(results[0], one) for one in results[1:]), config


def test_explain_says_who_reads_tiles() -> None:
    weight = _weight((64, 128)).tiled()
    with devices.pretend(devices.KNOWN["h200"]):
        few, many = (fk.explain(fk.linear, torch.ones(size, 128).half(), weight) for size in (2, 1025))
        reasons = {one.backend: one.reason for one in few.verdicts}
        rows = {
            one.backend: one.reason
            for one in fk.explain(fk.linear, torch.ones(2, 128).half(), _weight((64, 128))).verdicts
        }
    assert (few.chosen, many.chosen) == ("hopper", "torch")
    assert "read rows, not int4_tiles" in str(reasons["triton"])
    assert rows["triton"] is None
    assert "reads weights in tiles (Weight.tiled)" in str(rows["hopper"])
    with devices.pretend(devices.KNOWN["a100"]):
        assert fk.explain(fk.linear, torch.ones(2, 128).half(), weight).chosen == "torch"


@pytest.mark.parametrize("format", ["int4 1x32", "int8 row zeros", "mxfp4 1x32", "fp8 row", "q4_1 1x32"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_activation_checkpointing_over_a_quantized_weight(format: str, backend: str) -> None:
    """As LoRA is trained: what the backward pass needs is computed again."""
    layout = Layout.parse(format)
    shape = "x".join(map(str, layout.group_shape))
    weight = Weight.quantize(torch.randn(32, 64), layout.format, shape, symmetric=not layout.zeros)
    if backend == "triton" and "q4" in format:
        pytest.skip("a format of the C++ kernels")
    x, bias = torch.randn(3, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    gradients = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        y = run(lambda x: fk.linear(x, weight, bias, backend=backend).tanh(), x)
        gradients.append(torch.autograd.grad(y.sum(), (x, bias)))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
