"""The public norms: argument checks and dispatch."""

from torch import Tensor

from flashkernel.core.arguments import check_finite, check_non_negative, is_float, needs_gradients, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.norm import library, spec


@replayed
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the root-mean-square normalization of x over its last dim: x / rms(x) * (weight + offset) + bias.

    Statistics are in float32. Under autocast the output keeps x's dtype; x and a residual of another dtype are
    promoted to the wider one. Every tensor is differentiable.

    Args:
        x: (..., width), float32, float16 or bfloat16; any strides.
        weight: (width,), any float dtype; None means 1.
        bias: (width,), any float dtype; None means 0.
        residual: shape and dtype of x; x + residual is normalized, in the same pass over memory.
        eps: added to the mean square before the root.
        offset: added to the weight; Gemma's norms take 1.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        y with x's shape and dtype, or (y, x + residual) where a residual is given.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight = torch.randn(2, 8), torch.ones(8)
        >>> torch.allclose(fk.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6), atol=1e-5)
        True
        >>> y, hidden = fk.rms_norm(x, weight, residual=torch.randn(2, 8))
    """
    x, residual = promoted(x, residual)
    _check("rms_norm", x, weight, bias, residual, eps)
    check_finite("rms_norm", "offset", offset)
    gradients = needs_gradients(x, weight, bias, residual)
    chosen = choose(spec.RMS_NORM, backend, x.device, x.dtype, gradients, width=x.shape[-1])
    if chosen.composite:
        return chosen.run(x, weight, bias, residual, eps=eps, offset=offset)
    y, total, _, _ = library.norm(x, weight, bias, residual, eps, offset, True, chosen.target)
    return y if residual is None else (y, total)


@replayed
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the layer normalization of x over its last dim: (x - mean(x)) / std(x) * weight + bias.

    Args:
        x: (..., width), float32, float16 or bfloat16; any strides.
        weight: (width,), any float dtype; None means 1.
        bias: (width,), any float dtype; None means 0.
        residual: shape and dtype of x; x + residual is normalized, in the same pass over memory.
        eps: added to the variance before the root.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        y with x's shape and dtype, or (y, x + residual) where a residual is given.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(2, 8)
        >>> torch.allclose(fk.layer_norm(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-5)
        True
    """
    x, residual = promoted(x, residual)
    _check("layer_norm", x, weight, bias, residual, eps)
    gradients = needs_gradients(x, weight, bias, residual)
    chosen = choose(spec.LAYER_NORM, backend, x.device, x.dtype, gradients, width=x.shape[-1])
    if chosen.composite:
        return chosen.run(x, weight, bias, residual, eps=eps)
    y, total, _, _ = library.norm(x, weight, bias, residual, eps, 0.0, False, chosen.target)
    return y if residual is None else (y, total)


def _check(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    check_non_negative(name, "eps", eps)
    if x.ndim == 0 or not is_float(x):
        raise ValueError(f"{name}: x must be a float tensor of at least one dim, not {x.dtype} {tuple(x.shape)}")
    for label, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if vector.ndim != 1 or vector.shape[0] != x.shape[-1] or not is_float(vector):
            raise ValueError(
                f"{name}: {label} is {vector.dtype} {tuple(vector.shape)}; x has {x.shape[-1]} columns, so it must be "
                f"a float tensor ({x.shape[-1]},)"
            )
        if vector.device != x.device:
            raise ValueError(f"{name}: {label} is on {vector.device} but x is on {x.device}; move one of them")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(
            f"{name}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}; "
            f"it must match x: {x.dtype} {tuple(x.shape)} on {x.device}"
        )
