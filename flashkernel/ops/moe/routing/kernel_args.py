"""Groups of the router's kernel arguments: the launchers fill them in, the kernels read them by name."""

from typing import Any, NamedTuple


class RouterInputs(NamedTuple):
    """What experts are chosen from; None for what there is none of."""

    logits: Any  # [tokens, experts]
    bias: Any  # [experts]
    noise: Any  # [tokens, experts]
    token_ids: Any  # [tokens]


class RoutingPointers(NamedTuple):
    """The fields of a `Routing`; None for those that a kernel neither reads nor writes."""

    experts: Any
    weights: Any
    positions: Any
    tokens: Any
    offsets: Any
    counts: Any


class RouterTraits(NamedTuple):
    """What of a `Router` is compiled in."""

    KIND: str
    NORMALIZE: bool
    K: int  # slots of a token
    MIN_K: int
    GROUPS: int
    TOP_GROUPS: int
    BEST_TWO: bool  # a group is as good as the sum of its best two experts


class RoutingBlock(NamedTuple):
    """What a program works on, padded to powers of two."""

    TOKENS: int
    EXPERTS: int
    SLOTS: int
