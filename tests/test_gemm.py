"""What the table cannot say of linear layers: independent formulas, shared tiles, chains in any order, wrong inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashkernel as fk
from flashkernel.blocks.epilogue import Activation, Bias, Epilogue, Gate, Operands, Residual, Scale
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.launch import collect_launches
from flashkernel.ops import registry
from flashkernel.ops.gemm.configs import LINEAR, MAX_ROWS, LinearConfig, row_tile
from flashkernel.ops.gemm.params import LinearExtras

LINEAR_OP = registry()["linear"]


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=2e-5)


def test_reference_against_formulas() -> None:
    x, weight, up = torch.randn(3, 5).double(), torch.randn(4, 5).double(), torch.randn(4, 5).double()
    bias, norm_weight, residual = torch.randn(4).double(), torch.randn(5).double(), torch.randn(3, 4).double()
    plain = fk.linear(x, weight, bias, backend="reference")
    fused = fk.linear(
        x, [weight, up], None, residual, norm_weight, activation="swiglu", scale=0.5, norm_eps=0.1, backend="reference"
    )
    for row in range(3):
        values = x[row].tolist()
        rms = math.sqrt(sum(value**2 for value in values) / 5 + 0.1)
        normal = [value / rms * factor for value, factor in zip(values, norm_weight.tolist())]
        for column in range(4):
            product = sum(a * b for a, b in zip(values, weight[column].tolist()))
            assert math.isclose(plain[row, column], product + bias[column], rel_tol=1e-12)
            gate = sum(a * b for a, b in zip(normal, weight[column].tolist()))
            other = sum(a * b for a, b in zip(normal, up[column].tolist()))
            expected = 0.5 * gate / (1 + math.exp(-gate)) * other + float(residual[row, column])
            assert math.isclose(fused[row, column], expected, rel_tol=1e-12)


def test_several_outputs_are_those_of_single_calls() -> None:
    x, weights = torch.randn(3, 20), [torch.randn(size, 20) for size in (6, 4, 9)]
    biases = [torch.randn(size) for size in (6, 4, 9)]
    for backend in ("torch", "triton"):
        together = fk.linear(x, weights, biases, backend=backend)
        packed = fk.linear(x, torch.cat(weights), torch.cat(biases), splits=(6, 4, 9), backend=backend)
        for weight, bias, one, split in zip(weights, biases, together, packed):
            _close(one, torch.nn.functional.linear(x, weight, bias))
            _close(split, one)


@pytest.mark.parametrize("sizes", [(1, 40, 1), (40, 1), (3, 0)])
def test_biases_of_several_layouts(sizes: tuple[int, ...]) -> None:
    """Views with strides and dtypes of their own, of one element or none too."""
    x, weights = torch.randn(3, 20), [torch.randn(size, 20) for size in sizes]
    biases = [torch.randn(2 * size)[::2] if index == 0 else torch.randn(size) for index, size in enumerate(sizes)]
    biases[-1] = biases[-1].half()
    for one, weight, bias in zip(fk.linear(x, weights, biases, backend="triton"), weights, biases):
        _close(one, torch.nn.functional.linear(x, weight, bias.float()))


@pytest.mark.parametrize("packed", ["halves", "interleaved"])
@pytest.mark.parametrize("rows", [2, 6])
def test_packed_gate_and_up_with_a_residual(packed: str, rows: int) -> None:
    x, weight, bias = torch.randn(rows, 18), torch.randn(14, 18) / 4, torch.randn(14)
    residual = torch.randn(rows, 7)
    order = torch.arange(14).view(2, 7) if packed == "halves" else torch.arange(14).view(7, 2).t()
    tensors = [tensor.requires_grad_() for tensor in (x, weight, bias, residual)]
    apart = fk.linear(
        x, [weight[order[0]], weight[order[1]]], [bias[order[0]], bias[order[1]]], residual, activation="geglu"
    )
    upstream = torch.randn(rows, 7)
    expected = torch.autograd.grad(apart, tensors, upstream)
    for backend in ("torch", "triton"):
        y = fk.linear(*tensors, activation="geglu", packed=packed, backend=backend)
        _close(y, apart)
        for mine, theirs in zip(torch.autograd.grad(y, tensors, upstream), expected):
            _close(mine, theirs)


def test_gradients_of_splits_and_of_frozen_weights() -> None:
    x, weight = torch.randn(3, 10, requires_grad=True), torch.randn(9, 10)
    first, second = fk.linear(x, weight, splits=(5, 4), backend="triton")
    (dx,) = torch.autograd.grad(first.sum() + 2 * second.sum(), x)
    _close(dx, (weight * torch.tensor([1.0] * 5 + [2.0] * 4)[:, None]).sum(0).expand(3, 10))
    assert weight.grad is None


SHARED = [
    LinearConfig("tensor", columns, 16, 4, 1, programs) for columns in (16, 32) for programs in (1, 2, 3, 5, 7, 19, 40)
]


@pytest.mark.parametrize("config", SHARED, ids=lambda config: f"{config.block_n}x{config.programs}")
def test_shared_tiles_add_up_whatever_the_shares(config: LinearConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one program for everything to many for a tile; the counters are left as they were found."""
    from flashkernel.ops.gemm import triton as kernels

    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(kernels, "counters", lambda where: counters)
    x, norm_weight = torch.randn(5, 70), torch.randn(70)
    weights, biases = [torch.randn(size, 70) for size in (40, 7, 18)], [torch.randn(size) for size in (40, 7, 18)]
    with tune.override(LINEAR, config):
        outputs = fk.linear(x, weights, biases, norm_weight=norm_weight, activation="silu", backend="triton")
        again = fk.linear(x, weights, biases, norm_weight=norm_weight, activation="silu", backend="triton")
        gated = fk.linear(
            x, [weights[0], weights[0] + 1], None, None, norm_weight, activation="reglu", backend="triton"
        )
    expected = fk.linear(x, weights, biases, norm_weight=norm_weight, activation="silu", backend="reference")
    for mine, repeated, theirs in zip(outputs, again, expected):
        _close(mine, theirs)
        assert torch.equal(mine, repeated)
    exact = [tensor.double() for tensor in (x, weights[0], norm_weight)]
    doubled = fk.linear(
        exact[0], [exact[1], exact[1] + 1], None, None, exact[2], activation="reglu", backend="reference"
    )
    torch.testing.assert_close(gated.double(), doubled, rtol=1e-4, atol=1e-3)
    assert not counters.any()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("config", [LinearConfig("vector", 4, 64, 2, 1), LinearConfig("vector", 1, 32, 1, 3)])
