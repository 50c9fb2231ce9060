"""Linear + cross-entropy, chunk by chunk: cuBLAS for the matrix products, one scan for the loss and its gradient.

A chunk of rows goes through logits = x W^T, the in-place gradient, dx = dlogits W and dW += dlogits^T x before the
next chunk takes over its memory: three matrix products in all, and never more than one chunk of logits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flashkernel.ops.loss import triton as kernels
from flashkernel.ops.loss.configs import chunk_rows
from flashkernel.ops.loss.params import LinearLossInputs, LossParams


class _Gradients:
    """Accumulates dx, dweight and dbias from chunks of dlogits; those not wanted stay empty."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]) -> None:
        self.x, self.weight = x, weight
        self.dx = torch.empty(x.shape if wanted[0] else 0, dtype=x.dtype, device=x.device)
        self.dweight = torch.empty(weight.shape if wanted[1] else 0, dtype=weight.dtype, device=x.device)
        self.dbias = torch.empty(0, dtype=x.dtype if bias is None else bias.dtype, device=x.device)
        self.bias_sum: Tensor | None = None  # float32
        self.wanted = wanted

    def add(self, dlogits: Tensor, rows: slice) -> None:
        if self.wanted[0]:
            torch.mm(dlogits, self.weight, out=self.dx[rows])
        if self.wanted[1]:
            if rows.start == 0:
                torch.mm(dlogits.t(), self.x[rows], out=self.dweight)
            else:
                self.dweight.addmm_(dlogits.t(), self.x[rows])
        if self.wanted[2]:
            total = dlogits.sum(0, dtype=torch.float32)
            self.bias_sum = total if self.bias_sum is None else self.bias_sum.add_(total)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.x.shape[0] == 0:
            if self.wanted[1]:
                self.dweight.zero_()
            if self.wanted[2]:
                self.dbias = self.dbias.new_zeros(self.weight.shape[0])
        elif self.bias_sum is not None:
            self.dbias = self.bias_sum.to(self.dbias.dtype)
        return self.dx, self.dweight, self.dbias


def _chunks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Pairs (rows, logits of those rows); every chunk reuses the same memory."""
    rows, classes = x.shape[0], weight.shape[0]
    step = chunk_rows(rows, classes, x.element_size())
    buffer = torch.empty((step, classes), dtype=x.dtype, device=x.device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        logits = buffer[: part.stop - part.start]
        if bias is None:
            torch.mm(x[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[part], weight.t(), out=logits)
        yield part, logits


def forward(
    inputs: LinearLossInputs, params: LossParams, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, count, dx, dweight, dbias), the gradients as the protocol says; `wanted` says which."""
    x, weight, bias, target = inputs
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    lse = torch.empty_like(loss)
    gradients = _Gradients(x, weight, bias, wanted)
    divided = params.reduction == "mean" or params.stored_scale(x.dtype) > 1.0
    divisor = kernels.counted(target, params) if any(wanted) and divided else None
    for part, logits in _chunks(x, weight, bias):
        kernels.launch_forward(logits, target[part], loss[part], lse[part], divisor, params, any(wanted))
        if any(wanted):
            gradients.add(logits, part)
    if params.reduction == "none":
        return loss, lse, torch.empty(0, dtype=torch.int32, device=x.device), *gradients.result()
    mean, count = kernels.reduced(loss, target, params)
    return mean, lse, count, *gradients.result()


def backward(
    dloss: Tensor, inputs: LinearLossInputs, lse: Tensor, params: LossParams, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) for a loss per row, whose weights were not known in forward: the logits are made again."""
    x, weight, bias, target = inputs
    gradients = _Gradients(x, weight, bias, wanted)
    for part, logits in _chunks(x, weight, bias):
        kernels.launch_backward(logits, target[part], lse[part], dloss[part], None, logits, params)
        gradients.add(logits, part)
    return gradients.result()


scaled = kernels.scaled  # the api looks for it in the module a backend names
