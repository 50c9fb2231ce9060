"""Attention backward on Hopper: a persistent kernel with a producer warp and two or three consumer warpgroups.

A program takes one work tile after another, in the order of its tile schedule: a tile of keys of one kv head. It
iterates over the blocks of queries that see them, of all query heads of the kv head:

    S^T = K Q^T,  dP^T = V dO^T,  P^T = exp(S^T - LSE),  dS^T = P^T (dP^T - delta)
    dV += P^T dO,  dK += dS^T Q,  dQ += dS K

The producer warp loads tiles by TMA and stores dK and dV (backward_producer.py). The consumers of heads up to 128 wide
are in backward_mainloop.py, those of wider heads (TRAITS.WIDE) in backward_wide_mainloop.py.
"""

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core.gluon import gl, gluon, synchronize
from flashkernel.ops.attention.hopper.backward_common import ConsumerArgs, Descriptors, allocate_buffers
from flashkernel.ops.attention.hopper.backward_mainloop import allocate_exchange, consume, consume_dq
from flashkernel.ops.attention.hopper.backward_producer import ProducerArgs, produce
from flashkernel.ops.attention.hopper.backward_wide_mainloop import allocate_wide_exchange, consume_dk, consume_dv
from flashkernel.ops.attention.hopper.pipeline import BlockTables, program_work_tiles
from flashkernel.ops.attention.hopper.softmax import ScoreParams

# Whether these are multiples of 16 makes no difference here, and would only compile the kernel again. Triton compiles
# for it nevertheless inside NamedTuples, so the kernel takes them as arguments of their own.
SIZES = (
    "max_ranges", "max_loads", "batch_stride", "head_stride", "max_work_tiles", "batch_kv_heads", "kv_heads",
    "q_blocks", "seqlen_q", "seqlen_k",
)  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=SIZES)
def attention_backward(
    dq_accum, q, do, k, v, lse_delta, dk, dv, mask_tables, tables, max_ranges, max_loads, batch_stride, head_stride,
    max_work_tiles, batch_kv_heads, kv_heads, group_size, q_blocks, seqlen_q, seqlen_k, scales,
    MASK: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """dK, dV, and dQ / softmax_scale in dq_accum (None: dQ is computed elsewhere). Tensors from q to dv are TMA
    descriptors, which Gluon takes as arguments of their own; tables are `TileTables`, scales `Scales`."""
    descriptors = Descriptors(q, do, k, v, lse_delta, dk, dv)
    buffers = allocate_buffers(descriptors, TRAITS)
    if TRAITS.WIDE:
        barriers, exchange = allocate_wide_exchange(descriptors, buffers, TRAITS)
    else:
        barriers, exchange = allocate_exchange(dq_accum, buffers, TRAITS)
    if TRAITS.PDL:
        pdl_enter()
    synchronize()  # else the compiler does so in the producer's loops, since these wait for the barriers
    work_tiles = program_work_tiles(tables.schedule, max_work_tiles, TRAITS.VARLEN)
    if TRAITS.VARLEN:
        loads = BlockTables(tables.schedule, tables.schedule, None, None, None)
        visits = loads
    else:
        loads = BlockTables(tables.loads, tables.load_counts, max_loads, batch_stride, head_stride)
        visits = BlockTables(tables.ranges, tables.range_counts, max_ranges, batch_stride, head_stride)
    scores = ScoreParams(seqlen_q, seqlen_k, scales.scale_log2, scales.softmax_scale, scales.softcap, mask_tables)
    heads = kv_heads * group_size
    delta_start = batch_kv_heads * group_size * q_blocks * TRAITS.BLOCK_M
    producer_args = ProducerArgs(
        descriptors, buffers, barriers, work_tiles, loads, heads, group_size, q_blocks, delta_start
    )  # fmt: skip
    consumer_args = ConsumerArgs(
        dq_accum, buffers, barriers, exchange, work_tiles, visits, heads, group_size, q_blocks, scores
    )  # fmt: skip
    if TRAITS.WIDE:
        gl.warp_specialize([
            (produce, (producer_args, TRAITS)),
            (consume_dv, (consumer_args, MASK, TRAITS)),
            (consume_dk, (consumer_args, TRAITS)),
        ], [4, 4], [240, 240])  # fmt: skip
    elif TRAITS.DQ_MODE == "dq_warpgroup":
        gl.warp_specialize([
            (produce, (producer_args, TRAITS)),
            (consume, (0, consumer_args, MASK, TRAITS)),
            (consume, (1, consumer_args, MASK, TRAITS)),
            (consume_dq, (consumer_args, TRAITS)),
        ], [4, 4, 4], [192, 192, 104])  # fmt: skip
    else:
        gl.warp_specialize([
            (produce, (producer_args, TRAITS)),
            (consume, (0, consumer_args, MASK, TRAITS)),
            (consume, (1, consumer_args, MASK, TRAITS)),
        ], [4, 4], [240, 240])  # fmt: skip
