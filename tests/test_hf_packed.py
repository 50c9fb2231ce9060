"""Packed sequences through Transformers on the Hopper kernels: a tile schedule for each kind of layer and step, and the
results of each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

import test_hf  # noqa: E402
from emulated_hopper import emulated  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import flashkernel.hf as hf  # noqa: E402
from flashkernel import attention, causal, documents  # noqa: E402
from flashkernel.blocks import tile_status  # noqa: E402
from flashkernel.core import derived  # noqa: E402
from flashkernel.hf import LayerMask  # noqa: E402
from flashkernel.ops.attention import hopper  # noqa: E402
from flashkernel.ops.attention.hopper import varlen_schedule  # noqa: E402
from flashkernel.ops.attention.varlen import library  # noqa: E402

LENGTHS = (13, 1, 22)
LAYERS = 4
KINDS = {"llama": 1, "gpt_oss": 2}  # how many kinds of layers there are: full, and sliding
# Transformers' gpt-oss does not look for packed sequences in position_ids.
PACKED = [("llama", "position_ids"), ("llama", "cu_seq_lens"), ("gpt_oss", "cu_seq_lens")]


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    derived._entries.clear()
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch, varlen_schedule):
        yield


def _model(name: str, attention: str, dtype: torch.dtype) -> Any:
    prefix, options = test_hf.MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(
        **{**options, "num_hidden_layers": LAYERS, "layer_types": options.get("layer_types", []) * 2 or None}
    )
    torch.manual_seed(0)
    made = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    return made.to(dtype)


def _packed_inputs(how: str) -> dict[str, Any]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if how == "position_ids":
        return {"position_ids": positions}
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }  # fmt: skip


def _gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


@pytest.mark.parametrize("name, how", PACKED)
def test_layers_share_a_schedule_and_sequences_are_on_their_own(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    schedule = library.schedule
    monkeypatch.setattr(library, "schedule", lambda *args: made.append(args) or schedule(*args))
    ours, alone = _model(name, hf.NAME, torch.float16), _model(name, "eager", torch.float32)
    tokens = torch.randint(1, 64, (1, sum(LENGTHS)))
    weight = torch.randn(1, sum(LENGTHS), 64)
    for step in range(1, 3):
        ours.zero_grad()
        packed = ours(input_ids=tokens, use_cache=False, **_packed_inputs(how)).logits
        assert len(made) == step * KINDS[name]  # each step has lengths of its own
        (packed.float() * weight).sum().backward()
        assert len(made) == step * KINDS[name]
    parts = [alone(input_ids=part, use_cache=False).logits for part in tokens.split(LENGTHS, 1)]
    expected = torch.cat(parts, 1)
    (expected * weight).sum().backward()
    largest = expected.abs().max()
    torch.testing.assert_close(packed.detach().float(), expected.detach(), rtol=0, atol=0.01 * float(largest.detach()))
    for found, wanted in zip(_gradients(ours), _gradients(alone)):
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()) + 1e-3)


def test_the_schedule_is_that_of_the_lengths_now() -> None:
    """One tensor of lengths that is written to between steps, as buffers of a data loader are."""
    ours, alone = _model("llama", hf.NAME, torch.float16), _model("llama", "eager", torch.float32)
    tokens, inputs = torch.randint(1, 64, (1, sum(LENGTHS))), _packed_inputs("cu_seq_lens")
    for lengths in ((13, 1, 22), (1, 30, 5), (12, 12, 12)):
        inputs["cu_seq_lens_q"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.no_grad():
            found = ours(input_ids=tokens, use_cache=False, **inputs).logits
            expected = torch.cat([alone(input_ids=part).logits for part in tokens.split(lengths, 1)], 1)
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.01 * float(expected.abs().max()))


def test_layers_share_the_block_ranges_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rows, for two kernels of one tile shape, and those of columns, whatever the number of layers."""
    made: list[Any] = []
    status = tile_status.tile_status
    monkeypatch.setattr(tile_status, "tile_status", lambda *args: made.append(args) or status(*args))
    ours, alone = _model("llama", hf.NAME, torch.float32), _model("llama", "eager", torch.float32)
    tokens, real = torch.randint(1, 64, (2, 20)), torch.arange(20) < torch.tensor([[20], [11]])
    for step in range(1, 3):
        logits = ours(input_ids=tokens, attention_mask=real.long(), use_cache=False).logits
        logits[real].square().sum().backward()
        assert len(made) == 2 * step
    expected = alone(input_ids=tokens[1:, :11], use_cache=False).logits
    torch.testing.assert_close(logits[1:, :11], expected, rtol=1e-3, atol=1e-3)


def test_documents_and_lengths_that_cut_at_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens see each other if both say so; the Hopper kernels serve it by lengths that are cut at both."""
    made: list[Any] = []
    schedule = library.schedule
    monkeypatch.setattr(library, "schedule", lambda *args: made.append(args[0].tolist()) or schedule(*args))
    q = torch.randn(1, 4, 40, 16, dtype=torch.float16)
    ends = torch.tensor([0, 10, 32, 40], dtype=torch.int32)
    ids = (torch.arange(40) >= 25).int()[None]
    mask = LayerMask(causal() & documents(ids), (1, 1, 40, 40))
    found, _ = hf.attention_forward(nn.Module(), q, q, q, mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends.clone())
    joined = torch.bucketize(torch.arange(40), torch.tensor([10, 25, 32]), right=True)[None]
    rows = q.transpose(1, 2).float()
    expected = attention(rows, rows, rows, causal=True, mask=documents(joined), backend="reference")
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=4e-3)
    assert made == [[0, 10, 25, 32, 40]]
