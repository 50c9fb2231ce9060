"""The public grouped product: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate, activation_width, check_activation, standard
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.core.arguments import autocast, autocast_dtype, is_float, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.op import FLOATS
from flashkernel.core.replay import replayed
from flashkernel.ops.matmul.configs import MAX_GROUPS
from flashkernel.ops.matmul.grouped import library, spec
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors
from flashkernel.ops.matmul.grouped.reference import as_offsets, as_row_and_column_scales
from flashkernel.ops.matmul.reference import default_dtype


@replayed
def grouped_matmul(
    x: Tensor,
    weights: Tensor,
    group_offsets: Tensor,
    *,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    row_weights: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | Activation | Gate | None = None,
    packed: str = "halves",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    return_preactivation: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiplies each group of rows by the group's own weight, in one launch: the products of a mixture of experts.

    y[scatter[r]] = row_weights[r] * activation(x[gather[r]] @ weights[g] + bias[g]), where row r belongs to group g.
    The group sizes stay on the GPU: there is no host sync. x, weights, row_weights and bias are differentiable;
    products of 8-bit operands are forward only.

    Args:
        x: (tokens, K), float32, float16, bfloat16 or float8_e4m3fn. Without `gather` its rows are sorted by group.
        weights: (groups, K, N) in x's dtype, with any strides: `weights.transpose(1, 2)` of weights (groups, N, K).
        group_offsets: integers (groups + 1,): group g has the rows from group_offsets[g] to group_offsets[g + 1]. The
            first is 0. Or (groups,): the number of rows of each. Rows after the last group give zeros.
        gather: integers (rows,): which row of x row r is; rows may repeat. None: row r.
        scatter: integers (rows,), all different: which row of the output row r is. None: row r.
        row_weights: (rows,) factors, or None.
        bias: (groups, N), or None.
        activation: "gelu", "gelu_tanh", "silu", "relu", "squared_relu", or gated: "swiglu", "geglu" (tanh),
            "geglu_exact", "reglu", "gpt_oss_glu"; an `Activation` or `Gate` object; None. A gate makes N / 2 columns.
        packed: how N holds gate and up: "halves", or "interleaved" column by column.
        x_scale: scales of an 8-bit x, float32: one for all, () or (1,), or one for each row, (tokens,). Given with
            weight_scale.
        weight_scale: one for all, one for each group, (groups,), or one for each column of each, (groups, N).
        out_rows: rows of the output with `scatter`; as many as there are rows unless given. Others are zero.
        out_dtype: the output's dtype; x's unless given, and bfloat16 of 8-bit operands.
        return_preactivation: returns (y, z) with z = x[gather] @ weights + bias (rows, N), before the activation and
            without a gradient, in x's dtype. Rows after the last group are zero.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (out_rows, N), or (out_rows, N / 2) with a gate; with `return_preactivation` two tensors.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weights = torch.randn(5, 8), torch.randn(3, 8, 4)
        >>> y = fk.grouped_matmul(x, weights, torch.tensor([0, 2, 2, 5]))  # the second group is empty
        >>> torch.allclose(y[2:], x[2:] @ weights[2], atol=1e-5)
        True
        >>> fk.grouped_matmul(x, weights, torch.tensor([2, 0, 3]), activation="swiglu").shape  # rows of each group
        torch.Size([5, 2])
    """
    lower = autocast_dtype(x)
    if lower is not None and x.dtype.itemsize > 1:
        x, weights = autocast(x, lower), autocast(weights, lower)
    rows = _check_groups(x, weights, group_offsets, gather, scatter, row_weights, bias)
    _check_options(activation, packed, weights.shape[2], out_rows, rows, scatter, out_dtype)
    if return_preactivation and (row_weights is not None or x.dtype.itemsize == 1):
        raise ValueError("grouped_matmul: return_preactivation is for products of 16 or 32 bits without row weights")
    x_scale, weight_scale = _scales(x, weights, x_scale, weight_scale)
    gradients = needs_gradients(x, weights, row_weights, bias)
    chosen = choose(spec.GROUPED_MATMUL, backend, x.device, x.dtype, gradients)
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(
                x, weights, group_offsets, gather=gather, scatter=scatter, row_weights=row_weights, bias=bias,
                activation=activation, packed=packed, x_scale=x_scale, weight_scale=weight_scale, out_rows=out_rows,
                out_dtype=out_dtype, return_preactivation=return_preactivation,
            )  # fmt: skip
    chain = ";".join([piece.text for piece in standard(False, activation, 1.0, False)])
    params = GroupedParams(
        default_dtype(x.dtype) if out_dtype is None else out_dtype, rows if out_rows is None else out_rows,
        torch.backends.cuda.matmul.allow_tf32, chain, packed,
    )  # fmt: skip
    save = return_preactivation or (gradients and (activation is not None or needs_gradients(row_weights)))
    tensors = GroupedTensors(gather, scatter, row_weights, bias, x_scale, weight_scale)
    offsets = as_offsets(group_offsets, weights.shape[0])
    y, z = library.grouped_matmul(x, weights, offsets, tensors, params, save, chosen.target)
    return (y, z) if return_preactivation else y


