"""The backward pass under a causal window in one kernel, in CUDA C++: which calls it serves, and the launch."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.mask import Mask
from flashkernel.core.cuda import TYPES, Module
from flashkernel.core.device import properties
from flashkernel.core.driver import TensorMap
from flashkernel.core.tune import ceil_div
from flashkernel.ops.attention.hopper.descriptors import tma_compatible
from flashkernel.ops.attention.params import AttentionParams

BLOCK = 64  # positions of a block
DIM = 64  # of heads
MAX_WINDOW = 2 * BLOCK + 1  # keys that a query sees, so that they lie in its own block and two before it
HALO = 2  # blocks that a thread block computes beyond its chunk
THREADS = 512
SHARED_BYTES = 182432  # K and V, Q and dO, dS, LSE and delta, mbarriers: window_backward.cu
_FOLDER = Path(__file__).parent
_ARGUMENTS = ", ".join(["tensor_map"] * 4 + ["pointer"] * 4 + ["int32"] * 7 + ["float32"])
_TMA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle


def served_window(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> int:
    """Returns how many keys a query sees, itself included, under the call's causal window; 0 where the kernel does not
    serve the call."""
    size = 0 if params.mask is None else _causal_window(params.mask)
    served = 0 < size <= MAX_WINDOW and q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3] == DIM
    return size if served and q.dtype in _TMA_TYPES and params.softcap == 0 and params.score is None else 0


def _causal_window(mask: Mask) -> int:
    form = mask.packed_form
    if form is None or form.ids is not None or form.left is None or form.right != 0:
        return 0
    return form.left + 1


@cache
def _module() -> Module:
    return Module(_FOLDER / "window_backward.cu", include=CUDA_HEADERS, specific=True)


@lru_cache(maxsize=256)
def chunk_blocks(blocks: int, batch_heads: int, sms: int) -> int:
    """Returns the blocks of a chunk: thread blocks fill the SMs in rounds, and each computes `HALO` blocks more."""

    def cost(chunk: int) -> int:
        rounds = ceil_div(ceil_div(blocks, chunk) * batch_heads, sms)
        return rounds * (chunk + HALO)

    return min(range(1, blocks + 1), key=lambda chunk: (cost(chunk), -chunk))


def launch(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_delta: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv), contiguous.

    Args:
        do: As q.
        q: (batch, seqlen, heads, 64), the last dim with stride 1.
        k: (batch, seqlen, kv_heads, 64).
        v: As k.
        lse_delta: float32 [2, batch, heads, padded], contiguous: -LSE log2(e) and -delta of a whole number of blocks.
        window: Keys that a query sees.
        scale: Of the scores.
    """
    batch, length, heads, _ = q.shape
    kv_heads, blocks = k.shape[2], ceil_div(length, BLOCK)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    chunk = chunk_blocks(blocks, batch * kv_heads, properties(q.device).sms)
    _module().kernel(f"attention_window_backward<{TYPES[q.dtype]}>", _ARGUMENTS).launch(
        ceil_div(blocks, chunk) * kv_heads * batch, THREADS,
        (
            *map(_tensor_map, (q, do, k, v)), lse_delta, dq, dk, dv, batch, kv_heads, heads // kv_heads, length,
            lse_delta.shape[3], window, chunk, scale,
        ),
        shared=SHARED_BYTES, programmatic=True,
    )  # fmt: skip
    return dq, dk, dv


def _tensor_map(x: Tensor) -> TensorMap:
    """Boxes of 64 positions of one head of x (batch, seqlen, heads, 64)."""
    x = tma_compatible(x)
    # TMA never follows the stride of a dim of size 1, but it must be a legal one.
    strides = [stride if size > 1 else DIM for size, stride in zip(x.shape, x.stride())]
    order = (1, 2, 0)  # positions, heads, batch entries
    return TensorMap(
        x, _TMA_TYPES[x.dtype], (DIM, *[x.shape[dim] for dim in order]),
        tuple([strides[dim] * x.element_size() for dim in order]), (DIM, BLOCK, 1, 1), _SWIZZLE_128B, nan_fill=False,
    )  # fmt: skip
