"""The declaration of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Call, Case, Cost, Input
from flashkernel.core.random_case import Rng
from flashkernel.ops.sampling.configs import MAX_CHUNKS
from flashkernel.ops.sampling.params import IN_PROMPT

_PACKAGE = "flashkernel.ops.sampling"
_TRUNCATE = ("temperature", "top_k", "top_p", "min_p")
_STATES = ("penalties", "token_counts", "bias_ids", "bias_values", "allowed")
_MAX_VOCAB = 16384 * MAX_CHUNKS


def _draw(low: float, high: float, neutral: float | None = None) -> Any:
    """Uniform numbers; one of three rows has the neutral value, if there is one."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
        values = torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low
        if neutral is not None and shape:
            values[::3] = neutral
        return values

    return draw


def _top_k(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    most = 1 + min(axes["vocab"], 200)
    return torch.randint(0, most, shape, generator=generator, device=generator.device)


def _seeds(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape, generator=generator, device=generator.device)


def _positions(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2**34, shape, generator=generator, device=generator.device)


def _penalties(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    device = generator.device
    values = torch.rand(shape, generator=generator, device=device) + torch.tensor([0.7, -0.5, -0.5], device=device)
    values[::3] = torch.tensor([1.0, 0.0, 0.0], device=device)
    return values


def _counts(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    draws = torch.randint(0, 12, (2, *shape), generator=generator, device=generator.device)
    return (draws[0] - 8).clamp(min=0) + torch.where(draws[1] > 9, IN_PROMPT, 0)


def _bias_ids(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    ids = torch.randint(0, axes["vocab"], shape, generator=generator, device=generator.device)
    ids[::2, shape[1] // 2 :] = -1
    return ids


def _until(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(shape, generator=generator, device=generator.device) < 0.5, 0, 2**31 - 1)


def _allowed(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Every word allows some token, so no row is without one."""
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device)
    return words | 1


class _Words(Input):
    """Words of 32 tokens each."""

    def shape(self, axes: Axes) -> tuple[int, ...]:
        states, vocab = super().shape(axes)
        return states, -(-vocab // 32)


_INPUTS = {
    "logits": Input(("rows", "vocab"), draw=lambda shape, axes, generator: 2.5 * torch.randn(
        shape, generator=generator, device=generator.device)),
    "seeds": Input(("rows",), torch.int64, _seeds),
    "positions": Input(("rows",), torch.int64, _positions),
    "temperature": Input(("rows",), torch.float32, _draw(0.2, 1.8, 0.0), optional=True),
    "top_k": Input(("rows",), torch.int32, _top_k, optional=True),
    "top_p": Input(("rows",), torch.float32, _draw(0.05, 1.1), optional=True),
    "min_p": Input(("rows",), torch.float32, _draw(0.0, 0.1, 0.0), optional=True),
    "penalties": Input(("rows", "three"), torch.float32, _penalties, optional=True),
    "token_counts": Input(("states", "vocab"), torch.int32, _counts, optional=True),
    "bias_ids": Input(("states", "entries"), torch.int32, _bias_ids, optional=True),
    "bias_values": Input(("states", "entries"), torch.float32, _draw(-9.0, 9.0), optional=True),
    "bias_until": Input(("states", "entries"), torch.int32, _until, optional=True),
    "allowed": _Words(("states", "vocab"), torch.int32, _allowed, optional=True),
    "restricted": Input(("states",), torch.int32, lambda shape, axes, generator: torch.randint(
        0, 2, shape, generator=generator, device=generator.device), optional=True),
    "state_rows": Input(("rows",), torch.int64, lambda shape, axes, generator: torch.randint(
        0, max(1, axes["states"]), shape, generator=generator, device=generator.device), optional=True),
}  # fmt: skip


def _case(name: str, rows: int, vocab: int, present: tuple[str, ...] = (), **changes: Any) -> Case:
    axes = {"rows": rows, "vocab": vocab, "states": rows, "entries": 5, "three": 3}
    return replace(Case(name, axes, present=present), **changes)


_CASES = (
    _case("plain", 6, 300),
    _case("greedy-and-random", 7, 300, ("temperature",)),
    _case("top-k", 6, 1000, ("top_k",)),
    _case("top-p", 6, 1000, ("temperature", "top_p")),
    _case("min-p", 6, 300, ("min_p",)),
    _case("truncated", 9, 2000, _TRUNCATE),
    _case("several-chunks", 4, 9000, ("temperature", "top_p")),
    _case("top-k-several-chunks", 4, 9001, ("temperature", "top_k", "top_p")),
    _case("penalties", 6, 300, ("penalties", "token_counts")),
    _case("biases", 6, 300, ("bias_ids", "bias_values")),
    _case("biases-until", 6, 300, ("temperature", "bias_ids", "bias_values", "bias_until")),
    _case("allowed", 6, 301, ("allowed",)),
    _case("restricted", 6, 301, ("allowed", "restricted", "top_p")),
    _case("everything", 9, 500, (*_TRUNCATE, *_STATES, "bias_until", "restricted", "state_rows")).at(states=4),
    _case("state-rows", 8, 100, ("temperature", "penalties", "token_counts", "state_rows")).at(states=3),
    _case("one-token", 3, 1, _TRUNCATE),
    _case("two-tokens", 5, 2, _TRUNCATE),
    _case("no-rows", 0, 40, _TRUNCATE),
    _case("padded", 5, 200, _TRUNCATE, layout="padded"),
    _case("transposed", 5, 200, _TRUNCATE, layout="transposed"),
    _case("offset", 5, 200, ("temperature", "top_p"), layout_of={"logits": "offset"}),
)


def _random_case(rng: Rng, case: Case) -> Case:
    """SampleParams by themselves; penalties with counts, ids with values."""
    present = {name for name in _TRUNCATE if rng.maybe()}
    states = rng.call.randint(1, 4)
    for group in (("penalties", "token_counts"), ("bias_ids", "bias_values"), ("allowed",)):
        if rng.maybe(0.4):
            present |= set(group)
    if "bias_ids" in present and rng.maybe():
        present.add("bias_until")
    if "allowed" in present and rng.maybe():
        present.add("restricted")
    rows = 0 if rng.empty() else rng.size(1, 9)
    if rng.maybe():
        present.add("state_rows")
    axes = {"rows": rows, "vocab": rng.size(1, 20000 if rng.large else 700), "entries": rng.call.randint(1, 6),
            "three": 3, "states": states if "state_rows" in present else rows}  # fmt: skip
    return replace(case, axes=axes, options={}, present=tuple(sorted(present)), dtype_of={}, layout_of={},
                   layout="contiguous")  # fmt: skip


def _bench(name: str, rows: int, vocab: int, present: tuple[str, ...], **dtypes: Any) -> Case:
    return replace(_case(name, rows, vocab, present), check_axes={"rows": min(rows, 16)}, **dtypes)


_F32 = {"dtypes": (torch.float32,)}
_BENCHES = (
    _bench("greedy-256x128256", 256, 128256, (), **_F32),
    _bench("temperature-256x128256", 256, 128256, ("temperature",), **_F32),
    _bench("top-p-256x128256", 256, 128256, ("temperature", "top_p"), **_F32),
    _bench("top-k-256x128256", 256, 128256, ("temperature", "top_k"), **_F32),
    _bench("truncated-256x128256", 256, 128256, _TRUNCATE, **_F32),
    _bench("top-p-1x128256", 1, 128256, ("temperature", "top_p"), **_F32),
    _bench("top-p-64x151936", 64, 151936, ("temperature", "top_p"), **_F32),
    _bench("top-p-256x128256-half", 256, 128256, ("temperature", "top_p"), dtypes=(torch.bfloat16,)),
)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Logits are read once, which no sampler can save; the search reads them again."""
    elements = case.axes["rows"] * case.axes["vocab"]
    return {"fwd": Cost(4.0 * elements, elements * dtype.itemsize)}


def _supports(call: Call) -> str | None:
    vocab = call.facts["vocab"]
    return None if vocab <= _MAX_VOCAB else f"vocabularies have up to {_MAX_VOCAB} tokens, not {vocab}"


SAMPLE = declare(
    _PACKAGE,
    "sample",
    "one token of each row of logits: temperature, top-k, top-p, min-p, penalties, biases, masks",
    inputs=_INPUTS,
    kernels=(backends.triton(f"{_PACKAGE}.triton", _supports),),
    workload=Workload(_CASES, _BENCHES, _cost),
    baselines=("eager", "compile"),
    differentiable=False,
    backward=None,
    random_case=_random_case,
)
OPS = (SAMPLE,)
