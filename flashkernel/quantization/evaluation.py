"""Perplexity of a model on a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from flashkernel.engine.transformer import Transformer
from flashkernel.quantization.layer_pass import SequenceRunner

CALIBRATION_TEXT = "pride_and_prejudice.txt"
EVALUATION_TEXT = "alice_in_wonderland.txt"


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text.

    Args:
        value: exp of the mean cross entropy of a token, given those before it in its window.
        tokens: How many tokens were predicted.
        length: Tokens of a window.

    Example:
        >>> from flashkernel.quantization import Perplexity
        >>> Perplexity(12.5, 1022, 512).value
        12.5
    """

    value: float
    tokens: int
    length: int


@torch.no_grad()
def perplexity(
    model: Transformer,
    token_ids: Tensor,
    progress: Callable[[int, int], None] | None = None,
    kv_cache: str | None = None,
) -> Perplexity:
    """Returns the perplexity of a model on windows of text that do not overlap.

    Args:
        model: A model of the engine, quantized or not.
        token_ids: int64 (windows, length), length at least 2; `windows` makes them. The first token of a window is not
            predicted.
        progress: Called after each layer with (layers done, layers).
        kv_cache: Format of keys and values: "float8_e4m3fn" or "int8", as the engine's cache stores them, or "int4",
            rounded to 4 bits in groups of 32 columns. None: the model's dtype.

    Returns:
        The perplexity, and of how many tokens.

    Example:
        >>> import torch
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> from flashkernel.quantization import perplexity
        >>> found = perplexity(tiny_transformer(), torch.randint(0, 100, (2, 32)))
        >>> found.tokens, found.value > 1
        (62, True)
    """
    if token_ids.ndim == 2 and token_ids.shape[1] == 1:
        raise ValueError("perplexity: windows have one token each, and the first one of a window is not predicted")
    runner = SequenceRunner(model, token_ids, kv_cache=kv_cache)
    hidden = runner.embeddings()
    for index, layer in enumerate(model.layers):
        hidden = runner.layer(hidden, layer, index)
        if progress is not None:
            progress(index + 1, len(model.layers))
    losses = runner.losses(hidden).double()
    if not bool(losses.isfinite().all()):
        count = int((~losses.isfinite()).sum())
        raise ValueError(
            f"perplexity: the model gives {count} of {losses.numel()} tokens no probability but NaN or 0; check its "
            "weights for NaN, and run it in bfloat16 or float32 if it overflows in float16"
        )
    return Perplexity(float(losses.mean().exp()), losses.numel(), token_ids.shape[1])


def windows(token_ids: list[int], length: int, most: int | None = None) -> Tensor:
    """Returns consecutive windows of a text's tokens, int64 (windows, length).

    Args:
        token_ids: The tokens of the text; the last ones that fill no window are left out.
        length: Tokens of a window.
        most: Windows at most; None: all.

    Returns:
        The windows; ValueError if the text fills none.

    Example:
        >>> from flashkernel.quantization import windows
        >>> windows([1, 2, 3, 4, 5], 2).tolist()
        [[1, 2], [3, 4]]
    """
    count = len(token_ids) // length
    if count == 0:
        raise ValueError(
            f"windows: the text has {len(token_ids)} tokens, fewer than one window of {length}; give a longer text, or "
            "a smaller length"
        )
    count = count if most is None else min(count, most)
    return torch.tensor(token_ids[: count * length], dtype=torch.int64, device="cpu").view(count, length)


def shipped_text(name: str) -> str:
    """Returns a text that comes with the library: CALIBRATION_TEXT or EVALUATION_TEXT, both in the public domain.

    Args:
        name: The file's name.

    Returns:
        The text, with an empty line between paragraphs.

    Example:
        >>> from flashkernel.quantization import EVALUATION_TEXT, shipped_text
        >>> "Alice" in shipped_text(EVALUATION_TEXT)
        True
    """
    return resources.files("flashkernel.quantization").joinpath("texts").joinpath(name).read_text(encoding="utf-8")