def test_the_vector_kernel_for_other_tiles(rows: int, config: LinearConfig) -> None:
    x, weight, residual = torch.randn(rows, 100), torch.randn(9, 100), torch.randn(rows, 9)
    with tune.override(LINEAR, config):
        _close(fk.linear(x, weight, None, residual, backend="triton"), x @ weight.t() + residual)


def test_weights_stored_in_by_out() -> None:
    """GPT-2's weights: contiguous along the outputs, alone, packed or beside others."""
    x = torch.randn(2, 24)
    stored = torch.randn(24, 30)
    _close(fk.linear(x, stored.t(), backend="triton"), x @ stored)
    gate, up = stored[:, 0::2], stored[:, 1::2]
    expected = torch.nn.functional.silu(x @ gate) * (x @ up)
    _close(fk.linear(x, stored.t(), activation="swiglu", packed="interleaved", backend="triton"), expected)
    mixed = fk.linear(x, [stored.t(), stored.t().contiguous()], backend="triton")
    _close(mixed[0], x @ stored)
    _close(mixed[1], x @ stored)


def test_vectors_of_other_dtypes_and_strides() -> None:
    x, weights = torch.randn(2, 12), [torch.randn(5, 12), torch.randn(5, 12)]
    biases = [torch.randn(5).half(), torch.randn(10)[::2]]
    norm_weight = torch.randn(24)[::2]
    for activation in (None, "swiglu"):
        mine = fk.linear(x, weights, biases, norm_weight=norm_weight, activation=activation, backend="triton")
        exact = fk.linear(x, weights, biases, norm_weight=norm_weight, activation=activation, backend="reference")
        for one, expected in zip(mine, exact):
            _close(one, expected)


