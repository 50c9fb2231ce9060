"""Triton attention of views: expanded, packed, at odd addresses, with heads anywhere; and what its descriptors take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.ops.attention import reference
from flashkernel.ops.attention.triton.descriptors import tile_sources

BATCH, LENGTH, HEADS, DIM = 2, 16, 4, 32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def plain(x: Tensor) -> Tensor:
    return x.contiguous()


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def dim_first(x: Tensor) -> Tensor:
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def one_head_for_all(x: Tensor) -> Tensor:
    return x[:, :, :1].contiguous().expand(x.shape)


def one_sequence_for_all(x: Tensor) -> Tensor:
    return x[:1].contiguous().expand(x.shape)


def one_position_for_all(x: Tensor) -> Tensor:
    return x[:, :1].contiguous().expand(x.shape)


def between_others(x: Tensor) -> Tensor:
    return torch.stack([-x, x, x + 1], 2)[:, :, 1]


def at_an_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def padded_heads(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 2))[..., : x.shape[3]]


def every_other_position(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


VIEWS = (
    plain, heads_first, sequence_first, dim_first, one_head_for_all, one_sequence_for_all, one_position_for_all,
    between_others, at_an_odd_address, padded_heads, every_other_position,
)  # fmt: skip


def assert_right(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **more: Tensor) -> None:
    """Output and gradients against the reference in float64."""
    found = [x.detach().requires_grad_() for x in (q, k, v)]
    known = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = fk.attention(*found, mask=fk.causal(), backend="triton", **more)
    want = reference.attention(*known, mask=fk.causal(), **{name: x.double() for name, x in more.items()})
    results = [out, *torch.autograd.grad(out, found, do)]
    wanted = [want, *torch.autograd.grad(want, known, do.double())]
    for label, result, right in zip(("o", "dq", "dk", "dv"), results, wanted):
        error = (result.double() - right).abs().max() / right.abs().max().clamp(min=1e-3)
        assert error < 4e-3, f"{label} is wrong by {error:.1e}"


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_views(view: Callable[[Tensor], Tensor]) -> None:
    q, k, v, do = (
        view(draw(BATCH, LENGTH, heads, DIM, seed=heads + n)) for n, heads in enumerate((HEADS, 2, 2, HEADS))
    )
    assert_right(q, k, v, do)


def test_views_of_one_tensor() -> None:
    qkv = draw(1, LENGTH, HEADS + 2 + 2, DIM)
    q, k, v = qkv.split([HEADS, 2, 2], 2)
    assert_right(q, k, v, draw(1, LENGTH, HEADS, DIM, seed=1))


def test_heads_of_one_element_may_have_any_stride() -> None:
    q, k, v = (draw(1, LENGTH, 2, 3, seed=seed)[..., 1:2] for seed in range(3))
    assert_right(q, k, v, draw(1, LENGTH, 2, 1, seed=3))


def test_no_values_at_all() -> None:
    q, k = draw(1, 5, 2, 16), draw(1, 7, 2, 16)
    out, lse = fk.attention(q, k, draw(1, 7, 2, 0), return_lse=True, backend="triton")
    assert out.shape == (1, 5, 2, 0)
    torch.testing.assert_close(lse, fk.attention(q, k, k, return_lse=True, backend="torch")[1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("extra", ["strided sinks", "expanded sinks", "expanded slopes", "transposed bias"])
def test_extras_may_be_views(extra: str) -> None:
    given = {
        "strided sinks": {"sinks": draw(HEADS, 3)[:, 1]},
        "expanded sinks": {"sinks": draw(1).expand(HEADS)},
        "expanded slopes": {"alibi_slopes": torch.tensor([0.25]).expand(HEADS)},
        "transposed bias": {"bias": draw(HEADS, LENGTH, LENGTH).transpose(1, 2)},
    }[extra]
    q, k, v = (draw(1, LENGTH, HEADS, DIM, seed=seed) for seed in range(3))
    assert_right(q, k, v, draw(1, LENGTH, HEADS, DIM, seed=3), **given)


@pytest.mark.parametrize(
    "x, described",
    [
        (draw(BATCH, 16, HEADS, 32), True),
        (draw(BATCH, HEADS, 16, 32).transpose(1, 2), True),
        (draw(1, 18, HEADS, 32), True),  # the last tile ends with the tensor
        (draw(BATCH, 18, HEADS, 32), False),  # it would go on into the next sequence
        (draw(1, HEADS, 18, 32).transpose(1, 2), False),  # or into the next head
        (draw(1, 16, 1, 32).expand(1, 16, HEADS, 32), True),
        (draw(1, 16, HEADS, 32).expand(BATCH, 16, HEADS, 32), True),
        (draw(1, 1, HEADS, 32).expand(1, 16, HEADS, 32), False),  # rows 0 bytes apart
        (draw(1, 16, 16, 35)[..., :32], False),  # rows 1120 bytes apart, but heads 70
        (draw(1, 16, 16, 40)[..., :32], True),  # heads 80 bytes apart
        (draw(1, 16, 1, 36)[..., :32], False),  # rows 72 bytes apart
        (at_an_odd_address(draw(1, 16, HEADS, 32)), False),
        (draw(1, 16, HEADS, 16), False),  # rows of 32 bytes
        (draw(1, 16, HEADS, 48), False),  # a tile is as wide as a power of two
        (draw(1, 16, HEADS, 64).float(), False),
        (draw(1, 0, HEADS, 64), False),
    ],
)
def test_what_is_read_by_descriptors(x: Tensor, described: bool) -> None:
    _, by_descriptors = tile_sources((x, 16))
    assert by_descriptors == described


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", [(128, 16), (128, 8), (64, 16), (32, 128), (256, 24), (16, 16)], ids=str)
def test_uneven_heads_over_many_tiles(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Long enough for every stage of the pipeline to be used several times."""
    q, k, v, do = (
        draw(1, 768, heads, dim, seed=heads + dim).to("cuda", dtype)
        for heads, dim in ((4, dims[0]), (1, dims[0]), (1, dims[1]), (4, dims[1]))
    )
    limit = 2e-2 if dtype == torch.bfloat16 else 4e-3
    found = [x.detach().requires_grad_() for x in (q, k, v)]
    known = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, want = fk.attention(*found, backend="triton"), reference.attention(*known)
    for label, result, right in zip(
        ("o", "dq", "dk", "dv"),
        [out, *torch.autograd.grad(out, found, do)],
        [want, *torch.autograd.grad(want, known, do.double())],
    ):
        error = (result.double() - right).abs().max() / right.abs().max()
        assert error < limit, f"{label} is wrong by {error:.1e}"


@pytest.mark.gpu
def test_heads_further_apart_than_int32_counts() -> None:
    """The third head begins 2^31 elements behind the first."""
    apart = 2**30
    memory = torch.zeros(2 * apart + 64 * 64, dtype=torch.float16, device="cuda")
    q, k, v = (draw(1, 64, 3, 64, seed=seed).cuda() for seed in range(3))
    far = memory.as_strided(k.shape, (0, 64, apart, 1))
    for x in (q, k, v):
        far.copy_(x)
        given = [far if y is x else y for y in (q, k, v)]
        torch.testing.assert_close(fk.attention(*given, backend="triton"), fk.attention(q, k, v, backend="triton"))
