"""Gated products, preactivations and gradients of activations in the epilogue: tiles, packings and resources."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch
from compiled import compiled
from in_turn import in_turn
from sass import stack_traffic
from test_compile import PARKED
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.gate_up import join_gate_up, split_gate_up
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import verify
from flashkernel.core.launch import Launch, collect_launches
from flashkernel.core.op import Case
from flashkernel.ops.matmul import hopper
from flashkernel.ops.matmul.configs import MATMUL as TRITON
from flashkernel.ops.matmul.configs import MatmulConfig
from flashkernel.ops.matmul.hopper.configs import HOPPER_MATMUL, HopperMatmul
from flashkernel.ops.matmul.spec import MATMUL_DACT

H200 = devices.KNOWN["h200"]
CONFIGS = {
    "cooperative": HopperMatmul(64, 128, 2, 3),
    "wide": HopperMatmul(64, 256, 2, 4),
    "tall": HopperMatmul(128, 128, 2, 2, group_m=2),
    "one-consumer": HopperMatmul(64, 128, 1, 2),
    "pingpong": HopperMatmul(64, 128, 2, 3, pingpong=True),
    "split-k": HopperMatmul(64, 128, 2, 2, num_splits=3),
    "pingpong-split-k": HopperMatmul(64, 256, 2, 3, pingpong=True, num_splits=2),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
by_packing = pytest.mark.parametrize("packed", ["halves", "interleaved"])


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    monkeypatch.setattr(hopper.launch, "launch", gluon_emulator.launch)
    with devices.pretend(replace(H200, sms=3)):
        yield


def _weights(n: int, k: int, rows_are_outputs: bool) -> Tensor:
    """[k, 2 n], stored as it is or transposed."""
    weights = torch.randn(2 * n, k).half() / 8
    return weights.T if rows_are_outputs else weights.T.contiguous()


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@by_config
@by_packing
@pytest.mark.parametrize("rows_are_outputs", [False, True])
def test_gated_tiles_on_hopper(config: HopperMatmul, packed: str, rows_are_outputs: bool, emulated: None) -> None:
    """More work tiles than programs, edges in M, N and K, with the preactivation."""
    a, b, bias = torch.randn(200, 136).half(), _weights(296, 136, rows_are_outputs), torch.randn(592)
    with tune.override(HOPPER_MATMUL, config):
        c, z = fk.matmul(
            a, b, bias=bias, activation="swiglu", packed=packed, return_preactivation=True, backend="hopper"
        )
    exact = a.double() @ b.double() + bias.double()
    gate, up = split_gate_up(exact, packed)
    _close(z, exact, 2e-3)
    _close(c, torch.nn.functional.silu(gate) * up, 3e-3)


@by_config
def test_a_pair_of_different_layouts_on_hopper(config: HopperMatmul, emulated: None) -> None:
    a = torch.randn(2, 70, 200).half()
    gate, up = torch.randn(2, 200, 90).half() / 8, torch.randn(2, 90, 200).half().transpose(1, 2) / 8
    with tune.override(HOPPER_MATMUL, config):
        c = fk.matmul(a, (gate, up), activation="geglu", backend="hopper")
    left, right = a.double() @ gate.double(), a.double() @ up.double()
    _close(c, torch.nn.functional.gelu(left, approximate="tanh") * right, 2e-3)


@by_config
@pytest.mark.parametrize("n", [96, 99])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@by_packing
def test_activation_gradients_on_hopper(
    config: HopperMatmul, n: int, activation: str, packed: str, emulated: None
) -> None:
    a, b = torch.randn(2, 70, 136).half() / 8, torch.randn(2, 136, n).half()
    z = torch.randn(2, 70, n if activation == "silu" else 2 * n).half()
    expected = fk.matmul_dact(
        a.double(), b.double(), z.double(), activation=activation, packed=packed, backend="reference"
    )
    with tune.override(HOPPER_MATMUL, config):
        dz, activated = fk.matmul_dact(a, b, z, activation=activation, packed=packed, dz_out=z, backend="hopper")
    assert dz is z
    _close(dz, expected[0], 4e-3)
    _close(activated, expected[1], 2e-3)


@pytest.mark.parametrize("case", MATMUL_DACT.cases, ids=lambda case: case.name)
def test_the_matrix_of_gradients_on_hopper(case: Case, emulated: None) -> None:
    if torch.float16 in case.dtypes:
        reports = list(verify(MATMUL_DACT, case, torch.float16, "hopper", "cpu"))
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.parametrize("splits, persistent", [*itertools.product((1, 3), (False, True))])
@by_packing
def test_gated_tiles_in_triton(splits: int, persistent: bool, packed: str) -> None:
    a, b, bias = torch.randn(2, 37, 70), torch.randn(2, 70, 90), torch.randn(90)
    config = MatmulConfig(16, 32, 16, 4, 2, group_m=2, splits=splits, persistent=persistent)
    with tune.override(TRITON, config):
        c, z = fk.matmul(
            a, b, bias=bias, activation="swiglu", packed=packed, return_preactivation=True, backend="triton"
        )
        dz, again = fk.matmul_dact(a, b[..., :45], z, activation="swiglu", packed=packed, backend="triton")
    exact = a @ b + bias
    gate, up = split_gate_up(exact, packed)
    _close(z, exact, 2e-5)
    _close(c, torch.nn.functional.silu(gate) * up, 1e-4)
    _close(again, c, 1e-5)
    gate, up = (x.clone().requires_grad_() for x in (gate, up))
    gradients = torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), a @ b[..., :45])
    _close(dz, join_gate_up(*gradients, packed), 2e-4)


def test_a_weight_gradient_is_added_into_a_float32_buffer() -> None:
    dy, x = torch.randn(33, 24).half(), torch.randn(33, 40).half()
    total = torch.randn(24, 40)
    expected = total + dy.float().T @ x.float()
    same = fk.matmul(dy.T, x, residual=total, out=total, backend="triton")
    assert same is total
    _close(total, expected, 1e-5)


def test_the_gradient_of_a_returned_preactivation_is_added() -> None:
    a, b = torch.randn(20, 16, requires_grad=True), torch.randn(16, 24, requires_grad=True)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        c, z = fk.matmul(a, b, activation="swiglu", return_preactivation=True, backend=backend)
        return torch.autograd.grad(c.square().sum() + z.sin().sum(), (a, b))

    for actual, exact in zip(gradients("triton"), gradients("reference")):
        _close(actual, exact, 1e-4)
    _, z = fk.matmul(a, b, activation="swiglu", return_preactivation=True, backend="triton")
    _close(torch.autograd.grad(z.sum(), a)[0], torch.ones(20, 24) @ b.T, 1e-4)


def test_dropout_draws_a_seed_that_repeats() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 16, requires_grad=True), torch.randn(16, 24).div(4).requires_grad_()

    def call(backend: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        c = fk.matmul(a, b, activation="swiglu", dropout=0.5, backend=backend)
        return c, *torch.autograd.grad(c.square().sum(), (a, b))

    first, again, expected = call("triton"), call("triton"), call("torch")
    for one, other, exact in zip(first, again, expected):
        assert torch.equal(one, other)
        _close(one, exact, 1e-4)
    share = float(
        (fk.matmul(torch.ones(100, 16), torch.ones(16, 200), dropout=0.25, backend="triton") == 0).float().mean()
    )
    assert abs(share - 0.25) < 0.02
    fk.matmul(a, b, dropout=0.5, seed=torch.tensor(7), backend="triton").sum().backward()


QUANTIZING = {name: config for name, config in CONFIGS.items() if config.rows == 64}


@pytest.mark.parametrize("config", QUANTIZING.values(), ids=QUANTIZING)
@pytest.mark.parametrize("n", [304, 299])
@pytest.mark.parametrize("gated", [False, True])
def test_fp8_outputs_on_hopper(config: HopperMatmul, n: int, gated: bool, emulated: None) -> None:
    """Blocks that end with a tile, within one and beyond the last column; C's rows are aligned or not."""
    a, b = torch.randn(2, 70, 136).half(), torch.randn(136, 2 * n if gated else n).half() / 8
    config = replace(config, block_n=256) if gated else config
    options: dict[str, Any] = {"activation": "reglu"} if gated else {}
    exact = fk.matmul(a.double(), b.double(), backend="reference", **options)
    with tune.override(HOPPER_MATMUL, config):
        c, scales = fk.matmul(a, b, out_quantize="block", backend="hopper", **options)
        divided = fk.matmul(
            a, b, out_scale=torch.tensor(0.01), out_dtype=torch.float8_e4m3fn, backend="hopper", **options
        )
    blocks = torch.nn.functional.pad(exact, (0, 384 - n)).view(2, 70, 3, 128).abs().amax(-1)
    _close(scales, blocks / 448, 1e-4)
    _close(c.double() * scales.double().repeat_interleave(128, 2)[..., :n], exact, 0.1)
    _close(divided, (exact * 100).clamp(-448, 448), 0.1)


