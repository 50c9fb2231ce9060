"""Groups of kernel arguments: the launchers fill them in, the kernels read them by name."""

from typing import Any, NamedTuple


class CachePointers(NamedTuple):
    """The cache: k and v in [batch, capacity, kv_heads, dim] or [pages, page_size, kv_heads, dim], and their scales."""

    k: Any
    v: Any
    k_scale: Any  # None where the cache is not quantized
    v_scale: Any


class CacheStrides(NamedTuple):
    """Strides in elements: of a page (of a sequence, where nothing is paged), of a key and of a KV head."""

    k_page: Any
    k_row: Any
    k_head: Any
    v_page: Any
    v_row: Any
    v_head: Any
    scale_page: Any
    scale_row: Any
    page_table: Any  # of a sequence, in 16-bit words


class QueryStrides(NamedTuple):
    """Strides of q [batch, seqlen_q, heads, head_dim] or, packed, [tokens, heads, head_dim]."""

    batch: Any  # None where queries are packed
    query: Any
    head: Any


class Output(NamedTuple):
    """o [batch, seqlen_q, heads, value_dim] and lse [batch, heads, seqlen_q]; None where there is none."""

    o: Any
    lse: Any


class Partials(NamedTuple):
    """What programs leave for the combine kernel: two slots per program, each a part of one work tile."""

    o: Any  # [slots, BLOCK_M, BLOCK_DV], unnormalized
    stats: Any  # [slots, 2, BLOCK_M]: row max, row sum


class Sizes(NamedTuple):
    """Sizes that the split schedule depends on."""

    batch: Any
    seqlen_q: Any
    heads: Any
    group_size: Any  # query heads per KV head
    head_groups: Any  # groups of TILE_KV_HEADS KV heads
    row_tiles: Any  # tiles of BLOCK_M rows that a sequence has for each of them
    capacity: Any  # keys that a sequence can have


class Window(NamedTuple):
    """Keys that a query sees, itself included (0: all), and the first keys that stay visible beside them."""

    size: Any
    sink_tokens: Any


class ScheduleConfig(NamedTuple):
    """What the split schedule is compiled for."""

    PREFIX_PASS: bool  # over the keys that all sequences share: all sequences are one
    PREFIX: int  # a shared prefix: 0 there is none, 1 its length is an argument, 2 its length is in device memory
    WINDOWED: bool
    BATCH: int  # sequences, padded to a power of two
    BLOCK_M: int
    BLOCK_N: int
    TILE_KV_HEADS: int  # KV heads in a tile


class AttendConfig(NamedTuple):
    """What the loop over K blocks is compiled for."""

    WINDOWED: bool
    SOFTCAP: bool
    HAS_SCALES: bool
    PAGE_SIZE: int  # 0: contiguous
    PRECISION: str
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    TILE_KV_HEADS: int
    NUM_STAGES: int


class OutputConfig(NamedTuple):
    """What the epilogue is compiled for."""

    HAS_SINKS: bool
    HAS_PREFIX: bool  # the output of a pass over the shared prefix is merged in
    VALUE_DIM: int
    BLOCK_DV: int
