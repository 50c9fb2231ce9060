"""One call of attention over packed sequences as the kernels see it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashkernel.blocks.mask import MAX_KEYS, Mask, causal, window
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams

NO_LIMIT = MAX_KEYS  # of `left` and `right`


Window = int | tuple[int | None, int | None] | None


def sides(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """How many keys a query sees before and behind the one it is aligned with; None for all."""
    if isinstance(window, tuple):
        left, right = (None if side is None else min(side, NO_LIMIT) for side in window)
        return left, 0 if causal else right
    return None if window is None else window - 1, 0 if causal or window is not None else None


class VarlenInputs(NamedTuple):
    """The tensors of a call that have gradients; the last dim of q, k and v has stride 1."""

    q: Tensor  # (tokens_q, heads, head_dim)
    k: Tensor  # (tokens_k, kv_heads, head_dim)
    v: Tensor  # (tokens_k, kv_heads, value_dim)
    sinks: Tensor | None  # (heads,)

    @property
    def one_batch(self) -> AttentionInputs:
        """The same as one batch entry."""
        return AttentionInputs(self.q[None], self.k[None], self.v[None], None, self.sinks, None)


class VarlenParams(NamedTuple):
    """Sequences, and what a score depends on beside q and k.

    Query i of a sequence is aligned with its key i + seqlen_k - seqlen_q, and sees from `left` keys before that one to
    `right` keys behind it.
    """

    num_sequences: int
    left: int
    right: int
    scale: float
    softcap: float
    deterministic: bool = False  # gradients are summed in a fixed order

    @property
    def mask(self) -> Mask | None:
        """The mask within a sequence."""
        if self.left >= NO_LIMIT and self.right >= NO_LIMIT:
            return None
        if self.right == 0:
            return causal() if self.left >= NO_LIMIT else causal() & window(self.left + 1)
        right = None if self.right >= NO_LIMIT else self.right
        return window(None if self.left >= NO_LIMIT else self.left + 1, right)

    @property
    def attention(self) -> AttentionParams:
        """The call of one sequence alone."""
        return AttentionParams(self.mask, self.scale, self.softcap, None, 0.0, 0, self.deterministic)


class HeadShape(NamedTuple):
    """Heads of q, of k and v, and their widths."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def schedule_size(num_sequences: int, tokens_q: int, tokens_k: int, heads: int) -> int:
    """Elements of a schedule, enough for any launch configs. Of each token: the forward kernel has work tiles of 16
    queries for two consumers at least, with 36 numbers each, the backward kernel of 64 keys, with 24; and an entry of
    two numbers for each 128 queries, or 64 keys, of a head."""
    tokens = tokens_q + tokens_k
    return 4 * tokens + tokens * heads // 16 + (num_sequences + 64) * (128 + 8 * heads) + 16384
