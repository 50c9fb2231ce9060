"""The padded sizes that steps have on a GPU: a short list, so that all of it is compiled and captured at the start."""

from __future__ import annotations

from dataclasses import dataclass

MIXED_DECODES = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096)  # decoding sequences beside prompts
PREFILL_TOKENS = (
    64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
)  # fmt: skip
TOKENS_PER_PREFILL = 32  # a step of so many prompt tokens has room for one more prompt
MIN_PREFILLS = 8


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: `num_decodes` sequences with one token each, then `num_prefills` with prompt tokens."""

    num_decodes: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_seqs(self) -> int:
        """Sequences, padding included."""
        return self.num_decodes + self.num_prefills

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.num_decodes + self.num_prefill_tokens

    def __str__(self) -> str:
        if not self.num_prefill_tokens:
            return f"{self.num_decodes} decodes"
        return f"{self.num_decodes} decodes + {self.num_prefill_tokens} prompt tokens"


class StepShapes:
    """All shapes of steps of up to `max_num_seqs` sequences and `max_num_tokens` tokens.

    Example:
        >>> from flashkernel.engine.step_shapes import StepShapes
        >>> shapes = StepShapes(max_num_seqs=64, max_num_tokens=512)
        >>> shapes.find(5, 0, 0), shapes.find(5, 2, 90)
        (StepShape(num_decodes=8, num_prefills=0, num_prefill_tokens=0), \
StepShape(num_decodes=16, num_prefills=8, num_prefill_tokens=128))
        >>> len(shapes.all())
        23
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.decodes = decode_sizes(max_num_seqs)
        self._mixed_decodes = [*(size for size in MIXED_DECODES if size < max_num_seqs), max_num_seqs]
        sizes = [*(size for size in PREFILL_TOKENS if size < max_num_tokens), max_num_tokens]
        self._prefills = [(size, min(max_num_seqs, max(MIN_PREFILLS, size // TOKENS_PER_PREFILL))) for size in sizes]
        self._prefills[-1] = (max_num_tokens, max_num_seqs)  # any step fits this

    def find(self, num_decodes: int, num_prefills: int, num_prefill_tokens: int) -> StepShape:
        """The smallest shape that a step fits."""
        if not num_prefills:
            return StepShape(next(size for size in self.decodes if size >= num_decodes))
        decodes = next(size for size in self._mixed_decodes if size >= num_decodes)
        tokens, prefills = next(
            (tokens, prefills)
            for tokens, prefills in self._prefills
            if tokens >= num_prefill_tokens and prefills >= num_prefills
        )
        return StepShape(decodes, prefills, tokens)

    def all(self) -> list[StepShape]:
        """Every shape, largest first: graphs captured later then reuse the memory of the first."""
        mixed = [
            StepShape(decodes, prefills, tokens)
            for tokens, prefills in self._prefills
            for decodes in self._mixed_decodes
        ]
        found = [*(StepShape(size) for size in self.decodes), *mixed]
        return sorted(found, key=lambda shape: (shape.num_tokens, shape.num_prefills), reverse=True)

    def num_logits(self, shape: StepShape) -> int:
        """Rows of logits of a step: no more sequences run than `max_num_seqs`."""
        return min(shape.num_seqs, self.max_num_seqs)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of steps that only decode."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, 4097, 64)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})