def test_fp8_outputs_in_triton() -> None:
    a, b = torch.randn(2, 37, 70), torch.randn(2, 70, 300)
    exact = a @ b
    for splits, block_n in ((1, 256), (3, 32)):
        with tune.override(TRITON, MatmulConfig(16, block_n, 16, 4, 2, splits=splits)):
            c, scales = fk.matmul(a, b, out_quantize="block", backend="triton")
        _close(c.double() * scales.double().repeat_interleave(128, 2)[..., :300], exact, 0.3)
    expected = fk.matmul(a, b, out_quantize="row", backend="reference")
    c, scales = fk.matmul(a, b, out_quantize="row", backend="triton")
    _close(scales, expected[1], 1e-5)
    _close(c, expected[0], 0.1)


def _launches(
    m: int, n: int, k: int, call: str, backend: str, packed: str = "halves", gpu: str = "h200", **given: Any
) -> list[Launch]:  # fmt: skip
    """The launches of a call on tensors without data."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    with devices.pretend(devices.KNOWN[gpu]), collect_launches() as launches:
        if call == "dact":
            width = 2 if given["activation"] == "swiglu" else 1
            fk.matmul_dact(empty(m, k), empty(k, n), empty(m, width * n), packed=packed, backend=backend, **given)
        elif call == "plain":
            fk.matmul(empty(m, k), empty(n, k).T, bias=empty(n), backend=backend, **given)
        elif call == "pair":
            fk.matmul(empty(m, k), (empty(n, k).T, empty(n, k).T), activation="swiglu", backend=backend, **given)
        else:
            weight = empty(2 * n, k).T if call == "gated" else empty(k, 2 * n)
            fk.matmul(
                empty(m, k), weight, bias=empty(2 * n), activation="swiglu", packed=packed, backend=backend, **given
            )
    return launches


COMPILED: dict[str, dict[str, Any]] = {
    "gated": {"m": 4096, "n": 14336, "k": 4096, "call": "gated"},
    "gated-pair": {"m": 4096, "n": 14336, "k": 4096, "call": "pair"},
    "gated-n-major": {"m": 4096, "n": 14336, "k": 4096, "call": "gated-n-major"},
    "gated-z": {"m": 4096, "n": 14336, "k": 4096, "call": "gated", "return_preactivation": True},
    "gated-z-interleaved": {"m": 4096, "n": 2880, "k": 2880, "call": "gated", "packed": "interleaved",
                            "return_preactivation": True},
    "gated-dropout": {"m": 4096, "n": 14336, "k": 4096, "call": "gated", "dropout": 0.1},
    "gated-fp8": {"m": 4096, "n": 14336, "k": 4096, "call": "gated", "out_quantize": "block"},
    "gated-fp8-z": {"m": 4096, "n": 14336, "k": 4096, "call": "gated", "out_quantize": "block",
                    "return_preactivation": True},
    "fp8": {"m": 4096, "n": 4096, "k": 4096, "call": "plain", "out_quantize": "block"},
    "fp8-rows": {"m": 4096, "n": 4096, "k": 4096, "call": "plain", "out_quantize": "row"},
    "fp8-out": {"m": 4096, "n": 4096, "k": 4096, "call": "plain", "out_dtype": torch.float8_e4m3fn},
    "gated-odd": {"m": 4096, "n": 4099, "k": 4096, "call": "gated", "return_preactivation": True},
    "gated-few-rows": {"m": 128, "n": 1024, "k": 16384, "call": "gated"},
    "dact": {"m": 4096, "n": 14336, "k": 4096, "call": "dact", "activation": "gelu_tanh"},
    "dact-gated": {"m": 4096, "n": 14336, "k": 4096, "call": "dact", "activation": "swiglu"},
    "dact-interleaved": {"m": 4096, "n": 2880, "k": 2880, "call": "dact", "activation": "swiglu",
                         "packed": "interleaved"},
    "dact-odd": {"m": 4096, "n": 4099, "k": 4096, "call": "dact", "activation": "swiglu"},
}  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize("name, backend", in_turn(COMPILED, ["hopper", "triton"], pytest.mark.every_config))
def test_compiled(name: str, backend: str) -> None:
    """WGMMA, no spills, and shared memory that a block has."""
    _assert_lean(_launches(**COMPILED[name], backend=backend))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["gated", "gated-z", "gated-dropout", "gated-fp8", "dact", "dact-gated"])
def test_compiled_for_ampere(name: str) -> None:
    for one in _launches(**COMPILED[name], backend="triton", gpu="a100"):
        code = compiled(one, 80)
        assert code.stack <= PARKED
        assert stack_traffic(code.sass).stores == 0
        assert code.shared <= devices.KNOWN["a100"].shared_per_block


def _assert_lean(launches: list[Launch]) -> None:
    for one in launches:
        code = compiled(one, 90)
        assert code.stack <= (0 if one.kernel.is_gluon() else PARKED)
        assert stack_traffic(code.sass).stores == 0
        assert code.shared <= H200.shared_per_block
    assert re.search("HGMMA.64x", compiled(launches[0], 90).sass)


def _tiles() -> list[HopperMatmul]:
    """The tiles of the search space, with the most stages each."""
    shape = {"batch": 1, "m": 4096, "n": 8192, "k": 4096, "bytes": 2, "block_scaled": 0, "integer": 0, "gated": 1}
    best: dict[tuple[int, int, bool, bool], HopperMatmul] = {}
    for config in HOPPER_MATMUL.space(H200, shape):
        if HOPPER_MATMUL.valid(config, H200, shape) is None:
            key = (config.rows, config.block_n, config.pingpong, config.stream_k)
            best[key] = max(best.get(key, config), config, key=lambda config: config.num_stages)
    return list(best.values())


@pytest.mark.compile
@pytest.mark.every_config
@pytest.mark.parametrize("config", _tiles(), ids=str)
@pytest.mark.parametrize("call", ["gated", "dact"])
def test_tiles_compiled(config: HopperMatmul, call: str) -> None:
    given: dict[str, Any] = {"activation": "swiglu"} if call == "dact" else {"return_preactivation": True}
    with tune.override(HOPPER_MATMUL, replace(config, num_splits=1)):
        _assert_lean(_launches(4096, 4096, 4096, call, "hopper", **given))


@pytest.mark.gpu
@by_config
@by_packing
@pytest.mark.parametrize("rows_are_outputs", [False, True])
def test_gated_tiles_on_a_gpu(config: HopperMatmul, packed: str, rows_are_outputs: bool) -> None:
    a, b = torch.randn(1800, 1096).bfloat16().cuda(), _weights(2504, 1096, rows_are_outputs).bfloat16().cuda()
    with tune.override(HOPPER_MATMUL, config):
        c, z = fk.matmul(a, b, activation="swiglu", packed=packed, return_preactivation=True, backend="hopper")
        dz, again = fk.matmul_dact(a, b[:, :2504], z, activation="swiglu", packed=packed, backend="hopper")
    expected = fk.matmul(a, b, activation="swiglu", packed=packed, return_preactivation=True, backend="torch")
    gradients = fk.matmul_dact(a, b[:, :2504], z, activation="swiglu", packed=packed, backend="torch")
    for actual, exact in zip((c, z, dz, again), (*expected, *gradients)):
        torch.testing.assert_close(actual, exact, rtol=2e-2, atol=2e-2 * float(exact.float().abs().max()) / 8)
