"""Products in tiles of 96 to 224 columns: arithmetic and barriers under the emulator, resources when compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled import disassemble
from cuda_emulator import emulated
from cuda_emulator import unavailable as no_emulator
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Operands
from flashkernel.core import cuda, tune
from flashkernel.core import device as devices
from flashkernel.lab import tuning
from flashkernel.lab.cuda_resources import Instance, compile_nvcc, has_nvcc, ptxas_report
from flashkernel.ops import registry
from flashkernel.ops.matmul import hopper
from flashkernel.ops.matmul.hopper import configs, tile_width
from flashkernel.ops.matmul.hopper.configs import HOPPER_MATMUL, TILE_WIDTHS, HopperMatmul
from flashkernel.ops.matmul.kernel_args import EpilogueTensors
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors

H200 = devices.KNOWN["h200"]
BF16, FP16 = torch.bfloat16, torch.float16
needs_emulator = pytest.mark.skipif(no_emulator() is not None, reason=str(no_emulator()))
needs_nvrtc = pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))
widths = pytest.mark.parametrize("width", TILE_WIDTHS)


def _config(width: int, stages: int = 2) -> HopperMatmul:
    return HopperMatmul(64, width, 2, stages, tile_width=True)


def _product(
    a: Tensor, weight: Tensor, config: HopperMatmul, chain: str = "", bias: Tensor | None = None,
    residual: Tensor | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Compares a [M, K] weight [N, K]^T, computed on 3 SMs, with float64."""
    tensors = MatmulTensors(bias=bias, residual=None if residual is None else residual[None], out=out)
    with emulated(90), devices.pretend(replace(H200, sms=3)), tune.override(HOPPER_MATMUL, config):
        (c,) = hopper.forward(a[None], weight.t()[None], MatmulParams(a.dtype, chain), tensors)
    exact, magnitude = a.double() @ weight.double().T, a.double().abs() @ weight.double().abs().T
    operands = Operands(() if bias is None else (bias.double(),), None if residual is None else residual.double())
    exact = Epilogue.parse(chain).run((exact,), operands)
    allowed = torch.finfo(a.dtype).eps * exact.abs() + 2e-6 * (magnitude + exact.abs()) + 1e-6
    assert ((c.double() - exact).abs() / allowed).max() <= 1


@needs_emulator
@widths
def test_several_tiles(width: int) -> None:
    """More tiles than SMs, edges in M, N and K, several passes through the stages."""
    dtype = BF16 if width == 160 else FP16
    _product(torch.randn(200, 328).to(dtype), torch.randn(2 * width + 24, 328).to(dtype), _config(width))


@needs_emulator
@pytest.mark.parametrize("size", [(1, 8, 8), (129, 8, 64), (3, 168, 72), (128, 96, 8)], ids=str)
def test_small_sizes(size: tuple[int, int, int]) -> None:
    m, n, k = size
    _product(torch.randn(m, k).half(), torch.randn(n, k).half(), _config(96 if n <= 96 else 160, 3))


@needs_emulator
@pytest.mark.parametrize(
    "chain", ["bias", "bias;activation gelu_tanh;scale 0.5;residual", "activation silu", "residual"]
)
def test_epilogues(chain: str) -> None:
    """Operands in other dtypes, with strides, and an output that is a view of wider rows."""
    a, weight = torch.randn(70, 96).to(BF16), torch.randn(200, 96).to(BF16)
    bias = torch.randn(400)[::2] if "bias" in chain else None
    residual = torch.randn(70, 300, dtype=FP16)[:, 7:207] if "residual" in chain else None
    out = torch.full((1, 70, 208), torch.nan, dtype=BF16)
    _product(a, weight, _config(160), chain, bias, residual, out[:, :, :200])
    assert out[:, :, 200:].isnan().all(), "it wrote beside its output"


@needs_emulator
def test_operands_are_views() -> None:
    a, weight = torch.randn(70, 160).half()[:, 8:104], torch.randn(320, 128).half()[::2, :96]
    _product(a, weight, _config(96))


def _epilogue(c: Tensor, chain: str = "", **tensors: Tensor) -> EpilogueTensors:
    return EpilogueTensors.of(c, MatmulParams(c.dtype, chain), MatmulTensors(**tensors))


