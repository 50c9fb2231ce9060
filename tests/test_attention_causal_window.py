"""The options `causal` and `window` of attention: the mask that they are, refusals, torch.compile and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_attention import by_backend, make_inputs
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.mask import Mask, causal, documents, prefix, window
from flashkernel.core import device as devices
from flashkernel.core import recording, replay
from flashkernel.core.dispatch import explain
from flashkernel.ops.attention import attention, reference

PACKED = torch.arange(20) // 7  # documents of 7 tokens


@by_backend
@pytest.mark.parametrize(
    "given, mask",
    [
        ({"causal": True}, causal()),
        ({"causal": True, "window": 5}, causal() & window(5)),
        ({"window": 5}, causal() & window(5)),  # as in attention_varlen, no later key is visible
        ({"causal": False, "window": None}, None),
        ({"causal": True, "mask": window(None, 3) | prefix(2)}, causal() & (window(None, 3) | prefix(2))),
        ({"window": 6, "mask": documents(PACKED)}, causal() & window(6) & documents(PACKED)),
        ({"causal": True, "mask": PACKED > 0}, causal() & (PACKED > 0)),
    ],
    ids=["causal", "both", "window", "neither", "with a mask", "with documents", "with a tensor"],
)
def test_causal_and_window(given: dict[str, Any], mask: Mask | None, backend: str) -> None:
    inputs = make_inputs()
    found, expected = attention(**inputs, **given, backend=backend), attention(**inputs, mask=mask, backend=backend)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_reference_has_causal_and_window_of_its_own() -> None:
    inputs = make_inputs(queries=11, keys=17)
    for given in ({"causal": True}, {"causal": True, "window": 4}, {"window": 4}, {"window": 4, "mask": prefix(9)}):
        torch.testing.assert_close(
            reference.attention(**inputs, **given), attention(**inputs, **given, backend="torch"), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"window": 0}, ValueError, "window is 0; a query sees itself at least"),
        ({"window": -3, "causal": True}, ValueError, "1 or more"),
        ({"window": (4, 0)}, TypeError, r"mask=flashkernel.window\(left, right\)"),
        ({"window": 4.0}, TypeError, "it must be a whole number, of the keys"),
        ({"window": True}, TypeError, "window is True"),
        ({"window": window(4)}, TypeError, "window is Mask"),
        ({"causal": causal()}, TypeError, "causal is a Mask; it must be True or False; a mask goes into mask="),
        ({"causal": causal}, TypeError, "a mask goes into mask="),
        ({"causal": 1}, TypeError, "causal is a int"),
    ],
)
def test_senseless_causal_and_window(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**make_inputs(), **given)
    x = torch.randn(6, 2, 16)
    if not isinstance(given.get("window"), tuple):  # there a pair is a window of two sides
        with pytest.raises(error, match=message):
            fk.attention_varlen(x, x, x, torch.tensor([0, 6]), **given)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_causal_and_window_under_compile(backend: str) -> None:
    inputs = make_inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
        return attention(q, k, v, causal=True, window=size, backend=backend)

    for size in (3, 7):
        expected = attention(**inputs, mask=causal() & window(size), backend=backend)
        torch.testing.assert_close(run(*inputs.values(), size), expected, rtol=1e-5, atol=1e-5)


def test_causal_and_window_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with causal=True is recorded as one with a mask is: its arguments are plain values."""
    monkeypatch.setattr(replay, "RECORD_AFTER", 1)
    inputs = make_inputs()
    known = attention.launch_cache.entries  # type: ignore[attr-defined]
    before = set(known)
    expected = attention(**inputs, mask=causal() & window(5), backend="triton")
    with torch.no_grad():
        for _ in range(3):
            found = attention(**inputs, causal=True, window=5, backend="triton")
    assert torch.equal(found, expected)
    assert [type(known[key]) for key in set(known) - before if "causal" in key] == [recording.Recording]


def test_a_window_is_explained() -> None:
    inputs = {name: x.bfloat16() for name, x in make_inputs(1, 4096, 4096, 2, 2, 128).items()}
    with devices.pretend(devices.KNOWN["h200"]):
        wide, narrow = (explain(attention, **inputs, causal=True, window=size) for size in (2048, 128))
    assert (wide.chosen, narrow.chosen) == ("hopper", "triton")
    assert "at most 384 keys" in str(narrow)
