"""The experts as a torch operator, with their gradients.

It saves its arguments and what goes into the activation; with `recompute` its arguments alone. The backward pass writes
the gradient of what goes into the activation over the saved values, unless the graph is kept for another pass.
"""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate
from flashkernel.blocks.weight import Weight
from flashkernel.core.arguments import unit_stride, without_autocast
from flashkernel.core.library import KernelOp, traced
from flashkernel.core.op import resolve
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_NUM_TENSORS = 15


def moe_experts(
    kernels: str, x: Tensor, routing: Routing, experts: Experts, save: bool, recompute: bool, backend: str
) -> Tensor:
    """[tokens, hidden]; differentiable in x, the routing weights, plain weights and biases.

    `save` stores what the backward pass needs, `recompute` lets it compute that again.
    """
    out, _ = _experts(
        x, routing.weights, *_parts(experts.gate_up), experts.gate_up_bias, *_parts(experts.down), experts.down_bias,
        routing.experts, routing.positions, routing.tokens, routing.offsets, routing.counts, experts.piece.text,
        experts.packed, _layout(experts.gate_up), _layout(experts.down), save and not recompute, backend, kernels,
    )  # fmt: skip
    return out


def _parts(weight: Tensor | Weight) -> tuple[Any, ...]:
    return (weight.data, weight.scales, weight.zeros) if isinstance(weight, Weight) else (weight, None, None)


def _layout(weight: Tensor | Weight) -> str:
    return weight.layout if isinstance(weight, Weight) else ""


def _weight(parts: tuple[Any, ...], layout: str) -> Any:
    return Weight.from_tensors([one for one in parts if one is not None], layout) if layout else parts[0]


def _assembled(tensors: tuple[Any, ...], settings: tuple[str, ...]) -> tuple[Tensor, Routing, Experts]:
    """x, the routing and the experts of an operator's arguments."""
    x, weights, *rest = tensors
    gate_up, gate_up_bias, down, down_bias, index = rest[:3], rest[3], rest[4:7], rest[7], rest[8:]
    activation, packed, gate_up_layout, down_layout = settings
    piece = Epilogue.parse(activation).pieces[0]
    assert isinstance(piece, (Activation, Gate))
    chosen, positions, tokens, offsets, counts = [one.contiguous() for one in index]
    experts = Experts(
        _weight(tuple(gate_up), gate_up_layout), _weight(tuple(down), down_layout), gate_up_bias, down_bias, piece,
        packed,
    )  # fmt: skip
    return unit_stride(x), Routing(chosen, weights, positions, tokens, offsets, counts), experts


