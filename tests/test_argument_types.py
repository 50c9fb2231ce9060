"""Arguments of wrong types: each public function refuses them in its own words, and takes NumPy's numbers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core.argument_types import OWN_CHECKS, Expected, expectation
from flashkernel.engine import SamplingParams
from flashkernel.ops import registry

WRONG: dict[type, list[Any]] = {
    Tensor: [3, 0.5, "abc", np.zeros(2), [1.0], object(), torch.float32, torch.zeros(2, 2).to_sparse()],
    float: ["abc", True, 1j, torch.tensor(0.5), torch.tensor(0.5, requires_grad=True), [0.5], np.zeros(2), torch.int8],
    int: ["abc", True, 0.5, torch.tensor(3), [3], np.float32(1.0)],
    bool: ["no", 1, 0, torch.tensor(True), np.zeros(1), None],
    str: [3, b"triton", ["torch"], torch.float32],
    torch.dtype: ["float16", float, np.float32, 16],
}
OTHERS = (
    fk.moe_balance_loss, fk.moe_balance_bias, fk.quantize_fp8, fk.sink_tokens, fk.prefix, fk.documents, fk.block_sparse,
    fk.column_intervals, fk.window,
)  # fmt: skip
FUNCTIONS = [getattr(fk, op.name) for op in registry().values()] + [*OTHERS]


def _parameters(function: Callable[..., Any]) -> dict[str, Expected]:
    hints = typing.get_type_hints(function)
    found = {name: expectation(hints.get(name)) for name in inspect.signature(function).parameters}
    return {name: one for name, one in found.items() if one is not None and name not in OWN_CHECKS}


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, Tensor) and value.is_sparse:
        return False
    return type(value) is kind or (kind is float and type(value) is int) or (kind is type(None) and value is None)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_wrong_types_are_refused(function: Callable[..., Any]) -> None:
    checked = _parameters(function)
    assert checked
    for name, expected in checked.items():
        for value in [value for kind in expected.types for value in WRONG.get(kind, ())]:
            if not any(_fits(value, kind) for kind in expected.types) and not (expected.items and type(value) is list):
                with pytest.raises(TypeError, match=rf"^{function.__name__}: {name} is .*; it must be a?"):
                    function(**{name: value})


def test_messages_say_what_to_do() -> None:
    x = torch.ones(2, 8)
    for call, message in [
        (lambda: fk.rms_norm(np.ones((2, 8))), r"x is a numpy.ndarray of shape \(2, 8\); .*; torch.as_tensor makes a"),
        (lambda: fk.rms_norm(x, eps=torch.tensor(1e-6)), r"eps is a float32 tensor of shape \(\); .* its .item\(\)"),
        (lambda: fk.rms_norm(x.to_sparse()), r"x is a tensor in layout sparse_coo; .* its .to_dense\(\) is"),
        (lambda: fk.quantize(x, "int8"), "dtype is 'int8'; .*; torch.int8, perhaps"),
        (
            lambda: fk.linear(x, [torch.ones(3, 8), None]),
            r"linear: weight\[1\] is None; it must be a tensor or a Weight",
        ),
        (lambda: fk.rms_norm(x, backend=0), "backend is 0; it must be a string or None"),
        (lambda: fk.sum(torch.nested.nested_tensor([x, x[:1]])), "layout nested; it must be a dense one: pad it"),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


def test_numpy_numbers_and_subclasses_are_taken() -> None:
    class Tagged(Tensor):
        pass

    q, k, v = torch.randn(3, 1, 8, 2, 16)
    expected = fk.attention(q, k, v, causal=True, window=3, scale=0.5, softcap=3.0)
    found = fk.attention(
        q.as_subclass(Tagged), torch.nn.Parameter(k), v, causal=np.bool_(True), window=np.int64(3),
        scale=np.float32(0.5), softcap=np.int32(3), return_lse=np.bool_(False),
    )  # fmt: skip
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_numbers_in_masks_and_score_functions(kind: Callable[[int], Any]) -> None:
    three, ids = kind(3), fk.Table(torch.tensor([0, 0, 1, 1, 1, 2, 2, 2]))
    for found, expected in [
        (fk.custom(lambda b, h, q, k: (q - k) // three < three), lambda q, k: (q - k) // 3 < 3),
        (fk.custom(lambda b, h, q, k: three + q - k < three * k), lambda q, k: 3 + q - k < 3 * k),
        (fk.custom(lambda b, h, q, k: (three >= q - k) & np.bool_(True)), lambda q, k: q - k <= 3),
        (fk.custom(lambda b, h, q, k: fk.where(np.bool_(False), k, ids[three]) <= q), lambda q, k: q - 0 * k >= 1),
        (fk.window(three, three), lambda q, k: (q - k < 3) & (k - q <= 3)),
        (fk.sink_tokens(three) | fk.prefix(three), lambda q, k: (k < 3) & (q >= 0)),
    ]:
        positions = torch.arange(8)
        assert torch.equal(found.visible(1, 1, 8, 8)[0, 0], expected(positions[:, None], positions[None, :]))
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    for backend in ("torch", "triton"):
        found = fk.attention(
            q, k, v, score=lambda s, b, h, i, j: np.float64(0.5) * s - np.float32(0.25) * abs(i - j), backend=backend
        )
        expected = fk.attention(q, k, v, score=lambda s, b, h, i, j: 0.5 * s - 0.25 * abs(i - j), backend="reference")
        torch.testing.assert_close(found, expected)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    found = fk.attention_varlen(q[0], k[0], v[0], ends, window=(three, kind(0)))
    assert torch.equal(found, fk.attention_varlen(q[0], k[0], v[0], ends, window=(3, 0)))


def test_numpy_numbers_in_sampling_params() -> None:
    found = SamplingParams(
        max_tokens=np.int64(6), temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(3), n=np.int64(2),
        logprobs=np.int32(2), stop_token_ids=np.array([5, 6]), logit_bias={np.int64(3): np.float32(2)},
    )  # fmt: skip
    expected = SamplingParams(
        max_tokens=6, temperature=0.5, top_k=3, seed=3, n=2, logprobs=2, stop_token_ids=[5, 6], logit_bias={3: 2.0}
    )
    assert found == expected
    assert repr(found) == repr(expected)
    with pytest.raises(ValueError, match=r"max_tokens is .*2\.5.*; it must be a whole number"):
        SamplingParams(max_tokens=np.float64(2.5))


@pytest.mark.parametrize("function", [fk.attention, fk.decode_attention, fk.paged_attention, fk.attention_varlen])
@pytest.mark.parametrize("window", ["4", 4.0, True, torch.tensor(4), np.zeros(2), torch.int32, {}], ids=repr)
def test_windows_of_wrong_types(function: Callable[..., Any], window: Any) -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 16)
    lengths, ends = torch.tensor([16], dtype=torch.int32), torch.tensor([0, 16], dtype=torch.int32)
    given: dict[Any, tuple[Any, ...]] = {
        fk.attention: (q, k, v),
        fk.decode_attention: (q, k, v, lengths),
        fk.paged_attention: (q[0], k, v, ends, lengths, lengths[None] * 0),
        fk.attention_varlen: (q[0], k[0], v[0], ends),
    }
    with pytest.raises(TypeError, match=f"^{function.__name__}: window is .*; it must be a whole number"):
        function(*given[function], window=window)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_a_window_of_more_keys_than_32_bits_hides_none(window: int) -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 16)
    ends = torch.tensor([0, 10, 16], dtype=torch.int32)
    lengths = torch.tensor([16], dtype=torch.int32)
    for backend in ("torch", "reference"):
        expected = fk.attention(q, k, v, causal=True, backend=backend)
        torch.testing.assert_close(fk.attention(q, k, v, window=window, backend=backend), expected)
        streaming = fk.causal() & (fk.window(window, window) | fk.sink_tokens(window))
        torch.testing.assert_close(fk.attention(q, k, v, mask=streaming, backend=backend), expected)
        torch.testing.assert_close(
            fk.decode_attention(q[:, -1:], k, v, lengths, window=window, backend=backend), expected[:, -1:]
        )
        packed = fk.attention_varlen(q[0], k[0], v[0], ends, causal=True, backend=backend)
        for sides in (window, (window, 0), (None, 0)):
            found = fk.attention_varlen(q[0], k[0], v[0], ends, window=sides, backend=backend)
            torch.testing.assert_close(found, packed)


def test_masks_of_values_without_meaning() -> None:
    with pytest.raises(ValueError, match="sink_tokens: count is -1"):
        fk.sink_tokens(-1)
    for layout in (torch.full((2, 2), 0.5), torch.full((2, 2), 1j)):
        with pytest.raises(ValueError, match=r"block_sparse: layout is torch\.(float32|complex64)"):
            fk.block_sparse(layout, 4)
    for set_ in (2, 256):
        assert fk.block_sparse(torch.full((2, 2), set_), 4).visible(1, 1, 8, 8).all()
    whole = torch.arange(8)
    for ids in (whole.float(), whole.half(), whole.double(), whole.to(torch.float8_e5m2)):
        for make, given, name in [
            (fk.documents, (ids,), "documents: query_ids"),
            (fk.documents, (whole, ids), "documents: key_ids"),
            (fk.prefix, (ids,), "prefix: lengths"),
            (fk.column_intervals, (ids, whole), "column_intervals: start"),
            (fk.column_intervals, (whole, ids), "column_intervals: end"),
        ]:
            with pytest.raises(ValueError, match=rf"^{name} is torch\.\w+; it must hold integers"):
                make(*given)
    q, ends = torch.randn(8, 2, 16), torch.tensor([0, 8])
    for name in ("bias", "alibi_slopes"):
        with pytest.raises(TypeError, match=f"attention_varlen: {name} is a list; it must be a tensor or None"):
            fk.attention_varlen(q, q, q, ends, **{name: [1.0, 2.0]})
