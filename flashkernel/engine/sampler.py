"""The sampler: penalties, temperature, top-k, top-p, min-p and one sample, for a whole batch on the device.

The host has each request's parameters and one uniform random number for it, and says which of these steps a batch
needs (`SamplingMetadata`); only the tokens go back to it. A sample is the inverse of the cumulative distribution at the
uniform number, which follows from the request's seed and the token's index. So it depends neither on the batch nor on
the state of the device's generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.engine.sampling_params import SamplingParams

_FLOAT_PARAMS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
FIELDS = {"top_k": torch.int64, "uniform": torch.float32, **dict.fromkeys(_FLOAT_PARAMS, torch.float32)}
_RANDOM, _TOP_P, _TOP_K, _NO_TOP_K, _PENALTIES = 1, 2, 4, 8, 16
INVALID_TOKEN = -1  # in place of a token whose logits are NaN or infinite
TOP_K_SIZES = (64, 1024)  # sizes of `topk` that are computed instead of a sort of the vocabulary


@dataclass(frozen=True)
class SamplingMetadata:
    """Which sampling steps a batch needs; a CUDA graph is captured for each."""

    random: bool = False  # some sequence has temperature > 0
    truncated: bool = False  # some random sequence has top_k, top_p or min_p
    max_top_k: int = 0  # all truncated sequences have a top_k up to this; 0: the whole vocabulary is sorted
    penalties: bool = False
    num_logprobs: int | None = None


class SamplerOutput(NamedTuple):
    """Sampled tokens, and log probabilities if the batch needs them."""

    token_ids: Tensor  # [batch]; INVALID_TOKEN for a row whose logits have no finite maximum
    logprobs: Tensor | None  # [batch]
    top_logprobs: Tensor | None  # [batch, num_logprobs]
    top_token_ids: Tensor | None  # [batch, num_logprobs]


class SamplingState:
    """Sampling parameters of each row of the KV cache, in arrays; a batch is a selection of rows."""

    def __init__(self, rows: int) -> None:
        self._values = {name: np.zeros(rows, dtype=np.float32) for name in _FLOAT_PARAMS}
        self._values["top_k"] = np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._needs = np.zeros(rows, dtype=np.int64)
        self._logprobs = np.full(rows, -1, dtype=np.int64)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        """Sets the parameters of a row."""
        for name, values in self._values.items():
            values[row] = getattr(params, name)
        random = params.temperature > 0
        needs = _RANDOM * random + _PENALTIES * params.has_penalties
        if random:
            needs |= _TOP_P * (params.top_p < 1 or params.min_p > 0) | _TOP_K * (params.top_k > 0)
            needs |= _NO_TOP_K * (params.top_k == 0)
        self._needs[row] = needs
        self._seeds[row] = seed % 2**64
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def metadata(self, rows: np.ndarray) -> SamplingMetadata:
        """What a batch of these rows needs."""
        needs = int(np.bitwise_or.reduce(self._needs[rows])) if rows.size else 0
        num_logprobs = int(self._logprobs[rows].max()) if rows.size else -1
        max_top_k = 0
        if needs & _TOP_K and not needs & _NO_TOP_K:
            largest = int(self._values["top_k"][rows].max())
            max_top_k = next((size for size in TOP_K_SIZES if largest <= size), 0)
        return SamplingMetadata(
            random=bool(needs & _RANDOM),
            truncated=bool(needs & (_TOP_P | _TOP_K)),
            max_top_k=max_top_k,
            penalties=bool(needs & _PENALTIES),
            num_logprobs=None if num_logprobs < 0 else num_logprobs,
        )

    def write(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray, token_indices: np.ndarray) -> None:
        """Writes a batch's parameters, and the uniform numbers of its tokens, into host buffers."""
        for name, values in self._values.items():
            arrays[name][: rows.size] = values[rows]
        arrays["uniform"][: rows.size] = uniform(self._seeds[rows], token_indices)


