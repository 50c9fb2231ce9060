"""The sampler against Transformers' own processors, against counted frequencies, and against wrong settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from flashkernel.engine import SamplingParams
from flashkernel.engine.sampler import (
    FIELDS,
    IN_PROMPT,
    INVALID_TOKEN,
    RowSamplingParams,
    SamplerOutput,
    SamplingStates,
    logprobs_of,
    sample,
)

VOCAB = 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _sample(
    logits: Tensor,
    params: list[SamplingParams],
    number: int = 0,
    tokens: tuple[list[int], list[int]] = ([], []),
    states: SamplingStates | None = None,
) -> Tensor:
    """One token for each row of logits, with the rows' own settings, after the `tokens` of a prompt and an output."""
    count, rows = len(params), np.arange(len(params))
    settings, states = RowSamplingParams(count), states or SamplingStates(count, logits.shape[1], logits.device)
    for row, one in enumerate(params):
        settings.set(row, one, one.seed or 0)
        states.set(row, one, list(one.stop_token_ids), *tokens)
    arrays = {
        name: np.zeros(count * width, dtype=str(dtype).removeprefix("torch."))
        for name, (dtype, width) in FIELDS.items()
    }
    settings.write(arrays, rows, np.full(count, number), count)
    tensors = {name: torch.from_numpy(array).to(logits.device) for name, array in arrays.items()}
    tensors["penalties"] = tensors["penalties"].view(count, 3)
    return sample(logits, tensors, states, torch.from_numpy(rows).to(logits.device)).token_ids.cpu()


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
    tokens = _sample(logits.expand(count, VOCAB).contiguous().to(device), params)
    expected = _kept(logits, params[0])
    found = torch.bincount(tokens, minlength=VOCAB).float() / count
    assert (found[expected == 0] == 0).all(), "a token was drawn that must be left out"
    spread = torch.sqrt(expected * (1 - expected) / count)
    assert (found - expected).abs().le(5 * spread + 1e-3).all()


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_and_random_rows_together(device: str) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=1, top_k=3)] * 3
    tokens = _sample(logits, params)
    best = logits.cpu().topk(3).indices
    assert tokens[::2].tolist() == best[::2, 0].tolist()
    assert all(token in row for token, row in zip(tokens[1::2].tolist(), best[1::2].tolist()))


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.9) for seed in range(5)]
    together = _sample(logits, params, number=7)
    alone = [int(_sample(logits[row : row + 1], [params[row]], number=7)) for row in range(5)]
    assert together.tolist() == alone
    mixed = [*params[:4], SamplingParams(temperature=0.3, seed=9, top_k=4, logprobs=2)]
    assert _sample(logits, mixed, number=7).tolist()[:4] == alone[:4]


@pytest.mark.parametrize("how", [{}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_a_draw_does_not_depend_on_what_others_ask_for(how: dict[str, float]) -> None:
    """Neighbors decide whether the vocabulary is sorted, searched for candidates, or neither."""
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 3
    neighbors = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3, "repetition_penalty": 1.0}]
    for number in range(200):
        mine = SamplingParams(temperature=1.0, seed=number, **how)  # type: ignore[arg-type]
        alone = int(_sample(logits, [mine]))
        for other in neighbors:
            beside = SamplingParams(temperature=1.0, seed=5, **other)  # type: ignore[arg-type]
            assert int(_sample(logits.expand(2, 100), [mine, beside])[0]) == alone


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_are_transformers_and_openais(device: str) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 5]
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.8, frequency_penalty=0.3),
        SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=2.0),
    ]
    for token in range(VOCAB):  # whatever token is ahead, by whatever little, the penalized order decides
        raised = logits.clone()
        raised[:, token] = 3.0
        states = SamplingStates(3, VOCAB, torch.device(device))
        tokens = _sample(raised.to(device), params, tokens=(prompt, output), states=states)
        for row, one in enumerate(params):
            seen = torch.tensor([[*prompt, *output]])
            scores = hf.RepetitionPenaltyLogitsProcessor(one.repetition_penalty)(seen, raised[row : row + 1].clone())[0]
            for other in set(output):
                scores[other] -= one.presence_penalty + one.frequency_penalty * output.count(other)
            assert int(tokens[row]) == int(scores.argmax())
            count = int(states.tensors["token_counts"][row, tokens[row]])
            assert count & (IN_PROMPT - 1) == output.count(int(tokens[row])) + 1


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    tokens = torch.tensor([7, 3])
    found = logprobs_of(SamplerOutput(tokens, logits), torch.tensor([1]), 3)
    logs = logits.log_softmax(-1)
    assert torch.equal(found.chosen, logs[1:, 3])
    assert torch.equal(found.top_token_ids, logs[1:].topk(3).indices)


@pytest.mark.parametrize("device", DEVICES)
def test_biases_and_min_tokens(device: str) -> None:
    """A bias moves a token; stop tokens cannot come before `min_tokens`, and can from then on."""
    logits = torch.zeros(3, VOCAB, device=device)
    logits[:, 9] = 5.0
    params = [
        SamplingParams(logit_bias={4: 9.5}),
        SamplingParams(min_tokens=3, stop_token_ids=[9]),
        SamplingParams(temperature=1.0, logit_bias={token: -100.0 for token in range(VOCAB) if token != 31}),
    ]
    assert _sample(logits, params, number=2).tolist() == [4, 0, 31]
    assert _sample(logits, params, number=3).tolist() == [4, 9, 31]


def test_stop_tokens_and_numbers_that_no_device_holds() -> None:
    """Stop tokens beyond the vocabulary never come; `min_tokens` may be any number."""
    logits = torch.zeros(1, VOCAB)
    logits[:, 9] = 5.0
    params = SamplingParams(max_tokens=None, min_tokens=2**40, stop_token_ids=[9, VOCAB, 2**40])
    assert _sample(logits, [params], number=100).tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-39, 9e-6])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=3)
    assert params.is_plain_greedy
    assert _sample(logits, [params, params]).tolist() == logits.argmax(-1).tolist()


def test_a_row_forgets_its_last_request() -> None:
    states = SamplingStates(1, VOCAB, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    logits[:, 9] = 5.0
    assert _sample(logits, [SamplingParams(logit_bias={4: 9.5})], states=states).tolist() == [4]
    states.set_allowed([0], [np.array([1 << 6, 0], dtype=np.int32)])
    assert _sample(logits, [SamplingParams()], states=states).tolist() == [9]
    assert _sample(logits, [SamplingParams(presence_penalty=9.0)], tokens=([], [9]), states=states).tolist() == [0]


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
            found.append(_sample(values, params).tolist())
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
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": True}, "top_k is True"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320; it must be a number from 0.001 to 100"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number, from 0 to 20"),
        ({"seed": 2**64}, "seed is"),
        ({"stop": ("",)}, "none empty"),
        ({"stop": ["x"] * 17}, "up to 16 strings"),
        ({"stop_token_ids": (-1,)}, "an entry of stop_token_ids is -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop": 5}, "stop is 5; it must be a string, or several"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is a dict; it must be StructuredOutputs"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_vllms_way_to_keep_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_a_single_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
