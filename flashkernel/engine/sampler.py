"""The sampler: settings and state of each row of the KV cache, and one launch of `flashkernel.sample` for a batch.

The host has each request's settings in arrays; a step copies those of its rows. What is large or changes rarely (counts
of tokens for penalties, logit biases, masks of allowed tokens) is on the device, by row. A batch of any mixture of
settings runs the same kernels on the same tensors, so one CUDA graph serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.decode_cpp import greedy
from flashkernel.core import cpp
from flashkernel.core.dispatch import is_scoped
from flashkernel.engine.sampling_params import MAX_BIAS_ENTRIES, SamplingParams

_FLOAT_PARAMS = ("temperature", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NO_PENALTY = (1.0, 0.0, 0.0)
# Fields that the host writes for every step: dtype, and entries of a row.
FIELDS: dict[str, tuple[torch.dtype, int]] = {
    "seeds": (torch.int64, 1), "positions": (torch.int64, 1), "top_k": (torch.int32, 1),
    **dict.fromkeys(_FLOAT_PARAMS, (torch.float32, 1)), "penalties": (torch.float32, 3),
}  # fmt: skip
LOWEST = -1e30  # logits at or below it have probability 0
INVALID_TOKEN = -1  # in place of a token whose logits are NaN or infinite
IN_PROMPT = 1 << 30  # flag in the counts of tokens
NEVER_ENDS = 2**31 - 1


class SamplerOutput(NamedTuple):
    """Sampled tokens, and the logits they were sampled from."""

    token_ids: Tensor  # [batch]; INVALID_TOKEN for a row whose logits have no finite maximum
    logits: Tensor  # [batch, vocab]


class Logprobs(NamedTuple):
    """Log probabilities of the rows that ask for them."""

    chosen: Tensor  # [rows]
    top: Tensor  # [rows, k]
    top_token_ids: Tensor  # [rows, k]
    rank: Tensor  # [rows]; 1 is the most likely token


class RowSamplingParams:
    """Sampling parameters of each row of the KV cache, in arrays on the host; a batch is a selection of rows."""

    def __init__(self, rows: int) -> None:
        self._values = {name: np.zeros(rows, dtype=np.float32) for name in _FLOAT_PARAMS}
        self._values["top_k"] = np.zeros(rows, dtype=np.int32)
        self._values["penalties"] = np.tile(np.array(_NO_PENALTY, dtype=np.float32), (rows, 1))
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self.num_logprobs = np.full(rows, -1, dtype=np.int64)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        """Sets the parameters of a row."""
        for name in (*_FLOAT_PARAMS, "top_k"):
            self._values[name][row] = min(getattr(params, name), NEVER_ENDS)
        self._values["penalties"][row] = [getattr(params, name) for name in _PENALTIES]
        self._seeds[row] = seed % 2**64
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def write(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray, token_indices: np.ndarray, padded: int) -> None:
        """Writes a batch's parameters into host buffers; `token_indices` are the positions of its tokens.

        Padding up to `padded` rows is greedy.
        """
        count = rows.size
        for name, values in self._values.items():
            width = FIELDS[name][1]
            target = arrays[name][: padded * width].reshape(-1, width)
            target[:count] = values[rows].reshape(count, width)
            target[count:] = _NO_PENALTY if name == "penalties" else 0
        arrays["seeds"][:count] = self._seeds[rows].view(np.int64)
        arrays["positions"][:count] = token_indices
        arrays["positions"][count:padded] = 0


class SamplingStates:
    """What changes logits before sampling, by row, on the device.

    On a GPU all of it is there from the start, since graphs read it; on a CPU it is made when a request needs it.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows, self.vocab_size, self.device = rows, vocab_size, device
        self.tensors: dict[str, Tensor] = {}
        self._used: set[int] = set()  # rows that are not in their first state
        if device.type != "cpu":
            for name in ("token_counts", "bias_ids", "allowed"):
                self._need(name)

    def _need(self, name: str) -> Tensor:
        """The tensor of this name; it and its companions are made if they are not there."""
        if name not in self.tensors:
            rows, device = self.rows, self.device
            if name == "token_counts":
                self.tensors[name] = torch.zeros((rows, self.vocab_size), dtype=torch.int32, device=device)
            elif name == "bias_ids":
                shape = (rows, MAX_BIAS_ENTRIES)
                self.tensors[name] = torch.full(shape, -1, dtype=torch.int32, device=device)
                self.tensors["bias_values"] = torch.zeros(shape, device=device)
                self.tensors["bias_until"] = torch.full(shape, NEVER_ENDS, dtype=torch.int32, device=device)
            else:
                words = -(-self.vocab_size // 32)
                self.tensors["allowed"] = torch.zeros((rows, words), dtype=torch.int32, device=device)
                self.tensors["restricted"] = torch.zeros(rows, dtype=torch.int32, device=device)
        return self.tensors[name]

    def set(
        self, row: int, params: SamplingParams, stop_ids: Sequence[int], prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Sets the state of a row for a request that has these tokens; `stop_ids` are banned up to `min_tokens`."""
        entries = [(token, value, NEVER_ENDS) for token, value in params.logit_bias]
        if params.min_tokens:
            until = min(params.min_tokens, NEVER_ENDS)
            entries += [(token, -torch.inf, until) for token in stop_ids if token < self.vocab_size]
        plain = not entries and not params.has_penalties and params.structured_outputs is None
        if row in self._used:
            self._reset(row)
        if plain:
            return
        self._used.add(row)
        if params.has_penalties:
            number = dict.fromkeys(prompt, IN_PROMPT)
            for token in output:
                number[token] = number.get(token, 0) + 1
            counts = self._need("token_counts")[row]
            counts.zero_()  # tokens of sequences without penalties are counted as well
            ids = self.to_device(np.fromiter(number.keys(), dtype=np.int64))
            counts[ids] = self.to_device(np.fromiter(number.values(), dtype=np.int32))
        if entries:
            self._need("bias_ids")
            kinds = {"bias_ids": np.int32, "bias_values": np.float32, "bias_until": np.int32}
            for column, (name, dtype) in zip(zip(*entries), kinds.items()):
                self.tensors[name][row, : len(column)] = self.to_device(np.array(column, dtype=dtype))

    def set_allowed(self, rows: Sequence[int], words: Sequence[np.ndarray]) -> None:
        """Sets the tokens that may be sampled next in `rows`: bit t % 32 of word t // 32; words int32, for each row."""
        indices = self.to_device(np.array(rows, dtype=np.int64))
        self._need("allowed").index_copy_(0, indices, self.to_device(np.stack(words)))
        self.tensors["restricted"].index_fill_(0, indices, 1)

    def _reset(self, row: int) -> None:
        self._used.discard(row)
        for name, value in (("bias_ids", -1), ("restricted", 0)):
            if name in self.tensors:
                self.tensors[name][row] = value

    def to_device(self, values: np.ndarray) -> Tensor:
        """Copied without waiting for the device: from pinned memory."""
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def sample(logits: Tensor, settings: Mapping[str, Tensor], states: SamplingStates, rows: Tensor) -> SamplerOutput:
    """Samples a token for each row, and counts it where penalties need that.

    Args:
        logits: float32 [batch, vocab].
        settings: The `FIELDS`, [batch] each; penalties [batch, 3].
        states: State of every row of the KV cache.
        rows: int64 [batch], the rows of the batch.

    Returns:
        Tokens and logits.
    """
    if _takes_the_largest(logits, settings, states):
        return SamplerOutput(greedy(logits, LOWEST), logits)
    given: dict[str, Any] = dict(states.tensors)
    given.update({name: x for name, x in settings.items() if name != "penalties" or "token_counts" in given})
    if states.tensors:
        given["state_rows"] = rows
    token_ids = fk.sample(logits, given.pop("seeds"), given.pop("positions"), **given)
    counts = states.tensors.get("token_counts")
    if counts is not None:
        flat = rows * counts.shape[1] + token_ids.clamp(min=0)
        counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return SamplerOutput(token_ids, logits)


def _takes_the_largest(logits: Tensor, settings: Mapping[str, Tensor], states: SamplingStates) -> bool:
    """Whether a C++ kernel on the CPU gives the tokens, without the checks and the dispatch of `flashkernel.sample`."""
    plain = logits.device.type == "cpu" and not states.tensors and not is_scoped() and cpp.can_compile() is None
    return plain and not any(settings["temperature"].tolist())


def logprobs_of(output: SamplerOutput, indices: Tensor, count: int, token_ids: Tensor | None = None) -> Logprobs:
    """Log probabilities of the unchanged logits, of the batch's rows `indices`, with the `count` most likely tokens.

    They are those of `token_ids`, int64 [rows]; by default of the tokens that were sampled.
    """
    logprobs = torch.log_softmax(output.logits[indices], -1)
    top = torch.topk(logprobs, count, -1)
    token_ids = output.token_ids[indices].clamp(min=0) if token_ids is None else token_ids
    chosen = logprobs.gather(1, token_ids[:, None])
    return Logprobs(chosen[:, 0], top.values, top.indices, 1 + (logprobs > chosen).sum(-1))