class TokenCounts:
    """For penalties: how often each row's output has each token, and which tokens its prompt has."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((rows, vocab_size), dtype=torch.bool, device=device)

    def set(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Sets the tokens of a row."""
        device = self.output.device
        self.output[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=self.output.shape[1]).to(
            device, torch.int32
        )
        seen = torch.zeros(self.prompt.shape[1], dtype=torch.bool)
        seen[torch.tensor(prompt, dtype=torch.int64)] = True
        self.prompt[row] = seen.to(device)


def uniform(seeds: np.ndarray, token_indices: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) for each (seed, token index): 24 bits of a hash of both (splitmix64's mixing, twice)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds.astype(np.uint64)) + token_indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((mixed >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits: Tensor,
    params: Mapping[str, Tensor],
    metadata: SamplingMetadata,
    rows: Tensor,
    counts: TokenCounts | None = None,
) -> SamplerOutput:
    """Samples a token for each row.

    Args:
        logits: float32 [batch, vocab].
        params: The `FIELDS`, [batch] each.
        metadata: Which steps the batch needs.
        rows: int64 [batch], rows of `counts`.
        counts: Needed for penalties; counts the sampled tokens.

    Returns:
        Tokens, and log probabilities of the unchanged logits if `metadata` asks for them.
    """
    raw = logits
    if metadata.penalties:
        assert counts is not None
        logits = _apply_penalties(logits, params, counts, rows)
    token_ids = fk.argmax(logits, invalid=INVALID_TOKEN)
    if metadata.random:
        temperature = params["temperature"]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        token_ids = torch.where(
            (temperature > 0) & (token_ids >= 0), _random_sample(scaled, params, metadata), token_ids
        )
    if metadata.penalties:
        assert counts is not None
        flat = rows * counts.output.shape[1] + token_ids.clamp(min=0)
        counts.output.view(-1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids, None, None, None)
    logprobs = torch.log_softmax(raw, -1)
    top = torch.topk(logprobs, metadata.num_logprobs, -1)
    chosen = logprobs.gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
    return SamplerOutput(token_ids, chosen, top.values, top.indices)


def _apply_penalties(logits: Tensor, params: Mapping[str, Tensor], counts: TokenCounts, rows: Tensor) -> Tensor:
    count = counts.output[rows]  # [batch, vocab]
    seen = counts.prompt[rows] | (count > 0)
    factor = params["repetition_penalty"][:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    frequency = params["frequency_penalty"][:, None] * count
    return logits - frequency - params["presence_penalty"][:, None] * (count > 0)


def _random_sample(scaled: Tensor, params: Mapping[str, Tensor], metadata: SamplingMetadata) -> Tensor:
    """One token of each row of logits / temperature.

    Probabilities are cumulated in the vocabulary's order whether or not tokens are left out, so that a row's sample
    does not depend on what other rows ask for.
    """
    probs = torch.softmax(scaled, -1)
    if metadata.truncated:
        probs = probs * _truncation_mask(scaled, params, metadata)
    return _inverse_cdf(probs.cumsum(-1), params["uniform"])


def _truncation_mask(scaled: Tensor, params: Mapping[str, Tensor], metadata: SamplingMetadata) -> Tensor:
    """Tokens that top-k, top-p and min-p keep, applied in this order; bool [batch, vocab]."""
    if metadata.max_top_k and metadata.max_top_k < scaled.shape[1]:
        values, order = torch.topk(scaled, metadata.max_top_k, -1)
    else:
        values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    top_k, top_p = params["top_k"][:, None], params["top_p"][:, None]
    values = values.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probs = torch.softmax(values, -1)
    before = probs.cumsum(-1) - probs  # sum over all more likely tokens
    keep = ((before < top_p) | (top_p >= 1)) & (probs >= params["min_p"][:, None] * probs[:, :1])
    keep = (keep & (probs > 0)) | (rank == 0)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, order, keep)


def _inverse_cdf(cdf: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds uniform * total; never one with probability zero."""
    total = cdf[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product that rounds up to the total would exceed all
    target = torch.minimum(uniform[:, None] * total, below)
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
