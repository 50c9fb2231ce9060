"""The kernels that make the block ranges of masks with tables, under Triton's interpreter, against what is visible."""

from __future__ import annotations

from collections.abc import Callable

import mask_programs as programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from test_attention_hopper_tables import MASKS

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import EMPTY, FULL, PARTIAL, Mask
from flashkernel.blocks.tile_ranges import SHORT_ROW
from flashkernel.blocks.tile_status import make_block_ranges, make_tile_ranges, tile_status

BATCH, HEADS, QUERIES, KEYS = 2, 4, 260, 230


def _contradicts(mask: Mask, status: torch.Tensor, sizes: tuple[int, int, int, int], block: tuple[int, int]) -> bool:
    """Whether a tile is called empty or full that is not."""
    queries, keys = sizes[2:]
    seen = mask.visible(*sizes)
    pairs = status.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :queries, :keys]
    seen = seen.expand(pairs.shape)
    return bool((seen & (pairs == EMPTY)).any() or (~seen & (pairs == FULL)).any())


def _at_distance() -> Mask:
    """A table read by the difference of query and key, and one through another."""
    far = (torch.arange(500) / 60).cos()
    order = torch.arange(KEYS, 0, -1, dtype=torch.int32) - 1
    ids = (torch.arange(KEYS) // 40).to(torch.int16)
    return fk.custom(
        lambda b, h, q, k: (fk.Table(far)[q - k + 240] > 0.3) | (fk.Table(ids)[fk.Table(order)[k]] == q // 64)
    )


def _floats() -> Mask:
    rows, columns = torch.arange(QUERIES).half() / 50, torch.arange(KEYS).float() / 40
    columns[70:75] = float("nan")
    return fk.custom(lambda b, h, q, k: fk.Table(rows)[q] < fk.Table(columns)[k])


def _entries() -> Mask:
    """Tables that are read by neither query nor key."""
    visible, limits = torch.tensor([True]), torch.tensor([100.0, float("inf")])
    return fk.custom(lambda b, h, q, k: fk.Table(visible)[0] & (fk.Table(limits)[b] > q) & (k <= q))


OTHERS: dict[str, Callable[[], Mask]] = {"at-distance": _at_distance, "floats": _floats, "entries": _entries}
ALL = {**{name: lambda make=make: make("cpu", QUERIES) for name, make in MASKS.items() if name != "cross"}, **OTHERS}


@pytest.mark.parametrize("block", [(64, 64), (16, 128), (128, 32)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_status_is_right_and_no_worse_than_that_of_interval_arithmetic_in_torch(
    name: str, block: tuple[int, int]
) -> None:
    mask, keys = ALL[name](), QUERIES if name in MASKS else KEYS
    sizes = (BATCH, HEADS, QUERIES, keys)
    status, in_torch = tile_status(mask, *sizes, *block), mask.tiles(*sizes, *block)
    assert not _contradicts(mask, status, sizes, block)
    assert not ((status == PARTIAL) & (in_torch != PARTIAL)).any()
    assert {EMPTY, PARTIAL} <= set(status.flatten().tolist()) or name in ("tensor", "floats")


@given(tree=programs.conditions(3))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_random_masks(tree: programs.Tree) -> None:
    mask = programs.mask_of(tree)
    if mask.tables:
        assert not _contradicts(mask, tile_status(mask, *programs.SIZES, 4, 8), programs.SIZES, (4, 8))


def test_bounds_beyond_32_bits() -> None:
    """A bound that fits into no constant of a kernel: torch computes the status."""
    ids = torch.arange(40, dtype=torch.int32) // 10
    mask = fk.custom(lambda b, h, q, k: (fk.Table(ids)[q] & -(2**31)) == k * 0)
    assert not _contradicts(mask, tile_status(mask, 1, 1, 40, 40, 16, 16), (1, 1, 40, 40), (16, 16))


def _ranges(row: list[int]) -> list[list[int]]:
    """[first, end, masked] of neighbouring tiles with the same status."""
    found: list[list[int]] = []
    for tile, status in enumerate(row):
        if status == EMPTY:
            continue
        if found and found[-1][1] == tile and found[-1][2] == int(status == PARTIAL):
            found[-1][1] += 1
        else:
            found.append([tile, tile + 1, int(status == PARTIAL)])
    return found


def _short(row: list[int]) -> list[int]:
    few = sum(status != EMPTY for status in row) <= SHORT_ROW and PARTIAL in row
    return [PARTIAL if few and status != EMPTY else status for status in row]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["blocks", "intervals", "tensor-by-head", "unsorted"])
def test_ranges_of_a_row(name: str, transposed: bool) -> None:
    mask, sizes = ALL[name](), (BATCH, HEADS, QUERIES, QUERIES, 16, 32)
    table, counts = make_tile_ranges(mask, sizes, transposed)
    status = tile_status(mask, *sizes)
    rows = (status.transpose(2, 3) if transposed else status).flatten(0, 2).tolist()
    assert len(rows) == counts.numel()
    for row, found, count in zip(rows, table.flatten(0, 2).tolist(), counts.flatten().tolist()):
        assert found[:count] == _ranges(_short(row))
        assert count or found[0] == [0, 0, 0]  # kernels read the first range before they know that there is none


@pytest.mark.parametrize("num_consumers, transposed, pad_front", [(2, False, False), (3, False, True), (1, True, False),
                                                                  (4, False, False)])  # fmt: skip
@pytest.mark.parametrize("name", ["blocks", "intervals", "tensor-by-head"])
def test_ranges_of_work_tiles(name: str, num_consumers: int, transposed: bool, pad_front: bool) -> None:
    """What the producer loads, and which of it each consumer skips, visits and skips."""
    mask, sizes = ALL[name](), (BATCH, HEADS, QUERIES, QUERIES, 16, 32)
    ranges, counts, loads, load_counts = make_block_ranges(mask, sizes, num_consumers, transposed, pad_front)
    status = tile_status(mask, *sizes)
    maps = (status.transpose(2, 3) if transposed else status).flatten(0, 1).tolist()
    tables = [x.flatten(0, 1).tolist() for x in (ranges, counts, loads, load_counts)]
    for rows, map_ranges, map_counts, map_loads, map_load_counts in zip(maps, *tables):
        empty = [[EMPTY] * len(rows[0])] * (-len(rows) % num_consumers)
        rows = empty + rows if pad_front else rows + empty
        assert len(map_load_counts) * num_consumers == len(rows)
        for tile, number in enumerate(map_load_counts):
            own = rows[tile * num_consumers : (tile + 1) * num_consumers]
            loaded = [any(row[block] != EMPTY for row in own) for block in range(len(own[0]))]
            assert map_loads[tile][:number] == _ranges([FULL if one else EMPTY for one in loaded])
            for w, row in enumerate(own):
                seen = [block for block, one in enumerate(row) if one != EMPTY]
                first, last = (seen[0], seen[-1]) if seen else (len(row), len(row))
                visited = [
                    (one or PARTIAL) if loaded[block] and first <= block <= last else EMPTY
                    for block, one in enumerate(row)
                ]
                skipped = sum(loaded[:first]), sum(one != EMPTY for one in visited), sum(loaded[last + 1 :])
                assert tuple(map_counts[tile][w]) == skipped
                expected = _ranges(visited)
                assert map_ranges[tile][w][: len(expected)] == expected


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 16, 128), (1, 2, 3, 700, 64, 16), (2, 1, 700, 3, 16, 64)], ids=str)
def test_a_few_rows_or_tiles(sizes: tuple[int, ...]) -> None:
    ids = torch.arange(700, dtype=torch.int32) // 50
    mask = fk.documents(ids[: sizes[2]], ids[: sizes[3]]) & fk.custom(lambda b, h, q, k: ex.minimum(q, k) >= 0)
    assert torch.equal(tile_status(mask, *sizes), mask.tiles(*sizes))
    table, counts = make_tile_ranges(mask, sizes, transposed=False)
    assert table.shape[2] == counts.shape[2] == -(-sizes[2] // sizes[4])


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(64, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("name", ["blocks", "intervals", "tensor", "unsorted", "prefixes"])
def test_status_and_ranges_on_a_gpu(name: str, block: tuple[int, int]) -> None:
    length = 900
    mask, sizes = MASKS[name]("cuda", length), (BATCH, HEADS, length, length, *block)
    status = tile_status(mask, *sizes)
    assert torch.equal(status, mask.tiles(*sizes, "cuda"))
    table, counts = make_tile_ranges(mask, sizes, transposed=False)
    for row, found, count in zip(
        status.flatten(0, 2).tolist(), table.flatten(0, 2).tolist(), counts.flatten().tolist()
    ):
        assert found[:count] == _ranges(_short(row))
