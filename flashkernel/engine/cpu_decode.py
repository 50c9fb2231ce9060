"""A decoding step on a CPU as one call: the kernels of all layers, prepared for a batch size.

The calls read and write buffers at fixed addresses. A step copies its embeddings, slots, lengths, page table and rotary
tables into them, and runs the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashkernel.blocks.decode_cpp import AppendCall, AttendCall, CallSequence

if TYPE_CHECKING:
    from flashkernel.engine.forward_pass import TorchForwardPass
    from flashkernel.engine.transformer import LayerWeights, Transformer
    from flashkernel.kvcache import LayerPages

MAX_BATCH = 16  # sequences; with more the host is a small part of a step


class DecodeProgram:
    """All layers of a model for one token of each sequence of a batch.

    Args:
        run: A pass over such a batch.
        model: The model.
        pages: KV pages of each layer.
    """

    def __init__(self, run: TorchForwardPass, model: Transformer, pages: list[LayerPages]) -> None:
        config, step = model.config, run.model_input.step
        batch, heads, kv_heads, dim = step.slots.shape[0], config.heads, config.kv_heads, config.head_dim
        options: dict[str, Any] = {"dtype": model.dtype}
        self.x = torch.empty((batch, config.hidden_size), **options)
        qkv = torch.empty((batch, heads + 2 * kv_heads, dim), **options)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
        rotated, o = torch.empty((batch, heads, dim), **options), torch.empty((batch, 1, heads, dim), **options)
        self.slots, self.lengths = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.int32)
        longest = -(-config.max_position_embeddings // pages[0].k_pages.shape[1])
        self.page_table = torch.zeros((batch, max(longest, step.page_table.shape[1])), dtype=torch.int32)
        self.tables = [torch.empty_like(run.rope[name][0]) for name in ("cos", "sin")] if run.rope else []
        cos, sin = self.tables if self.tables else (None, None)
        kept: list[Any] = [qkv, rotated, o, pages]
        calls: list[tuple[Any, int]] = []
        scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        for index, (layer, own) in enumerate(zip(model.layers, pages)):
            hidden = torch.empty((batch, layer.down_proj.shape[1]), **options)
            first, second, third, fourth = run.layer_calls(layer)
            append = AppendCall(self.slots, cos, sin, run.rope.get("rotary_dim", 0))
            attend = AttendCall(self.lengths, self.page_table, scale)
            sinks = None if layer.sinks is None else layer.sinks.float()
            window = config.sliding_windows[index] or 0
            queries = rotated if self.tables else q
            calls += [
                first.bind(self.x, None, qkv.view(batch, -1)),
                append.bind(k, v, q if self.tables else None, own.k_pages, own.v_pages,
                            rotated if self.tables else None),
                attend.bind(queries[:, None], own.k_pages, own.v_pages, o, window, sinks, own.k_scale, own.v_scale),
                second.bind(o.view(batch, -1), self.x, self.x),
                third.bind(self.x, None, hidden),
                fourth.bind(hidden, self.x, self.x),
            ]  # fmt: skip
            kept += [hidden, first, second, third, fourth, append, attend, sinks, layer]
        self._kept, self._sequence = kept, CallSequence(calls)

    def __call__(self, run: TorchForwardPass, x: Tensor) -> Tensor:
        """Hidden states [batch, hidden] after the last layer, in a buffer that the next step overwrites."""
        step = run.model_input.step
        self.x.copy_(x)
        self.slots.copy_(step.slots)
        self.lengths.copy_(step.lengths)
        self.page_table[:, : step.page_table.shape[1]].copy_(step.page_table)
        for table, name in zip(self.tables, ("cos", "sin")):
            table.copy_(run.rope[name][0])
        self._sequence()
        return self.x


def fits(layer: LayerWeights) -> bool:
    """Whether a layer is six calls: no experts, no norms but the two in front of its halves."""
    others = (layer.router, layer.q_norm, layer.k_norm, layer.attention_post_norm, layer.mlp_post_norm)
    return all(one is None for one in others)
