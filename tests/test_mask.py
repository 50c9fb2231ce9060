"""Masks: what they say of pairs, what they say of tiles, and that the two never contradict each other."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import EMPTY, FULL, Mask

IDS = torch.tensor([0] * 13 + [1] * 20 + [2] * 31)
LAYOUT = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
STARTS = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(1))
MASKS = [
    fk.causal(),
    ~fk.causal(),
    fk.causal() & fk.window(7),
    fk.window(4, 2),
    (fk.window(5) | fk.sink_tokens(3)) & fk.causal(),
    fk.documents(IDS) & fk.causal(),
    fk.documents(torch.stack([IDS, IDS.flip(0)])),
    fk.prefix(torch.tensor([5, 9])) | fk.causal(),
    fk.block_sparse(LAYOUT, 16),
    fk.block_sparse(torch.stack([LAYOUT, ~LAYOUT]), 16) & fk.causal(),
    fk.column_intervals(STARTS, torch.full((64,), 64)) & fk.causal(),
    fk.custom(lambda b, h, q, k: (q - k) % 3 == 0),
    fk.custom(lambda b, h, q, k: (k <= q) & (2 * k > q - 4 * h)),
    fk.custom(lambda b, h, q, k: ex.where(h == 0, k <= q, k >= q)),
    fk.custom(lambda b, h, q, k: ex.absolute(q - k) < 3 + b),
]


def _pieces(mask: Mask, sizes: tuple[int, int], tile: tuple[int, int]) -> list[tuple[int, torch.Tensor]]:
    """(status, pairs) of every tile."""
    seen = mask.visible(2, 2, *sizes)
    status = mask.tiles(2, 2, *sizes, *tile)
    found = []
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(size) for size in status.shape)).tolist():
        rows, columns = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
        pairs = seen[min(b, seen.shape[0] - 1), min(h, seen.shape[1] - 1), rows, columns]
        found.append((int(status[b, h, i, j]), pairs))
    return found


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(
    "sizes, tile", [((64, 64), (16, 16)), ((50, 60), (16, 8)), ((7, 33), (8, 16)), ((64, 64), (32, 8))]
)
def test_tiles_tell_the_truth(mask: Mask, sizes: tuple[int, int], tile: tuple[int, int]) -> None:
    for status, pairs in _pieces(mask, sizes, tile):
        assert status != EMPTY or not pairs.any()
        assert status != FULL or pairs.all()


@pytest.mark.parametrize("mask", MASKS[:9], ids=repr)
def test_tiles_of_the_named_masks_are_exact(mask: Mask) -> None:
    for status, pairs in _pieces(mask, (64, 64), (16, 16)):
        assert status == (EMPTY if not pairs.any() else FULL if pairs.all() else 1)


def test_a_ragged_last_tile_is_never_full() -> None:
    assert fk.custom(lambda b, h, q, k: k >= 0).tiles(1, 1, 8, 12, 8, 8).tolist() == [[[[2, 1]]]]


def test_named_masks_against_plain_definitions() -> None:
    queries, keys = 5, 8
    for mask, sees in [
        (fk.causal(), lambda q, k: k <= q + 3),
        (fk.causal() & fk.window(2), lambda q, k: q + 3 - 2 < k <= q + 3),
        ((fk.window(2) | fk.sink_tokens(1)) & fk.causal(), lambda q, k: k <= q + 3 and (k > q + 1 or k < 1)),
        (fk.window(2, 1), lambda q, k: q + 1 < k <= q + 4),
        (fk.prefix(6) | fk.causal(), lambda q, k: k < 6 or k <= q + 3),
    ]:
        expected = [[sees(q, k) for k in range(keys)] for q in range(queries)]
        assert mask.visible(1, 1, queries, keys)[0, 0].tolist() == expected


def test_a_function_that_branches_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="write & for and"):
        fk.custom(lambda b, h, q, k: k <= q and q - k < 4)
    with pytest.raises(TypeError, match="positive integer"):
        fk.custom(lambda b, h, q, k: q % k == 0)
    with pytest.raises(IndexError, match="give every index"):
        fk.custom(lambda b, h, q, k: ex.Table(LAYOUT)[q] == 1)
    with pytest.raises(ValueError, match="at least itself"):
        fk.window(0)


def test_drawing() -> None:
    assert fk.causal().draw(4) == "█▄  \n███▄"


def test_image(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    (fk.causal() & fk.window(40)).image(path, 96)
    assert path.stat().st_size > 1000


def test_a_mask_lets_go_of_its_tables() -> None:
    """With its last reference: in a CUDA graph's memory, a table that waits for the garbage collector is an error."""
    gc.collect()
    gc.disable()
    try:
        table = torch.ones(4, dtype=torch.int32)
        storage = StorageWeakRef(table.untyped_storage())
        made = Mask(ex.Variable("k") <= ex.Table(table)[ex.Variable("b")])
        assert ex.recall(made.text, [table]) is not None
        del table, made
        assert storage.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_relative_and_bounded_are_true(mask: Mask) -> None:
    """A relative mask says the same after both positions have moved; a bounded one sees no key past the last."""
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    q, k = torch.arange(40).view(1, 1, 40, 1), torch.arange(80).view(1, 1, 1, 80)
    sizes = {"b": b, "h": h, "sq": 40, "sk": 48}
    seen = ex.evaluate(mask.expression, {**sizes, "q": q, "k": k})
    if mask.relative:
        assert torch.equal(seen, ex.evaluate(mask.expression, {**sizes, "q": q - 96, "k": k - 96}))
    if mask.bounded:
        assert not seen[..., 48:].any()