def _forward(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_zeros: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_zeros: Tensor | None,
    down_bias: Tensor | None,
    chosen: Tensor,
    positions: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    counts: Tensor,
    activation: str,
    packed: str,
    gate_up_layout: str,
    down_layout: str,
    save: bool,
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """(out, what went into the activation; empty unless saved)"""
    tensors = (
        x, weights, gate_up, gate_up_scales, gate_up_zeros, gate_up_bias, down, down_scales, down_zeros, down_bias,
        chosen, positions, tokens, offsets, counts,
    )  # fmt: skip
    given = _assembled(tensors, (activation, packed, gate_up_layout, down_layout))
    out, z = resolve(kernels).forward(*given, save, backend)
    return out, x.new_empty(0) if z is None else z


def _fake_forward(
    x, weights, gate_up, gate_up_scales, gate_up_zeros, gate_up_bias, down, down_scales, down_zeros, down_bias, chosen,
    positions, tokens, offsets, counts, activation, packed, gate_up_layout, down_layout, save, backend, kernels,
):  # fmt: skip
    size = (tokens.shape[0], gate_up.shape[1]) if save else (0,)
    return x.new_empty((x.shape[0], down.shape[1])), x.new_empty(size)


def _backward(
    dout: Tensor,
    z: Tensor | None,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_zeros: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_zeros: Tensor | None,
    down_bias: Tensor | None,
    chosen: Tensor,
    positions: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    counts: Tensor,
    activation: str,
    packed: str,
    gate_up_layout: str,
    down_layout: str,
    wanted: list[bool],
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, gate_up, down and the biases; those not wanted are empty."""
    tensors = (
        x, weights, gate_up, gate_up_scales, gate_up_zeros, gate_up_bias, down, down_scales, down_zeros, down_bias,
        chosen, positions, tokens, offsets, counts,
    )  # fmt: skip
    return _gradients(
        dout, z, tensors, (activation, packed, gate_up_layout, down_layout), False, wanted, backend, kernels
    )  # fmt: skip


def _backward_in_place(
    dout: Tensor,
    z: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_zeros: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_zeros: Tensor | None,
    down_bias: Tensor | None,
    chosen: Tensor,
    positions: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    counts: Tensor,
    activation: str,
    packed: str,
    gate_up_layout: str,
    down_layout: str,
    wanted: list[bool],
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_backward`; it writes to z."""
    tensors = (
        x, weights, gate_up, gate_up_scales, gate_up_zeros, gate_up_bias, down, down_scales, down_zeros, down_bias,
        chosen, positions, tokens, offsets, counts,
    )  # fmt: skip
    return _gradients(
        dout, z, tensors, (activation, packed, gate_up_layout, down_layout), True, wanted, backend, kernels
    )  # fmt: skip


def _gradients(dout, z, tensors, settings, in_place, wanted, backend, kernels):
    x, routing, experts = _assembled(tensors, settings)
    results = resolve(kernels).backward(
        unit_stride(dout.to(x.dtype)), x, routing, experts, z, in_place, wanted, backend
    )  # fmt: skip
    found = [x.new_empty(0) if result is None else result for result in results]
    for index, given in ((1, routing.weights), (4, experts.gate_up_bias), (5, experts.down_bias)):
        if wanted[index] and given is not None:
            found[index] = found[index].to(given.dtype)
    return tuple(found)


def _fake_backward(dout, z, x, weights, *rest):
    gate_up, gate_up_bias, down, down_bias, wanted = rest[0], rest[3], rest[4], rest[7], rest[-3]
    given = (x, weights, gate_up, down, gate_up_bias, down_bias)
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0) for tensor, want in zip(given, wanted))


def _setup_context(ctx, inputs, output):
    *settings, save, backend, kernels = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], output[1] if save else None)
    ctx.settings = (tuple(settings), backend, kernels)


def _may_overwrite(ctx, dout):
    """Whether nobody reads the saved z after this pass: in eager mode, unless the graph is kept."""
    eager = (
        getattr(ctx, "_forward_cls", None) is _experts.function
    )  # not an operator of torch.library, which returns it
    return eager and not traced(dout) and not _keeps_graph()


def _pull_back(ctx, dout, _):
    if dout is None:
        return (None,) * 22
    *tensors, z = ctx.saved_tensors
    settings, backend, kernels = ctx.settings
    need = ctx.needs_input_grad
    wanted = [need[0], need[1], need[2], need[6], need[5], need[9]]
    function = _experts_backward_in_place if z is not None and _may_overwrite(ctx, dout) else _experts_backward
    with without_autocast(dout):  # of a backward() that is called inside it
        results = function(dout, z, *tensors, *settings, wanted, backend, kernels)
    dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = (
        result if want else None for result, want in zip(results, wanted)
    )
    return dx, dweights, dgate_up, None, None, dgate_up_bias, ddown, None, None, ddown_bias, *[None] * 12


_experts_backward = KernelOp("moe_experts_backward", _backward, _fake_backward)
_experts_backward_in_place = KernelOp(
    "moe_experts_backward_in_place", _backward_in_place, _fake_backward, mutates=("z",)
)  # fmt: skip
_experts = KernelOp("moe_experts", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
