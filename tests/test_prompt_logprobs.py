"""Log probabilities of prompts are those of a pass over the whole text: in chunks, among others, on a small pool."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from tiny_engine import _drained, _greedy, _other, _set_ahead, _tokens
from transformers import AutoModelForCausalLM

from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.prompt_lookup import PromptLookup


@pytest.fixture(name="model", scope="module")
def model_fixture(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def _check(model: Any, prompt: list[int], found: Any, best: int) -> None:
    """Against Transformers."""
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt)
    assert found[0] is None
    for position, one in enumerate(found[1:]):
        token = prompt[position + 1]
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(logprobs[position, token]), abs=2e-4)
        assert one.rank == 1 + int((logprobs[position] > logprobs[position, token]).sum())
        top = logprobs[position].topk(best)
        assert [token for token, _ in one.top_logprobs] == top.indices.tolist()
        assert [value for _, value in one.top_logprobs] == pytest.approx(top.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_prompts_are_scored_among_others(base: LLM, model: Any, ahead: bool, rows: int) -> None:
    """With few rows of logits a step, and a pool that other requests need."""
    llm = _set_ahead(_other(base, kv_cache_tokens=256, max_num_seqs=rows, max_num_batched_tokens=48), ahead)
    prompts = tiny_models.prompts((40, 3, 33, 1, 70, 9))
    params = [_greedy(6, prompt_logprobs=index % 4) if index % 2 == 0 else _greedy(20) for index in range(6)]
    done = llm.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in done] == _tokens(base, prompts, [_greedy(6), _greedy(20)] * 3)
    for prompt, one, asked in zip(prompts, done, params):
        if asked.prompt_logprobs is None:
            assert one.prompt_logprobs is None
        else:
            _check(model, prompt, one.prompt_logprobs, asked.prompt_logprobs)
    assert _drained(llm)


def test_cached_prompts_are_scored_again(base: LLM, model: Any) -> None:
    llm = _other(base, kv_cache_tokens=1024)
    (prompt,) = tiny_models.prompts((60,))
    first = llm.generate([prompt], _greedy(4))[0]
    scored = llm.generate([prompt], _greedy(4, prompt_logprobs=1, n=2, temperature=0.0))[0]
    again = llm.generate([prompt], _greedy(4))[0]
    assert scored.num_cached_tokens == 0
    assert again.num_cached_tokens == 48
    assert first.outputs[0].token_ids == scored.outputs[0].token_ids == again.outputs[0].token_ids
    _check(model, prompt, scored.prompt_logprobs, 1)


def test_preempted_prompts_are_scored_once(base: LLM, model: Any, ahead: bool) -> None:
    """Older requests grow into their pages, also while they are scored, a few tokens a step."""
    llm = _set_ahead(_other(base, kv_cache_tokens=144, max_num_seqs=3, max_num_batched_tokens=3), ahead)
    prompts = tiny_models.prompts((14, 10, 60))
    params = _greedy(60, prompt_logprobs=2)
    unscored: list[bool] = []
    preempt = llm.engine.scheduler._preempt

    def noting(sequence: Any) -> None:
        unscored.append(sequence.scores_prompt and len(sequence.prompt_logprobs) > 1)
        preempt(sequence)

    llm.engine.scheduler._preempt = noting  # type: ignore[method-assign]
    done = llm.generate(prompts, params)
    assert any(unscored), "none was preempted in the middle of its prompt"
    for prompt, one in zip(prompts, done):
        _check(model, prompt, one.prompt_logprobs, 2)
    assert [one.outputs[0].token_ids for one in done] == _tokens(base, prompts, _greedy(60))
    assert _drained(llm)


def test_a_stream_has_them_with_its_first_token(base: LLM, model: Any) -> None:
    (prompt,) = tiny_models.prompts((20,))
    steps = list(base.stream(prompt, _greedy(3, prompt_logprobs=0)))
    assert [step.prompt_logprobs is None for step in steps] == [False, True, True]
    _check(model, prompt, steps[0].prompt_logprobs, 0)


def test_drafts_and_new_prompts_share_the_rows_of_logits(
    base: LLM, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft takes rows that are free; prompts that come in the same step must then wait for the next one."""
    monkeypatch.setattr(PromptLookup, "draft", lambda self, token_ids, count: (1,) * count)  # mostly rejected
    llm = _set_ahead(_other(base, kv_cache_tokens=2048, max_num_seqs=4, num_speculative_tokens=4), ahead)
    prompts = tiny_models.prompts((45, 5, 6, 7))
    first = llm.engine.add_request(prompts[0], _greedy(40), streaming=False)
    while not llm.engine._unfinished[first].has_sampled or len(llm.engine._unfinished[first].token_ids) < 50:
        llm.engine.step()
    added = [llm.engine.add_request(prompt, _greedy(10), streaming=False) for prompt in prompts[1:]]
    found = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            assert output.request_output is not None
            assert output.request_output.error is None, output.request_output.error
            found[output.request_id] = output.request_output.outputs[0].token_ids
    expected = _tokens(base, prompts, [_greedy(40), *[_greedy(10)] * 3])
    assert [found[name] for name in (first, *added)] == expected


def test_wrong_numbers_are_refused(base: LLM) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)
