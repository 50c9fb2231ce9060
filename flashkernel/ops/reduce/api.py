"""The public reductions, all over the last dim: argument checks, dispatch, autograd."""

from importlib.util import find_spec

import torch
from torch import Tensor

from flashkernel.core.arguments import check_finite, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.library import KernelOp
from flashkernel.core.op import Op, resolve
from flashkernel.core.replay import replayed
from flashkernel.ops.reduce import kinds, spec
from flashkernel.ops.reduce.masks import mask_rows


@replayed
def sum(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """The sum of each row, added in float32, in x's dtype; 0 for rows without columns."""
    return _reduce_rows(spec.SUM, kinds.SUM, x, keepdim, backend)


@replayed
def mean(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """The mean of each row, added in float32, in x's dtype; NaN for rows without columns, as in torch."""
    return _reduce_rows(spec.MEAN, kinds.MEAN, x, keepdim, backend)


@replayed
def max(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """The largest value of each row; NaN where one is in it. Equal maxima share the gradient evenly (torch.amax)."""
    _check("max", x)
    if x.shape[-1] == 0 and x.shape[:-1].numel():
        raise ValueError(f"max: x has shape {tuple(x.shape)}; a row without columns has no maximum")
    return _reduce_rows(spec.MAX, kinds.MAX, x, keepdim, backend)


@replayed
def logsumexp(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """log(sum(exp(x))) of each row, without overflow. A row of nothing but -inf, or without columns, gives -inf and
    a gradient of zero."""
    return _reduce_rows(spec.LOGSUMEXP, kinds.LOGSUMEXP, x, keepdim, backend)


@replayed
def softmax(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Softmax of scale * x over the last dim, in float32 inside.

    `mask` is boolean and broadcasts to x; True means visible. With `causal`, x is [..., queries, keys] and query q sees
    keys up to q + keys - queries. A row that sees nothing, or nothing but -inf, gives zeros and a gradient of zero.
    """
    _check("softmax", x)
    check_finite("softmax", "scale", scale)
    _check_mask(x, mask, causal)
    chosen = choose(spec.SOFTMAX, backend, x.device, x.dtype)
    if chosen.composite:
        return chosen.run(x, mask, scale=scale, causal=causal)
    return _softmax(x, mask, float(scale), causal, chosen.target)


@replayed
def argmax(x: Tensor, *, invalid: int | None = None) -> Tensor:
    """The place of each row's largest value, int64; of equal ones the first. On a GPU many programs share a row.

    NaN counts as the largest, as in torch. With `invalid`, a row whose maximum is not finite (NaN or an infinity) gives
    that number instead of a place.
    """
    _check("argmax", x)
    if x.shape[-1] == 0:
        raise ValueError(f"argmax: x has shape {tuple(x.shape)}; a row without columns has no maximum")
    if x.device.type == "cuda" and x.numel() > 0 and _HAS_TRITON:
        return _argmax(x, invalid)
    place = x.argmax(-1)
    if invalid is None:
        return place
    return torch.where(x.gather(-1, place[..., None])[..., 0].isfinite(), place, invalid)


@replayed
def weighted_sum(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """y[r] = sum over c of x[r, c] * weight[c], added in float32, in x's dtype."""
    _check("weighted_sum", x)
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1] or not weight.is_floating_point():
        raise ValueError(
            f"weighted_sum: weight is {weight.dtype} of shape {tuple(weight.shape)}; x has {x.shape[-1]} columns, "
            f"so it must be a float tensor of shape ({x.shape[-1]},)"
        )
    if weight.device != x.device:
        raise ValueError(f"weighted_sum: weight is on {weight.device} but x is on {x.device}; move one of them")
    chosen = choose(spec.WEIGHTED_SUM, backend, x.device, x.dtype, weight=weight.dtype)
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(x, weight)
    return _reduce(x, weight, kinds.WEIGHTED, chosen.target)[0]


def _reduce_rows(op: Op, kind: int, x: Tensor, keepdim: bool, backend: str | None) -> Tensor:
    _check(op.name, x)
    chosen = choose(op, backend, x.device, x.dtype)
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(x, keepdim=keepdim)
    y, _ = _reduce(x, None, kind, chosen.target)
    return y.unsqueeze(-1) if keepdim else y


def _check(name: str, x: Tensor) -> None:
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"{name}: x must be a float tensor with at least one dim, not {x.dtype} of shape {tuple(x.shape)}"
        )


def _check_mask(x: Tensor, mask: Tensor | None, causal: bool) -> None:
    if causal and x.ndim < 2:
        raise ValueError(f"softmax: causal needs x of shape [..., queries, keys], not {tuple(x.shape)}")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"softmax: mask is {mask.dtype}; it must be torch.bool, True where a column is visible")
    if mask.device != x.device:
        raise ValueError(f"softmax: mask is on {mask.device} but x is on {x.device}; move one of them")
    lead = x.ndim - mask.ndim
    if lead < 0 or any(size != 1 and size != x.shape[lead + dim] for dim, size in enumerate(mask.shape)):
        raise ValueError(
            f"softmax: a mask of shape {tuple(mask.shape)} does not broadcast to x of shape {tuple(x.shape)}"
        )


def _flat(x: Tensor) -> Tensor:
    """[rows, width] with unit stride along the row; a view where the layout allows one."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _forward(x: Tensor, weight: Tensor | None, kind: int, kernels: str) -> tuple[Tensor, Tensor]:
    """(y, saved): saved [rows], in float32, is what the backward of max and logsumexp needs; empty for the others."""
    y, saved = resolve(kernels).reduce(_flat(x), None if weight is None else weight.contiguous(), kind)
    return y.view(x.shape[:-1]), saved


def _fake_forward(x, weight, kind, kernels):
    rows = x.shape[:-1].numel()
    kept = rows if kind in (kinds.MAX, kinds.LOGSUMEXP) else 0
    return x.new_empty(x.shape[:-1]), x.new_empty(kept, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, weight, kind, kernels = inputs
    y, saved = output
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.kind, ctx.kernels = x.shape, kind, kernels
    if kind == kinds.WEIGHTED:
        ctx.save_for_backward(x, weight)
    elif kind in (kinds.MAX, kinds.LOGSUMEXP):
        ctx.save_for_backward(x, y, saved)


def _pull_back(ctx, dy, _dsaved):
    if dy is None:
        return None, None, None, None
    if ctx.kind == kinds.SUM:
        return dy.unsqueeze(-1).expand(ctx.shape), None, None, None  # a view: nothing is written, as in torch
    if ctx.kind == kinds.MEAN:
        return (dy / ctx.shape[-1]).unsqueeze(-1).expand(ctx.shape), None, None, None
    if ctx.kind == kinds.WEIGHTED:
        want_x, want_weight = ctx.needs_input_grad[:2]
        dx, dweight = _weighted_backward(dy, *ctx.saved_tensors, want_x, want_weight, ctx.kernels)
        return dx if want_x else None, dweight if want_weight else None, None, None
    return _reduce_backward(dy, *ctx.saved_tensors, ctx.kind, ctx.kernels), None, None, None


def _backward(dy: Tensor, x: Tensor, y: Tensor, saved: Tensor, kind: int, kernels: str) -> Tensor:
    """dx of max or logsumexp."""
    dx = resolve(kernels).reduce_backward(dy.reshape(-1).contiguous(), _flat(x), y.reshape(-1), saved, kind)
    return dx.view(x.shape)


def _fake_backward(dy, x, y, saved, kind, kernels):
    return x.new_empty(x.shape)


def _weighted_pull(
    dy: Tensor, x: Tensor, weight: Tensor, want_x: bool, want_weight: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); the one not wanted is empty."""
    flat = dy.reshape(-1).contiguous()
    dx, dweight = resolve(kernels).weighted_backward(flat, _flat(x), weight.contiguous(), want_x, want_weight)
    return dx.view(x.shape) if want_x else dx, dweight


def _fake_weighted_pull(dy, x, weight, want_x, want_weight, kernels):
    return x.new_empty(x.shape if want_x else 0), weight.new_empty(weight.shape if want_weight else 0)


def _softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool, kernels: str) -> Tensor:
    queries = x.shape[-2] if causal else 0
    return resolve(kernels).softmax(_flat(x), mask_rows(mask, x.shape), scale, queries).view(x.shape)


def _fake_softmax(x, mask, scale, causal, kernels):
    return x.new_empty(x.shape)


def _argmax_forward(x: Tensor, invalid: int | None) -> Tensor:
    return resolve("flashkernel.ops.reduce.triton.argmax:argmax")(_flat(x), invalid).view(x.shape[:-1])


def _fake_argmax(x, invalid):
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def _setup_softmax(ctx, inputs, output):
    x, _, scale, causal, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)
    ctx.settings = (scale, x.shape[-2] if causal else 0, kernels)


def _pull_back_softmax(ctx, dy):
    if dy is None:
        return None, None, None, None, None
    (y,) = ctx.saved_tensors
    return _softmax_backward(dy, y, *ctx.settings), None, None, None, None


def _softmax_pull(dy: Tensor, y: Tensor, scale: float, queries: int, kernels: str) -> Tensor:
    """dx of the softmax y; queries > 0 says causal."""
    return resolve(kernels).softmax_backward(_flat(dy), _flat(y), scale, queries).view(y.shape)


def _fake_softmax_pull(dy, y, scale, queries, kernels):
    return y.new_empty(y.shape)


_HAS_TRITON = find_spec("triton") is not None
_argmax = KernelOp("argmax", _argmax_forward, _fake_argmax)
_reduce_backward = KernelOp("reduce_backward", _backward, _fake_backward)
_weighted_backward = KernelOp("weighted_sum_backward", _weighted_pull, _fake_weighted_pull)
_reduce = KernelOp("reduce", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
_softmax_backward = KernelOp("softmax_backward", _softmax_pull, _fake_softmax_pull)
_softmax = KernelOp(
    "softmax", _softmax_forward, _fake_softmax, setup_context=_setup_softmax, backward=_pull_back_softmax
)
