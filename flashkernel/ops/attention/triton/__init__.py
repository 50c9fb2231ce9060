"""Launchers of the Triton attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.tile_ranges import TileRanges, max_visible_keys, tile_ranges
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.attention.configs import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, AttentionConfig
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, InputGradients, OutputGradients
from flashkernel.ops.attention.triton.arguments import (
    AttentionTraits,
    Bias,
    Dropout,
    KeyGradients,
    Outputs,
    QueryGradients,
    Ranges,
    ScoreTerms,
    Sizes,
    Statistics,
    Strides,
)
from flashkernel.ops.attention.triton.backward_kernels import attention_backward_keys, attention_backward_queries
from flashkernel.ops.attention.triton.descriptors import tile_sources
from flashkernel.ops.attention.triton.forward_kernel import attention_forward

MAX_DIM_DK_DV = 128  # head sizes up to which one program holds both dk and dv in registers


def forward(inputs: AttentionInputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, seqlen_q, heads, value_dim) in q's dtype, lse (batch, heads, seqlen_q) in float32."""
    q, k, v, bias, sinks, alibi_slopes = inputs
    batch, seqlen_q, heads, _ = q.shape
    o = torch.empty((batch, seqlen_q, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    config = _config(FORWARD, inputs, params)
    ranges = _tile_ranges(inputs, params, config)
    functions = params.functions()
    sources, tma = tile_sources((q, config.block_m), (k, config.block_n), (v, config.block_n))
    launch(
        attention_forward, (tune.ceil_div(seqlen_q, config.block_m) * heads * batch,),
        *sources, Outputs(o, lse), sinks, Bias.of(bias), ScoreTerms.of(params, alibi_slopes), Dropout.of(params),
        Ranges.of(ranges), Sizes.of(q, k), Strides.of(q), Strides.of(k), Strides.of(v),
        functions.score_tables, functions.mask_tables,
        MASK=functions.mask, SCORE=functions.score, TRAITS=_traits(inputs, params, config, tma),
        num_warps=config.num_warps,
    )  # fmt: skip
    return o, lse


def backward(
    outputs: OutputGradients, inputs: AttentionInputs, params: AttentionParams, want_bias: bool
) -> InputGradients:
    """The gradients; those without their input, and a bias gradient not wanted, are None."""
    o, lse, do, dlse = outputs
    stats = Statistics(lse, torch.empty_like(lse), dlse)
    gradients, dbias = _backward_queries(do, inputs, o, stats, params, want_bias)
    dk, dv = _backward_keys(do, inputs, stats, params)
    _, dsinks, dslopes = gradients
    if inputs.sinks is not None and dsinks is not None:
        dsinks = dsinks.sum((0, 2)).to(inputs.sinks.dtype)  # [heads]
    if inputs.alibi_slopes is not None and dslopes is not None:
        dslopes = dslopes.sum(-1)  # [batch, heads]
        dslopes = (dslopes.sum(0) if inputs.alibi_slopes.ndim == 1 else dslopes).to(inputs.alibi_slopes.dtype)
    if inputs.bias is not None and dbias is not None:
        dbias = dbias.to(inputs.bias.dtype)
    return gradients.dq, dk, dv, dbias, dsinks, dslopes


def _backward_queries(
    do: Tensor, inputs: AttentionInputs, o: Tensor, stats: Statistics, params: AttentionParams, want_bias: bool
) -> tuple[QueryGradients, Tensor | None]:
    """(dq and of each tile the gradients of sinks and slopes, dbias); writes delta, which the keys' kernel reads."""
    q, k, v, bias, sinks, alibi_slopes = inputs
    batch, seqlen_q, heads, _ = q.shape
    config = _config(BACKWARD_QUERIES, inputs, params)
    ranges = _tile_ranges(inputs, params, config)
    functions = params.functions()
    tiles = tune.ceil_div(seqlen_q, config.block_m)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dbias = None
    if want_bias and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=q.device)
    dsinks, dslopes = (
        None if x is None else torch.empty((batch, heads, tiles), dtype=torch.float32, device=q.device)
        for x in (sinks, alibi_slopes)
    )
    gradients = QueryGradients(dq, dsinks, dslopes)
    sources, tma = tile_sources(
        (q, config.block_m), (k, config.block_n), (v, config.block_n), (do, config.block_m)
    )  # fmt: skip
    launch(
        attention_backward_queries, (tiles * heads * batch,),
        *sources, o, sinks, Bias.of(bias), Bias.gradient_of(dbias), stats, gradients,
        ScoreTerms.of(params, alibi_slopes), Dropout.of(params), Ranges.of(ranges), Sizes.of(q, k),
        Strides.of(q), Strides.of(k), Strides.of(v), Strides.of(do), functions.score_tables, functions.mask_tables,
        MASK=functions.mask, SCORE=functions.score, SCORE_GRAD=functions.score_grad,
        TRAITS=_traits(inputs, params, config, tma), num_warps=config.num_warps,
    )  # fmt: skip
    return gradients, dbias


def _backward_keys(do: Tensor, inputs: AttentionInputs, stats: Statistics, params: AttentionParams) -> KeyGradients:
    q, k, v, bias, _, alibi_slopes = inputs
    batch, seqlen_k, kv_heads, head_dim = k.shape
    gradients = KeyGradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v)))
    config = _config(BACKWARD_KEYS, inputs, params)
    ranges = _tile_ranges(inputs, params, config, transposed=True)
    functions = params.functions()
    sources, tma = tile_sources(
        (q, config.block_m), (k, config.block_n), (v, config.block_n), (do, config.block_m)
    )  # fmt: skip
    for want in ("kv",) if max(head_dim, v.shape[3]) <= MAX_DIM_DK_DV else ("k", "v"):
        launch(
            attention_backward_keys, (tune.ceil_div(seqlen_k, config.block_n) * kv_heads * batch,),
            *sources, Bias.of(bias), stats._replace(dlse=None), gradients, ScoreTerms.of(params, alibi_slopes),
            Dropout.of(params), Ranges.of(ranges), Sizes.of(q, k),
            Strides.of(q), Strides.of(k), Strides.of(v), Strides.of(do), functions.score_tables, functions.mask_tables,
            MASK=functions.mask, SCORE=functions.score, SCORE_GRAD=functions.score_grad,
            TRAITS=_traits(inputs, params, config, tma), WANT_K=want != "v", WANT_V=want != "k",
            num_warps=config.num_warps,
        )  # fmt: skip
    return gradients


