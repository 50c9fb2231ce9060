"""The rotary embedding in CUDA C++: which instance of the kernel in kernel.cu to launch, with which grid."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.rope import Rotation
from flashkernel.core import cuda
from flashkernel.core.arguments import unit_stride
from flashkernel.core.cuda import TYPES, Kernel, Module
from flashkernel.core.tune import ceil_div

FOLDER = Path(__file__).parent
MODULE = Module(FOLDER / "kernel.cu", include=CUDA_HEADERS)
MAX_THREADS, HEADS = 256, 4  # as in kernel.cu
MAX_BATCHES = 65535  # of a grid's second axis; the third takes the rest

_ARGUMENTS = ", ".join(["pointer"] * 8 + ["int64"] * 18 + ["int32"] * 6 + ["float32"] * 2 + ["bool"] * 2)


@cache
def kernel(heads: torch.dtype, table: torch.dtype, pairs: int, interleaved: bool) -> Kernel:
    """The instance for heads and tables of these dtypes, `pairs` pairs of dims a thread."""
    types = f"{TYPES[heads]}, {TYPES[table]}"
    return MODULE.kernel(f"rotate_heads<{types}, {pairs}, {str(interleaved).lower()}>", _ARGUMENTS)


def forward(q: Tensor, k: Tensor | None, rotation: Rotation, inverse: bool) -> tuple[Tensor, Tensor]:
    """(q, k) rotated, both contiguous; without a k, an empty tensor stands for it."""
    q, k = unit_stride(q), None if k is None else unit_stride(k)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(0 if k is None else k.shape, dtype=q.dtype, device=q.device)
    _launch((q, k), (q_out, None if k is None else k_out), rotation, inverse)
    return q_out, k_out


def forward_in_place(q: Tensor, k: Tensor | None, rotation: Rotation) -> None:
    """Rotates q and k where they are; each element is read and written by one thread."""
    _launch((q, k), (q, k), rotation, inverse=False)


_Pair = tuple[Tensor, Tensor | None]  # q and k


def _launch(heads: _Pair, outputs: _Pair, rotation: Rotation, inverse: bool) -> None:
    (q, k), (cos, sin, rates, positions, scaling, rotary, interleaved) = heads, rotation
    batch, seq, q_heads, head_dim = q.shape
    k_heads = 0 if k is None else k.shape[2]
    if q_heads + k_heads == 0:
        return
    if cos is not None and sin is not None:
        if cos.dtype not in TYPES:
            cos, sin = cos.float(), sin.float()
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
    pairs = _pairs_per_thread(heads, outputs, rotary, interleaved)
    block = _block(cuda.target(q.device).sms, batch, seq, q_heads + k_heads, ceil_div(rotary // 2, pairs))
    across = min(batch, MAX_BATCHES)
    table_strides = (0, 0, 0)
    if cos is not None:
        per_batch = cos.stride(0) if cos.ndim == 3 and cos.shape[0] > 1 else 0
        table_strides = (per_batch, cos.stride(-2), cos.stride(-1))
    position_strides = (0, 0)
    if positions is not None:
        per_batch = positions.stride(0) if positions.ndim == 2 and positions.shape[0] > 1 else 0
        position_strides = (per_batch, positions.stride(-1))
    strides = [step for x in (*heads, *outputs) for step in ((0, 0, 0) if x is None else x.stride()[:3])]
    chosen = kernel(q.dtype, torch.float32 if cos is None else cos.dtype, pairs, interleaved)
    chosen.launch(
        (ceil_div(seq, block[2]), across, ceil_div(batch, max(1, across))), block,
        (
            *heads, *outputs, cos, sin, rates, positions, *strides, *table_strides, *position_strides,
            0 if cos is None else cos.shape[-2], batch, seq, q_heads, k_heads, head_dim, rotary, scaling,
            -1.0 if inverse else 1.0, positions is not None and positions.dtype == torch.int64,
            rotary < head_dim and outputs[0] is not q,
        ),
        shared=8 * block[0] * pairs * block[2],
    )  # fmt: skip


def _block(sms: int, batch: int, seq: int, heads: int, columns: int) -> tuple[int, int, int]:
    """Threads along a head's columns, its heads and its tokens."""
    x, tokens = min(columns, 32), batch * seq
    # Few tokens: a head for each thread, so that all loads are under way at once. Many: HEADS heads for each.
    y = min(MAX_THREADS // x, heads if tokens < 4 * sms else ceil_div(heads, HEADS))
    return x, y, max(1, min(128 // (x * y), 8, seq, tokens // sms))


def _vector_pairs(dtype: torch.dtype, interleaved: bool) -> int:
    """Pairs of dims in a 16-byte access: in the half layout it holds one member of each pair, interleaved both."""
    return 16 // dtype.itemsize // (2 if interleaved else 1)


def _pairs_per_thread(heads: _Pair, outputs: _Pair, rotary: int, interleaved: bool) -> int:
    """A whole vector where every head is made of them, else 1."""
    pairs, count = _vector_pairs(heads[0].dtype, interleaved), 16 // heads[0].element_size()
    given = [x for x in (*heads, *outputs) if x is not None]
    if rotary // 2 % pairs or rotary % count or given[0].shape[3] % count:
        return 1
    for x in given:
        steps = [step for size, step in zip(x.shape[:3], x.stride()) if size > 1]
        if x.data_ptr() % 16 or any(step % count for step in steps):
            return 1
    return pairs
