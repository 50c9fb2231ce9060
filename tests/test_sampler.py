"""The sampler against Transformers' own processors, against counted frequencies, and against wrong settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from flashkernel.engine import SamplingParams
from flashkernel.engine.sampler import (
    FIELDS,
    INVALID_TOKEN,
    SamplingMetadata,
    SamplingState,
    TokenCounts,
    sample,
    uniform,
)

VOCAB = 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _sample(
    logits: Tensor, params: list[SamplingParams], number: int = 0, counts: TokenCounts | None = None
) -> tuple[Tensor, SamplingMetadata]:
    """One token for each row of logits, with the rows' own settings."""
    rows = np.arange(len(params))
    state = SamplingState(len(params))
    for row, one in enumerate(params):
        state.set(row, one, one.seed or 0)
    arrays = {name: np.zeros(len(params), dtype=str(dtype).removeprefix("torch.")) for name, dtype in FIELDS.items()}
    state.write(arrays, rows, np.full(len(params), number))
    metadata = state.metadata(rows)
    tensors = {name: torch.from_numpy(array).to(logits.device) for name, array in arrays.items()}
    return sample(logits, tensors, metadata, torch.from_numpy(rows).to(logits.device), counts).token_ids.cpu(), metadata


def _kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities after Transformers' warpers, in its order."""
    scores, none = logits[None] / params.temperature, torch.zeros(1, 0, dtype=torch.long)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(none, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(none, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(none, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_draws_follow_transformers_probabilities(how: dict[str, float], device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, generator=generator) * 2
    count = 4000
    params = [SamplingParams(seed=seed, **how) for seed in range(count)]  # type: ignore[arg-type]
    tokens, _ = _sample(logits.expand(count, VOCAB).contiguous().to(device), params)
    expected = _kept(logits, params[0])
    found = torch.bincount(tokens, minlength=VOCAB).float() / count
    assert (found[expected == 0] == 0).all(), "a token was drawn that must be left out"
    spread = torch.sqrt(expected * (1 - expected) / count)
    assert (found - expected).abs().le(5 * spread + 1e-3).all()


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_and_random_rows_together(device: str) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=1, top_k=3)] * 3
    tokens, metadata = _sample(logits, params)
    assert metadata.random
    best = logits.cpu().topk(3).indices
    assert tokens[::2].tolist() == best[::2, 0].tolist()
    assert all(token in row for token, row in zip(tokens[1::2].tolist(), best[1::2].tolist()))


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.9) for seed in range(5)]
    together, _ = _sample(logits, params, number=7)
    alone = [int(_sample(logits[row : row + 1], [params[row]], number=7)[0]) for row in range(5)]
    assert together.tolist() == alone
    mixed = [*params[:4], SamplingParams(temperature=0.3, seed=9, top_k=4, logprobs=2)]
    assert _sample(logits, mixed, number=7)[0].tolist()[:4] == alone[:4]


@pytest.mark.parametrize("how", [{}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_a_draw_does_not_depend_on_what_others_ask_for(how: dict[str, float]) -> None:
    """Neighbours decide whether the vocabulary is sorted, searched for candidates, or neither."""
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 3
    neighbours = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3, "repetition_penalty": 1.0}]
    for number in range(200):
        mine = SamplingParams(temperature=1.0, seed=number, **how)  # type: ignore[arg-type]
        alone = int(_sample(logits, [mine])[0])
        for other in neighbours:
            beside = SamplingParams(temperature=1.0, seed=5, **other)  # type: ignore[arg-type]
            assert int(_sample(logits.expand(2, 100), [mine, beside])[0][0]) == alone