def test_rows_far_apart() -> None:
    x = torch.randn(4, 50, 16)[:, -1]
    weight = torch.randn(8, 16)
    _close(fk.linear(x, weight, backend="triton"), x @ weight.t())


@pytest.mark.parametrize("rows", [1, 5])
def test_a_long_sum_is_in_float32(rows: int) -> None:
    """20000 ones and a half each: float16 sums would stop at 2048."""
    x = torch.ones(rows, 20000, dtype=torch.float16)
    weight = torch.full((2, 20000), 0.5, dtype=torch.float16)
    assert torch.equal(fk.linear(x, weight, backend="triton"), torch.full((rows, 2), 1e4, dtype=torch.float16))
    wide = fk.linear(x, weight * 16, out_dtype=torch.float32, backend="triton")
    assert torch.equal(wide, torch.full((rows, 2), 1.6e5))


CHAINS = [
    (),
    (Residual(), Activation("relu"), Scale(2.0), Bias()),
    (Scale(0.5), Activation("gelu"), Bias(), Activation("squared_relu")),
    (Bias(), Activation("gelu_tanh"), Residual(), Activation("silu")),
    (Bias(), Gate("gpt_oss", 1.5, 0.7), Scale(3.0), Residual()),
    (Gate("gelu"), Bias(), Residual()),
    (Gate("silu"), Scale(-1.0), Residual(), Activation("relu")),
]


@pytest.mark.parametrize("pieces", CHAINS, ids=lambda pieces: Epilogue(pieces).text or "nothing")
def test_chains_compose(pieces: tuple) -> None:
    """Any order of pieces: by torch, by the kernels, and backwards against autograd."""
    from flashkernel.ops.gemm import triton as kernels

    chain = Epilogue(pieces)
    assert Epilogue.parse(chain.text) == chain
    count = 2 if chain.gated else 1
    x, weights = torch.randn(3, 12), [torch.randn(10, 12) / 3 for _ in range(count)]
    biases, residual = [torch.randn(10) for _ in range(count)], torch.randn(3, 10)
    products = tuple((x @ weight.t()).requires_grad_() for weight in weights)
    operands = Operands(tuple(bias.requires_grad_() for bias in biases), residual.requires_grad_())
    expected = chain.run(products, operands)
    plain = [bias.detach() for bias in biases]
    for rows in (3, 6):
        y = kernels.forward(
            x[:1].expand(rows, 12).contiguous() if rows > 3 else x, weights, plain,
            LinearExtras(
                residual.detach()[:1].expand(rows, 10).contiguous() if rows > 3 else residual.detach(), None,
                chain.text, "halves", 0.0, 0.0, torch.float32,
            ),
        )  # fmt: skip
        _close(y, expected.detach()[:1].expand(rows, 10) if rows > 3 else expected.detach())
    upstream = torch.randn(3, 10)
    wanted = [*products, *operands.biases, operands.residual]
    theirs = torch.autograd.grad(expected, wanted, upstream, allow_unused=True)
    detached = Operands(tuple(plain), residual.detach())
    mine = chain.pull_back(tuple(product.detach() for product in products), detached, upstream)
    for gradient, exact in zip(mine[0], theirs):
        _close(gradient, exact)
    if any(isinstance(piece, Bias) for piece in pieces):
        for gradient, exact in zip(mine[1], theirs[count:]):
            _close(gradient.sum(0), exact)
    if any(isinstance(piece, Residual) for piece in pieces):
        _close(mine[2], theirs[-1])


def test_one_launch_for_all_outputs() -> None:
    x = torch.empty(16, 4096, dtype=torch.bfloat16, device="meta")
    matrix = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    norm_weight = torch.empty(4096, device="meta")
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        fk.linear(x, [matrix, matrix, matrix], norm_weight=norm_weight, backend="triton")
        fk.linear(x[:1], [matrix, matrix], norm_weight=norm_weight, activation="swiglu", backend="triton")
    assert [launch.name for launch in launches] == ["linear_tensor", "linear_vector"]


