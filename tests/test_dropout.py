"""Dropout without a seed: drawn from torch's generator, as torch's own attention draws it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_graphs import capture
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashkernel as fk
from flashkernel.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = ["torch", "triton", "reference"]
LENGTHS = [0, 5, 16]


def _inputs(device: str = "cpu", grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 16, 4, 16), (1, 16, 2, 16), (1, 16, 2, 16))
    return tuple(torch.randn(shape, generator=generator).to(device).requires_grad_(grad) for shape in shapes)  # type: ignore[return-value]


def _varlen(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=q.device)
    if function is flash_attn_varlen_func:
        return function(q[0], k[0], v[0], lengths, lengths, 16, 16, dropout_p=p)
    return function(q[0], k[0], v[0], lengths, dropout=p)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    **{name: lambda q, k, v, p, name=name: fk.attention(q, k, v, dropout=p, backend=name) for name in BACKENDS},
    "varlen": lambda q, k, v, p: _varlen(fk.attention_varlen, q, k, v, p),
    "flash_attn_func": lambda q, k, v, p: flash_attn_func(q, k, v, dropout_p=p),
    "flash_attn_varlen_func": lambda q, k, v, p: _varlen(flash_attn_varlen_func, q, k, v, p),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_calls_differ_and_manual_seed_repeats_them(call: Callable[..., Tensor]) -> None:
    inputs = _inputs()
    torch.manual_seed(7)
    first, second = call(*inputs, 0.5), call(*inputs, 0.5)
    assert not torch.equal(first, second), "the same entries were dropped twice"
    torch.manual_seed(7)
    assert torch.equal(call(*inputs, 0.5), first)
    assert torch.equal(call(*inputs, 0.5), second)


@calls
def test_nothing_is_drawn_without_dropout(call: Callable[..., Tensor]) -> None:
    inputs = _inputs()
    before = torch.get_rng_state()
    call(*inputs, 0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_given_seed_and_an_explanation_draw_nothing() -> None:
    inputs = _inputs()
    before = torch.get_rng_state()
    repeated = [fk.attention(*inputs, dropout=0.5, seed=3) for _ in range(2)]
    fk.explain(fk.attention, *inputs, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*repeated)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backward_drops_what_forward_did(backend: str) -> None:
    """v's gradient of the summed output is the sum of the kept probabilities; summed with v it is the output."""
    q, k, v = _inputs(grad=True)
    out = fk.attention(q, k, v, dropout=0.5, backend=backend)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_recomputation_under_checkpoint_drops_the_same(backend: str, reentrant: bool) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fk.attention(q, k, v, dropout=0.5, backend=backend)

    inputs = _inputs(grad=True)
    torch.manual_seed(5)
    expected = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    kept = [x.detach().clone().requires_grad_() for x in inputs]
    out = checkpoint(layer, *kept, use_reentrant=reentrant)
    torch.manual_seed(99)
    out.square().sum().backward()
    for x, gradient in zip(kept, expected):
        torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_compiled_function_draws_anew(backend: str, device: str) -> None:
    inputs = _inputs(device, grad=True)
    compiler = "aot_eager" if device == "cpu" else "inductor"
    torch._dynamo.reset()
    layer = torch.compile(
        lambda q, k, v: fk.attention(q, k, v, dropout=0.5, backend=backend), fullgraph=True, backend=compiler
    )
    torch.manual_seed(1)
    first, second = layer(*inputs), layer(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    again = layer(*inputs)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    dv = torch.autograd.grad(again.sum(), inputs[2])[0]
    torch.testing.assert_close((dv * inputs[2]).sum(), again.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_replays_of_a_cuda_graph_drop_others() -> None:
    inputs = [x.half() for x in _inputs("cuda")]
    graph, captured = capture(lambda: fk.attention(*inputs, dropout=0.5))
    found = []
    torch.cuda.manual_seed(11)
    for _ in range(2):
        graph.replay()
        found.append(captured.clone())
    torch.cuda.manual_seed(11)
    graph.replay()
    assert not torch.equal(*found)
    assert torch.equal(captured, found[0])
