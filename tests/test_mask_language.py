"""The mask language: random functions against plain Python, and what is refused when a mask is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import mask_programs as programs
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import EMPTY, FULL, Mask
from flashkernel.core.generate import jit_function
from flashkernel.ops.attention.hopper.block_ranges import every_row_visible
from flashkernel.ops.attention.triton.arguments import Sizes
from flashkernel.ops.attention.triton.scores import TileIndices, visible

random_masks = given(tree=programs.conditions(3))
quickly = settings(max_examples=150, deadline=None, derandomize=True)
POSITIONS = 16


@triton.jit
def _write(out, tables, sizes, MASK: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr):
    """[batch, heads, SIDE, SIDE]: what the kernels think of each pair."""
    # Tensors: of numbers without a shape, Triton's interpreter compares integers only.
    b = tl.program_id(0) + tl.zeros([1, 1], tl.int64)
    h = tl.program_id(1) + tl.zeros([1, 1], tl.int32)
    q, k = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    seen = tl.where(visible(TileIndices(b, h, q, k), sizes, tables, MASK, EVEN), q * 0 + k * 0 + 1, 0)
    tl.store(out + ((b * tl.num_programs(1) + h) * SIDE + q) * SIDE + k, seen)


def _by_triton(mask: Mask, sizes: tuple[int, int, int, int] = programs.SIZES, even: bool = False) -> torch.Tensor:
    batch, heads, queries, keys = sizes
    out = torch.zeros((batch, heads, POSITIONS, POSITIONS), dtype=torch.int32)
    function = jit_function("visible", "b, h, q, k, sq, sk, tables", mask.text)
    tables = ex.table_arguments(list(mask.tables))
    _write[(batch, heads)](out, tables, Sizes(heads, 1, queries, keys), function, even, POSITIONS)
    return out[:, :, :queries, :keys].bool()


def _whole(mask: Mask, sizes: tuple[int, int, int, int] = programs.SIZES) -> torch.Tensor:
    return mask.visible(*sizes).expand(sizes)


@quickly
@random_masks
def test_torch_and_triton_agree_with_python(tree: programs.Tree) -> None:
    mask, expected = programs.mask_of(tree), programs.expected(tree)
    assert torch.equal(_whole(mask), expected), mask.text
    assert torch.equal(_by_triton(mask), expected), mask.text
    recalled = Mask(ex.recall(mask.text, list(mask.tables)))
    assert recalled.text == mask.text
    assert torch.equal(_whole(recalled), expected), "a text names one function"


@settings(max_examples=300, deadline=None, derandomize=True)
@random_masks
def test_tiles_never_contradict_pairs(tree: programs.Tree) -> None:
    mask = programs.mask_of(tree)
    seen = _whole(mask)
    for rows, columns in ((4, 4), (1, 1), (5, 2), (16, 3)):
        status = mask.tiles(*programs.SIZES, rows, columns).expand(2, 2, -1, -1)
        for i, pairs in enumerate(seen.split(rows, 2)):
            for j, tile in enumerate(pairs.split(columns, 3)):
                some, every = tile.flatten(2).any(-1), tile.flatten(2).all(-1)
                assert not (some & (status[:, :, i, j] == EMPTY)).any(), mask.text
                assert not (~every & (status[:, :, i, j] == FULL)).any(), mask.text


@settings(max_examples=200, deadline=None, derandomize=True)
@random_masks
def test_masks_are_relative_and_rows_see_keys_only_where_it_is_true(tree: programs.Tree) -> None:
    mask = programs.mask_of(tree)
    for queries, keys in ((13, 11), (5, 11), (1, 3)):
        seen = mask.visible(2, 2, queries, keys)
        assert not every_row_visible(mask, queries, keys) or seen.any(-1).all(), mask.text
    values = {"b": torch.arange(2).view(2, 1, 1, 1), "h": torch.arange(2).view(1, 2, 1, 1), "sq": 13, "sk": 11}
    q, k = torch.arange(13).view(1, 1, -1, 1), torch.arange(11).view(1, 1, 1, -1)
    if mask.relative:
        here, moved = (ex.evaluate(mask.expression, {**values, "q": q - by, "k": k - by}) for by in (0, 24))
        assert torch.equal(torch.as_tensor(here), torch.as_tensor(moved)), mask.text


@pytest.mark.parametrize("queries, keys", [(16, 16), (9, 16), (16, 9), (1, 5), (7, 1)])
def test_every_row_visible_is_no_guess(queries: int, keys: int) -> None:
    sees_all = [fk.causal() & fk.window(3), fk.window(4, 2), fk.causal(), fk.prefix(1) | fk.causal(), fk.sink_tokens(1)]
    others = [~fk.window(4), ~fk.causal(), fk.custom(lambda b, h, q, k: q - k > 3), fk.sink_tokens(0)]
    for mask in (*sees_all, *others):
        true = bool(mask.visible(1, 1, queries, keys).any(-1).all())
        assert not every_row_visible(mask, queries, keys) or true, mask
        if queries <= keys and any(mask is one for one in sees_all):
            assert every_row_visible(mask, queries, keys), "known masks are known to show every query a key"
    assert not every_row_visible(fk.custom(lambda b, h, q, k: k < b), queries, keys)


NAMED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a constant": (lambda b, h, q, k: True, lambda b, h, q, k: True),
    "nothing": (lambda b, h, q, k: False, lambda b, h, q, k: False),
    "a head": (lambda b, h, q, k: h == 0, lambda b, h, q, k: h == 0),
    "a query": (lambda b, h, q, k: q % 3 == 1, lambda b, h, q, k: q % 3 == 1),
    "tanh of an integer": (lambda b, h, q, k: ex.tanh(q - k) < 0.5, lambda b, h, q, k: q - k <= 0),
    "exp of an integer": (lambda b, h, q, k: ex.exp(q - k) <= 1.0, lambda b, h, q, k: q <= k),
    "a ratio": (lambda b, h, q, k: q / 2 < k, lambda b, h, q, k: q / 2 < k),
    "nan in min": (
        lambda b, h, q, k: ~(ex.minimum(q * float("nan"), 1.0) < 2) & (ex.maximum(k, 4) < 6),
        lambda b, h, q, k: max(k, 4) < 6,
    ),
    "nan in abs": (lambda b, h, q, k: ~(abs(q * float("nan")) >= 0) & (k < 3), lambda b, h, q, k: k < 3),
    "inf less inf": (
        lambda b, h, q, k: ~(ex.where(q < 3, float("inf"), 0.0) - ex.where(k < 3, float("inf"), 0.0) <= float("inf")),
        lambda b, h, q, k: q < 3 and k < 3,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_functions(name: str) -> None:
    function, python = NAMED[name]
    mask = fk.custom(function)
    expected = torch.tensor(
        [[[[python(b, h, q, k) for k in range(16)] for q in range(16)] for h in range(2)] for b in range(2)]
    )
    assert torch.equal(_whole(mask, (2, 2, 16, 16)), expected)
    assert torch.equal(_by_triton(mask, (2, 2, 16, 16)), expected)
    assert torch.equal(_by_triton(mask, (2, 2, 16, 16), even=True), expected)
    status = mask.tiles(2, 2, 16, 16, 4, 4).expand(2, 2, -1, -1)
    tiles = expected.unflatten(2, (4, 4)).unflatten(4, (4, 4))  # [2, 2, 4, rows, 4, columns]
    assert not ((status == EMPTY) & tiles.any(5).any(3)).any()
    assert not ((status == FULL) & ~tiles.all(5).all(3)).any()


RANKS, HIDDEN = torch.arange(16) % 5, torch.arange(16) % 3 == 0
PAIRS = torch.arange(2 * 16).view(2, 16) % 7
OF_TORCH: dict[str, Callable[..., Any]] = {
    "a captured tensor": lambda b, h, q, k: RANKS[q] == RANKS[k],
    "a captured condition": lambda b, h, q, k: HIDDEN[q] & (q < k),
    "indices below zero": lambda b, h, q, k: RANKS[q - k] < PAIRS[h, k - 4],
    "a table of a table": lambda b, h, q, k: PAIRS[b, RANKS[q] + 2] <= k,
    "where": lambda b, h, q, k: torch.where(q < 3, k, q - k) > 2,
    "minimum and maximum": lambda b, h, q, k: torch.minimum(q, k) + 3 > torch.maximum(q, k),
    "logic": lambda b, h, q, k: torch.logical_and(torch.logical_not(q == k), torch.logical_or(q % 2, k < 4)),
    "tanh and exp": lambda b, h, q, k: torch.tanh((q - k) * 0.1) + 0.05 < torch.exp(-0.3 * torch.abs(q - k)),
    "exp2": lambda b, h, q, k: torch.exp2(-q / 2) * 3.1 > k,
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_functions_written_for_flex_attention(name: str) -> None:
    """They read captured tensors and call torch's functions, here of tensors of indices, which vmap would give them."""
    function = OF_TORCH[name]
    indices = (torch.arange(size).view([-1 if axis == dim else 1 for axis in range(4)])
               for dim, size in enumerate((2, 2, 16, 16)))  # fmt: skip
    expected = function(*indices).expand(2, 2, 16, 16)
    mask = fk.custom(function)
    assert torch.equal(_whole(mask, (2, 2, 16, 16)), expected)
    assert torch.equal(_by_triton(mask, (2, 2, 16, 16)), expected)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda b, h, q, k: torch.sigmoid(q) > 0.5, r"sigmoid cannot stand .* there are tensor\[index\], torch\.where"),
        (lambda b, h, q, k: torch.where(q > k, input=q, other=k) > 1, "where with input= cannot stand"),
        (lambda b, h, q, k: PAIRS[h, :] > 1, "slice cannot stand"),
        (lambda b, h, q, k: q - k, "x != 0"),
        (lambda b, h, q, k: 1, "x != 0"),
        (lambda b, h, q, k: (k <= q) & k, "x != 0"),
        (lambda b, h, q, k: (q * 0.5) & k, "two conditions or two integers"),
        (lambda b, h, q, k: ~q, "x == 0 for a number"),
        (lambda b, h, q, k: (q < 3) ^ k, "two conditions"),
        (lambda b, h, q, k: q / 2 // 1 < k, "an integer on the left, not a float"),
        (lambda b, h, q, k: q * 0.5 % 2 < k, "an integer on the left, not a float"),
        (lambda b, h, q, k: q // 2.0 < k, "a positive integer on the right, not 2.0"),
        (lambda b, h, q, k: q // 0 < k, "a positive integer on the right, not 0"),
        (lambda b, h, q, k: q % -3 < k, "a positive integer on the right, not -3"),
        (lambda b, h, q, k: q % True < k, "a positive integer on the right, not True"),
        (lambda b, h, q, k: 9 // q < k, "a positive integer on the right, not an integer"),
        (lambda b, h, q, k: fk.where(q, k, 0) < 3, "a condition first"),
        (lambda b, h, q, k: k < 2**31, "does not fit into 32 bits"),
        (lambda b, h, q, k: min(q, k) < 3, "flashkernel.where"),
        (lambda b, h, q, k: 0 <= k <= q, "write & for and"),
        (lambda b, h, q, k: fk.Table(torch.ones(4))[q / 2] > 0, "write // for a division"),
        (lambda b, h, q, k: fk.Table(torch.ones(4))[q < 2] > 0, "for a condition"),
        (lambda b, h, q, k: fk.Table(torch.ones(()))[()] > 0, "write a single number as it is"),
        (lambda b, h, q, k: fk.Table(torch.ones(4, dtype=torch.complex64))[k] > 0, r"\.to\(dtype\)"),
        (lambda b, h, q, k: fk.Table([1, 2])[k] > 0, "not of list"),
        (lambda b, h, q, k: torch.ones(4) > k, r"Tensor cannot stand .* tensor\[index\]"),
        (torch.ones(4, 4, dtype=torch.bool), "tensor_mask"),
    ],
)
def test_what_cannot_run_everywhere_is_refused_when_a_mask_is_made(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fk.custom(function)


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default_dtype", [torch.bfloat16, torch.float64], indirect=True)
def test_torchs_default_dtype_makes_no_difference(default_dtype: None) -> None:
    """As it is where a model is made in bfloat16, which holds no positions beyond 256."""
    q, k = torch.arange(600)[:, None], torch.arange(600)[None, :]
    for function, expected in (
        (lambda b, h, q, k: q * 0.5 < k, q < 2 * k),
        (lambda b, h, q, k: q / 2 <= k, q <= 2 * k),
        (lambda b, h, q, k: k < 300.5 + 0 * q, (k <= 300) & (q >= 0)),
        (lambda b, h, q, k: ex.maximum(q, 301.5) <= k, (q <= k) & (k > 301)),
        (lambda b, h, q, k: fk.where(q < 3, 299.5, k) > 299, (q < 3) | (k > 299)),
    ):
        mask = fk.custom(function)
        assert torch.equal(_whole(mask, (1, 1, 600, 600))[0, 0], expected), mask.text
        status = mask.tiles(1, 1, 600, 600, 20, 20)[0, 0]
        tiles = expected.unflatten(1, (30, 20)).unflatten(0, (30, 20))  # [30, rows, 30, columns]
        assert not ((status == EMPTY) & tiles.any(3).any(1)).any(), mask.text
        assert not ((status == FULL) & ~tiles.all(3).all(1)).any(), mask.text
    inputs = torch.randn(3, 1, 12, 2, 16, dtype=torch.float32)
    score = fk.score_function(lambda s, b, h, i, j: s + fk.where(i < j, 0.1234, j * 0.3))
    options: dict[str, Any] = {"dropout": 0.3, "seed": 5, "score": score}
    found, exact = (
        fk.attention(*inputs.to(dtype), **options, backend=backend)
        for dtype, backend in ((torch.float32, "torch"), (torch.float64, "reference"))
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_masks_are_not_truth_values() -> None:
    for function in (
        lambda: fk.causal() and fk.window(3),
        lambda: fk.causal() or fk.window(3),
        lambda: not fk.causal(),
        lambda: 1 if fk.causal() else 0,
    ):
        with pytest.raises(TypeError, match="write & for and"):
            function()
    with pytest.raises(TypeError, match=r"not to a function; flashkernel\.custom"):
        fk.causal() & (lambda b, h, q, k: k > 0)
    with pytest.raises(TypeError, match="not to a bool"):
        fk.causal() | True


def test_division_is_cheap_where_nothing_is_negative() -> None:
    """What runs on a GPU for masks over plain positions is what ran before: one division, no correction."""
    text = fk.custom(lambda b, h, q, k: (q // 48 == k // 48) & ((q + 2 * k) % 5 < 3)).text
    assert text == "(((q // 48) == (k // 48)) & (((q + (2 * k)) % 5) < 3))"
    assert fk.custom(lambda b, h, q, k: (q - k) // 64 == 0).text == "(((q - k) >> 6) == 0)"
    assert "tl.cast" not in fk.block_sparse(torch.ones(2, 2, dtype=torch.bool), 8).text


def test_a_table_too_large_for_32_bits_is_addressed_by_64() -> None:
    table = torch.empty((2**12, 2**12, 2**8), dtype=torch.bool, device="meta")
    mask = fk.custom(lambda b, h, q, k: fk.Table(table)[h, q, k])
    assert len(re.findall(r"tl\.cast\([hqk], tl\.int64\)", mask.text)) == 3