def test_what_the_kernels_decline() -> None:
    weight = torch.empty(64, 64, dtype=torch.float16, device="meta")
    with devices.pretend(devices.KNOWN["h200"]):
        few = fk.explain(fk.linear, torch.empty(32, 64, dtype=torch.float16, device="meta"), weight)
        many = fk.explain(fk.linear, torch.empty(65, 64, dtype=torch.float16, device="meta"), weight)
    with devices.pretend(devices.KNOWN["t4"]):
        old = fk.explain(fk.linear, torch.empty(5, 64, dtype=torch.float16, device="meta"), weight)
    assert (few.chosen, many.chosen, old.chosen) == ("triton", "torch", "cuda")
    assert "cuBLAS" in str(many)
    assert "sm_80" in str(old)


def test_up_to_64_rows_by_one_weight_are_cublas_on_hopper() -> None:
    """As recorded in results/h200/linear.json. A norm in front, several weights, a gate, or outputs that are not
    16-byte vectors keep the kernel."""

    def chosen(gpu: str = "h200", rows: int = 64, columns: int = 4096, weights: int = 1, **given: Any) -> str | None:
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        matrix = torch.empty(columns, 4096, dtype=torch.bfloat16, device="meta")
        with devices.pretend(devices.KNOWN[gpu]):
            answer = fk.explain(fk.linear, x, matrix if weights == 1 else [matrix] * weights, **given)
        assert answer.chosen != "torch" or "cuBLAS" in str(answer)
        return answer.chosen

    assert chosen() == chosen(rows=33) == chosen(activation="gelu") == "torch"
    norm = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    kept = ({"rows": 32}, {"weights": 3}, {"norm_weight": norm}, {"columns": 50257}, {"activation": "swiglu"},
            {"out_dtype": torch.float32}, {"gpu": "a100"})  # fmt: skip
    for given in kept:
        assert chosen(**given) == "triton", given


def test_three_and_four_rows_are_the_tensor_cores_on_hopper() -> None:
    shape = {"columns": 4096, "inner": 4096, "bytes": 2, "streams": 1, "transposed": 0, "norm": 0}
    found = {
        (gpu, rows, columns): LINEAR.heuristic(
            devices.KNOWN[gpu], {**shape, "rows": rows, "columns": columns}
        ).kernel
        for gpu in ("h200", "a100") for rows in (2, 3, 4) for columns in (768, 4096)
    }  # fmt: skip
    assert {key for key, kernel in found.items() if kernel == "tensor"} == {("h200", 3, 4096), ("h200", 4, 4096)}


def _shapes() -> list[dict[str, int]]:
    found = []
    for case in LINEAR_OP.benches:
        if case.axes["rows"] > MAX_ROWS:
            continue
        parts = [name for name in ("columns", "second", "third") if name == "columns" or name in case.present]
        columns = sum(case.axes[name] for name in parts)
        found.append(
            {
                "rows": case.axes["rows"], "columns": columns, "inner": case.axes["inner"], "bytes": 2,
                "streams": 2 if "up" in case.present else 1, "transposed": 0,
                "norm": int("norm_weight" in case.present),
            }
        )  # fmt: skip
    return found


