"""Dropout of attention: what it drops follows from its seed, in every backend."""

from __future__ import annotations

import pytest
import torch
from plain_attention import assert_agrees, by_fast_backend, make_inputs

import flashkernel as fk
from flashkernel.blocks import dropout as dropping
from flashkernel.blocks.mask import causal
from flashkernel.ops.attention import attention


@by_fast_backend
def test_dropout_follows_from_its_seed(backend: str) -> None:
    inputs = make_inputs(queries=150, keys=140)
    options = {"dropout": 0.4, "mask": causal()}
    first, again, other = (attention(**inputs, **options, seed=seed, backend=backend) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert_agrees(inputs, {**options, "seed": 7}, backend)


@by_fast_backend
def test_dropout_leaves_the_lse_alone(backend: str) -> None:
    inputs = make_inputs()
    _, dropped = attention(**inputs, dropout=0.5, seed=3, return_lse=True, backend=backend)
    _, plain = attention(**inputs, return_lse=True, backend=backend)
    assert torch.equal(dropped, plain)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 1, -5])
def test_dropout_keeps_its_share(probability: float, seed: int) -> None:
    kept = dropping.keep(seed, 2, 4, 200, 250, probability).double()  # 400,000 draws: 5 sigma is below 0.004
    assert kept.mean().item() == pytest.approx(1 - probability, abs=0.004)
    for dim in (0, 1, 2, 3):  # neighbors along any dim are independent
        size = kept.shape[dim]
        both = (kept.narrow(dim, 0, size - 1) * kept.narrow(dim, 1, size - 1)).mean().item()
        assert both == pytest.approx((1 - probability) ** 2, abs=0.008)


def test_dropout_by_tile_and_by_integers() -> None:
    """Tiles see what the whole sees, and the 64-bit arithmetic is that of 32-bit words."""
    whole = dropping.keep(9, 2, 3, 50, 60, 0.3)
    q, k = torch.arange(13, 29).view(1, 1, -1, 1), torch.arange(40, 60).view(1, 1, 1, -1)
    b, h = torch.tensor(1).view(1, 1, 1, 1), torch.tensor(2).view(1, 1, 1, 1)
    tile = dropping.keep_pairs(9, b, h, q, k, 3, 50, 60, 0.3)
    assert torch.equal(tile[0, 0], whole[1, 2, 13:29, 40:60])
    words = [0, 1, 0x12345678, 0xFFFFFFFF]
    assert dropping.scramble(torch.tensor(words)).tolist() == [dropping.scramble(word) for word in words]
    far = dropping.keep_pairs(9, b, h, q + 2**20, k, 3, 2**21, 2**21, 0.3)  # indices beyond 2^32
    assert 0.4 < far.double().mean().item() < 0.95
    assert not torch.equal(far, tile)


def test_seed_on_the_device_drops_what_the_number_does() -> None:
    """A seed in a tensor decides as the same number does, in every backend, forward and backward."""
    q, k, v = (torch.randn(1, 20, heads, 16) for heads in (4, 2, 2))
    number = 5_000_000_011  # more than 32 bits
    for backend in ("reference", "torch", "triton"):
        results = []
        for seed in (number, torch.tensor(number)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = fk.attention(*leaves, mask=fk.causal(), dropout=0.4, seed=seed, backend=backend)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(*pair) for pair in zip(*results)), backend
    with pytest.raises(ValueError, match="one int64"):
        fk.attention(q, k, v, dropout=0.4, seed=torch.tensor([1, 2]))
