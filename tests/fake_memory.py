"""A stand-in for the device memory that a paged cache hands out."""

from __future__ import annotations

import numpy as np


class Memory:
    """A fake device: one number in each slot."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.held = np.zeros((pages, page_size), dtype=np.int64)

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())
        assert len(set(targets.tolist())) == len(targets)
        self.held[targets] = self.held[sources]