@pytest.mark.parametrize("gpu", ["a100", "l4", "h200", "b200"])
def test_heuristics_are_valid_and_spread_the_work(gpu: str) -> None:
    device = devices.KNOWN[gpu]
    for shape in _shapes():
        for size in (2, 4):
            given = {**shape, "bytes": size}
            config = LINEAR.heuristic(device, given)
            assert LINEAR.valid(config, device, given) is None, f"{config} for {given}"
            if config.kernel == "tensor" and config.programs:
                tiles, steps = -(-shape["columns"] // config.block_n), -(-shape["inner"] // config.block_k)
                share = -(-tiles * steps // config.programs)
                assert share >= 4
                # Nobody has more than a few steps beyond an equal share of two programs a multiprocessor.
                per_sm = -(-config.programs // device.sms) * share
                assert per_sm <= tiles * steps / device.sms * 1.5 + 8, f"{config} for {given}"
        assert any(LINEAR.valid(config, device, shape) is None for config in LINEAR.space(device, shape))


def test_configs_that_cannot_run_are_refused() -> None:
    shape = {"rows": 16, "columns": 64, "inner": 64, "bytes": 2, "streams": 1, "transposed": 0, "norm": 0}
    device = devices.KNOWN["h200"]
    refused = {
        LinearConfig("vector", 4, 256, 4, 1): "too many",
        LinearConfig("tensor", 128, 256, 4, 6): "shared memory",
        LinearConfig("tensor", 64, 8, 4, 1): "at least 16",
        LinearConfig("abacus", 64, 64, 4, 1): "no kernel",
    }
    for config, reason in refused.items():
        assert reason in (LINEAR.valid(config, device, shape) or ""), config
    one = {**shape, "rows": 1}
    assert "registers" in (LINEAR.valid(LinearConfig("vector", 16, 2048, 1, 1), device, one) or "")
    assert "one program" in (LINEAR.valid(LinearConfig("vector", 4, 256, 4, 1, 132), device, one) or "")
    assert "contiguous" in (LINEAR.valid(LinearConfig("vector", 4, 256, 4, 1), device, {**one, "transposed": 1}) or "")
    many = {**shape, "rows": MAX_ROWS + 1, "bytes": 1, "dequantized": 1}
    assert "tile of rows" in (LINEAR.valid(LinearConfig("tensor", 64, 64, 4, 4, 132), device, many) or "")
    assert LINEAR.valid(LinearConfig("tensor", 64, 64, 4, 4), device, many) is None
    assert row_tile(17) == 32


def test_autocast_takes_mixed_dtypes() -> None:
    """As torch.nn.Linear: x from an autocast operator, the weight a float32 parameter."""
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fk.linear(x.bfloat16(), weight)
    assert y.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(y.float().sum(), weight)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.arange(6)}, "float tensor"),
        ({"weight": torch.randn(4, 5)}, r"shape \(4, 5\); x has 6 columns"),
        ({"weight": torch.randn(4, 6).half()}, "float16"),
        ({"weight": torch.randn(4, 6, device="meta")}, "on meta"),
        ({"weight": [torch.randn(4, 6)] * 4}, "4 weights"),
        ({"weight": []}, "0 weights"),
        ({"weight": [torch.randn(4, 6)] * 2, "bias": [torch.randn(4)]}, "1 biases were given for 2"),
        ({"weight": [torch.randn(4, 6)] * 2, "residual": torch.randn(3, 4)}, "one output"),
        ({"weight": [torch.randn(4, 6), torch.randn(5, 6)], "activation": "swiglu"}, "gate has 4 outputs and up has 5"),
        ({"weight": [torch.randn(4, 6)] * 3, "activation": "swiglu"}, "3 weights"),
        ({"weight": torch.randn(5, 6), "activation": "swiglu"}, "even number of rows, not 5"),
        ({"bias": torch.randn(5)}, "4 outputs"),
        ({"bias": torch.randn(4, device="meta")}, "on meta"),
        ({"residual": torch.randn(3, 5)}, r"output's shape \(3, 4\)"),
        ({"norm_weight": torch.randn(5)}, "x has 6 columns"),
        ({"norm_weight": torch.ones(6, device="meta")}, "on meta"),
        ({"activation": "swish"}, "'swish'; it must be one of gelu"),
        ({"activation": Gate("tanh")}, "'tanh'"),
        ({"packed": "thirds"}, "'thirds'"),
        ({"splits": (1, 2)}, "add up to 4"),
        ({"splits": (5, -1)}, "add up to 4"),
        ({"out_dtype": torch.int32}, "float dtype"),
    ],
)
def test_wrong_inputs(change: dict, message: str) -> None:
    given = {"x": torch.randn(3, 6), "weight": torch.randn(4, 6), **change}
    with pytest.raises((ValueError, TypeError), match=message):
        fk.linear(**given)


