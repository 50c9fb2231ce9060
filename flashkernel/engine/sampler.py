"""Choosing tokens for a whole batch on the device: penalties, temperature, top-k, top-p, min-p, and a draw.

The host knows each request's settings and one random number for it, and says what a batch needs (`Plan`); no value
goes back to it but the tokens. A draw is the inverse of the cumulated probabilities at a uniform number that follows
from the request's seed and the number of the token, so it depends neither on the batch nor on the device's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.engine.sampling import SamplingParams

_SETTINGS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
FIELDS = {"top_k": torch.int64, "uniform": torch.float32, **dict.fromkeys(_SETTINGS, torch.float32)}
_RANDOM, _TOP_P, _TOP_K, _UNTRIMMED, _PENALISED = 1, 2, 4, 8, 16
INVALID = -1  # in place of a token, where logits are NaN or infinite
TOP_K_STEPS = (64, 1024)  # candidates that are looked for instead of sorting the vocabulary


@dataclass(frozen=True)
class Plan:
    """What the sequences of a batch need together; a CUDA graph is captured for each plan."""

    random: bool = False
    trimmed: bool = False  # some have top_k, top_p or min_p
    candidates: int = 0  # all have a top_k up to this; 0: the whole vocabulary must be sorted
    penalised: bool = False
    logprobs: int | None = None


class Sampled(NamedTuple):
    """Tokens [batch], -1 (`INVALID`) for a row whose logits have no finite maximum, and where asked for the logs of
    their probabilities and of the likeliest tokens'."""

    tokens: Tensor
    logprob: Tensor | None
    top_logprobs: Tensor | None  # [batch, n]
    top_tokens: Tensor | None


class RowSettings:
    """The settings of each row of the cache, in arrays: a batch's are picked out by its rows."""

    def __init__(self, rows: int) -> None:
        self._values = {name: np.zeros(rows, dtype=np.float32) for name in _SETTINGS}
        self._values["top_k"] = np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._needs = np.zeros(rows, dtype=np.int64)
        self._logprobs = np.full(rows, -1, dtype=np.int64)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        for name, values in self._values.items():
            values[row] = getattr(params, name)
        random = params.temperature > 0
        needs = _RANDOM * random + _PENALISED * params.penalised
        if random:
            needs |= _TOP_P * (params.top_p < 1 or params.min_p > 0) | _TOP_K * (params.top_k > 0)
            needs |= _UNTRIMMED * (params.top_k == 0)
        self._needs[row] = needs
        self._seeds[row] = seed % 2**64
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def plan(self, rows: np.ndarray) -> Plan:
        needs = int(np.bitwise_or.reduce(self._needs[rows])) if rows.size else 0
        logprobs = int(self._logprobs[rows].max()) if rows.size else -1
        candidates = 0
        if needs & _TOP_K and not needs & _UNTRIMMED:
            largest = int(self._values["top_k"][rows].max())
            candidates = next((step for step in TOP_K_STEPS if largest <= step), 0)
        return Plan(
            random=bool(needs & _RANDOM),
            trimmed=bool(needs & (_TOP_P | _TOP_K)),
            candidates=candidates,
            penalised=bool(needs & _PENALISED),
            logprobs=None if logprobs < 0 else logprobs,
        )

    def write(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray, numbers: np.ndarray) -> None:
        """Put a batch's settings, and its uniform numbers for the `numbers`-th tokens, into host buffers."""
        for name, values in self._values.items():
            arrays[name][: rows.size] = values[rows]
        arrays["uniform"][: rows.size] = uniform(self._seeds[rows], numbers)


class TokenCounts:
    """How often each row's output has each token, and which its prompt has: what penalties ask for."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.output = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((rows, vocab), dtype=torch.bool, device=device)

    def set(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A row begins with these tokens."""
        device = self.output.device
        self.output[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=self.output.shape[1]).to(
            device, torch.int32
        )
        seen = torch.zeros(self.prompt.shape[1], dtype=torch.bool)
        seen[torch.tensor(prompt, dtype=torch.int64)] = True
        self.prompt[row] = seen.to(device)


def uniform(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (seed, number), float32: 24 bits of a hash of both (splitmix64's mixing, twice)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds.astype(np.uint64)) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((mixed >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits: Tensor, settings: Mapping[str, Tensor], plan: Plan, rows: Tensor, counts: TokenCounts | None = None
) -> Sampled:
    """Tokens for float32 logits [batch, vocab]; settings are [batch] each, rows say whose `counts` to use."""
    raw = logits
    if plan.penalised:
        assert counts is not None
        logits = _penalised(logits, settings, counts, rows)
    tokens = fk.argmax(logits, invalid=INVALID)
    if plan.random:
        temperature = settings["temperature"]
        warm = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        tokens = torch.where((temperature > 0) & (tokens >= 0), _drawn(warm, settings, plan), tokens)
    if plan.penalised:
        assert counts is not None
        place = rows * counts.output.shape[1] + tokens.clamp(min=0)
        counts.output.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    if plan.logprobs is None:
        return Sampled(tokens, None, None, None)
    logs = torch.log_softmax(raw, -1)
    best = torch.topk(logs, plan.logprobs, -1)
    chosen = logs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return Sampled(tokens, chosen, best.values, best.indices)


def _penalised(logits: Tensor, settings: Mapping[str, Tensor], counts: TokenCounts, rows: Tensor) -> Tensor:
    came = counts.output[rows]  # [batch, vocab]
    seen = counts.prompt[rows] | (came > 0)
    factor = settings["repetition_penalty"][:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    often = settings["frequency_penalty"][:, None] * came
    return logits - often - settings["presence_penalty"][:, None] * (came > 0)


def _drawn(warm: Tensor, settings: Mapping[str, Tensor], plan: Plan) -> Tensor:
    """One token of each row by its probability: the first at which the cumulated ones exceed the uniform number.

    They are cumulated in the vocabulary's order whether or not tokens are left out, so that a row's draw does not
    depend on what other rows ask for.
    """
    shares = torch.softmax(warm, -1)
    if plan.trimmed:
        shares = shares * _kept(warm, settings, plan)
    return _first_beyond(shares.cumsum(-1), settings["uniform"])


def _kept(warm: Tensor, settings: Mapping[str, Tensor], plan: Plan) -> Tensor:
    """Which tokens top-k, top-p and min-p leave, in this order; bool [batch, vocab]."""
    if plan.candidates and plan.candidates < warm.shape[1]:
        values, order = torch.topk(warm, plan.candidates, -1)
    else:
        values, order = torch.sort(warm, dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    top_k, top_p = settings["top_k"][:, None], settings["top_p"][:, None]
    values = values.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    shares = torch.softmax(values, -1)
    likelier = shares.cumsum(-1) - shares  # all that come before, together
    kept = ((likelier < top_p) | (top_p >= 1)) & (shares >= settings["min_p"][:, None] * shares[:, :1])
    kept = (kept & (shares > 0)) | (rank == 0)
    return torch.zeros_like(warm, dtype=torch.bool).scatter_(1, order, kept)


def _first_beyond(cumulated: Tensor, chance: Tensor) -> Tensor:
    """The first place whose cumulated share exceeds chance * total; one without a share of its own is never it."""
    total = cumulated[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product that rounds up to the total would exceed all
    target = torch.minimum(chance[:, None] * total, below)
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=cumulated.shape[1] - 1)