def test_what_it_serves() -> None:
    a, weight, c = torch.empty(1, 64, 64).half(), torch.empty(96, 64).half(), torch.empty(1, 64, 96).half()
    b = weight.t()[None]
    assert tile_width.serves(a, b, _epilogue(c))
    assert tile_width.serves(a, b, _epilogue(c, "bias;activation gelu", bias=torch.empty(96)))
    assert not tile_width.serves(a, b.contiguous(), _epilogue(c)), "rows along N"
    assert not tile_width.serves(a.float(), b.float(), _epilogue(c.float()))
    assert not tile_width.serves(a, b, _epilogue(c.float()))
    assert not tile_width.serves(a, b, _epilogue(c, "dropout 0.5"))
    assert not tile_width.serves(a, b, _epilogue(c, "gate silu 1.0 inf", up=b))
    assert not tile_width.serves(a, b, _epilogue(c, preactivation=torch.empty_like(c)))
    assert not tile_width.serves(a[..., :60], b[:, :60], _epilogue(c[..., :92]))
    assert not tile_width.serves(a.expand(2, -1, -1), b, _epilogue(c.expand(2, -1, -1)))


def _shape(**changed: int) -> dict[str, int]:
    shape = {"batch": 1, "m": 512, "n": 10240, "k": 8192, "bytes": 2, "block_scaled": 0, "integer": 0, "tile_width": 1}
    return {**shape, **changed}


def test_the_search_space() -> None:
    """A search times them where they serve; they are no heuristic's choice."""
    found = [config for config in HOPPER_MATMUL.space(H200, _shape()) if config.tile_width]
    assert [config.block_n for config in found] == list(TILE_WIDTHS)
    assert all(HOPPER_MATMUL.valid(config, H200, _shape()) is None for config in found)
    assert not HOPPER_MATMUL.heuristic(H200, _shape()).tile_width
    assert not any(config.tile_width for config in HOPPER_MATMUL.space(H200, _shape(tile_width=0)))
    for wrong in (replace(found[0], block_n=128), replace(found[0], pingpong=True), replace(found[0], num_stages=9)):
        assert HOPPER_MATMUL.valid(wrong, H200, _shape())
    assert HOPPER_MATMUL.valid(found[0], H200, _shape(tile_width=0))


@needs_nvrtc
def test_a_search_compiles_them_ahead() -> None:
    op = registry()["matmul"]
    case = next(case for case in op.benches if case.name == "llama-70b-qkv-512")
    found = [kernel.name for kernel in tuning.kernels_of_space(op, case, BF16, H200, "hopper")]
    assert [name.split(", ")[1] for name in found] == [str(width) for width in TILE_WIDTHS]


@needs_nvrtc
@pytest.mark.compile
@widths
def test_compiled_for_hopper(width: int) -> None:
    a, weight = torch.empty(1, 512, 512, dtype=BF16, device="meta"), torch.empty(512, 512, dtype=BF16, device="meta")
    c, residual = (torch.empty(1, 512, 512, dtype=BF16, device="meta") for _ in range(2))
    config = next(one for one in HOPPER_MATMUL.space(H200, _shape()) if one.tile_width and one.block_n == width)
    for chain, tensors in (
        ("", {}),
        ("bias;activation gelu;residual", {"bias": torch.empty(512, device="meta"), "residual": residual}),
    ):
        with devices.pretend(H200), cuda.recorded_launches() as launches:
            tile_width.multiply(a, weight.t()[None], _epilogue(c, chain, **tensors), config)
        (launch,) = launches
        code = launch.kernel.module.compile(launch.kernel.name, 90)
        (taken,) = ptxas_report(code.log).values()
        assert taken["spilled"] == 0
        assert "C75" not in code.log, "wgmma is serialized"
        assert launch.shared == configs.tile_width_shared_bytes(config) <= H200.shared_per_block
        sass = disassemble(code.code)
        assert f"HGMMA.64x{width}x16.F32.BF16" in sass
        assert "UTMALDG.2D" in sass
        assert "STG.E.128" in sass
        assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in sass, "products wait for one another"
        if has_nvcc():
            group = [Instance(launch.kernel, ("matmul",), launch.threads, launch.shared)]
            assert all(found["spilled"] == 0 for found in compile_nvcc(group, 90).values())
