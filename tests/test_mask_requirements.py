"""Masks at the call: sizes they were not made for are refused, and boolean tensors are masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from flashkernel.blocks.mask import EMPTY, FULL, PARTIAL, Mask, tensor_mask

BATCH, HEADS, QUERIES, KEYS = 2, 4, 10, 12
by_backend = pytest.mark.parametrize("backend", ["torch", "triton", "reference"])


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, QUERIES, HEADS, 16), (BATCH, KEYS, 2, 16), (BATCH, KEYS, 2, 16))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _layout(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


WRONG: dict[str, tuple[Callable[[], Mask], str]] = {
    "few ids of queries": (lambda: fk.documents(_ids(9), _ids(12)), "query_ids is made for at most 9 queries, .* 10"),
    "few ids of keys": (lambda: fk.documents(_ids(10)), "key_ids is made for at most 10 keys, but the call has 12"),
    "ids of another batch": (lambda: fk.documents(_ids(3, 12)), "query_ids is made for 3 batch, but the call has 2"),
    "a small layout": (lambda: fk.block_sparse(_layout(2, 2), 5), "layout is made for at most 10 keys"),
    "other heads": (lambda: fk.block_sparse(_layout(2, 2, 2), 8), "layout is made for 2 heads, but the call has 4"),
    "another batch": (lambda: fk.block_sparse(_layout(1, 4, 2, 2), 8), "layout is made for 1 batch"),
    "few intervals": (lambda: fk.column_intervals(_ids(12), _ids(11)), "end is made for at most 11 keys"),
    "intervals of a batch": (lambda: fk.column_intervals(_ids(1, 12), _ids(12)), "start is made for 1 batch"),
    "lengths of a batch": (lambda: fk.prefix(_ids(3)), "lengths is made for 3 batch, but the call has 2"),
    "a tensor of other keys": (lambda: tensor_mask(_layout(10, 11)), "boolean tensor is made for 11 keys"),
    "a tensor of more queries": (lambda: tensor_mask(_layout(11, 12)), "boolean tensor is made for 11 queries"),
    "a tensor of other heads": (lambda: tensor_mask(_layout(2, 10, 12)), "boolean tensor is made for 2 heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_a_mask_was_not_made_for(name: str) -> None:
    make, message = WRONG[name]
    for mask in (make(), ~make(), fk.causal() & make(), make() | fk.causal(), fk.causal() & ~(fk.causal() | make())):
        with pytest.raises(ValueError, match=f"^attention: .*{message}"):
            fk.attention(*_tensors(), mask=mask, backend="torch")


def test_other_operators_refuse_as_well() -> None:
    q, k, v = _tensors()
    short = fk.documents(_ids(7))
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    scales = [torch.ones(BATCH, heads) for heads in (HEADS, 2, 2)]
    with pytest.raises(ValueError, match=r"^attention_fp8: documents: query_ids is made for at most 7 queries"):
        fk.attention_fp8(*eight, *scales, mask=short)
    lengths = torch.tensor([0, 4, KEYS], dtype=torch.int32)
    with pytest.raises(ValueError, match="key_ids is made for at most 7 keys"):
        fk.attention_varlen(q[0, :7], k[0], v[0], lengths.clamp(max=7), lengths, mask=short)
    with pytest.raises(TypeError, match="attention_fp8: mask is a function"):
        fk.attention_fp8(*eight, *scales, mask=lambda b, h, q, k: k <= q)


@by_backend
def test_longer_tables_and_reads_outside_custom_tables(backend: str) -> None:
    """A buffer may be longer than the sequence; what a custom mask reads outside of its tables is 0."""
    q, k, v = _tensors()
    ids = (torch.arange(40) // 5).to(torch.int32)
    outside = fk.custom(lambda b, h, q, k: fk.Table(_ids(1, 3) + 1)[b, k] == 0)
    for mask in (fk.documents(ids), outside):
        expected = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask.visible(2, 4, QUERIES, KEYS), enable_gqa=True
        )
        found = fk.attention(q, k, v, mask=mask, backend=backend)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6


@by_backend
@pytest.mark.parametrize(
    "mask",
    [
        _drawn(QUERIES, KEYS),
        _drawn(HEADS, QUERIES, KEYS),
        _drawn(BATCH, HEADS, QUERIES, KEYS),
        _drawn(BATCH, 1, 1, KEYS),
        _drawn(BATCH, 1, 1, KEYS).expand(BATCH, HEADS, QUERIES, KEYS),
        _drawn(KEYS),
        _drawn(1, 1, QUERIES, 1),
        torch.ones(1, 1, dtype=torch.bool),
        _drawn(KEYS, QUERIES).T,
    ],
    ids=lambda mask: "x".join(map(str, mask.shape)),
)
def test_boolean_tensors(mask: torch.Tensor, backend: str) -> None:
    q, k, v = _tensors()
    wide = mask.broadcast_to(BATCH, HEADS, QUERIES, KEYS)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=wide, enable_gqa=True
    ).transpose(1, 2)
    expected = expected.masked_fill(~wide.any(-1).transpose(1, 2)[..., None], 0)
    found = fk.attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    both = fk.attention(q, k, v, mask=fk.causal() & mask, backend=backend)
    hidden = wide & fk.causal().visible(1, 1, QUERIES, KEYS)
    torch.testing.assert_close(both, fk.attention(q, k, v, mask=hidden, backend="reference"), rtol=1e-4, atol=1e-5)


def test_tiles_of_a_boolean_tensor_are_exact() -> None:
    seen = torch.zeros(2, 3, 50, 70, dtype=torch.bool)
    seen[0, 1, 3, 60], seen[1, 2, 16:32, 16:48], seen[1, 0] = True, True, True
    for rows, columns in ((16, 16), (8, 32), (64, 7), (1, 70)):
        status = tensor_mask(seen).tiles(2, 3, 50, 70, rows, columns)
        for i, part in enumerate(seen.split(rows, 2)):
            for j, tile in enumerate(part.split(columns, 3)):
                some, every = tile.flatten(2).any(-1), tile.flatten(2).all(-1)
                if (j + 1) * columns > 70:  # a tile that sticks out is masked
                    every &= False
                assert torch.equal(status[:, :, i, j], torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)))


@pytest.mark.parametrize("block", [4, 16, 32, 24])
def test_tiles_of_a_block_layout_are_exact(block: int) -> None:
    layout = torch.rand(-(-96 // block), -(-96 // block), generator=torch.Generator().manual_seed(2)) < 0.3
    mask = fk.block_sparse(layout, block)
    seen = mask.visible(1, 1, 96, 96)
    status = mask.tiles(1, 1, 96, 96, 16, 16)
    tiles = seen.unflatten(2, (6, 16)).unflatten(4, (6, 16))
    assert torch.equal(status == EMPTY, ~tiles.any(5).any(3))
    assert torch.equal(status == FULL, tiles.all(5).all(3))


@pytest.mark.parametrize("dtype, message", [(torch.float32, "goes into bias="), (torch.int64, "write tensor != 0")])
def test_tensors_of_numbers_are_refused_with_advice(dtype: torch.dtype, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fk.attention(*_tensors(), mask=torch.ones(QUERIES, KEYS, dtype=dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_whole(backend: str, dynamic: bool) -> None:
    """A boolean tensor, and a mask that is made in the graph, of tables that are its inputs."""

    def run(q: Any, k: Any, v: Any, seen: Any, ids: Any) -> Any:
        first = fk.attention(q, k, v, mask=seen, backend=backend)
        return first + fk.attention(
            q, k, v, mask=fk.documents(ids[:, : q.shape[1]], ids) & fk.causal(), backend=backend
        )

    given = (*_tensors(), _drawn(BATCH, 1, QUERIES, KEYS), (torch.arange(KEYS) // 4).to(torch.int32).repeat(BATCH, 1))
    found = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*given)
    torch.testing.assert_close(found, run(*given), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match="made for at most 11 keys"):
        run(*given[:-1], given[-1][:, :11])
