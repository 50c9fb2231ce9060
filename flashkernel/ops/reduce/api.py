"""The public reductions, all over the last dim: argument checks and dispatch."""

from importlib.util import find_spec

import torch
from torch import Tensor

from flashkernel.blocks.mask import check_causal_window
from flashkernel.core.arguments import check_finite, is_float, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.op import Op
from flashkernel.core.replay import replayed
from flashkernel.ops.reduce import kinds, library, spec


@replayed
def sum(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """Returns the sum of each row (the last dim); 0 for rows without columns.

    Args:
        x: (..., columns), float32, float16 or bfloat16; any strides.
        keepdim: keeps the reduced dim, with size 1.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (...) or (..., 1) in x's dtype; computed in float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(2, 5)
        >>> torch.allclose(fk.sum(x), x.sum(-1), atol=1e-5)
        True
    """
    return _reduce_rows(spec.SUM, kinds.SUM, x, keepdim, backend)


@replayed
def mean(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """Returns the mean of each row (the last dim); NaN for rows without columns, as in torch.

    Args:
        x: (..., columns), float32, float16 or bfloat16; any strides.
        keepdim: keeps the reduced dim, with size 1.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (...) or (..., 1) in x's dtype; computed in float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(2, 5)
        >>> torch.allclose(fk.mean(x), x.mean(-1), atol=1e-5)
        True
    """
    return _reduce_rows(spec.MEAN, kinds.MEAN, x, keepdim, backend)


@replayed
def max(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """Returns the largest value of each row (the last dim), NaN where the row has one.

    Equal maxima share the gradient evenly, as in torch.amax.

    Args:
        x: (..., columns), float32, float16 or bfloat16; any strides.
        keepdim: keeps the reduced dim, with size 1.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (...) or (..., 1) in x's dtype; computed in float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(2, 5)
        >>> torch.allclose(fk.max(x), x.amax(-1), atol=1e-5)
        True
    """
    _check("max", x)
    if x.shape[-1] == 0 and x.shape[:-1].numel():
        raise ValueError(f"max: x has shape {tuple(x.shape)}; a row without columns has no maximum")
    return _reduce_rows(spec.MAX, kinds.MAX, x, keepdim, backend)


@replayed
def logsumexp(x: Tensor, *, keepdim: bool = False, backend: str | None = None) -> Tensor:
    """Returns log(sum(exp(x))) of each row (the last dim), without overflow.

    A row of -inf alone, or without columns, gives -inf and a gradient of 0.

    Args:
        x: (..., columns), float32, float16 or bfloat16; any strides.
        keepdim: keeps the reduced dim, with size 1.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (...) or (..., 1) in x's dtype; computed in float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(2, 5)
        >>> torch.allclose(fk.logsumexp(x), x.logsumexp(-1), atol=1e-5)
        True
    """
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
    """Returns softmax(scale * x) over the last dim, computed in float32.

    A row that sees nothing, or -inf alone, gives zeros and a gradient of 0.

    Args:
        x: (..., columns), float32, float16 or bfloat16; with `causal`, (..., seqlen_q, seqlen_k).
        mask: boolean, broadcasts to x; True means visible.
        scale: a factor on x.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A tensor with x's shape and dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> scores = torch.zeros(3, 3)
        >>> fk.softmax(scores, causal=True)[1]
        tensor([0.5000, 0.5000, 0.0000])
    """
    _check("softmax", x)
    check_finite("softmax", "scale", scale)
    check_causal_window("softmax", causal, None)
    _check_mask(x, mask, causal)
    chosen = choose(spec.SOFTMAX, backend, x.device, x.dtype, needs_gradients(x))
    if chosen.composite:
        return chosen.run(x, mask, scale=scale, causal=causal)
    return library.softmax(x, mask, float(scale), causal, chosen.target)


@replayed
def argmax(x: Tensor, *, invalid: int | None = None) -> Tensor:
    """Returns the index of each row's largest value (the last dim); of equal values the first.

    NaN counts as the largest value, as in torch. On a GPU several programs share a row.

    Args:
        x: (..., columns), float32, float16 or bfloat16, with at least one column.
        invalid: returned instead of an index where the maximum is not finite; None returns the index there too.

    Returns:
        (...), int64.

    Example:
        >>> import torch, flashkernel as fk
        >>> fk.argmax(torch.tensor([[1.0, 3.0, 2.0], [float("nan"), 0.0, 0.0]]), invalid=-1)
        tensor([ 1, -1])
    """
    _check("argmax", x)
    if x.shape[-1] == 0:
        raise ValueError(f"argmax: x has shape {tuple(x.shape)}; a row without columns has no maximum")
    if x.device.type == "cuda" and x.numel() > 0 and _HAS_TRITON:
        return library.argmax(x, invalid)
    index = x.argmax(-1)
    if invalid is None:
        return index
    return torch.where(x.gather(-1, index[..., None])[..., 0].isfinite(), index, invalid)


@replayed
def weighted_sum(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """Returns y[r] = sum over c of x[r, c] * weight[c], computed in float32.

    Args:
        x: (..., columns), float32, float16 or bfloat16.
        weight: (columns,), any float dtype.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (...) in x's dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight = torch.randn(2, 5), torch.randn(5)
        >>> torch.allclose(fk.weighted_sum(x, weight), x @ weight, atol=1e-5)
        True
    """
    _check("weighted_sum", x)
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1] or not is_float(weight):
        raise ValueError(
            f"weighted_sum: weight is {weight.dtype} of shape {tuple(weight.shape)}; x has {x.shape[-1]} columns, "
            f"so it must be a float tensor of shape ({x.shape[-1]},)"
        )
    if weight.device != x.device:
        raise ValueError(f"weighted_sum: weight is on {weight.device} but x is on {x.device}; move one of them")
    gradients = needs_gradients(x, weight)
    chosen = choose(spec.WEIGHTED_SUM, backend, x.device, x.dtype, gradients, weight=weight.dtype)
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(x, weight)
    return library.reduce(x, weight, kinds.WEIGHTED, chosen.target)[0]


def _reduce_rows(op: Op, kind: int, x: Tensor, keepdim: bool, backend: str | None) -> Tensor:
    _check(op.name, x)
    chosen = choose(op, backend, x.device, x.dtype, needs_gradients(x))
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(x, keepdim=keepdim)
    y, _ = library.reduce(x, None, kind, chosen.target)
    return y.unsqueeze(-1) if keepdim else y


def _check(name: str, x: Tensor) -> None:
    if x.ndim == 0 or not is_float(x):
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


_HAS_TRITON = find_spec("triton") is not None
