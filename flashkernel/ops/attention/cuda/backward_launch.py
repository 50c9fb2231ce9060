"""Launchers of the CUDA C++ attention backward pass: preprocess, main kernel, postprocess."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.tile_ranges import tile_ranges
from flashkernel.core import cuda, tune
from flashkernel.core.cuda import Kernel
from flashkernel.ops.attention.cuda.backward_configs import BACKWARD, BackwardConfig
from flashkernel.ops.attention.cuda.configs import padded_dim
from flashkernel.ops.attention.cuda.launch import (
    DROPOUT,
    RANGES,
    SCORES,
    SIZES,
    STRIDES,
    TYPES,
    dropout_arguments,
    kernel_for,
    module,
    range_arguments,
    score_arguments,
    size_arguments,
    strides,
)
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, InputGradients, OutputGradients

_PREPROCESS_ARGUMENTS = (
    "pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, "
    f"{STRIDES}, int32, int32, int32, int32, int32"
)
_BACKWARD_ARGUMENTS = (
    "pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, "
    f"{STRIDES}, {STRIDES}, {STRIDES}, {STRIDES}, int64, int64, int64, int64, {RANGES}, int32, int32, int32, "
    f"{SIZES}, {SCORES}, {DROPOUT}"
)
_POSTPROCESS_ARGUMENTS = "pointer, pointer, float32, int32, int32, int32, int32"


def backward(
    outputs: OutputGradients, inputs: AttentionInputs, params: AttentionParams, want_bias: bool
) -> InputGradients:
    """The gradients; those without their input, and a bias gradient not wanted, are None."""
    o, lse, do, dlse = outputs
    q, k, v, do = (cuda.vectorized(x) for x in (inputs.q, inputs.k, inputs.v, do))
    inputs = inputs._replace(q=q, k=k, v=v)
    batch, seqlen_q, heads, head_dim = q.shape
    dlse = None if dlse is None else dlse.float().contiguous()
    target = cuda.target(q.device)
    changed = inputs.bias is not None or inputs.alibi_slopes is not None or params.score is not None
    shape = {
        "head_dim": head_dim, "value_dim": v.shape[3], "asynchronous": int(target.arch >= 80),
        "plain": int(not changed and params.softcap == 0 and params.dropout == 0),
    }  # fmt: skip
    config: BackwardConfig = tune.pick(BACKWARD, target, shape)
    tiles = tune.ceil_div(seqlen_q, config.block_m)
    padded = tiles * config.block_m
    # -LSE log2(e) and -delta of each query, and the sum of dQ in the order of the kernel's accumulators.
    stats = torch.empty((2, batch, heads, padded), dtype=torch.float32, device=q.device)
    dq_sum = torch.empty((batch, heads, padded, padded_dim(head_dim)), dtype=torch.float32, device=q.device)
    dsinks = _preprocess(do, dlse, inputs, o, lse, stats, dq_sum, config)
    dk, dv, dbias, slope_sums = _backward(do, inputs, stats, dq_sum, params, want_bias, config)
    dq = _postprocess(inputs, dq_sum, params, config)
    if inputs.bias is not None and dbias is not None:
        dbias = dbias.to(inputs.bias.dtype)
    dslopes = None
    if inputs.alibi_slopes is not None and slope_sums is not None:
        dslopes = _dslopes(inputs.alibi_slopes, slope_sums, stats, dlse, seqlen_q)
    return dq, dk, dv, dbias, dsinks, dslopes


def _preprocess(
    do: Tensor, dlse: Tensor | None, inputs: AttentionInputs, o: Tensor, lse: Tensor, stats: Tensor, dq_sum: Tensor,
    config: BackwardConfig,
) -> Tensor | None:  # fmt: skip
    """Writes stats and zeroes dq_sum. Returns the gradient of the sinks, if there are any."""
    q, v, sinks = inputs.q, inputs.v, inputs.sinks
    batch, seqlen_q, heads, head_dim = q.shape
    tiles = stats.shape[3] // config.block_m
    dsinks = None  # of each warp's queries
    if sinks is not None:
        dsinks = torch.empty((batch, heads, tiles * config.num_warps), dtype=torch.float32, device=q.device)
    dims = f"{padded_dim(head_dim)}, {padded_dim(v.shape[3])}"
    name = f"attention_backward_preprocess<{TYPES[q.dtype]}, {dims}, {config.block_m}, {config.num_warps}>"
    _process_kernel(name, _PREPROCESS_ARGUMENTS, inputs).launch(
        tiles * heads * batch, config.num_warps * 32,
        (
            o, do, lse, dlse, sinks, stats, dq_sum, dsinks, *strides(do), batch, heads, seqlen_q, v.shape[3], tiles,
        ),
        device=q.device,
    )  # fmt: skip
    return None if sinks is None or dsinks is None else dsinks.sum((0, 2)).to(sinks.dtype)


def _backward(
    do: Tensor, inputs: AttentionInputs, stats: Tensor, dq_sum: Tensor, params: AttentionParams, want_bias: bool,
    config: BackwardConfig,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dk, dv, dbias in float32, slope_sums); adds to dq_sum.

    slope_sums is [4, batch, heads, padded]: of each query the sums of dS distance, dS, P and P distance over keys.
    """
    q, k, v, bias, _, alibi_slopes = inputs
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dbias = slope_sums = None
    dbias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if want_bias and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=q.device)
        dbias_strides = tuple(0 if size == 1 else stride for size, stride in zip(dbias.shape, dbias.stride()))
    if alibi_slopes is not None:
        slope_sums = torch.zeros((4, *stats.shape[1:]), dtype=torch.float32, device=q.device)
    sizes = (batch, heads, seqlen_q, seqlen_k, config.block_m, config.block_n)
    ranges = tile_ranges(params.mask, *sizes, q.device, transposed=True)
    q_tiles, k_tiles = stats.shape[3] // config.block_m, tune.ceil_div(seqlen_k, config.block_n)
    template = f"{config.template}, {'true' if dbias is not None else 'false'}"
    kernel, tables = kernel_for("backward", _BACKWARD_ARGUMENTS, inputs, params, template)
    kernel.launch(
        k_tiles * kv_heads * batch, config.num_warps * 32,
        (
            q, k, v, do, stats, dq_sum, dk, dv, dbias, slope_sums, *strides(q), *strides(k), *strides(v), *strides(do),
            *dbias_strides, *range_arguments(ranges), batch, q_tiles, k_tiles, *size_arguments(inputs),
            *score_arguments(inputs, params), *dropout_arguments(params), *tables,
        ),
        shared=config.shared_bytes(padded_dim(head_dim), padded_dim(value_dim)), device=q.device,
    )  # fmt: skip
    return dk, dv, dbias, slope_sums


