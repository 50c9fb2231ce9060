"""Tensors in huge pages: the same values, at aligned addresses, alive without what placed them."""

from __future__ import annotations

import gc

import pytest
import torch

from flashkernel.core import huge_pages
from flashkernel.core.huge_pages import HugePages

needs_pages = pytest.mark.skipif(not huge_pages.available(), reason="the system has no huge pages to ask for")


@needs_pages
def test_tensors_are_copied_side_by_side() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(37, 5, generator=generator), torch.arange(7, dtype=torch.int8), torch.randn(3, 4).half().T]
    pages = HugePages()
    placed = [pages.place(x) for x in given]
    del pages
    gc.collect()
    for x, found in zip(given, placed):
        assert torch.equal(found, x)
        assert found.dtype == x.dtype
        assert found.is_contiguous()
        assert found.data_ptr() % 64 == 0
    assert placed[0].data_ptr() % huge_pages.PAGE == 0
    assert placed[1].data_ptr() - placed[0].data_ptr() == 768  # 740 bytes, rounded up to 64
    given[0].zero_()
    assert placed[0].abs().sum() > 0


@needs_pages
def test_what_does_not_fit_gets_a_mapping_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 1 << 12)
    pages = HugePages()
    large, small = torch.arange(3 << 19), torch.arange(8)
    assert torch.equal(pages.place(large), large)
    assert torch.equal(pages.place(small), small)


def test_without_huge_pages_and_without_elements_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HugePages().place(torch.empty(0, 3)).shape == (0, 3)
    monkeypatch.setattr(huge_pages, "available", lambda: False)
    x = torch.ones(3)
    assert HugePages().place(x) is x