def _config(tunable: tune.Tunable, inputs: AttentionInputs, params: AttentionParams) -> AttentionConfig:
    """The config of a kernel. `gathers`: a tensor is read pair by pair, a bias or the table of a mask or a score."""
    q, k, v = inputs.q, inputs.k, inputs.v
    masked = params.mask is not None and len(params.mask.tables) > 0
    scored = params.score is not None and len(ex.tables(params.score)) > 0
    shape = {
        "seqlen_q": q.shape[1], "seqlen_k": k.shape[1],
        "max_visible_keys": max_visible_keys(params.mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1]),
        "head_dim": q.shape[3], "value_dim": v.shape[3], "bytes": q.element_size(),
        "gathers": int(inputs.bias is not None or masked or scored),
    }  # fmt: skip
    return tune.pick(tunable, device.properties(q.device), shape)


def _tile_ranges(
    inputs: AttentionInputs, params: AttentionParams, config: AttentionConfig, transposed: bool = False
) -> TileRanges:
    batch, seqlen_q, heads, _ = inputs.q.shape
    sizes = (batch, heads, seqlen_q, inputs.k.shape[1], config.block_m, config.block_n)
    return tile_ranges(params.mask, *sizes, inputs.q.device, transposed)


def _traits(inputs: AttentionInputs, params: AttentionParams, config: AttentionConfig, tma: bool) -> AttentionTraits:
    q, k, v, bias, _, alibi_slopes = inputs
    changed = params.score is not None or params.softcap > 0 or bias is not None or alibi_slopes is not None
    precise = q.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return AttentionTraits(
        PLAIN=params.scale > 0 and not changed,
        PRECISION="ieee" if precise else "tf32",
        HEAD_DIM=q.shape[3],
        VALUE_DIM=v.shape[3],
        BLOCK_D=max(16, tune.power_of_2(q.shape[3])),
        BLOCK_DV=max(16, tune.power_of_2(v.shape[3])),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        TMA=tma,
        EVEN=q.shape[1] % config.block_m == 0 and k.shape[1] % config.block_n == 0,
    )
