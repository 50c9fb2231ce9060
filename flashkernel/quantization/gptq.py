"""GPTQ (Frantar et al. 2022): columns are rounded one after another, and each error is corrected in those that follow.

For a layer y = W x and H = sum of x x^T over the calibration tokens, the squared change of the outputs is tr(D H D^T)
with D = W - Q. After column j is rounded, it is least if every other column i changes by
-(w_j - q_j) * (H^-1)_ji / (H^-1)_jj. With the upper Cholesky factor of H^-1 a column changes those to its right alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.blocks.integers import IntegerRange
from flashkernel.quantization.scheme import Scheme, assemble, fit_grid

BLOCK = 128  # columns whose corrections are applied together to the rest of the matrix
_TRIES = 4  # of a Cholesky factorization, with ten times the damping each


def gptq(matrix: Tensor, hessian: Tensor, scheme: Scheme, *, damping: float = 0.01, act_order: bool = False) -> Weight:
    """Returns a matrix (out, in) in integers that change the layer's outputs little.

    Args:
        matrix: The layer's weight, any float dtype.
        hessian: Sum of x x^T over the layer's inputs, float32 (in, in).
        scheme: "int4" or "int8".
        damping: Share of the Hessian's mean diagonal that is added to it.
        act_order: Columns with the largest inputs are rounded first. Scales are then those of the matrix as it was
            (static groups), so that groups stay consecutive columns.
    """
    weight, numbers = matrix.float().clone(), scheme.numbers
    columns = weight.shape[1]
    size = columns if scheme.group_size == -1 else scheme.group_size
    importance = hessian.diagonal().clone()
    dead = importance <= 0
    weight[:, dead] = 0.0
    scales, zeros = fit_grid(weight, scheme, importance.clamp_min(1e-12))
    order = importance.argsort(descending=True) if act_order else torch.arange(columns, device=weight.device)
    factor = _inverse_factor(hessian[order][:, order], dead[order], damping)
    weight, columns_in_order = weight[:, order], order.tolist()
    codes = torch.empty_like(weight, dtype=numbers.dtype)
    least, most = (numbers.least, numbers.most) if zeros is not None else _symmetric(numbers)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(weight[:, start:stop])
        for j in range(start, stop):
            column = columns_in_order[j]
            group = column // size
            if not act_order and column % size == 0:  # the group as earlier corrections left it
                part = slice(column, column + size)
                found = fit_grid(weight[:, part], Scheme(scheme.format, -1, scheme.symmetric), importance[part])
                scales[:, group : group + 1] = found[0]
                if zeros is not None and found[1] is not None:
                    zeros[:, group : group + 1] = found[1]
            scale = scales[:, group]
            zero = zeros[:, group].float() if zeros is not None else float(numbers.middle)
            code = ((weight[:, j] * (1 / scale)).round() + zero).clamp(least, most)
            error = (weight[:, j] - (code - zero) * scale) / factor[j, j]
            weight[:, j:stop] -= error[:, None] * factor[j, j:stop]
            codes[:, column] = code.to(numbers.dtype)
            errors[:, j - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return assemble(codes, scales, zeros, scheme)


def _symmetric(numbers: IntegerRange) -> tuple[int, int]:
    """The integers at equal distances from the middle."""
    return 2 * numbers.middle - numbers.most, numbers.most


def _inverse_factor(hessian: Tensor, dead: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped Hessian."""
    wanted = hessian.double().clone()
    diagonal = wanted.diagonal()
    diagonal[dead] = 1.0
    mean = float(diagonal.mean())
    for attempt in range(_TRIES):
        damped = wanted + torch.eye(len(dead), dtype=wanted.dtype, device=wanted.device) * (
            mean * damping * 10.0**attempt
        )
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed) == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(failed) == 0:
                return upper.float()
    raise ValueError(
        f"GPTQ: the Hessian of a layer with {len(dead)} inputs is not positive definite, even with damping "
        f"{damping * 10.0 ** (_TRIES - 1)}; calibrate with more text, or with a larger damping"
    )
