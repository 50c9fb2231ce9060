"""One call of `sample` as backends see it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

IN_PROMPT = 1 << 30  # flag in `token_counts`; the bits below count a token in the output
LOWEST = -1e30  # logits at or below it have probability 0, as -inf has
INVALID = -1  # in place of a token where a row's largest logit is NaN or infinite


class SampleParams(NamedTuple):
    """Sampling parameters of each row, [rows] each; None leaves a parameter out."""

    seeds: Tensor  # int64
    positions: Tensor  # int64
    temperature: Tensor | None = None  # float32; 0 is greedy
    top_k: Tensor | None = None  # int32; 0 keeps all
    top_p: Tensor | None = None  # float32
    min_p: Tensor | None = None  # float32
    penalties: Tensor | None = None  # float32 [rows, 3]: repetition, presence, frequency


class States(NamedTuple):
    """What changes logits before sampling, by state; `rows` says which state each row has."""

    rows: Tensor | None = None  # int64 [rows]; None: row i has state i
    token_counts: Tensor | None = None  # int32 [states, vocab]
    bias_ids: Tensor | None = None  # int32 [states, entries]; -1: no entry
    bias_values: Tensor | None = None  # float32 [states, entries]
    bias_until: Tensor | None = None  # int32 [states, entries]
    allowed: Tensor | None = None  # int32 [states, ceil(vocab / 32)]
    restricted: Tensor | None = None  # int32 [states]; 0: `allowed` does not apply

    @property
    def empty(self) -> bool:
        """Whether nothing changes the logits."""
        return self.token_counts is None and self.bias_ids is None and self.allowed is None


def from_keywords(seeds: Tensor, positions: Tensor, given: dict[str, Any]) -> tuple[SampleParams, States]:
    """The arguments of `sample` behind the logits."""
    params = {name: value for name, value in given.items() if name in SampleParams._fields}
    states = {name.removeprefix("state_"): value for name, value in given.items() if name not in params}
    return SampleParams(seeds, positions, **params), States(**states)
