"""What the launchers of the CUDA C++ attention kernels share: macros, groups of arguments, the form tensors have."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.dropout import seed_word, threshold
from flashkernel.blocks.source_cuda import cuda_source, table_arguments, table_macros
from flashkernel.blocks.tile_ranges import TileRanges
from flashkernel.core.cuda import TYPES, Kernel, Module
from flashkernel.ops.attention.cuda.configs import padded_dim
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams

FOLDER = Path(__file__).parent

# Groups of kernel parameters, in the order of the functions below.
STRIDES = "int64, int32, int64"  # of a batch, a row and a head
RANGES = "pointer, pointer, int64, int64, int32"
SIZES = "int32, int32, int32, int32, int32, int32"
SCORES = "pointer, int64, int64, int64, int64, pointer, int64, float32, float32"
DROPOUT = "pointer, uint32, uint32, float32"


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of a batch, a row and a head."""
    return x.stride(0), x.stride(1), x.stride(2)


def range_arguments(ranges: TileRanges) -> tuple[Any, ...]:
    return ranges.table, ranges.count, *ranges.strides, ranges.max_ranges


def size_arguments(inputs: AttentionInputs) -> tuple[int, ...]:
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, kv_heads = q.shape[2], k.shape[2]
    return heads, heads // kv_heads, q.shape[1], k.shape[1], q.shape[3], v.shape[3]


def score_arguments(inputs: AttentionInputs, params: AttentionParams) -> tuple[Any, ...]:
    """The bias and its strides, 0 where it is broadcast; the slopes and their batch stride; scale and softcap."""
    bias, slopes = inputs.bias, inputs.alibi_slopes
    bias_strides: Iterable[int] = (0, 0, 0, 0)
    if bias is not None:
        bias_strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride()))
    slopes_batch = slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0
    return bias, *bias_strides, slopes, slopes_batch, params.scale, params.softcap


def dropout_arguments(params: AttentionParams) -> tuple[Any, ...]:
    """A seed on the device or a scrambled word, the threshold of a hash, and 1 / (1 - probability)."""
    drawn = params.seed if isinstance(params.seed, Tensor) else None
    word = 0 if drawn is not None else seed_word(int(params.seed))
    return drawn, word, threshold(params.dropout), 1.0 / (1.0 - params.dropout)


def has_extras(inputs: AttentionInputs, params: AttentionParams) -> bool:
    """Whether a score is more than scale * q . k, with a positive scale, under a mask of positions."""
    tables = params.mask is not None and len(params.mask.tables) > 0
    changed = inputs.bias is not None or inputs.alibi_slopes is not None or params.score is not None
    return tables or changed or params.softcap > 0 or params.dropout > 0 or params.scale <= 0


def kernel_for(
    name: str, arguments: str, inputs: AttentionInputs, params: AttentionParams, template: str, **more: bool
) -> tuple[Kernel, tuple[Any, ...]]:
    """The kernel attention_<name> for a call, and the tables of its mask and score function as last arguments.

    Mask and score function become part of the source: each has kernels of its own. `template` are the template
    arguments behind the type and the head widths, `more` are further macros.
    """
    mask = None if params.mask is None else params.mask.expression
    score_grad = None if params.score is None else ex.derivative(params.score, "score")
    tables: list[Tensor] = []
    for expression in (mask, params.score, score_grad):
        if expression is not None:
            tables += [table for table in ex.tables(expression) if not any(table is known for known in tables)]
    macros = {
        "HAS_BIAS": inputs.bias is not None, "HAS_ALIBI": inputs.alibi_slopes is not None,
        "HAS_SOFTCAP": params.softcap > 0, "HAS_SCORE": params.score is not None, "HAS_DROPOUT": params.dropout > 0,
        "HAS_SINKS": inputs.sinks is not None, "SCALE_FIRST": params.scale <= 0,
        "BIAS_TYPE": TYPES[inputs.q.dtype if inputs.bias is None else inputs.bias.dtype],
        "SINK_TYPE": TYPES[inputs.q.dtype if inputs.sinks is None else inputs.sinks.dtype],
        **table_macros(tables), **more,
    }  # fmt: skip
    if mask is not None:
        macros["MASK_EXPRESSION"] = cuda_source(mask, tables)
    if params.score is not None and score_grad is not None:
        macros["SCORE_EXPRESSION"] = f"static_cast<float>({cuda_source(params.score, tables)})"
        macros["SCORE_GRAD_EXPRESSION"] = f"static_cast<float>({cuda_source(score_grad, tables)})"
    values, kinds = table_arguments(tables)
    dims = f"{padded_dim(inputs.q.shape[3])}, {padded_dim(inputs.v.shape[3])}"
    instance = f"attention_{name}<{TYPES[inputs.q.dtype]}, {dims}, {template}>"
    return module(name, tuple(macros.items())).kernel(instance, arguments + kinds), values


@lru_cache(maxsize=1024)
def module(name: str, macros: tuple[tuple[str, Any], ...]) -> Module:
    return Module(FOLDER / f"{name}.cu", defines=dict(macros), include=CUDA_HEADERS)
