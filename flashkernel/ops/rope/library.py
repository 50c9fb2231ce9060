"""The rope kernels as torch operators, with their gradients."""

from torch import Tensor

from flashkernel.blocks.rope import half_width
from flashkernel.core.launch import mark_written
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve


def _forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
    inverse: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """(q', k'); k' is empty without a k."""
    cos, sin = _halves(cos, sin, rotary, interleaved)
    return resolve(kernels).forward(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, inverse)


def _fake_forward(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, inverse, kernels):
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def _forward_in_place(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
    kernels: str,
) -> None:
    cos, sin = _halves(cos, sin, rotary, interleaved)
    resolve(kernels).forward_in_place(q, k, cos, sin, rates, positions, scaling, rotary, interleaved)
    for x in (q, k):
        if x is not None:
            mark_written(x)


def _halves(
    cos: Tensor | None, sin: Tensor | None, rotary: int, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Tables with one column for each pair."""
    if cos is None or sin is None:
        return cos, sin
    return half_width(cos, rotary, interleaved), half_width(sin, rotary, interleaved)


def _fake_forward_in_place(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, kernels):
    return None


def _setup_context(ctx, inputs, output):
    _, _, *tables, scaling, rotary, interleaved, inverse, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tables)
    ctx.settings = (scaling, rotary, interleaved, not inverse, kernels)
    ctx.has_k = inputs[1] is not None


def _pull_back(ctx, dq, dk):
    gradients = [gradient for gradient in (dq, dk if ctx.has_k else None) if gradient is not None]
    rotated = [None, None]
    if gradients:
        pair = (gradients[0], gradients[1] if len(gradients) == 2 else None)
        rotated = list(rope(*pair, *ctx.saved_tensors, *ctx.settings))
    if dq is None:
        rotated = [None, rotated[0]]
    elif len(gradients) < 2:
        rotated = [rotated[0], None]
    return (*rotated, *(None,) * 9)


rope = KernelOp("rope", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
rope_in_place = KernelOp("rope_in_place", _forward_in_place, _fake_forward_in_place, mutates=("q", "k"))
