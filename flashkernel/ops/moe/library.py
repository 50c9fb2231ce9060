"""The experts as a torch operator, with their gradients.

It saves its arguments and what goes into the activation; with `recompute` its arguments alone. The backward pass writes
the gradient of what goes into the activation over the saved values, unless the graph is kept for another pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue, Gate
from flashkernel.blocks.weight import Weight
from flashkernel.core.arguments import unit_stride, without_autocast
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def moe_experts(
    kernels: str, x: Tensor, routing: Routing, experts: Experts, save: bool, recompute: bool, backend: str
) -> Tensor:
    """[tokens, hidden]; differentiable in x, the routing weights, plain weights and biases.

    `save` stores what the backward pass needs, `recompute` lets it compute that again.
    """
    given = ExpertArguments(
        _stored(experts.gate_up), _stored(experts.down), experts.gate_up_bias, experts.down_bias, experts.piece.text,
        experts.packed,
    )  # fmt: skip
    out, _ = _experts(x, routing, given, save and not recompute, backend, kernels)
    return out


class StoredWeight(NamedTuple):
    """A plain tensor, whose layout is "", or the tensors of a `Weight`."""

    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    layout: str

    @property
    def weight(self) -> Tensor | Weight:
        if not self.layout:
            return self.data
        return Weight.from_tensors([one for one in self[:3] if one is not None], self.layout)


def _stored(weight: Tensor | Weight) -> StoredWeight:
    if isinstance(weight, Weight):
        return StoredWeight(weight.data, weight.scales, weight.zeros, weight.layout)
    return StoredWeight(weight, None, None, "")


class ExpertArguments(NamedTuple):
    """`Experts` as an operator takes them; the activation is the text of a piece of an epilogue."""

    gate_up: StoredWeight
    down: StoredWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    packed: str

    @property
    def experts(self) -> Experts:
        piece = Epilogue.parse(self.activation).pieces[0]
        assert isinstance(piece, (Activation, Gate))
        return Experts(
            self.gate_up.weight, self.down.weight, self.gate_up_bias, self.down_bias, piece, self.packed
        )  # fmt: skip


def _dense(routing: Routing) -> Routing:
    """The routing with contiguous indices."""
    experts, weights, *others = routing
    return Routing(experts.contiguous(), weights, *[one.contiguous() for one in others])


def _forward(
    x: Tensor, routing: Routing, experts: ExpertArguments, save: bool, backend: str, kernels: str
) -> tuple[Tensor, Tensor]:
    """(out, what went into the activation; empty unless saved)"""
    out, z = resolve(kernels).forward(unit_stride(x), _dense(routing), experts.experts, save, backend)
    return out, x.new_empty(0) if z is None else z


def _fake_forward(x, routing, experts, save, backend, kernels):
    size = (routing.tokens.shape[0], experts.gate_up.data.shape[1]) if save else (0,)
    return x.new_empty((x.shape[0], experts.down.data.shape[1])), x.new_empty(size)


def _backward(
    dout: Tensor, z: Tensor | None, x: Tensor, routing: Routing, experts: ExpertArguments, wanted: list[bool],
    backend: str, kernels: str,
) -> _Gradients:  # fmt: skip
    """Gradients of x, weights, gate_up, down and the biases; those not wanted are empty."""
    return _gradients(dout, z, x, routing, experts, False, wanted, backend, kernels)


def _backward_in_place(
    dout: Tensor, z: Tensor, x: Tensor, routing: Routing, experts: ExpertArguments, wanted: list[bool], backend: str,
    kernels: str,
) -> _Gradients:  # fmt: skip
    """As `_backward`; it writes to z."""
    return _gradients(dout, z, x, routing, experts, True, wanted, backend, kernels)


def _gradients(dout, z, x, routing, experts, in_place, wanted, backend, kernels):
    results = resolve(kernels).backward(
        unit_stride(dout.to(x.dtype)), unit_stride(x), _dense(routing), experts.experts, z, in_place, wanted, backend
    )  # fmt: skip
    found = [x.new_empty(0) if result is None else result for result in results]
    for index, given in ((1, routing.weights), (4, experts.gate_up_bias), (5, experts.down_bias)):
        if wanted[index] and given is not None:
            found[index] = found[index].to(given.dtype)
    return tuple(found)


def _fake_backward(dout, z, x, routing, experts, wanted, backend, kernels):
    weights = (experts.gate_up.data, experts.down.data)
    return empty_gradients((x, routing.weights, *weights, experts.gate_up_bias, experts.down_bias), wanted)


def _setup_context(ctx, inputs, output):
    x, routing, experts, save, ctx.backend, ctx.kernels = inputs
    gate_up, down, *biases, activation, packed = experts
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, *routing, *gate_up[:3], *down[:3], *biases, output[1] if save else None)
    ctx.texts = (gate_up.layout, down.layout, activation, packed)


def _pull_back(ctx, wanted, dout, _):
    x, *saved, z = ctx.saved_tensors
    gate_up_layout, down_layout, *texts = ctx.texts
    gate_up = StoredWeight._make((*saved[6:9], gate_up_layout))
    down = StoredWeight._make((*saved[9:12], down_layout))
    experts = ExpertArguments(gate_up, down, *saved[12:], *texts)
    in_place = z is not None and _experts.may_overwrite(ctx, dout)
    function = _experts_backward_in_place if in_place else _experts_backward
    with without_autocast(dout):  # of a backward() that is called inside it
        return function(dout, z, x, Routing(*saved[:6]), experts, wanted, ctx.backend, ctx.kernels)


_experts_backward = KernelOp("moe_experts_backward", _backward, _fake_backward)
_experts_backward_in_place = KernelOp(
    "moe_experts_backward_in_place", _backward_in_place, _fake_backward, mutates=("z",)
)  # fmt: skip
_experts = KernelOp(
    "moe_experts",
    _forward,
    _fake_forward,
    Gradient(_setup_context, _pull_back, ("x", "weights", "gate_up_data", "down_data", "gate_up_bias", "down_bias")),
)