@replayed
def grouped_weight_gradient(
    x: Tensor, dz: Tensor, group_offsets: Tensor, *, gather: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Returns the gradient of a grouped product's weights: x[gather].T @ dz for each group of rows. Not differentiable.

    Under autocast x and dz are cast as for torch.matmul.

    Args:
        x: (tokens, K), float32, float16 or bfloat16.
        dz: (rows, N) in x's dtype, sorted by group: the gradient of the products.
        group_offsets: integers (groups + 1,): group g has the rows from group_offsets[g] to group_offsets[g + 1].
        gather: integers (rows,): which row of x belongs to row r; None: row r.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (groups, K, N) in x's dtype; zero for a group without rows.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, dz = torch.randn(5, 8), torch.randn(5, 4)
        >>> dw = fk.grouped_weight_gradient(x, dz, torch.tensor([0, 2, 2, 5]))
        >>> torch.allclose(dw[2], x[2:].T @ dz[2:], atol=1e-5), bool((dw[1] == 0).all())
        (True, True)
    """
    lower = autocast_dtype(x)
    if lower is not None:
        x, dz = autocast(x, lower), autocast(dz, lower)
    _check_indices("grouped_weight_gradient", x.device, group_offsets=group_offsets, gather=gather)
    rows = (x if gather is None else gather).shape[:1].numel()
    if x.ndim != 2 or dz.ndim != 2 or dz.shape[0] != rows or (gather is None and x.shape[0] != rows):
        raise ValueError(
            f"grouped_weight_gradient: x is {tuple(x.shape)} and dz {tuple(dz.shape)}; they must be (tokens, K) and "
            f"({rows}, N), with as many tokens as rows unless they are gathered"
        )
    if x.dtype != dz.dtype or x.dtype not in (*FLOATS, torch.float64) or x.device != dz.device:
        raise ValueError(
            f"grouped_weight_gradient: x is {x.dtype} on {x.device} and dz {dz.dtype} on {dz.device}; they must be one "
            "float dtype on one device"
        )
    if not 1 <= group_offsets.shape[0] <= MAX_GROUPS:
        raise ValueError(f"grouped_weight_gradient: {group_offsets.shape[0]} offsets; there are 1 to {MAX_GROUPS}")
    if needs_gradients(x, dz):
        raise ValueError("grouped_weight_gradient: it has no gradient; call it under torch.no_grad()")
    chosen = choose(spec.GROUPED_WEIGHT_GRADIENT, backend, x.device, x.dtype)
    if chosen.composite:
        with without_autocast(x):
            return chosen.run(x, dz, group_offsets, gather=gather)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return library.grouped_weight_gradient(x, dz, group_offsets, gather, tf32, chosen.target)


def _check_indices(function: str, device: torch.device, **indices: Tensor | None) -> None:
    for name, index in indices.items():
        if index is None:
            continue
        if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64) or index.device != device:
            raise ValueError(
                f"{function}: {name} is {index.dtype} {tuple(index.shape)} on {index.device}; it must be int32 or "
                f"int64 with one dim on {device}"
            )


def _check_options(
    activation: str | Activation | Gate | None,
    packed: str,
    columns: int,
    out_rows: int | None,
    rows: int,
    scatter: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    check_activation("grouped_matmul", activation)
    if packed not in PACKINGS:
        raise ValueError(f"grouped_matmul: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    if activation_width(activation) == 2 and columns % 2:
        raise ValueError(f"grouped_matmul: {columns} columns do not divide into gate and up; N must be even")
    if out_rows is not None and (scatter is None or out_rows < rows):
        raise ValueError(
            f"grouped_matmul: out_rows is {out_rows} for {rows} rows; give a scatter index, and at least as many"
        )
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"grouped_matmul: out_dtype is {out_dtype}; it must be a float dtype")


def _scales(
    x: Tensor, weights: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Scales as kernels take them: [tokens or 1] and [groups, N or 1]; None and None where there are none."""
    if (x_scale is None) != (weight_scale is None):
        raise ValueError(
            "grouped_matmul: give both x_scale and weight_scale, or neither; a scale of 1 is torch.ones(())"
        )
    if x_scale is None or weight_scale is None:
        return None, None
    if x.dtype.itemsize > 1:
        raise ValueError(f"grouped_matmul: scales are for 8-bit operands; x is {x.dtype}: multiply it instead")
    groups, _, columns = weights.shape
    shapes = {"x_scale": (x_scale, [(), (1,), (x.shape[0],), (x.shape[0], 1)]),
              "weight_scale": (weight_scale, [(), (1,), (groups,), (groups, 1), (groups, columns)])}  # fmt: skip
    for name, (given, allowed) in shapes.items():
        if tuple(given.shape) not in allowed or given.dtype != torch.float32 or given.device != x.device:
            raise ValueError(
                f"grouped_matmul: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be float32 "
                f"{' or '.join(map(str, allowed))} on {x.device}"
            )
    rows_scale, columns_scale = as_row_and_column_scales(x_scale, weight_scale, groups)
    return rows_scale.contiguous(), columns_scale


def _check_groups(
    x: Tensor,
    weights: Tensor,
    group_offsets: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    row_weights: Tensor | None,
    bias: Tensor | None,
) -> int:
    """The number of rows."""
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[1] != x.shape[1]:
        raise ValueError(
            f"grouped_matmul: x is {tuple(x.shape)} and weights {tuple(weights.shape)}; they must be (tokens, K) and "
            "(groups, K, N)"
        )
    if x.dtype != weights.dtype or x.dtype not in (*FLOATS, torch.float64, FP8) or x.device != weights.device:
        raise ValueError(
            f"grouped_matmul: x is {x.dtype} on {x.device} and weights {weights.dtype} on {weights.device}; they must "
            "be one float dtype, of 8 bits float8_e4m3fn, on one device"
        )
    groups = weights.shape[0]
    if groups >= MAX_GROUPS:
        raise ValueError(f"grouped_matmul: {groups} groups; there may be up to {MAX_GROUPS - 1}")
    if group_offsets.ndim != 1 or group_offsets.shape[0] not in (groups, groups + 1):
        raise ValueError(
            f"grouped_matmul: group_offsets is {tuple(group_offsets.shape)}; for {groups} groups it must be "
            f"({groups + 1},), or ({groups},) row counts"
        )
    _check_indices("grouped_matmul", x.device, group_offsets=group_offsets, gather=gather, scatter=scatter)
    rows = gather.shape[0] if gather is not None else scatter.shape[0] if scatter is not None else x.shape[0]
    if gather is None and rows != x.shape[0]:
        raise ValueError(f"grouped_matmul: scatter has {rows} indices for {x.shape[0]} rows; give one for each")
    shapes = {"gather": (gather, (rows,)), "scatter": (scatter, (rows,)), "row_weights": (row_weights, (rows,)),
              "bias": (bias, (groups, weights.shape[2]))}  # fmt: skip
    for name, (given, shape) in shapes.items():
        if given is None:
            continue
        floats = name in ("row_weights", "bias")
        if tuple(given.shape) != shape or given.device != x.device or (floats and not is_float(given)):
            raise ValueError(
                f"grouped_matmul: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be "
                f"{'float' if floats else 'integers'} {shape} on {x.device}"
            )
    return rows
