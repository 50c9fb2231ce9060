"""The rope kernels as torch operators, with their gradients."""

from torch import Tensor

from flashkernel.blocks.rope import Rotation
from flashkernel.core.launch import mark_written
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve


def _forward(q: Tensor, k: Tensor | None, rotation: Rotation, inverse: bool, kernels: str) -> tuple[Tensor, Tensor]:
    """(q', k'); k' is empty without a k."""
    return resolve(kernels).forward(q, k, rotation.by_pairs, inverse)


def _fake_forward(q, k, rotation, inverse, kernels):
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def _forward_in_place(q: Tensor, k: Tensor | None, rotation: Rotation, kernels: str) -> None:
    resolve(kernels).forward_in_place(q, k, rotation.by_pairs)
    for x in (q, k):
        if x is not None:
            mark_written(x)


def _fake_forward_in_place(q, k, rotation, kernels):
    return None


def _setup_context(ctx, inputs, output):
    _, k, rotation, inverse, ctx.kernels = inputs
    ctx.save_for_backward(*rotation[:4])
    ctx.plain = rotation[4:]
    ctx.inverse, ctx.has_k = not inverse, k is not None


def _pull_back(ctx, wanted, dq, dk):
    gradients = [gradient for gradient in (dq, dk if ctx.has_k else None) if gradient is not None]
    if not gradients:
        return None, None
    pair = (gradients[0], gradients[1] if len(gradients) == 2 else None)
    rotated = rope(*pair, Rotation(*ctx.saved_tensors, *ctx.plain), ctx.inverse, ctx.kernels)
    if dq is None:
        return None, rotated[0]
    return rotated[0], rotated[1] if len(gradients) == 2 else None


rope = KernelOp("rope", _forward, _fake_forward, Gradient(_setup_context, _pull_back, ("q", "k")))
rope_in_place = KernelOp("rope_in_place", _forward_in_place, _fake_forward_in_place, mutates=("q", "k"))
