"""Packed sequences against each sequence alone: odd lengths, empty sequences, strides, dtypes of the lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_hopper import emulated
from torch import Tensor

import flashkernel as fk
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.hopper import varlen_schedule

LENGTHS = (0, 1, 2, 15, 37, 63, 64, 65, 129)


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch, varlen_schedule):
        yield


def _alone(tensors: list[Tensor], lengths: tuple[list[int], list[int]], **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of each sequence by the reference."""
    q, k, v = tensors
    parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]))
    found = [
        fk.attention(*(x[None] for x in part), return_lse=True, backend="reference", **options) for part in parts
    ]  # fmt: skip
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def _strided(chance: random.Random, tokens: int, heads: int, dim: int) -> Tensor:
    """Contiguous, heads first, or a part of wider rows."""
    kind = chance.randrange(3)
    if kind == 0:
        return torch.randn(tokens, heads, dim)
    if kind == 1:
        return torch.randn(heads, tokens, dim).transpose(0, 1)
    return torch.randn(tokens, 3 * heads, dim)[:, heads : 2 * heads]


@pytest.mark.parametrize("backend, seeds", [("hopper", 8), ("triton", 6), ("torch", 12)])
def test_packed_is_each_sequence_alone(backend: str, seeds: int) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)
        torch.manual_seed(seed)
        count, dim = chance.choice([1, 2, 5]), chance.choice([16, 64, 80])
        lengths_q = [chance.choice(LENGTHS) for _ in range(count)]
        lengths_k = lengths_q if seed % 2 else [chance.choice(LENGTHS) for _ in range(count)]
        options: dict[str, Any] = {"causal": chance.random() < 0.6, "window": chance.choice([None, None, 20])}
        heads, kv_heads = chance.choice([(2, 2), (4, 2), (4, 1)])
        sizes = ((sum(lengths_q), heads), (sum(lengths_k), kv_heads), (sum(lengths_k), kv_heads))
        tensors = [_strided(chance, tokens, number, dim).half() for tokens, number in sizes]
        given = [x.detach().requires_grad_() for x in tensors]
        wide = [x.double().requires_grad_() for x in tensors]
        cu_q, cu_k = (
            torch.tensor([0, *lengths]).cumsum(0).to(chance.choice([torch.int32, torch.int64]))
            for lengths in (lengths_q, lengths_k)
        )
        out, lse = fk.attention_varlen(*given, cu_q, cu_k, return_lse=True, backend=backend, **options)
        expected, expected_lse = _alone(wide, (lengths_q, lengths_k), **options)
        case = f"seed {seed}: {lengths_q} {lengths_k} {heads}/{kv_heads} {dim} {options}"
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-3, msg=lambda text, case=case: case + text)
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=0, atol=4e-3)
        weight = torch.randn_like(expected)
        found = torch.autograd.grad(out, given, weight.half())
        wanted = torch.autograd.grad(expected, wide, weight)
        for one, other in zip(found, wanted):
            assert one.shape == other.shape
            largest = float(other.abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(
                one.double(), other, rtol=0, atol=0.01 * largest + 2e-3, msg=lambda text, case=case: case + text
            )


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 9}, {"window": (30, 4)}], ids=str)
def test_documents_within_sequences(options: dict[str, Any]) -> None:
    """A mask of sorted documents cuts the sequences; the smaller window counts. Others go to the portable kernels."""
    q, k, v = (torch.randn(70, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 0, 20, 50, 70])
    ids = torch.tensor([0] * 35 + [4] * 30 + [5] * 5)
    for mask in (fk.documents(ids), fk.documents(ids) & fk.window(20) & fk.causal()):
        assert fk.explain(fk.attention_varlen, q, k, v, cu_seqlens, mask=mask, **options).chosen == "hopper"
        found, expected = (
            fk.attention_varlen(*given, cu_seqlens, mask=mask, return_lse=True, backend=backend, **options)
            for backend, given in (("hopper", (q, k, v)), ("reference", (q.double(), k.double(), v.double())))
        )
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=4e-3)
    for other in (fk.documents(ids.flip(0)), fk.documents(ids, ids.clone()), fk.documents(ids) | fk.causal()):
        assert fk.explain(fk.attention_varlen, q, k, v, cu_seqlens, mask=other, **options).chosen == "triton"
    q = torch.zeros(40, 4, 64, dtype=torch.float16)  # packed unlike the keys
    lengths = torch.tensor([0, 0, 20, 30, 40])
    answer = fk.explain(fk.attention_varlen, q, k, v, lengths, cu_seqlens, mask=fk.documents(ids[:40], ids), **options)
    assert answer.chosen == "triton"


@pytest.mark.parametrize("backend", ["hopper", "triton", "torch"])
@pytest.mark.parametrize("tokens", [0, 9])
def test_all_sequences_are_empty(backend: str, tokens: int) -> None:
    """Tokens behind the last sequence see nothing."""
    q, k, v = (torch.randn(tokens, 2, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out, lse = fk.attention_varlen(
        q, k, v, torch.zeros(5, dtype=torch.int32), causal=True, return_lse=True, backend=backend
    )  # fmt: skip
    assert out.shape == (tokens, 2, 16)
    assert not out.any()
    assert torch.equal(lse, torch.full((2, tokens), float("-inf")))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()


def test_lengths_that_decrease_read_and_write_nothing_outside() -> None:
    """They are not checked, which would wait for the device; the result is undefined."""
    q, k, v = (torch.randn(40, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    for lengths in ([0, 30, 10, 40], [40, 20, 0], [0, 100, 200], [-50, 10, 60]):
        out = fk.attention_varlen(q, k, v, torch.tensor(lengths), causal=True, backend="hopper")
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3


def test_more_sequences_than_a_grid_has_blocks_in_y() -> None:
    count = 66_000
    q = torch.randn(count, 1, 8)
    v = torch.randn(count, 1, 8)
    out = fk.attention_varlen(q, q, v, torch.arange(count + 1), causal=True, backend="torch")
    torch.testing.assert_close(out, v)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_more_sequences_than_a_grid_has_blocks_in_y_on_a_gpu(backend: str) -> None:
    count = 66_000
    q, k, v = (torch.randn(count, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = fk.attention_varlen(q, k, v, torch.arange(count + 1, device="cuda"), causal=True, backend=backend)
    torch.testing.assert_close(out, v, rtol=0, atol=2e-3)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.testing.assert_close(dv, torch.ones_like(v), rtol=0, atol=2e-3)
    assert float(dq.abs().max()) < 2e-2
    assert float(dk.abs().max()) < 2e-2