def _postprocess(inputs: AttentionInputs, dq_sum: Tensor, params: AttentionParams, config: BackwardConfig) -> Tensor:
    """dq from its float32 sum."""
    q = inputs.q
    batch, seqlen_q, heads, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = dq_sum.shape[2] // config.block_m
    dim = padded_dim(head_dim)
    name = f"attention_backward_postprocess<{TYPES[q.dtype]}, {dim}, {config.block_m}, {config.num_warps}>"
    _process_kernel(name, _POSTPROCESS_ARGUMENTS, inputs).launch(
        tiles * heads * batch, config.num_warps * 32,
        (dq_sum, dq, params.scale, heads, seqlen_q, head_dim, tiles),
        shared=2 * config.block_m * dim, device=q.device,
    )  # fmt: skip
    return dq


def _process_kernel(name: str, arguments: str, inputs: AttentionInputs) -> Kernel:
    sinks = inputs.sinks
    sink_type = TYPES[inputs.q.dtype if sinks is None else sinks.dtype]
    macros = (("HAS_SINKS", sinks is not None), ("SINK_TYPE", sink_type))
    return module("backward_process", macros).kernel(name, arguments)


def _dslopes(slopes: Tensor, slope_sums: Tensor, stats: Tensor, dlse: Tensor | None, seqlen_q: int) -> Tensor:
    """The gradient of the slopes, -sum(dS distance).

    delta comes from an O that was rounded to 16 bit, and long distances would multiply its error. The sum of P dP is
    delta without that error: the difference is taken back.
    """
    ds_distance, ds, p, p_distance = slope_sums[..., :seqlen_q]
    delta = -stats[1, ..., :seqlen_q]
    error = delta - (ds + delta * p)
    if dlse is not None:
        error = error + dlse
    gradient = -(ds_distance + error * p_distance).sum(-1)  # [batch, heads]
    return (gradient.sum(0) if slopes.ndim == 1 else gradient).to(slopes.dtype)
