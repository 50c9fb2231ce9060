"""What the table cannot say of MLPs: memory, graphs that are kept, buffers for gradients, modules, wrong inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.ops.mlp import library

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


def _tensors(rows: int = 70, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, gate, up, down"""
    sizes = ((rows, 20), (12, 20), (12, 20), (20, 12))
    return [(torch.randn(size) / 3).to(dtype).requires_grad_() for size in sizes]


def _expected(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@BACKENDS
@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("packed", [False, True])
def test_against_the_formula(backend: str, rows: int, packed: bool) -> None:
    x, gate, up, down = _tensors(rows)
    weight: Any = torch.cat((gate, up)) if packed else (gate, up)
    y, expected = fk.mlp(x, weight, down, backend=backend), _expected(x, gate, up, down)
    _close(y, expected)
    upstream = torch.randn_like(y)
    for mine, theirs in zip(*(torch.autograd.grad(one, (x, gate, up, down), upstream) for one in (y, expected))):
        _close(mine, theirs)
    with torch.no_grad():
        _close(fk.mlp(x, weight, down, backend=backend), expected)


def test_a_kept_graph_is_not_overwritten() -> None:
    """Twice through one graph, then a last time, which may write over what was saved: the same gradients."""
    tensors = _tensors()
    y = fk.mlp(tensors[0], tensors[1:3], tensors[3], backend="triton")
    upstream = torch.randn_like(y)
    passes = [torch.autograd.grad(y, tensors, upstream, retain_graph=keep) for keep in (True, True, False)]
    for first, second, last in zip(*passes):
        assert torch.equal(first, second)
        assert torch.equal(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, tensors, upstream)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(recompute: bool) -> None:
    """Its arguments, and what goes into the activation; with recompute its arguments alone."""
    x, gate, up, down = _tensors()
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fk.mlp(x, (gate, up), down, recompute=recompute, backend="triton")
    shapes = [tensor.shape for tensor in (x, gate, up, down)]
    assert saved == (shapes if recompute else [*shapes, torch.Size((70, 24))])
    for mine, theirs in zip(
        torch.autograd.grad(y.sum(), (x, gate, down)),
        torch.autograd.grad(_expected(x, gate, up, down).sum(), (x, gate, down)),
    ):
        _close(mine, theirs)


@BACKENDS
def test_checkpointing_and_offloading(backend: str) -> None:
    tensors = _tensors()

    def run(*given: Tensor) -> Tensor:
        return fk.mlp(given[0], given[1:3], given[3], residual=given[0], backend=backend)

    exact = torch.autograd.grad(run(*tensors).square().sum(), tensors)
    again = torch.autograd.grad(checkpoint(run, *tensors, use_reentrant=False).square().sum(), tensors)
    with torch.autograd.graph.save_on_cpu():
        moved = torch.autograd.grad(run(*tensors).square().sum(), tensors)
    for expected, one, two in zip(exact, again, moved):
        _close(one, expected)
        _close(two, expected)


def test_no_second_derivative() -> None:
    x, gate, up, down = _tensors()
    for loss in (torch.sum, lambda y: y.square().sum()):  # the gradient of a sum is a constant
        y = fk.mlp(x, (gate, up), down, backend="triton")
        (gradient,) = torch.autograd.grad(loss(y), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            (gradient.sum() + x.sum()).backward()


@BACKENDS
@pytest.mark.parametrize("width", [torch.float32, torch.float16])
def test_main_grads(backend: str, width: torch.dtype) -> None:
    tensors = _tensors(dtype=torch.float16)
    x, gate, up, down = tensors
    buffers = [torch.ones(weight.shape, dtype=width) for weight in (gate, up, down)]
    for _ in range(2):
        fk.mlp(x, (gate, up), down, main_grads=buffers, backend=backend).float().sum().backward()
    assert [weight.grad for weight in (gate, up, down)] == [None, None, None]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    _expected(*exact).sum().backward()
    for buffer, leaf in zip(buffers, exact[1:]):
        torch.testing.assert_close(buffer.double(), 1 + 2 * leaf.grad, rtol=1e-2, atol=5e-2)
    torch.testing.assert_close(x.grad.double(), 2 * exact[0].grad, rtol=1e-2, atol=1e-2)


def test_frozen_weights_and_adapters() -> None:
    """Gradients go through frozen weights, plain or quantized, to x."""
    x, gate, up, down = _tensors(dtype=torch.float16)
    frozen = [weight.detach() for weight in (gate, up, down)]
    for given in (frozen, [fk.Weight.quantize(weight, "fp8") for weight in frozen]):
        matrices = [one.dequantize(torch.float64) if isinstance(one, fk.Weight) else one.double() for one in given]
        leaf = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(_expected(leaf, *matrices).sum(), leaf)
        (gradient,) = torch.autograd.grad(fk.mlp(x, given[:2], given[2], backend="triton").float().sum(), x)
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)


@BACKENDS
def test_autocast(backend: str) -> None:
    """Products in the lower dtype, gradients in the parameters'; a residual in float32 keeps the output there."""
    tensors = _tensors()
    x, gate, up, down = tensors
    with torch.autocast("cpu", dtype=torch.float16):
        y = fk.mlp(x, (gate, up), down, backend=backend)
        wide = fk.mlp(x, (gate, up), down, residual=x, backend=backend)
    assert (y.dtype, wide.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(y.float(), _expected(*tensors), rtol=2e-2, atol=2e-2)
    for gradient, tensor in zip(torch.autograd.grad(wide.sum(), tensors), tensors):
        assert gradient.dtype == tensor.dtype


def test_out_may_be_the_residual() -> None:
    x, gate, up, down = (tensor.detach() for tensor in _tensors())
    expected = _expected(x, gate, up, down) + x
    for backend in ("torch", "triton", "reference"):
        out = x.clone()
        assert fk.mlp(out, (gate, up), down, residual=out, out=out, backend=backend) is out
        _close(out, expected)


def test_launches_and_choices() -> None:
    """Forward two products, backward four; few rows and old GPUs have other kernels."""

    def given(rows: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = True) -> tuple[Tensor, ...]:
        sizes = ((rows, 512), (2048, 512), (512, 1024))
        return tuple(torch.empty(size, dtype=dtype, device="meta").requires_grad_(gradient) for size in sizes)

    with devices.pretend(devices.KNOWN["h200"]):
        assert fk.explain(fk.mlp, *given(4096)).chosen == "hopper"
        assert fk.explain(fk.mlp, *given(8, gradient=False)).chosen == "triton"
        assert fk.explain(fk.mlp, *given(4096, torch.float32)).chosen == "torch"
        with collect_launches() as launches:
            fk.mlp(*given(4096)).backward(torch.empty(4096, 512, dtype=torch.bfloat16, device="meta"))
    assert len(launches) == 2, "products without an epilogue are cuBLAS's"
    with devices.pretend(devices.KNOWN["a100"]):
        assert fk.explain(fk.mlp, *given(4096)).chosen == "triton"
    with devices.pretend(devices.KNOWN["t4"]):
        assert fk.explain(fk.mlp, *given(8, torch.float16, gradient=False)).chosen == "cuda"
        assert fk.explain(fk.mlp, *given(4096, torch.float16)).chosen == "triton"
        with collect_launches() as launches:
            fk.mlp(*given(4096, torch.float16)).backward(torch.empty(4096, 512, dtype=torch.float16, device="meta"))
    assert [launch.name for launch in launches] == ["activation_forward", "activation_backward"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.arange(6)}, "float tensor"),
        ({"gate_up_weight": torch.randn(8, 5)}, r"is \(8, 5\); x has 6 columns"),
        ({"gate_up_weight": torch.randn(7, 6)}, "even number of rows"),
        ({"gate_up_weight": [torch.randn(4, 6)] * 3}, "a list of 3"),
        ({"gate_up_weight": [torch.randn(4, 6)] * 2, "activation": "gelu"}, "takes one weight"),
        ({"gate_up_weight": (torch.randn(4, 6), torch.randn(5, 6))}, r"\(4, 6\) and \(5, 6\)"),
        ({"down_weight": torch.randn(6, 8)}, r"must be \(out_features, 4\)"),
        ({"down_weight": torch.randn(6, 4).half()}, "float16"),
        ({"gate_up_bias": torch.randn(4)}, r"gate_up_bias is torch.float32 \(4,\)"),
        ({"gate_up_bias": [torch.randn(8)] * 2}, "2 biases were given for 1"),
        ({"down_bias": torch.arange(6)}, "down_bias is torch.int64"),
        ({"residual": torch.randn(3, 5)}, r"residual is torch.float32 \(3, 5\)"),
        ({"norm_weight": torch.randn(5)}, "norm_weight"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"activation": None}, "two calls of linear"),
        ({"packed": "thirds"}, "packed is 'thirds'"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"main_grads": [torch.zeros(8, 6)]}, "1 main_grads were given for 2 weights"),
        ({"out": torch.zeros(2, 6)}, r"out is torch.float32 \(2, 6\)"),
        ({"x": torch.randn(3, 6, requires_grad=True), "out": torch.zeros(3, 6)}, "out takes no gradients"),
    ],
)
def test_wrong_inputs(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.randn(3, 6), "gate_up_weight": torch.randn(8, 6), "down_weight": torch.randn(6, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fk.mlp(**{**given, **change})


def test_compiled_with_main_grads_says_what_to_do() -> None:
    x, gate, up, down = _tensors()
    buffers = [torch.zeros_like(weight) for weight in (gate, up, down)]
    with pytest.raises(Exception, match="eager mode"):
        torch.compile(lambda: fk.mlp(x, (gate, up), down, main_grads=buffers), backend="eager", fullgraph=True)()


def test_in_place_is_for_eager_mode() -> None:
    """Under torch.compile the preactivation is an output that the graph owns: the operator does not write to it."""
    tensors = _tensors()
    expected = torch.autograd.grad(_expected(*tensors).sum(), tensors)

    def run(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return fk.mlp(x, (gate, up), down, backend="triton")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    before = dict(library._mlp_backward_in_place.forward.entries)
    for mine, theirs in zip(torch.autograd.grad(compiled(*tensors).sum(), tensors), expected):
        _close(mine, theirs)
    assert library._mlp_backward_in_place.forward.entries == before
