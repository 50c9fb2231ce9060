"""The public experts: argument checks and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_width, check_activation
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.blocks.weight import Weight
from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import autocast, autocast_dtype, is_float, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.op import FLOATS
from flashkernel.ops.moe import library, spec
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing


@type_checked
def moe_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor | Weight,
    down: Tensor | Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str | Activation | Gate = "swiglu",
    packed: str = "halves",
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Sends each token through its experts, and returns the weighted sum of their outputs.

    out[t] = sum over j of weights[t, j] * (activation(x[t] gate_up[e]^T + gate_up_bias[e]) down[e]^T + down_bias[e]),
    with e = experts[t, j]. Nothing is padded or dropped unless the routing has a capacity, nothing waits for the GPU,
    and sums are in a fixed order: results repeat exactly. x, the routing weights, plain weights and biases are
    differentiable.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16.
        routing: what `moe_route` returned for these tokens.
        gate_up: (experts, 2 * intermediate, hidden) in x's dtype with any strides: of weights stored (in, out), the
            transposed view. (experts, intermediate, hidden) if the activation has no gate. Or a quantized stack in a
            `Weight`, which is frozen. Its activation_dtype is what x, or what goes into the second product, is rounded
            to: MXFP4 and fp8 weights with x in float8_e4m3fn have kernels, forward only.
        down: (experts, hidden, intermediate), likewise.
        gate_up_bias: (experts, 2 * intermediate), or None.
        down_bias: (experts, hidden), or None.
        activation: "swiglu", "geglu", "geglu_exact", "reglu", "gpt_oss_glu", or without a gate "gelu", "gelu_tanh",
            "silu", "relu", "squared_relu"; or an `Activation` or `Gate` object.
        packed: how gate_up holds gate and up: "halves", or "interleaved" row by row (gpt-oss).
        recompute: saves x alone for the backward pass, which computes the first product again.
        backend: the backend to run on ("hopper", "triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (tokens, hidden) in x's dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, gate_up, down = torch.randn(5, 8), torch.randn(4, 24, 8), torch.randn(4, 8, 12)
        >>> routing = fk.moe_route(torch.randn(5, 4), fk.Router("softmax", 1))
        >>> y = fk.moe_experts(x, routing, gate_up, down)
        >>> expert = int(routing.experts[0, 0])
        >>> torch.allclose(y[0], fk.mlp(x[0], gate_up[expert], down[expert]), atol=1e-4)
        True
    """
    lower = autocast_dtype(x)
    if lower is not None:
        x = autocast(x, lower)
        gate_up, down = (autocast(one, lower) if isinstance(one, Tensor) else one for one in (gate_up, down))
    experts = Experts(gate_up, down, gate_up_bias, down_bias, activation, packed)
    _check(x, routing, experts)
    gradients = needs_gradients(x, routing.weights, *experts.tensors)
    chosen = choose(spec.MOE_EXPERTS, backend, x.device, x.dtype, gradients, weight=experts.layout)
    with without_autocast(x):
        if chosen.composite:
            return chosen.run(x, routing, experts)
        return library.moe_experts(spec.PRODUCTS, x, routing, experts, gradients, recompute, chosen.name)


def _check(x: Tensor, routing: Routing, experts: Experts) -> None:
    check_activation("moe_experts", experts.activation)
    if experts.activation is None:
        raise ValueError("moe_experts: activation is None; without one it is two calls of grouped_matmul")
    if experts.packed not in PACKINGS:
        raise ValueError(f"moe_experts: packed is {experts.packed!r}; it must be 'halves' or 'interleaved'")
    if x.ndim != 2 or x.dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"moe_experts: x is {x.dtype} {tuple(x.shape)}; it must be float (tokens, hidden)")
    gate_up, down = experts.gate_up, experts.down
    for name, weight in (("gate_up", gate_up), ("down", down)):
        wrong_dtype = isinstance(weight, Tensor) and weight.dtype != x.dtype
        if weight.ndim != 3 or weight.device != x.device or wrong_dtype:
            raise ValueError(
                f"moe_experts: {name} is {weight.dtype} {tuple(weight.shape)} on {weight.device}; it must be "
                f"(experts, out, in) in x's dtype {x.dtype} on {x.device}, or a flashkernel.Weight"
            )
    width = activation_width(experts.activation)
    count, wide, hidden = gate_up.shape
    if hidden != x.shape[1] or wide % width or tuple(down.shape) != (count, down.shape[1], wide // width):
        raise ValueError(
            f"moe_experts: gate_up is {tuple(gate_up.shape)} and down {tuple(down.shape)} for x with {x.shape[1]} "
            f"columns; they must be (experts, {'2 * ' if width == 2 else ''}intermediate, {x.shape[1]}) and (experts, "
            "outputs, intermediate)"
        )
    biases = (("gate_up_bias", experts.gate_up_bias, wide), ("down_bias", experts.down_bias, down.shape[1]))
    for name, bias, size in biases:
        fits = bias is None or (tuple(bias.shape) == (count, size) and bias.device == x.device)
        if bias is not None and not (fits and is_float(bias)):
            raise ValueError(
                f"moe_experts: {name} is {bias.dtype} {tuple(bias.shape)} on {bias.device}; it must be a float tensor "
                f"{(count, size)} on {x.device}"
            )
    if routing.positions.shape[0] != x.shape[0] or routing.offsets.shape[0] != count + 1:
        raise ValueError(
            f"moe_experts: the routing is of {routing.positions.shape[0]} tokens and {routing.offsets.shape[0] - 1} "
            f"experts; x has {x.shape[0]} tokens and gate_up {count} experts"
        )
    if routing.weights.device != x.device:
        raise ValueError(f"moe_experts: the routing is on {routing.weights.device} and x on {x.device}")