def test_relative_and_bounded_are_found() -> None:
    found = {(mask.relative, mask.bounded) for mask in (fk.causal(), fk.causal() & fk.window(7), fk.window(4, 0))}
    assert found == {(True, True)}
    assert (fk.window(4, 2).relative, fk.window(4, 2).bounded) == (True, False)
    streaming = (fk.window(5) | fk.sink_tokens(3)) & fk.causal()
    assert (streaming.relative, streaming.bounded) == (False, True)
    loose = fk.sink_tokens(3) | fk.causal()
    assert (loose.relative, loose.bounded) == (False, False)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_masks_are_copied_and_pickled(
    mask: Mask, again: Callable[[Mask], Mask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also into a process that has not made the mask: operators find its expression by its text."""
    state = pickle.dumps(mask)
    monkeypatch.setattr(ex, "_traced", {})
    found = again(pickle.loads(state))
    assert found.text in ex._traced
    assert (found.name, found.requires, found.text) == (mask.name, mask.requires, mask.text)
    assert torch.equal(found.visible(2, 2, 64, 64), mask.visible(2, 2, 64, 64))
    recalled = Mask(ex.recall(found.text, found.tables))
    assert torch.equal(recalled.visible(2, 2, 64, 64), mask.visible(2, 2, 64, 64))


def test_score_functions_are_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = fk.Table(torch.tensor([0.5, 0.25]))
    score = fk.score_function(lambda score, b, h, q, k: score - slopes[h] * abs(q - k))
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    expected = fk.attention(q, k, v, score=score, backend="triton")
    state = pickle.dumps(score)
    monkeypatch.setattr(ex, "_traced", {})
    assert torch.equal(fk.attention(q, k, v, score=pickle.loads(state), backend="triton"), expected)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_masks_do_not_ask_for_torchs_default_device(mask: Mask) -> None:
    seen, status = mask.visible(2, 2, 50, 60), mask.tiles(2, 2, 50, 60, 16, 8)
    with torch.device("meta"):
        assert torch.equal(mask.visible(2, 2, 50, 60), seen)
        assert torch.equal(mask.tiles(2, 2, 50, 60, 16, 8), status)
        assert mask.draw(8)
