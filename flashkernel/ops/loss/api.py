"""The public losses: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.core.arguments import (
    autocast,
    autocast_dtype,
    check_non_negative,
    check_softcap,
    is_float,
    needs_gradients,
    without_autocast,
)
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.loss import library, spec
from flashkernel.ops.loss.params import LinearLossInputs, LossParams

REDUCTIONS = ("mean", "sum", "none")


@replayed
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Returns the cross-entropy of logits against class indices, computed in float32.

    Where every target is ignored, "mean" gives 0 and a gradient of 0 (torch gives NaN). A target out of range gives NaN
    in its loss and gradient: the kernels never read outside a row, and cannot raise without waiting for the device.

    Args:
        logits: (..., classes), float32, float16 or bfloat16.
        target: (...), integers.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the target's probability that is spread over all classes; 0 to 1.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of a row.
        softcap: bounds the logits to softcap * tanh(logits / softcap) first; 0 means no bound.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for one loss per target.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A float32 scalar, or a float32 tensor with target's shape for reduction="none".

    Example:
        >>> import torch, flashkernel as fk
        >>> logits, target = torch.randn(3, 10, requires_grad=True), torch.tensor([1, 2, -100])
        >>> loss = fk.cross_entropy(logits, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, target))
        True
        >>> loss.backward()
    """
    _check("cross_entropy", logits, target, label_smoothing, z_loss, softcap, reduction)
    target = _indices(target)
    gradients = needs_gradients(logits)
    chosen = choose(spec.CROSS_ENTROPY, backend, logits.device, logits.dtype, gradients, classes=logits.shape[-1])
    if chosen.composite:
        with without_autocast(logits):
            return chosen.run(
                logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
                softcap=softcap, reduction=reduction,
            )  # fmt: skip
    params = LossParams(ignore_index, float(label_smoothing), float(z_loss), float(softcap), reduction)
    loss, _, _ = library.cross_entropy(logits, target, params, chosen.target)
    return loss


@replayed
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Returns the cross-entropy of x @ weight^T + bias without holding all logits in memory.

    Gradients are computed in the forward pass, one chunk of rows at a time (reduction="none" recomputes the logits in
    backward instead). Under autocast x, weight and bias are cast as for torch.nn.functional.linear.

    Args:
        x: (..., hidden), float32, float16 or bfloat16.
        weight: (classes, hidden) in x's dtype: the language-model head.
        target: (...), integers.
        bias: (classes,) in x's dtype, or None.
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: share of the target's probability that is spread over all classes; 0 to 1.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of a row.
        softcap: bounds the logits to softcap * tanh(logits / softcap) first; 0 means no bound.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for one loss per target.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A float32 scalar, or a float32 tensor with target's shape for reduction="none".

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(10, 8)
        >>> target = torch.tensor([1, 2, 3])
        >>> loss = fk.linear_cross_entropy(x, weight, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, target), atol=1e-5)
        True
    """
    _check_linear(x, weight, target, bias)
    _check("linear_cross_entropy", x, target, label_smoothing, z_loss, softcap, reduction)
    lower = autocast_dtype(x)
    if lower is not None:
        x, weight, bias = autocast(x, lower), autocast(weight, lower), None if bias is None else autocast(bias, lower)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"linear_cross_entropy: x is {x.dtype} but weight is {weight.dtype}; cast one, or use autocast"
        )
    target = _indices(target)
    gradients = needs_gradients(x, weight, bias)
    chosen = choose(spec.LINEAR_CROSS_ENTROPY, backend, x.device, x.dtype, gradients, classes=weight.shape[0])
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(
                x, weight, target, bias, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
                softcap=softcap, reduction=reduction,
            )  # fmt: skip
    wanted = [torch.is_grad_enabled() and value is not None and value.requires_grad for value in (x, weight, bias)]
    params = LossParams(ignore_index, float(label_smoothing), float(z_loss), float(softcap), reduction)
    inputs = LinearLossInputs(x, weight, bias, target)
    loss, *_ = library.linear_cross_entropy(inputs, params, wanted, chosen.target)
    return loss


def _check(
    name: str, values: Tensor, target: Tensor, smoothing: float, z_loss: float, softcap: float, reduction: str
) -> None:
    if values.ndim < 1 or not is_float(values):
        raise ValueError(
            f"{name}: needs a float tensor with at least one dim, not {values.dtype} {tuple(values.shape)}"
        )
    if values.shape[-1] == 0 and target.numel() > 0:
        raise ValueError(f"{name}: the input has shape {tuple(values.shape)}, without a class for targets to name")
    whole = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if not whole or target.shape != values.shape[:-1]:
        raise ValueError(
            f"{name}: target is {target.dtype} {tuple(target.shape)}; it must be integers of shape "
            f"{tuple(values.shape[:-1])}, one class index per row of {tuple(values.shape)}"
        )
    if target.device != values.device:
        raise ValueError(f"{name}: target is on {target.device} but the input is on {values.device}; move one of them")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing is {smoothing}; it must be from 0 to 1")
    check_non_negative(name, "z_loss", z_loss)
    check_softcap(name, softcap)


def _indices(target: Tensor) -> Tensor:
    """int64 and int32 are taken as they are; narrower and unsigned types could not hold ignore_index."""
    return target if target.dtype in (torch.int64, torch.int32) else target.long()


def _check_linear(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if weight.ndim == 2 and weight.shape[0] == 0:
        raise ValueError(f"linear_cross_entropy: weight is {tuple(weight.shape)}, without a class for targets to name")
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: weight is {tuple(weight.shape)} and x {tuple(x.shape)}; "
            f"weight must be (classes, {x.shape[-1] if x.ndim else '?'})"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is {tuple(bias.shape)}; it must be ({weight.shape[0]},)")
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        raise ValueError(f"linear_cross_entropy: weight is on {weight.device} but x is on {x.device}; move one of them")
