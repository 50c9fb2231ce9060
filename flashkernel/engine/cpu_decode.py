"""A decoding step on a CPU as one call: the kernels of all layers, prepared for a batch size.

The calls read and write buffers at fixed addresses. A step copies its embeddings, slots, lengths, page table and rotary
tables into them, and runs the sequence. The small copies are numpy's, which cost the host less than torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel import Frequencies, Weight
from flashkernel.blocks import decode_cpp, linear_cpp
from flashkernel.blocks.decode_cpp import AppendCall, AttendCall, CallSequence
from flashkernel.blocks.linear_cpp import RowReader
from flashkernel.blocks.rope import token_tables
from flashkernel.core import cpp

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashkernel.engine.forward_pass import TorchForwardPass
    from flashkernel.engine.transformer import LayerWeights, Transformer
    from flashkernel.kvcache import LayerPages

MAX_BATCH = 16  # sequences; with more the host is a small part of a step


def compile_kernels(model: Transformer, progress: Callable[[str, int, int], None]) -> None:
    """Compiles the C++ kernels that a model's steps call, or loads them from the cache on disk.

    Args:
        model: A model on a CPU.
        progress: Called as `progress(what, done, total)`.
    """
    if cpp.can_compile() is not None:
        return  # torch computes what they would
    sources = [decode_cpp.SOURCE]
    if any(_has_formats(x) for part in (model.weights, *model.layers) for x in vars(part).values()):
        sources += [linear_cpp.SOURCE, decode_cpp.SEQUENCE_SOURCE]
    for done, source in enumerate(sources):
        progress("compiling", done, len(sources))
        cpp.library(source)
    progress("ready", len(sources), len(sources))


def _has_formats(x: Any) -> bool:
    """Whether this is a weight in a format of its own, or has one."""
    return any(map(_has_formats, x)) if isinstance(x, tuple) else isinstance(x, Weight)


class RotaryTable:
    """cos and sin of all positions up to the largest that was asked for, which doubles when it is exceeded.

    Args:
        frequencies: Of the rotary embedding.
    """

    def __init__(self, frequencies: Frequencies) -> None:
        self.frequencies = frequencies
        self._tables = [np.empty((0, frequencies.rotary_dim // 2), dtype=np.float32)] * 2

    def copy(self, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
        """Writes cos and sin of some positions [tokens] into arrays [tokens, rotary_dim / 2]."""
        last = int(positions.max())
        if last >= len(self._tables[0]):
            every = torch.arange(max(512, 1 << last.bit_length()), device="cpu")
            found = token_tables(
                every[None], None, None, every, self.frequencies, self.frequencies.rotary_dim, interleaved=False
            )  # [1, positions, 1, rotary_dim / 2]
            self._tables = [table[0, :, 0].float().numpy() for table in found]
        for table, to in zip(self._tables, (cos, sin)):
            np.take(table, positions, axis=0, out=to)


class DecodeProgram:
    """A model for one token of each sequence of a batch, from token ids to logits.

    Args:
        run: A pass over such a batch.
        model: The model.
        pages: KV pages of each layer; they must live as long as the program is called.
    """

    def __init__(self, run: TorchForwardPass, model: Transformer, pages: list[LayerPages]) -> None:
        config, step = model.config, run.model_input.step
        batch, heads, kv_heads, dim = step.slots.shape[0], config.heads, config.kv_heads, config.head_dim
        options: dict[str, Any] = {"dtype": model.dtype}
        self.model, self.x = model, torch.empty((batch, config.hidden_size), **options)
        qkv = torch.empty((batch, heads + 2 * kv_heads, dim), **options)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
        rotated, o = torch.empty((batch, heads, dim), **options), torch.empty((batch, 1, heads, dim), **options)
        slots, lengths = (
            torch.empty(batch, dtype=torch.int64, device="cpu"),
            torch.empty(batch, dtype=torch.int32, device="cpu"),
        )
        longest = -(-config.max_position_embeddings // pages[0].k_pages.shape[1])
        page_table = torch.zeros((batch, max(longest, step.page_table.shape[1])), dtype=torch.int32, device="cpu")
        self._slots, self._lengths, self._page_table = slots.numpy(), lengths.numpy(), page_table.numpy()
        self._rotary = _rotary_table(run)
        width = 0 if config.frequencies is None else config.frequencies.rotary_dim
        tables = [torch.empty((batch, width // 2), device="cpu") for _ in range(2)] if width else []
        self._tables = [table.numpy() for table in tables]
        cos, sin = tables if tables else (None, None)
        kept: list[Any] = [qkv, rotated, o]
        calls: list[tuple[Any, int]] = []
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        for index, (layer, own) in enumerate(zip(model.layers, pages)):
            hidden = torch.empty((batch, layer.down_proj.shape[1]), **options)
            first, second, third, fourth = run.layer_calls(layer)
            append = AppendCall(slots, cos, sin, width)
            attend = AttendCall(lengths, page_table, scale)
            sinks = None if layer.sinks is None else layer.sinks.float()
            window = config.sliding_windows[index] or 0
            queries = rotated if tables else q
            calls += [
                first.bind(self.x, None, qkv.view(batch, -1)),
                append.bind(k, v, q if tables else None, own.k_pages, own.v_pages, rotated if tables else None),
                attend.bind(queries[:, None], own.k_pages, own.v_pages, o, window, sinks, own.k_scale, own.v_scale),
                second.bind(o.view(batch, -1), self.x, self.x),
                third.bind(self.x, None, hidden),
                fourth.bind(hidden, self.x, self.x),
            ]
            kept += [hidden, first, second, third, fourth, append, attend, sinks, layer]
        head, self._logits = run.head_call(model), None
        if head is not None:
            self._logits = torch.empty((batch, head.outputs), device="cpu")
            calls.append(head.bind(self.x, None, self._logits))
        self._embedding = _embedding_reader(model)
        self._kept, self._sequence = (*kept, head), CallSequence(calls)

    def __call__(self, run: TorchForwardPass) -> Tensor:
        """Logits [batch, vocab] in float32, which the next step may overwrite."""
        model_input = run.model_input
        step, ids = model_input.step, model_input.input_ids
        if self._embedding is not None:
            self._embedding(ids, self.x)
        else:
            self.x.copy_(self.model.embed(ids))
        self._slots[:] = step.slots.numpy()
        self._lengths[:] = step.lengths.numpy()
        self._page_table[:, : step.page_table.shape[1]] = step.page_table.numpy()
        if self._rotary is not None:
            self._rotary.copy(step.positions.numpy(), *self._tables)
        self._sequence()
        return self.model.logits(run, self.x) if self._logits is None else self._logits


def _rotary_table(run: TorchForwardPass) -> RotaryTable | None:
    """The table that all programs of a model share; None if positions are learned."""
    frequencies = run.config.frequencies
    if frequencies is not None and "rotary" not in run.calls:
        run.calls["rotary"] = RotaryTable(frequencies)
    return run.calls.get("rotary")


def _embedding_reader(model: Transformer) -> RowReader | None:
    """A call for the embeddings of tokens; None where the C++ kernels do not read the table."""
    table, plain = model.weights.embedding, model.config.embedding_scale == 1 and model.dtype == torch.float32
    if not isinstance(table, Weight) or not plain:
        return None
    x = torch.empty((1, table.shape[1]), device="cpu")
    return RowReader(table) if fk.explain(fk.linear, x, table).chosen == "cpp" else None


def fits(layer: LayerWeights) -> bool:
    """Whether a layer is six calls: no experts, no norms but the two in front of its halves."""
    others = (layer.router, layer.q_norm, layer.k_norm, layer.attention_post_norm, layer.mlp_post_norm)
    return all(one is None for one in others)
