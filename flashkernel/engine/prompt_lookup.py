"""Speculative decoding by prompt look-up: what followed the last tokens where they came before is a draft.

A step computes the last token and the draft together, and keeps the draft as far as it is what the model would have
said: under greedy decoding the tokens are the same as without.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAMS = (3, 2)  # lengths of what must match, longest first


class PromptLookup:
    """Where each n-gram of a sequence came last.

    Example:
        >>> from flashkernel.engine.prompt_lookup import PromptLookup
        >>> PromptLookup().draft([1, 2, 3, 4, 5, 9, 2, 3], 3)
        (4, 5, 9)
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._known = 0

    def draft(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed where the sequence's last tokens came before; () if they did not."""
        for end in range(max(self._known, min(NGRAMS)), len(token_ids)):
            for size in NGRAMS:
                if end >= size:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._known = len(token_ids)
        for size in NGRAMS:
            position = self._after.get(tuple(token_ids[-size:])) if len(token_ids) > size else None
            if position is not None:
                return tuple(token_ids[position : position + count])
        return ()