def test_the_metadata_says_no_more_than_is_needed() -> None:
    def metadata(*params: SamplingParams) -> SamplingMetadata:
        return _sample(torch.zeros(len(params), VOCAB), list(params))[1]

    warm = {"temperature": 1.0}
    assert metadata(SamplingParams()) == SamplingMetadata()
    assert metadata(SamplingParams(top_k=5, top_p=0.5)) == SamplingMetadata(), "greedy needs no candidates"
    assert metadata(SamplingParams(**warm), SamplingParams()) == SamplingMetadata(random=True)
    assert metadata(SamplingParams(**warm, top_k=40)) == SamplingMetadata(random=True, truncated=True, max_top_k=64)
    assert metadata(SamplingParams(**warm, top_k=65)).max_top_k == 1024
    assert metadata(SamplingParams(**warm, top_k=2000)).max_top_k == 0
    assert metadata(SamplingParams(**warm, top_k=40), SamplingParams(**warm)).max_top_k == 0
    assert metadata(SamplingParams(**warm, top_k=40), SamplingParams()).max_top_k == 64
    assert metadata(SamplingParams(logprobs=0), SamplingParams(logprobs=4)).num_logprobs == 4


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_are_transformers_and_openais(device: str) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 5]
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.8, frequency_penalty=0.3),
        SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=2.0),
    ]
    for token in range(VOCAB):  # whatever token is ahead, by whatever little, the penalised order decides
        raised = logits.clone()
        raised[:, token] = 3.0
        counts = TokenCounts(3, VOCAB, torch.device(device))
        for row in range(3):
            counts.set(row, prompt, output)
        tokens, _ = _sample(raised.to(device), params, counts=counts)
        for row, one in enumerate(params):
            seen = torch.tensor([[*prompt, *output]])
            scores = hf.RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(seen, raised[row : row + 1].clone())[0]
            for other in set(output):
                scores[other] -= one.presence_penalty + one.frequency_penalty * output.count(other)
            assert int(tokens[row]) == int(scores.argmax())
            assert counts.output[row, tokens[row]] == output.count(int(tokens[row])) + 1


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(temperature=0.2, top_k=3, seed=1, logprobs=3), SamplingParams()]
    state = SamplingState(2)
    for row, one in enumerate(params):
        state.set(row, one, 1)
    arrays = {name: np.zeros(2, dtype=str(dtype).removeprefix("torch.")) for name, dtype in FIELDS.items()}
    state.write(arrays, np.arange(2), np.zeros(2))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    found = sample(logits, tensors, state.metadata(np.arange(2)), torch.arange(2))
    logs = logits.log_softmax(-1)
    assert found.logprobs is not None
    assert torch.equal(found.logprobs, logs.gather(1, found.token_ids[:, None])[:, 0])
    assert torch.equal(found.top_token_ids, logs.topk(3).indices)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_uniform_numbers_lie_below_one(seed: int, number: int) -> None:
    value = float(uniform(np.array([seed], dtype=np.uint64), np.array([number]))[0])
    assert 0 <= value < 1
    assert value != float(uniform(np.array([seed], dtype=np.uint64), np.array([number + 1]))[0])


def test_uniform_numbers_are_uniform() -> None:
    seeds, numbers = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = uniform(seeds.ravel(), numbers.ravel()).astype(np.float64)
    counts, _ = np.histogram(values, 64, (0, 1))
    chi2 = float(((counts - values.size / 64) ** 2 / (values.size / 64)).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_the_ends_of_the_distribution() -> None:
    """A chance next to one takes the last token that has any probability, one of zero the first."""
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]]).repeat(2, 1)
    ones = {name: torch.ones(2, dtype=dtype) for name, dtype in FIELDS.items()}
    chances = torch.tensor([0.0, 1 - 2**-24])
    found = sample(logits, {**ones, "uniform": chances}, SamplingMetadata(random=True), torch.arange(2))
    assert found.token_ids.tolist() == [0, 2]
    trimmed = {**ones, "uniform": chances, "top_k": torch.zeros(2, dtype=torch.int64)}
    found = sample(logits, trimmed, SamplingMetadata(random=True, truncated=True), torch.arange(2))
    assert sorted(found.token_ids.tolist()) == [0, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_without_meaning_give_no_token(wrong: float, device: str) -> None:
    """A row whose largest logit is not finite, or that has a NaN, gives INVALID_TOKEN; other rows are not affected."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    broken = logits.clone()
    broken[1] = wrong
    if math.isnan(wrong):
        broken[1, 1:] = 0.0
    for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"repetition_penalty": 2.0}):
        params = [SamplingParams(seed=row, **how) for row in range(3)]  # type: ignore[arg-type]
        found = []
        for values in (logits, broken):
            counts = TokenCounts(3, VOCAB, torch.device(device))
            found.append(_sample(values, params, counts=counts)[0].tolist())
        assert found[1] == [found[0][0], INVALID_TOKEN, found[0][2]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be a number from 0 to 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": True}, "top_k is True"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number, from 0 to 20"),
        ({"seed": 2**64}, "seed is"),
        ({"stop": ("",)}, "none empty"),
        ({"stop": ["x"] * 17}, "up to 16 strings"),
        ({"stop_token_ids": (-1,)}, "an entry of stop_token_ids is -1"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_single_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
