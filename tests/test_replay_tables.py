"""Replayed calls that read what follows from tensors: masks with tables, and what is derived from arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core import replay
from flashkernel.core.derived import derived
from flashkernel.core.recording import Recording
from flashkernel.ops.norm import library as norm


def test_masks_with_tables_are_looked_up_at_every_replay(repeated: list[Any]) -> None:
    """Forward and backward, with a new tensor of ids at each call, and with one that is written to."""
    ids = torch.zeros(1, 32, dtype=torch.int32)
    for split, mine in zip((5, 9, 20, 31, 4, 12), (False, False, False, False, True, True)):
        given = ids if mine else torch.empty_like(ids)
        given.copy_(torch.arange(32) >= split)
        mask, do = fk.documents(given) & fk.causal(), torch.randn(1, 32, 2, 16)
        q, k, v = (torch.randn(1, 32, 2, 16, requires_grad=True) for _ in range(3))
        pair = []
        for backend in ("triton", "torch"):
            out = fk.attention(q, k, v, mask=mask, backend=backend)
            pair.append([out, *torch.autograd.grad(out, (q, k, v), do)])
        for found, wanted in zip(*pair):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert len(set(repeated)) == 2
    assert len(repeated) == 8


@pytest.mark.parametrize("gradients", [False, True])
def test_public_calls_under_masks_with_tables_are_repeated(gradients: bool, repeated: list[Any]) -> None:
    """Each step with new tensors, and composed anew with `causal`; one is written to between calls."""
    layout = torch.ones(3, 3, dtype=torch.int8)
    for number in range(7):
        start = torch.randint(0, 40, (1, 40)).int()
        if number == 5:
            layout[2, 0] = 0
        mask = fk.block_sparse(layout, 16) & fk.column_intervals(start, start + 5)
        q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=gradients) for _ in range(3))
        pair = []
        for backend in ("triton", "torch"):
            out = fk.attention(q, k, v, mask=mask, causal=True, backend=backend)
            pair.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))] if gradients else [out])
        for found, wanted in zip(*pair):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    kinds = [type(entry) for entry in fk.attention.launch_cache.entries.values()]
    assert kinds.count(replay.OperatorCall if gradients else Recording) == 1
    assert len(set(repeated)) == (2 if gradients else 1)
    assert len(repeated) >= (8 if gradients else 5)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_derived_from_arguments_is_looked_up_at_every_replay(gradients: bool, repeated: list[Any]) -> None:
    """As the tile schedule of packed sequences from their lengths: made once for each version of them."""
    made: list[int] = []

    def doubled(weight: Tensor) -> tuple[Tensor]:
        made.append(len(made))
        return (2 * weight,)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        (twice,) = derived("doubled", [weight], doubled)
        return norm.norm(x, twice, None, None, 1e-6, 0.0, True, "flashkernel.ops.norm.triton")[0]

    torch.manual_seed(0)
    call, weight = replay.replayed(call), torch.randn(32)
    for number in range(8):
        if number in (5, 6):
            weight.mul_(3)
        x = torch.randn(4, 32, requires_grad=gradients)
        found, expected = call(x, weight), fk.rms_norm(x, 2 * weight, backend="torch")
        torch.testing.assert_close(found, expected)
        if gradients:
            pair = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
    assert len(made) - 3 <= 1  # one more while the call is recorded
    assert len(repeated) >= 6
