"""The gradient of an activation or gate at the end of a matrix product, in one launch.

A product that ended in `scale * activation(z)` pulls its gradient back with dz = scale * dy * activation'(z), or with
the gradients of gate and up. The same launch adds the bias to z where z is stored without it, and sums dz over its rows
for the bias where one program has all rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.blocks.epilogue_triton import pull_back_activation
from flashkernel.core import tune
from flashkernel.core.launch import launch

MAX_ROWS = 64  # of which one program has all: up to so many, the bias's gradient is part of the launch
_TILE = 2048  # elements of a program


@triton.jit
def activation_gradient_kernel(
    dy, z, up, bias, up_bias, dz, dup, dbias, dup_bias, rows, columns, dy_stride, z_stride, dz_stride,
    z_step, dz_step, bias_step, dbias_step, factor,
    CHAIN: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, STORED: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # [BLOCK_M]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # [BLOCK_N]
    in_columns = column < columns
    inside = (row < rows)[:, None] & in_columns[None, :]
    gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32) * factor
    up_gradient = gradient
    if CHAIN != "":
        there = row[:, None] * z_stride + column[None, :] * z_step
        value = tl.load(z + there, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            value += tl.load(bias + column * bias_step, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        up_value = value
        if GATED:
            up_value = tl.load(up + there, mask=inside, other=0.0).to(tl.float32)
            if BIASED:
                up_value += tl.load(up_bias + column * bias_step, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        _, gradient, up_gradient = pull_back_activation(gradient, value, up_value, CHAIN)
    if STORED:
        to = row[:, None] * dz_stride + column[None, :] * dz_step
        tl.store(dz + to, gradient, mask=inside)
        if GATED:
            tl.store(dup + to, up_gradient, mask=inside)
    if SUMMED:  # rows outside have gradient 0
        tl.store(dbias + column * dbias_step, tl.sum(gradient, 0), mask=in_columns)
        if GATED:
            tl.store(dup_bias + column * dbias_step, tl.sum(up_gradient, 0), mask=in_columns)


def activation_gradient(
    dy: Tensor,
    values: tuple[Tensor, ...],
    activation: Activation | Gate | None,
    factor: float,
    gradients: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] = (),
    bias_gradients: tuple[Tensor, ...] = (),
) -> None:
    """Writes the gradient of factor * activation(z + bias) for the output's gradient dy.

    Args:
        dy: [rows, columns], with unit stride along its rows.
        values: z [rows, columns], or gate and up of one layout; not read without an activation.
        activation: What was applied to z; None for a factor alone.
        factor: What the activation's output was multiplied by.
        gradients: Where dz, or the gradients of gate and up, are written; they may be `values`. Empty: nowhere.
        biases: What z is stored without: [columns], one for each of `values`; empty where z has it.
        bias_gradients: Where the sums of `gradients` over all rows are written; up to `MAX_ROWS` rows.
    """
    rows, columns = dy.shape
    if dy.numel() == 0:
        for summed in bias_gradients:
            summed.zero_()
        return
    block_m = max(16, tune.power_of_2(rows)) if bias_gradients else 16
    block_n = max(16, _TILE // block_m)
    gated = isinstance(activation, Gate)
    z, dz, b, db = (_pair(given) for given in (values, gradients, biases, bias_gradients))
    launch(
        activation_gradient_kernel, (tune.ceil_div(rows, block_m), tune.ceil_div(columns, block_n)),
        dy, *z, *b, *dz, *db, rows, columns, dy.stride(0), _stride(z[0], 0), _stride(dz[0], 0),
        _stride(z[0], 1), _stride(dz[0], 1), _stride(b[0], 0), _stride(db[0], 0),
        float(factor), CHAIN="" if activation is None else activation.text, GATED=gated, BIASED=len(biases) > 0,
        STORED=len(gradients) > 0, SUMMED=len(bias_gradients) > 0, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _pair(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if not tensors else (tensors[0], tensors[-1])


def _stride(tensor: Tensor | None, dim: int) -> int:
    return 0 if tensor is None else tensor.stride(dim)
