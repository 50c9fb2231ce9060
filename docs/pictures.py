"""Draws the pictures of docs/masks.md from the masks themselves, into docs/pictures/.

Usage: python docs/pictures.py. Each SVG names, in its description, a digest of what it shows; a test compares that with
the masks, so a picture cannot fall behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import flashkernel as fk

FOLDER = Path(__file__).parent / "pictures"
SIZE, TILE = 32, 8  # queries and keys of a picture, and of a tile
HIDDEN, MASKED, UNMASKED = "#eceff1", "#ffb74d", "#4db6ac"  # pairs; visible ones by what their tile costs


@dataclass(frozen=True)
class Picture:
    """A mask and what is written above it; `slope` is that of ALiBi."""

    title: str
    mask: Callable[[], fk.Mask]
    slope: float = 0.0


def _documents() -> fk.Mask:
    return fk.causal() & fk.documents(torch.tensor([0] * 16 + [1] * 10 + [2] * 6))


def _block_sparse() -> fk.Mask:
    layout = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    return fk.causal() & fk.block_sparse(layout, TILE)


def _column_intervals() -> fk.Mask:
    """Keys 8 to 15 are a first answer, hidden from the second one: queries from 16 on do not see them."""
    start = torch.full((SIZE,), SIZE)
    start[8:16] = 16
    return fk.causal() & fk.column_intervals(start, torch.full((SIZE,), SIZE))


PICTURES = {
    "causal": Picture("causal()", fk.causal),
    "window": Picture("window(6, 6)", lambda: fk.window(6, 6)),
    "causal-window": Picture("causal() & window(8)", lambda: fk.causal() & fk.window(8)),
    "sink-tokens": Picture(
        "causal() & (window(8) | sink_tokens(3))", lambda: fk.causal() & (fk.window(8) | fk.sink_tokens(3))
    ),
    "prefix": Picture("causal() | prefix(10)", lambda: fk.causal() | fk.prefix(10)),
    "documents": Picture("causal() & documents(ids)", _documents),
    "block-sparse": Picture("causal() & block_sparse(layout, 8)", _block_sparse),
    "column-intervals": Picture("causal() & column_intervals(start, end)", _column_intervals),
    "custom": Picture(
        "causal() & custom(every fourth key, or near)",
        lambda: fk.causal() & fk.custom(lambda b, h, q, k: (k % 4 == 0) | (q - k < 4)),
    ),
    "alibi": Picture("causal(), alibi_slopes", fk.causal, slope=1 / 8),
}


def visible_pairs(picture: Picture) -> torch.Tensor:
    """Which queries attend to which keys: bool [SIZE, SIZE]."""
    return picture.mask().visible(1, 1, SIZE, SIZE)[0, 0]


def tile_status(picture: Picture) -> torch.Tensor:
    """What a kernel does with each tile: 0 skips it, 1 masks it, 2 computes it without a mask."""
    return picture.mask().tiles(1, 1, SIZE, SIZE, TILE, TILE)[0, 0]


def digest(picture: Picture) -> str:
    """A short hash of what a picture shows."""
    shown = picture.title.encode() + repr(picture.slope).encode()
    shown += visible_pairs(picture).numpy().tobytes() + tile_status(picture).numpy().tobytes()
    return hashlib.sha256(shown).hexdigest()[:16]


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Writes one picture: a square for each pair, a frame for each tile."""
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    picture = PICTURES[name]
    seen, status = visible_pairs(picture), tile_status(picture)
    whole = status.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1) == 2
    colors = torch.tensor([to_rgb(HIDDEN), to_rgb(MASKED), to_rgb(UNMASKED)])
    pixels = colors[torch.where(seen, torch.where(whole, 2, 1), 0)]  # [SIZE, SIZE, 3]
    if picture.slope:  # ALiBi multiplies a probability by exp(-slope * distance): the paler, the less
        distance = (torch.arange(SIZE)[:, None] - torch.arange(SIZE)).abs()
        weight = torch.exp(-picture.slope * distance)[..., None]
        pixels = torch.where(seen[..., None], weight * pixels + (1 - weight), pixels)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "monospace"}):
        figure = Figure(figsize=(3.6, 3.7))
        axes = figure.subplots()
        axes.imshow(pixels.numpy(), extent=(0, SIZE, SIZE, 0), interpolation="none")
        for edge in range(0, SIZE + 1, TILE):
            axes.axhline(edge, color="#546e7a", linewidth=0.8)
            axes.axvline(edge, color="#546e7a", linewidth=0.8)
        axes.set(xticks=range(0, SIZE + 1, TILE), yticks=range(0, SIZE + 1, TILE), xlabel="key", ylabel="query")
        axes.set_title(picture.title, fontsize=8)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": digest(picture)})
    return path


if __name__ == "__main__":
    for picture_name in PICTURES:
        print(draw(picture_name))