def test_a_list_of_biases_has_one_for_each_weight() -> None:
    with pytest.raises(TypeError, match=r"linear: bias\[1\] is None; it must be a tensor"):
        fk.linear(torch.randn(3, 6), [torch.randn(4, 6)] * 2, [torch.randn(4), None])  # type: ignore[list-item]


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 131, 132, 264, 1000])
def test_shared_tiles_on_a_gpu(programs: int) -> None:
    """Bit-equal on repeat, on another stream and in a graph; the counters are zeros between launches."""
    from flashkernel.ops.gemm import counters

    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2000, 4096, device="cuda", dtype=torch.bfloat16) / 64
    with torch.no_grad(), tune.override(LINEAR, LinearConfig("tensor", 64, 128, 4, 4, programs)):
        first = fk.linear(x, weight, backend="triton")
        torch.testing.assert_close(first.float(), x.float() @ weight.float().t(), rtol=1e-2, atol=2e-2)
        for _ in range(50):
            assert torch.equal(fk.linear(x, weight, backend="triton"), first)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(fk.linear(x, weight, backend="triton"), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fk.linear(x, weight, backend="triton")
        for _ in range(3):
            captured.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, first)
    for tables in counters._tables.values():
        assert not any(table.any() for table in tables)


@pytest.mark.parametrize("rows", [3, 80])
@pytest.mark.parametrize("width", [torch.float32, torch.float16])
def test_main_grads_get_the_weights_gradients(rows: int, width: torch.dtype) -> None:
    """Added to what is there, call by call, in the buffer's dtype; the weights get none of their own."""
    x, weight, up = (torch.randn(*size).half() / 3 for size in ((rows, 20), (12, 20), (12, 20)))
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, up)]
    buffers = [torch.ones(12, 20, dtype=width) for _ in range(2)]
    for _ in range(2):
        y = fk.linear(leaves[0], leaves[1:], activation="swiglu", main_grads=buffers)
        y.float().sum().backward()
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, up)]
    fk.linear(exact[0], exact[1:], activation="swiglu", backend="reference").sum().backward()
    for buffer, leaf in zip(buffers, exact[1:]):
        assert buffer.dtype == width
        torch.testing.assert_close(buffer.double(), 1 + 2 * leaf.grad, rtol=1e-2, atol=5e-2)
    torch.testing.assert_close(leaves[0].grad.double(), 2 * exact[0].grad, rtol=1e-2, atol=1e-2)


def test_main_grads_that_do_not_fit() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    for buffers, message in (
        ([torch.zeros(4, 8)] * 2, "2 main_grads were given for 1 weights"),
        ([torch.zeros(8, 4)], r"\(8, 4\) on cpu; it must be float32"),
        ([torch.zeros(4, 8).bfloat16()], "bfloat16"),
        ([torch.zeros(4, 8, requires_grad=True)], "require no gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            fk.linear(x, weight, main_grads=buffers)
    with pytest.raises(ValueError, match="quantized"):
        fk.linear(x, fk.Weight.quantize(weight), main_grads=[torch.zeros(4, 8)])
    with pytest.raises(fk.BackendError, match="adds no gradients to main_grads"):
        fk.linear(x, weight, main_grads=[torch.zeros(4, 8)], backend="triton")


def test_many_rows_are_products_with_an_epilogue() -> None:
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    matrix = torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")
    norm_weight = torch.empty(1024, device="meta")
    with devices.pretend(devices.KNOWN["h200"]):
        assert fk.explain(fk.linear, x, matrix, activation="swiglu").chosen == "hopper"
        assert fk.explain(fk.linear, x.float(), matrix.float(), activation="swiglu").chosen == "torch"
        with collect_launches() as launches:
            fk.linear(x, matrix, activation="swiglu", backend="hopper")
            fk.linear(x, [matrix, matrix], norm_weight=norm_weight, activation="swiglu", backend="triton")
    with devices.pretend(devices.KNOWN["a100"]):
        assert fk.explain(fk.linear, x, matrix, activation="gelu").chosen == "triton"
    names = [launch.name for launch in launches]
    assert len(names) == 3
    assert "norm" in names[1]


def test_the_backward_pass_of_few_rows_is_few_launches() -> None:
    """dz and the bias's gradient in one launch; the rest are three products: z again, dx and dW."""
    x, weight = (
        torch.empty(size, dtype=torch.bfloat16, device="meta").requires_grad_() for size in ((8, 64), (96, 64))
    )
    bias = torch.empty(96, device="meta").requires_grad_()
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        y = fk.linear(x, weight, bias, activation="swiglu", backend="triton")
        torch.autograd.grad(y, (x, weight, bias), torch.empty_like(y))
    assert [launch.name for launch in launches][1:] == ["activation_gradient_kernel"]
