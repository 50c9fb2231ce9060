"""Speculative decoding by prompt look-up: the same tokens in fewer steps."""

from __future__ import annotations

import pytest
import tiny_models
from tiny_engine import _drained, _greedy, _other, _set_ahead, _tokens

from flashkernel.engine import LLM, EngineArgs, SamplingParams
from flashkernel.engine.prompt_lookup import PromptLookup


def test_a_draft_is_what_followed_before() -> None:
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 3], 4) == ()
    assert lookup.draft([1, 2, 3, 1, 2], 4) == (3, 1, 2)
    assert lookup.draft([1, 2, 3, 1, 2, 9, 1, 2], 2) == (9, 1), "the last place counts"
    assert PromptLookup().draft([7], 3) == ()


@pytest.mark.parametrize("count", [1, 4])
def test_greedy_tokens_are_the_same(base: LLM, ahead: bool, count: int) -> None:
    """Prompts that repeat themselves among others, with requests that cannot speculate beside them."""
    llm = _set_ahead(_other(base, kv_cache_tokens=2048, max_num_seqs=16, num_speculative_tokens=count), ahead)
    phrase = tiny_models.prompts((9,))[0]
    prompts = [phrase * 5, *tiny_models.prompts((17, 3)), phrase * 2, phrase * 3]
    params = [_greedy(30), _greedy(40), _greedy(1), _greedy(25, temperature=0.8, seed=3), _greedy(20, logprobs=1)]
    assert _tokens(llm, prompts, params) == _tokens(base, prompts, params)
    assert _drained(llm)


def test_text_that_repeats_itself_takes_fewer_steps(base: LLM) -> None:
    plain, quick = (_other(base, kv_cache_tokens=1024, num_speculative_tokens=count) for count in (0, 4))
    prompt = tiny_models.prompts((12,))[0]
    answer = list(_tokens(plain, [prompt], _greedy(60))[0])
    before = plain.engine.stats().num_steps, quick.engine.stats().num_steps
    again = [*prompt, *answer, *prompt]  # the model is likely to say the same again
    expected = _tokens(plain, [again], _greedy(60))
    assert _tokens(quick, [again], _greedy(60)) == expected
    steps = plain.engine.stats().num_steps - before[0], quick.engine.stats().num_steps - before[1]
    assert steps[1] <= steps[0]
    stats = quick.engine.stats()
    assert stats.num_draft_tokens >= stats.num_accepted_tokens > 0
    assert plain.engine.stats().num_draft_tokens == 0


def test_drafts_are_counted(base: LLM) -> None:
    """Steps and accepted tokens make up what was generated; a token behind a rejected one is not accepted."""
    llm = _other(base, kv_cache_tokens=1024, num_speculative_tokens=3)
    prompt = tiny_models.prompts((9,))[0] * 4
    (tokens,) = _tokens(llm, [prompt], _greedy(40))
    stats = llm.engine.stats()
    assert stats.num_steps + stats.num_accepted_tokens == len(tokens) == 40
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens <= 3 * stats.num_steps


def test_speculation_on_a_pool_that_runs_dry(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=160, max_num_seqs=8, num_speculative_tokens=4), ahead)
    prompts = [prompt * 2 for prompt in tiny_models.prompts((9, 12, 15, 20, 7))]
    assert _tokens(llm, prompts, _greedy(30)) == _tokens(base, prompts, _greedy(30))
    assert _drained(llm)


def test_stops_inside_a_draft(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=1024, num_speculative_tokens=6)
    prompt = tiny_models.prompts((10,))[0] * 4
    free = _tokens(base, [prompt], _greedy(30))[0]
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[free[11]])
    assert _tokens(llm, [prompt], params) == _tokens(base, [prompt], params)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        EngineArgs(num_speculative_tokens=-1)
