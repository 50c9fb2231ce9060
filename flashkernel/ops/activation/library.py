"""The activation kernels as torch operators, with their gradients."""

from torch import Tensor

from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve


def _forward(
    gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float, kernels: str
) -> Tensor:
    """layout: "plain" (no up), "separate", "halves" or "interleaved"."""
    return resolve(kernels).forward(gate, up, kind, layout, alpha, limit)


def _fake_forward(gate, up, kind, layout, alpha, limit, kernels):
    if layout in ("plain", "separate"):
        return gate.new_empty(gate.shape)
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float, kernels: str
) -> tuple[Tensor, Tensor]:
    """(dgate, dup); dup is empty without an up."""
    return resolve(kernels).backward(dy, gate, up, kind, layout, alpha, limit)


def _fake_backward(dy, gate, up, kind, layout, alpha, limit, kernels):
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _setup_context(ctx, inputs, output):
    gate, up, *settings = inputs
    ctx.save_for_backward(gate, up)
    ctx.settings = settings


def _pull_back(ctx, wanted, dy):
    return activation_backward(dy, *ctx.saved_tensors, *ctx.settings)


activation_backward = KernelOp("activation_backward", _backward, _fake_backward)
activation = KernelOp("activation", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("gate", "up")))
