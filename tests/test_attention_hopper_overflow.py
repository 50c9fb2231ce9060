"""The Hopper forward kernel with a fixed row max, under the emulator: work tiles that overflow are computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch

from flashkernel.blocks.mask import Mask, causal, custom, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import verify
from flashkernel.core.op import Case
from flashkernel.ops.attention import attention, hopper
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, Forward
from flashkernel.ops.attention.spec import ATTENTION
from flashkernel.ops.attention.workload import axes_of

ALIKE, FAR_APART = 0.1, 30.0  # scales: scores that differ by a few units, and by hundreds


@pytest.fixture
def flagged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """An emulated H200 of 3 SMs, and for each forward pass how many work tiles it flagged; None where it has no
    fixed row max."""
    counts: list[Any] = []
    monkeypatch.setattr(hopper.forward_launch, "launch", gluon_emulator.counting_retries(counts))
    with devices.pretend(replace(devices.KNOWN["h200"], sms=3)):
        yield counts


def _check(case: Case, device: str = "cpu") -> None:
    failures = [report.message for report in verify(ATTENTION, case, torch.bfloat16, "hopper", device) if not report.ok]
    assert not failures, "\n".join(failures)


def _case(mask: Mask | None, scale: float, axes: Any, **more: Any) -> Case:
    options = {"scale": scale, "return_lse": True} | ({} if mask is None else {"mask": mask})
    return Case("fixed_max", axes, options, gradients=False, **more)


SHAPES = {
    "full-64": (None, axes_of(1, (130, 700), 2, 64), {}),
    "full-128": (None, axes_of(2, (200, 400), 2, 128), {}),
    "full-256": (None, axes_of(1, (100, 300), 1, 256), {}),
    "causal-64": (causal(), axes_of(2, 400, (4, 2), 64), {}),
    "causal-128": (causal(), axes_of(1, 600, (2, 1), 128), {}),
    "late-keys": (causal(), axes_of(1, (70, 500), 2, 64), {}),
    "gpt-oss": (causal() & window(128), axes_of(1, 500, (8, 1), 64), {"present": ("sinks",)}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_that_are_alike_are_not_flagged(shape: str, flagged: list[Any]) -> None:
    mask, axes, more = SHAPES[shape]
    _check(_case(mask, ALIKE, axes, **more))
    assert flagged == [0]


@pytest.mark.parametrize("shape", SHAPES)
def test_flagged_work_tiles_are_computed_again(shape: str, flagged: list[Any]) -> None:
    mask, axes, more = SHAPES[shape]
    _check(_case(mask, FAR_APART, axes, **more))
    assert len(flagged) == 1
    assert flagged[0] > 0


CONFIGS = [
    Forward(2, 64, 2, 1, 240),
    Forward(2, 128, 2, 1, 240, overlap=True),
    Forward(3, 64, 4, 2, 160, overlap=True),
    Forward(4, 64, 8, 1, 112, overlap=True),
]


@pytest.mark.parametrize("scale", [ALIKE, FAR_APART])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_kind_of_config(config: Forward, scale: float, flagged: list[Any]) -> None:
    with tune.override(FORWARD, config):
        _check(_case(causal() & window(200), scale, axes_of(1, (310, 450), (4, 2), 64)))
    assert (flagged[0] > 0) == (scale == FAR_APART)


@pytest.mark.parametrize("stages", range(4, 9))
def test_work_tiles_overlap_only_if_the_pipeline_has_enough_stages(stages: int, flagged: list[Any]) -> None:
    """The first of four consumers skips three K blocks between work tiles: with five stages, they must not overlap."""
    config = Forward(4, 64, stages, 1, 112, overlap=True)
    with devices.pretend(replace(devices.KNOWN["h200"], sms=1)), tune.override(FORWARD, config):
        _check(_case(causal(), ALIKE, axes_of(1, 700, 2, 64)))
    assert flagged == [0]


@pytest.mark.parametrize("outgrown", [[], [1], [0, 2]], ids=str)
def test_only_flagged_work_tiles_are_computed_again(outgrown: list[int], flagged: list[Any]) -> None:
    """One work tile for each of three heads; the scores of some outgrow those of their first K block."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 3, 64, dtype=torch.bfloat16) for length in (64, 300, 300))
    for head in outgrown:
        k[:, 256:, head] *= 100
    wide = [x.double() for x in (q, k, v)]
    with devices.pretend(replace(devices.KNOWN["h200"], sms=1)), tune.override(FORWARD, Forward(2, 64, 2, 1, 240)):
        o = attention(q, k, v, backend="hopper")
    torch.testing.assert_close(o.double(), attention(*wide, backend="reference"), atol=2e-2, rtol=2e-2)
    assert flagged == [len(outgrown)]


def test_calls_without_a_fixed_max(flagged: list[Any]) -> None:
    """float16 has no range for P > 1; and a row without a visible key cannot be told from one that underflowed."""
    blind = custom(lambda b, h, q, k: (q > 5) & (k <= q))
    for dtype, mask, lengths in (
        (torch.float16, None, (70, 70)),
        (torch.bfloat16, causal(), (90, 70)),
        (torch.bfloat16, blind, (70, 70)),
    ):
        q, k = (torch.randn(1, length, 1, 64, dtype=dtype) for length in lengths)
        attention(q, k, k, mask=mask, backend="hopper")
    assert flagged == [None, None, None]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_and_nans_come_out_as_with_the_online_softmax(value: float, flagged: list[Any]) -> None:
    q = torch.randn(1, 70, 1, 64, dtype=torch.bfloat16)
    k = torch.randn(1, 200, 1, 64, dtype=torch.bfloat16)
    k[0, 150, 0, 3] = value
    o = attention(q, k, k, backend="hopper")
    online = attention(q.half(), k.half(), k.half(), backend="hopper")
    assert torch.equal(o.isnan(), online.isnan())
    assert o.isnan().any()
    assert flagged[0] > 0
    assert flagged[1] is None


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [ALIKE, FAR_APART])
@pytest.mark.parametrize("shape", SHAPES)
def test_retries_on_a_gpu(shape: str, scale: float) -> None:
    mask, axes, more = SHAPES[shape]
    _check(_case(mask, scale, axes, **more), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_flagged_work_tiles_on_a_gpu(head_dim: int) -> None:
    """Several work tiles per program, all of them computed twice."""
    _check(_case(causal(), FAR_APART, axes_of(8, 1100, (16, 8), head_dim)), "cuda")
