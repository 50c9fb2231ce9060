"""The MLP as a torch operator, with its gradients.

It saves its arguments and what goes into the activation; with `recompute` its arguments alone. The backward pass writes
the gradient of what goes into the activation over the saved values, unless the graph is kept for another pass.
"""

from typing import Any

import torch
from torch import Tensor

from flashkernel.core.arguments import as_rows, without_autocast
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.mlp.params import MainGrads, MlpParams, MlpTensors

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _forward(
    tensors: MlpTensors, main_grads: MainGrads, params: MlpParams, dtype: torch.dtype, recompute: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """(y [..., outputs], what went into the activation; empty with `recompute`)

    x and the residual have any number of dims. Differentiable in all tensors but `main_grads`.
    """
    x, residual = tensors.x, tensors.residual
    rows = tensors._replace(x=as_rows(x), residual=None if residual is None else as_rows(residual))
    y, preactivation = resolve(kernels).forward(rows, params, dtype, not recompute)
    return y.view(*x.shape[:-1], y.shape[-1]), x.new_empty(0) if preactivation is None else preactivation


def _fake_forward(tensors, main_grads, params, dtype, recompute, kernels):
    x = tensors.x
    rows, width = x.shape[:-1].numel(), tensors.gate_up.shape[0] * (1 if tensors.up is None else 2)
    y = x.new_empty((*x.shape[:-1], tensors.down.shape[0]), dtype=dtype)
    return y, x.new_empty(0 if recompute else (rows, width))


def _backward(
    dy: Tensor, tensors: MlpTensors, preactivation: Tensor | None, params: MlpParams, wanted: list[bool], kernels: str
) -> _Gradients:
    """Gradients of x, gate (or both), up, down and their biases; those not wanted are empty."""
    return _backward_in_place(dy, tensors, preactivation, MainGrads(), params, False, wanted, kernels)


def _backward_in_place(
    dy: Tensor, tensors: MlpTensors, preactivation: Tensor | None, main_grads: MainGrads, params: MlpParams,
    in_place: bool, wanted: list[bool], kernels: str,
) -> _Gradients:  # fmt: skip
    """As `_backward`; it adds to the main gradients, whose weights have none here, and may write to preactivation."""
    x = tensors.x
    results = resolve(kernels).backward(
        as_rows(dy.to(x.dtype)), tensors._replace(x=as_rows(x)), preactivation, main_grads, params, in_place, wanted
    )
    found = [x.new_empty(0) if result is None else result for result in results]
    if wanted[0]:
        found[0] = found[0].view(x.shape)
    for index, bias in enumerate((tensors.gate_up_bias, tensors.up_bias, tensors.down_bias), 4):
        if wanted[index] and bias is not None:
            found[index] = found[index].to(bias.dtype)
    return tuple(found)  # type: ignore[return-value]


def _fake_backward(dy, tensors, preactivation, params, wanted, kernels):
    return empty_gradients(tensors[:7], wanted)


def _fake_backward_in_place(dy, tensors, preactivation, main_grads, params, in_place, wanted, kernels):
    return empty_gradients(tensors[:7], _without(wanted, main_grads))


def _without(wanted, main_grads):
    """`wanted` without the weights whose gradients are added elsewhere."""
    added = [False, *[main is not None for main in main_grads], False, False, False]
    return [want and not elsewhere for want, elsewhere in zip(wanted, added)]


def _setup_context(ctx, inputs, output):
    tensors, ctx.main_grads, ctx.params, _, recompute, ctx.kernels = inputs
    # The main gradients are not saved: other calls add to them before this one's backward pass.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:7], None if recompute else output[1])
    ctx.residual_dtype = None if tensors.residual is None else tensors.residual.dtype


def _pull_back(ctx, wanted, dy, _):
    *tensors, preactivation = ctx.saved_tensors
    given, needed, in_place = MlpTensors(*tensors), wanted[:7], mlp.may_overwrite(ctx, dy)
    results: Any = [None] * 7
    if any(needed):
        with without_autocast(dy):  # of a backward() that is called inside it
            if in_place or any(main is not None for main in ctx.main_grads):
                results = _mlp_backward_in_place(
                    dy, given, preactivation, ctx.main_grads, ctx.params, in_place, needed, ctx.kernels
                )
            else:
                results = _mlp_backward(dy, given, preactivation, ctx.params, needed, ctx.kernels)
    kept = [result if want else None for result, want in zip(results, _without(needed, ctx.main_grads))]
    return *kept, dy.to(ctx.residual_dtype) if wanted[7] else None


_mlp_backward = KernelOp("mlp_backward", _backward, _fake_backward)
_mlp_backward_in_place = KernelOp(
    "mlp_backward_in_place", _backward_in_place, _fake_backward_in_place,
    mutates=("preactivation", *MainGrads._fields),
)  # fmt: skip
mlp = KernelOp("mlp", _forward, _fake_forward, Gradient(_setup_context, _pull_back, MlpTensors._fields))
