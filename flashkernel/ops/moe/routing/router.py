"""`Router`, which says how experts are chosen, and `Routing`, what was chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from flashkernel.core.argument_types import check_fields
from flashkernel.core.arguments import static
from flashkernel.core.tune import ceil_div

KINDS = ("softmax", "sigmoid", "dynamic", "random", "hash", "expert_choice")


@dataclass(frozen=True)
class Router:
    """How a mixture of experts chooses, from the logits of its gate.

    - "softmax": the k largest probabilities (Mixtral, Qwen3, DeepSeek-V2). Normalized, this is the softmax over the k
      largest logits, as gpt-oss computes it. Logits with noise added are noisy top-k gating.
    - "sigmoid": the k largest sigmoid(logit) + bias; the bias takes part in the choice alone (DeepSeek-V3).
    - "dynamic": as many of the largest probabilities as reach `mass`, at least `min_k` and at most k.
    - "expert_choice": each expert takes the tokens with the largest probabilities for it, `capacity` of them. Loads are
      equal by construction. The choice of a token depends on the other tokens, later ones among them: it leaks the
      future into the training of a causal model, and generation has no later tokens to compare with. It is safe for
      encoders, and where all tokens that are compared belong to one position.
    - "random", "hash": k experts by a hash of the token's index, or of its id (`token_ids`), for ablations. Weights are
      the softmax of the chosen logits.

    Args:
        kind: One of the above.
        k: Experts of a token; for "expert_choice" their average, from which the capacity follows.
        normalize: Divides a token's weights by their sum.
        scale: Multiplies the weights (DeepSeek's routed_scaling_factor).
        groups: Groups of consecutive experts, of one size. A token takes experts of its best `top_groups` groups only.
            A group is as good as its best expert; with "sigmoid", as the sum of its best two.
        top_groups: Groups that a token may take experts from.
        mass: Probability that "dynamic" collects, in (0, 1].
        min_k: The least number of experts of "dynamic".
        capacity: Rows that an expert takes at most. Tokens beyond it, in the order of the batch, are dropped there.
            None: no limit; for "expert_choice" tokens * k / experts, rounded up.
        seed: Of "random" and "hash".
        capacity_factor: In the place of `capacity`: rows that an expert takes at most, as a multiple of its equal share
            tokens * k / experts, rounded up.

    Example:
        >>> import flashkernel as fk
        >>> fk.Router("sigmoid", 8, groups=8, top_groups=4, scale=2.5)
        Router(sigmoid, k=8, scale=2.5, groups=8, top_groups=4)
        >>> fk.Router("softmax", 0)
        Traceback (most recent call last):
        ValueError: Router: k is 0; it must be at least 1
    """

    kind: str = "softmax"
    k: int = 2
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    mass: float = 1.0
    min_k: int = 1
    capacity: int | None = None
    seed: int = 0
    capacity_factor: float | None = None
    text: str = field(
        init=False, repr=False, compare=False
    )  # the other fields, for torch's operators; `parse` reads it

    def __post_init__(self) -> None:
        check_fields(self)
        error = self._error()
        if error is not None:
            raise ValueError(f"Router: {error}")
        # Made here, of numbers: torch.compile may hold the fields of a router that it is given as symbols.
        values = (self.kind, self.k, self.normalize, self.scale, self.groups, self.top_groups, self.mass, self.min_k,
                  self.capacity, self.seed, self.capacity_factor)  # fmt: skip
        words = [str(static(value) if isinstance(value, (int, float)) else value) for value in values]
        object.__setattr__(self, "text", " ".join(words))

    def _error(self) -> str | None:
        if self.kind not in KINDS:
            return f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}"
        if self.k < 1:
            return f"k is {self.k}; it must be at least 1"
        if not 1 <= self.top_groups <= self.groups:
            return f"top_groups is {self.top_groups} of {self.groups} groups; it must be from 1 to groups"
        if self.groups > 1 and self.kind not in ("softmax", "sigmoid"):
            return f"{self.kind!r} has no groups; they belong to 'softmax' and 'sigmoid'"
        if not 0 < self.mass <= 1:
            return f"mass is {self.mass}; it must be a probability above 0"
        if not 1 <= self.min_k <= self.k:
            return f"min_k is {self.min_k}; it must be from 1 to k ({self.k})"
        if self.capacity is not None and self.capacity < 1:
            return f"capacity is {self.capacity}; it must be at least 1, or None"
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            return f"capacity_factor is {self.capacity_factor}; it must be above 0 and finite, or None"
        if self.capacity is not None and self.capacity_factor is not None:
            return f"capacity is {self.capacity} and capacity_factor {self.capacity_factor}; give one of them"
        if not abs(self.scale) < float("inf"):
            return f"scale is {self.scale}; it must be a finite number"
        return None

    def declines(self, experts: int) -> str | None:
        """Why it cannot choose among so many `experts`; None where it can.

        Args:
            experts: How many there are.
        """
        if experts % self.groups:
            return f"{experts} experts do not divide into {self.groups} groups of one size"
        allowed = experts // self.groups * self.top_groups
        if self.k > allowed:
            limit = f"{experts} experts" if self.groups == 1 else f"the {allowed} experts of {self.top_groups} groups"
            return f"k is {self.k} and a token cannot have more than {limit}; lower k"
        return None

    @property
    def cache_key(self) -> str:
        """What a launch cache tells calls apart by."""
        return self.text

    @staticmethod
    def parse(text: str) -> Router:
        """Returns the Router of such a `text`.

        Args:
            text: As `text` of a Router gives it.
        """
        return _parse(text)

    def slots(self, experts: int) -> int:
        """Slots that a token has with so many `experts`: the columns of `Routing.experts`.

        Args:
            experts: How many there are.
        """
        return experts if self.kind == "expert_choice" else self.k

    def rows(self, tokens: int, experts: int) -> int:
        """Rows that so many `experts` take at most of so many `tokens`, all together.

        Args:
            tokens: How many are routed.
            experts: How many there are.
        """
        if self.kind == "expert_choice":
            return experts * self.choice_capacity(tokens, experts)
        return tokens * self.k

    def limit(self, tokens: int, experts: int) -> int | None:
        """Of so many `tokens`, those that one of so many `experts` takes at most; None: no limit.

        Args:
            tokens: How many are routed.
            experts: How many there are.
        """
        if self.capacity_factor is None:
            return self.capacity
        return max(1, math.ceil(self.capacity_factor * tokens * self.k / experts))

    def choice_capacity(self, tokens: int, experts: int) -> int:
        """Of so many `tokens`, those that one of so many `experts` takes with "expert_choice".

        Args:
            tokens: How many are routed.
            experts: How many there are.
        """
        limit = self.limit(tokens, experts)
        return min(tokens, ceil_div(tokens * self.k, experts) if limit is None else limit)

    def __repr__(self) -> str:
        shown = [f"{one.name}={getattr(self, one.name)}" for one in fields(self)[2:-1]
                 if getattr(self, one.name) != one.default]  # fmt: skip
        return f"Router({', '.join([self.kind, f'k={self.k}', *shown])})"


@lru_cache(maxsize=256)
def _parse(text: str) -> Router:
    kind, k, normalize, scale, groups, top_groups, mass, min_k, capacity, seed, factor = text.split(" ")
    return Router(
        kind, int(k), normalize == "True", float(scale), int(groups), int(top_groups), float(mass), int(min_k),
        None if capacity == "None" else int(capacity), int(seed), None if factor == "None" else float(factor),
    )  # fmt: skip


class Routing(NamedTuple):
    """What a router chose: for each token its experts and weights, and for the products the rows sorted by expert.

    A row is a pair of a token and an expert that computes it. Rows are sorted by expert, then by token.

    Attributes:
        experts: int32 (tokens, slots): the chosen experts, best first; -1 in a slot that is not used.
        weights: float32 (of float64 logits float64), (tokens, slots), 0 where a slot is not used. Differentiable.
        positions: int32 (tokens, slots): the row of each slot; -1 where it is not used, or dropped at capacity.
        tokens: int32 (rows,): the token of each row; 0 behind the last row that is used.
        offsets: int32 (experts + 1,): expert e has the rows from offsets[e] to offsets[e + 1].
        counts: int32 (experts,): tokens that chose each expert, dropped ones included.

    Example:
        >>> import torch, flashkernel as fk
        >>> routing = fk.moe_route(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), fk.Router("softmax", 2))
        >>> routing.experts.tolist(), routing.offsets.tolist(), routing.tokens.tolist()
        ([[1, 2], [0, 2]], [0, 1, 2, 4], [1, 0, 0, 1])
    """

    experts: Tensor
    weights: Tensor
    positions: Tensor
    tokens: Tensor
    offsets: Tensor
    counts: Tensor
