"""Attention over a cache, writes into its pages and greedy sampling on a CPU, by the C++ kernels of blocks/cpp.

Each is few microseconds of arithmetic for one new token, so what matters is that a call is one call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import cpp

SOURCE = Path(__file__).parent / "cpp" / "decode.cpp"
SEQUENCE_SOURCE = SOURCE.with_name("steps.cpp")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Append(ctypes.Structure):
    """A write, as blocks/cpp/decode.cpp has it."""

    _fields_ = [
        *[(name, _POINTER) for name in ("k", "v", "q", "k_pages", "v_pages", "q_out", "cos", "sin", "slots")],
        *[(name, _LONG) for name in ("tokens", "heads", "kv_heads", "head_dim", "value_dim", "rotary_dim")],
        *[(name, _LONG) for name in ("page_size", "num_slots", "table_stride")],
        *[(f"{name}_strides", _LONG * 2) for name in ("k", "v", "q")],
        *[(f"{name}_page_strides", _LONG * 3) for name in ("k", "v")],
        *[(name, _INT) for name in ("dtype", "page_dtype", "interleaved", "threads")],
    ]


class _Attend(ctypes.Structure):
    """Attention, as blocks/cpp/attend.h has it."""

    _fields_ = [
        *[(name, _POINTER) for name in ("q", "k", "v", "k_scale", "v_scale", "sinks", "lengths", "page_table")],
        *[(name, _POINTER) for name in ("out", "lse", "partials", "finished")],
        *[(name, _LONG) for name in ("batch", "seqlen_q", "heads", "kv_heads", "head_dim", "value_dim", "page_size")],
        *[(name, _LONG) for name in ("capacity", "table_stride", "splits")],
        *[(f"{name}_strides", _LONG * 3) for name in ("q", "k", "v")],
        ("scale_strides", _LONG * 2),
        *[(name, _LONG) for name in ("window", "sink_tokens")],
        *[(name, _FLOAT) for name in ("scale", "softcap")],
        *[(name, _INT) for name in ("dtype", "cache_dtype", "threads", "padding")],
    ]


@cache
def _kernels() -> Any:
    found = cpp.library(SOURCE)
    for function in (found.append_kv, found.append_kv_team, found.attend, found.attend_team):
        function.argtypes, function.restype = [_POINTER], None
    found.greedy.argtypes, found.greedy.restype = [_POINTER, _LONG, _LONG, _LONG, _FLOAT, _POINTER], None
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def greedy(logits: Tensor, lowest: float) -> Tensor:
    """Returns int64 (rows,): the index of the largest logit of each row, the first of several.

    Args:
        logits: float32 (rows, vocab) with unit stride along its rows.
        lowest: The result is -1 for a row whose largest logit is NaN, infinite or at most this.
    """
    found = torch.empty(logits.shape[0], dtype=torch.int64, device="cpu")
    _kernels().greedy(logits.data_ptr(), *logits.shape, logits.stride(0), lowest, found.data_ptr())
    return found


class AppendCall:
    """Writes the keys and values of the same new tokens into the pages of one layer after the other.

    Args:
        slots: int64 (tokens,), contiguous.
        cos: float32 (tokens, rotary_dim / 2) with unit stride along its rows, or None: nothing is rotated.
        sin: The same.
        rotary_dim: Leading dims that are rotated.
        interleaved: Pairs are adjacent dims instead of the two halves of the rotated dims.
    """

    def __init__(
        self, slots: Tensor, cos: Tensor | None, sin: Tensor | None, rotary_dim: int, interleaved: bool = False
    ) -> None:
        self._run, self._team, self._kept = _kernels().append_kv, _kernels().append_kv_team, (slots, cos, sin)
        self._call = _Append(
            cos=_address(cos), sin=_address(sin), slots=slots.data_ptr(), tokens=slots.shape[0],
            rotary_dim=rotary_dim if cos is not None else 0, table_stride=0 if cos is None else cos.stride(0),
            interleaved=interleaved,
        )  # fmt: skip
        self._shape: Any = None
        self._pointer = ctypes.addressof(self._call)

    def __call__(self, k: Tensor, v: Tensor, q: Tensor | None, k_pages: Tensor, v_pages: Tensor) -> Tensor | None:
        """Returns the rotated q (tokens, heads, head_dim), or None without a q. Rows have unit strides."""
        rotated = None if q is None else torch.empty(q.shape, dtype=q.dtype, device="cpu")
        self.bind(k, v, q, k_pages, v_pages, rotated)
        self._run(self._pointer)
        return rotated

    def bind(
        self, k: Tensor, v: Tensor, q: Tensor | None, k_pages: Tensor, v_pages: Tensor, rotated: Tensor | None
    ) -> tuple[Any, int]:  # fmt: skip
        """Sets the tensors of a call; `rotated` is q's output.

        Returns:
            The function that all threads of a team call, and its argument.
        """
        call = self._call
        shape = (k.stride(), v.stride(), k.dtype, k_pages.shape, k_pages.stride(), v_pages.stride(), k_pages.dtype)
        if shape != self._shape:  # else the layer before had the same
            self._shape = shape
            self._set_shape(k, v, q, k_pages, v_pages)
        call.k, call.v, call.k_pages, call.v_pages = k.data_ptr(), v.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr()
        call.q, call.q_out, call.threads = _address(q), _address(rotated), torch.get_num_threads()
        return self._team, self._pointer

    def _set_shape(self, k: Tensor, v: Tensor, q: Tensor | None, k_pages: Tensor, v_pages: Tensor) -> None:
        call = self._call
        call.heads, call.kv_heads, call.head_dim, call.value_dim = 0, k.shape[1], k.shape[2], v.shape[2]
        call.page_size, call.num_slots = k_pages.shape[1], k_pages.shape[0] * k_pages.shape[1]
        call.k_strides[:], call.v_strides[:] = k.stride()[:2], v.stride()[:2]
        if q is not None:
            call.heads, call.q_strides[:] = q.shape[1], q.stride()[:2]
        call.k_page_strides[:], call.v_page_strides[:] = k_pages.stride()[:3], v_pages.stride()[:3]
        call.dtype, call.page_dtype = DTYPES[k.dtype], DTYPES[k_pages.dtype]


class AttendCall:
    """Attention of the queries of some sequences to their keys, in one layer after the other.

    Args:
        lengths: int32 (batch,), contiguous: the keys of each sequence.
        page_table: int32 (batch, max_pages) with unit stride along its rows; None: a contiguous cache.
        scale: What Q K^T is multiplied by.
        softcap: Scores are softcap * tanh(score / softcap); 0 is none.
        sink_tokens: The first keys that stay visible beside a window.
    """

    def __init__(
        self, lengths: Tensor, page_table: Tensor | None, scale: float, softcap: float = 0.0, sink_tokens: int = 0
    ) -> None:
        self._run, self._team, self._kept = _kernels().attend, _kernels().attend_team, (lengths, page_table)
        self._call = _Attend(
            lengths=lengths.data_ptr(), page_table=_address(page_table), batch=lengths.shape[0], scale=scale,
            softcap=softcap, sink_tokens=sink_tokens, table_stride=0 if page_table is None else page_table.stride(0),
        )  # fmt: skip
        self._pages = None if page_table is None else page_table.shape[1]
        self._shape: Any = None
        self._pointer = ctypes.addressof(self._call)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, sinks: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns o (batch, seqlen_q, heads, value_dim) of q (batch, seqlen_q, heads, head_dim).

        Args:
            q: The queries.
            k: (pages, page_size, kv_heads, head_dim), or (batch, capacity, kv_heads, head_dim).
            v: The same, (..., value_dim).
            window: Keys that a query sees, itself included; 0: all.
            sinks: float32 (heads,), contiguous, or None.
            k_scale: float32, contiguous, of a quantized cache.
            v_scale: The same.
            lse: float32 (batch, heads, seqlen_q), contiguous, which is written; None: it is not wanted.
        """
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="cpu")
        self.bind(q, k, v, out, window, sinks, k_scale, v_scale, lse)
        self._run(self._pointer)
        return out

    def bind(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int = 0, sinks: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, lse: Tensor | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        """Sets the tensors of a call; `out` is contiguous.

        Returns:
            The function that all threads of a team call, and its argument.
        """
        call = self._call
        threads = torch.get_num_threads()
        shape = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), v.shape, v.stride(), k.dtype, threads)
        if shape != self._shape:  # else the layer before had the same
            self._shape = shape
            self._set_shape(q, k, v, k_scale, threads)
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.k_scale, call.v_scale, call.sinks, call.lse = (_address(x) for x in (k_scale, v_scale, sinks, lse))
        call.window = window
        return self._team, self._pointer

    def _set_shape(self, q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, threads: int) -> None:
        call = self._call
        batch, call.seqlen_q, call.heads, call.head_dim = q.shape
        call.kv_heads, call.value_dim, call.page_size = k.shape[2], v.shape[3], k.shape[1]
        call.capacity = k.shape[1] * (1 if self._pages is None else self._pages)
        call.q_strides[:], call.k_strides[:], call.v_strides[:] = q.stride()[:3], k.stride()[:3], v.stride()[:3]
        if k_scale is not None:
            call.scale_strides[:] = k_scale.stride()[:2]
        call.dtype, call.cache_dtype, call.threads = DTYPES[q.dtype], CACHE_DTYPES[k.dtype], threads
        pairs = batch * call.kv_heads  # a task each, if that gives all threads the same work; else one for each thread
        call.splits = 1 if pairs % threads == 0 or pairs > 4 * threads else threads
        rows = call.seqlen_q * call.heads // call.kv_heads
        self._partials = torch.empty(pairs * call.splits * rows * (2 + call.value_dim), device="cpu")
        self._finished = torch.zeros(pairs, dtype=torch.int32, device="cpu")
        call.partials, call.finished = self._partials.data_ptr(), self._finished.data_ptr()


class CallSequence:
    """Calls of C++ kernels that run one after the other on one team of threads, in one call from Python.

    Args:
        calls: (function, argument) of each, as `bind` of LinearCall, AppendCall and AttendCall returns them. Their
            objects must live as long as the sequence.
    """

    def __init__(self, calls: list[tuple[Any, int]]) -> None:
        flat = [value for run, argument in calls for value in (ctypes.cast(run, _POINTER).value, argument)]
        self._steps, self._count = (_POINTER * len(flat))(*flat), len(calls)
        self._run = cpp.library(SEQUENCE_SOURCE).run_steps
        self._run.argtypes, self._run.restype = [_POINTER, _LONG, ctypes.c_int], None
        self._pointer, self._threads = ctypes.addressof(self._steps), torch.get_num_threads()

    def __call__(self) -> None:
        self._run(self._pointer, self._count, self._threads)
