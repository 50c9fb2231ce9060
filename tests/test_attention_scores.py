"""Score functions: pairs whose score is -inf, or that are hidden, have no gradient and spoil none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.derivative import derivative
from flashkernel.core.check import execute

TABLE = torch.linspace(0.5, 1.5, 12)
SCORES: dict[str, Callable[..., Any]] = {  # each makes -inf of -inf
    "scaled": lambda s, b, h, q, k: s * 0.5,
    "divided": lambda s, b, h, q, k: s / 2 + 0.1 * q,
    "by a table": lambda s, b, h, q, k: fk.Table(TABLE)[k] * s,
    "tanh": lambda s, b, h, q, k: s + ex.tanh(s) * (h + 1),
    "exp": lambda s, b, h, q, k: s + 0.1 * ex.exp(s),
    "clipped": lambda s, b, h, q, k: ex.minimum(s, 0.5),
    "where": lambda s, b, h, q, k: fk.where(s < 0, 2 * s, s - 0.25 * (q == k)),
    "magnitude": lambda s, b, h, q, k: -ex.absolute(s - 0.3),
    "squared": lambda s, b, h, q, k: s - 0.1 * s * s,  # whose derivative is infinite
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", SCORES)
def test_minus_infinity_in_a_bias(name: str, backend: str) -> None:
    """The same as under a mask that hides these pairs; one row sees nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, bias = (
        torch.randn(shape, generator=generator) for shape in ((1, 9, 2, 16), (1, 12, 1, 16), (1, 12, 1, 16), (2, 9, 12))
    )
    hidden = torch.rand(2, 9, 12, generator=generator) < 0.3
    hidden[1, 4] = True
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": torch.tensor([0.1, 0.3])}
    score = ex.score_function(SCORES[name])
    exact = execute(
        fk.attention, {name: x.double() for name, x in inputs.items()},
        {"mask": ~hidden, "score": score, "softcap": 4.0, "backend": "reference"}, list(inputs),
    )  # fmt: skip
    mine = execute(
        fk.attention, {**inputs, "bias": bias.masked_fill(hidden, -torch.inf)},
        {"score": score, "softcap": 4.0, "backend": backend}, list(inputs),
    )  # fmt: skip
    for kind in ("outputs", "gradients"):
        for which, value in getattr(mine, kind).items():
            expected = getattr(exact, kind)[which]
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_hidden_pairs_whose_scores_overflow(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 10, 1, 16, generator=generator) for name in "qkv"}
    score = ex.score_function(lambda s, b, h, q, k: s + fk.where(k <= q, 0.0, ex.exp(1000.0 + s)))
    exact = execute(fk.attention, inputs, {"mask": fk.causal(), "backend": "reference"}, list(inputs))
    mine = execute(fk.attention, inputs, {"mask": fk.causal(), "score": score, "backend": backend}, list(inputs))
    for which, value in mine.gradients.items():
        torch.testing.assert_close(value, exact.gradients[which], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: 0.0,
        lambda s, b, h, q, k: q - k,
        lambda s, b, h, q, k: 0.5 * k,
        lambda s, b, h, q, k: (k <= q) + s,
        lambda s, b, h, q, k: fk.Table(TABLE.half())[k] - fk.Table(TABLE.double())[q],
    ],
)
def test_simple_score_functions(function: Callable[..., Any], backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 1, 16, generator=generator) for _ in range(3))
    s = q[0, :, 0] @ k[0, :, 0].T / 4
    i, j = torch.arange(12)[:, None], torch.arange(12)[None, :]
    plain = ex.evaluate(ex.trace_score(function), {"score": s, "b": 0, "h": 0, "q": i, "k": j})
    expected = torch.softmax(torch.as_tensor(plain).float().expand(12, 12), -1) @ v[0, :, 0]
    found = fk.attention(q, k, v, score=function, backend=backend)
    torch.testing.assert_close(found[0, :, 0], expected, rtol=1e-4, atol=1e-5)


def test_a_score_is_a_number() -> None:
    with pytest.raises(TypeError, match="hidden by mask="):
        fk.score_function(lambda s, b, h, q, k: k <= q)


FINITE: dict[str, Callable[..., Any]] = {  # of -inf, too
    "raised": lambda s, b, h, q, k: ex.maximum(s, -0.5),
    "raised by another": lambda s, b, h, q, k: ex.maximum(0.5 * s + 0.25, s * s - k),
    "between": lambda s, b, h, q, k: torch.maximum(torch.minimum(s, q - 2.0), torch.tanh(s) - 0.5),
    "exp2": lambda s, b, h, q, k: torch.exp2(-s * (h + 1)) * q,
}


@pytest.mark.parametrize("name", [*SCORES, *FINITE])
def test_derivatives_are_those_of_autograd(name: str) -> None:
    """Ties of min and max, and abs at 0, included; and nothing of a score that does not matter is left in the text."""
    expression = ex.trace_score({**SCORES, **FINITE}[name])
    s = torch.linspace(-3, 3, 121, dtype=torch.float64).requires_grad_()
    values = {"b": 0, "h": 1, "q": torch.tensor(3), "k": torch.tensor(5)}
    (expected,) = torch.autograd.grad(ex.evaluate(expression, {**values, "score": s}).sum(), s)
    found = torch.as_tensor(ex.evaluate(derivative(expression, "score"), {**values, "score": s.detach()}))
    torch.testing.assert_close(found.double().expand(s.shape), expected)


def test_derivatives_are_simple() -> None:
    def text(function: Callable[..., Any]) -> str:
        return ex.triton_source(derivative(ex.trace_score(function), "score"), [TABLE])

    assert text(lambda s, b, h, q, k: s * 0.5) == "0.5"
    assert text(lambda s, b, h, q, k: 2 * s - (q - k) * 0.1) == "2"
    assert text(lambda s, b, h, q, k: s / 4) == "0.25"
    assert text(lambda s, b, h, q, k: q * 1.0) == "0.0"
    assert "score" not in text(lambda s, b, h, q, k: s * fk.Table(TABLE)[k] + k)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_tables_have_no_gradient(backend: str) -> None:
    """Where one is asked for it was none, and nothing said so; conditions of a mask have none by their nature."""
    q, table = torch.randn(1, 8, 2, 16), torch.rand(2, requires_grad=True)
    read = fk.Table(table)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * read[h]

    for given in (score, fk.score_function(score)):
        with pytest.raises(ValueError, match=r"^attention: a table of the score function requires a gradient"):
            fk.attention(q, q, q, score=given, backend=backend)
        with pytest.raises(ValueError, match=r"^attention_varlen: a table of the score function requires a gradient"):
            fk.attention_varlen(q[0], q[0], q[0], ends, score=given, backend=backend)
        with torch.no_grad():
            fk.attention(q, q, q, score=given, backend=backend)
    fk.attention(q, q, q, mask=fk.custom(lambda b, h, i, j: read[h] * i >= j), backend=backend)


def test_a_softcap_keeps_the_digits_of_small_scores_in_float32() -> None:
    """The capped score is off by roundings of the score, not of the softcap."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, 2, 16) * size for size in (0.1, 0.1, 1))
    wide = {"backend": "reference", "softcap": 50.0, "return_lse": True}
    wanted, lse = fk.attention(q.double(), k.double(), v.double(), **wide)
    found, found_lse = fk.attention(q, k, v, **wide | {"backend": "triton"})
    assert (found - wanted).abs().max() < 3e-7
    assert (found_lse - lse).abs().max() < 8e-7
