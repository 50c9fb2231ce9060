"""Groups of kernel arguments.

Triton takes a NamedTuple as one argument, and kernels read its fields by name. A field that is None is compiled in, so
`if x is not None` costs nothing in a kernel. Tensor descriptors stay arguments of their own: Triton 3.6 looks for them
in no tuple. So do the tables of masks and score functions, which are tuples already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashkernel.blocks.dropout import seed_word, threshold
from flashkernel.blocks.tile_ranges import TileRanges
from flashkernel.ops.attention.params import AttentionParams


class Sizes(NamedTuple):
    heads: int  # of queries
    group_size: int  # query heads per key/value head
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Sizes:
        return cls(q.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1])


class Strides(NamedTuple):
    """Of a (batch, seqlen, heads, head_dim) tensor, in elements; its last stride is 1."""

    batch: int
    seq: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Strides:
        return cls(*x.stride()[:3])


class Bias(NamedTuple):
    """A bias, or its gradient, with strides that are 0 along the dims it is broadcast along.

    The gradient's strides along queries and keys are None there: sums are added, not elements one by one.
    """

    tensor: Any
    batch: int = 0
    head: int = 0
    q: int | None = 0
    k: int | None = 0

    @classmethod
    def of(cls, bias: Tensor | None) -> Bias:
        if bias is None:
            return cls(None)
        return cls(bias, *(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride())))

    @classmethod
    def gradient_of(cls, dbias: Tensor | None) -> Bias:
        found = cls.of(dbias)
        return found._replace(q=found.q or None, k=found.k or None)


class ScoreTerms(NamedTuple):
    """What becomes of q . k beside a bias and a score function; a softcap of None is none."""

    softmax_scale: float
    softcap: float | None
    alibi_slopes: Any
    slopes_batch: int  # stride between batches; 0 where all share the slopes

    @classmethod
    def of(cls, params: AttentionParams, alibi_slopes: Tensor | None) -> ScoreTerms:
        by_batch = alibi_slopes is not None and alibi_slopes.ndim == 2
        return cls(
            params.scale, params.softcap if params.softcap > 0 else None, alibi_slopes,
            alibi_slopes.stride(0) if alibi_slopes is not None and by_batch else 0,
        )  # fmt: skip


class Dropout(NamedTuple):
    """All fields are None without dropout. The seed is a scrambled word, or lies on the device, where it was drawn."""

    seed: int | None = None
    device_seed: Any = None
    threshold: int | None = None  # hashes below it are dropped
    scale: float | None = None  # 1 / (1 - probability)

    @classmethod
    def of(cls, params: AttentionParams) -> Dropout:
        if params.dropout == 0:
            return cls()
        limit, scale = threshold(params.dropout), 1.0 / (1.0 - params.dropout)
        if isinstance(params.seed, Tensor):
            return cls(None, params.seed, limit, scale)
        return cls(seed_word(params.seed), None, limit, scale)


class Ranges(NamedTuple):
    """The tiles that each work tile iterates over (blocks/tile_ranges.py)."""

    table: Tensor
    counts: Tensor
    batch_stride: int
    head_stride: int
    max_ranges: int

    @classmethod
    def of(cls, ranges: TileRanges) -> Ranges:
        return cls(ranges.table, ranges.count, *ranges.strides, ranges.max_ranges)


class Statistics(NamedTuple):
    """Of each query, float32 [batch, heads, seqlen_q]."""

    lse: Tensor
    delta: Tensor  # sum(o * do) - dlse; the queries' kernel writes it, the keys' kernel reads it
    dlse: Tensor | None = None


class Outputs(NamedTuple):
    """What the forward kernel writes."""

    o: Tensor  # [batch, seqlen_q, heads, value_dim]
    lse: Tensor  # float32 [batch, heads, seqlen_q]


class QueryGradients(NamedTuple):
    """What the queries' kernel writes."""

    dq: Tensor
    dsinks: Tensor | None  # float32 [batch, heads, tiles]
    dslopes: Tensor | None  # float32 [batch, heads, tiles]


class KeyGradients(NamedTuple):
    """What the keys' kernel writes."""

    dk: Tensor
    dv: Tensor


class AttentionTraits(NamedTuple):
    """What a kernel is compiled for, beside the functions of the mask and the scores."""

    PLAIN: bool  # scores are q . k times a positive scale, which the exponent takes (`exponent_scale`)
    PRECISION: str  # of float32 products
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int  # HEAD_DIM rounded up to a power of two; BLOCK_DV is that of VALUE_DIM
    BLOCK_DV: int
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    NUM_STAGES: int
    TMA: bool  # tiles are loaded by descriptors
    EVEN: bool  # queries and keys end with their tiles
