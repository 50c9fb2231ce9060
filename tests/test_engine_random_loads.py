"""Random loads on small pools: requests of all kinds, added, aborted and preempted, say what each says alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_models
from tiny_engine import _as_on_a_gpu, _drained, _other, _set_ahead

from flashkernel.engine import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs
from flashkernel.engine.grammar import GrammarError

SHARED = tiny_models.prompts((64, 48))
KINDS: list[dict[str, Any]] = [
    {}, {"ignore_eos": True}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"stop": ("a",)},
    {"stop": ("e s", "11"), "min_tokens": 2}, {"min_tokens": 2, "logit_bias": {0: 50.0}},
]  # fmt: skip


def _requests(draw: random.Random, count: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts that begin alike, that repeat themselves, and others; with settings of every kind."""
    kinds = list(KINDS)
    try:
        import llguidance  # noqa: F401

        kinds.append({"structured_outputs": StructuredOutputs(regex="[a-z ]{5,40}")})
    except ImportError:
        pass
    found = []
    for _ in range(count):
        tail = [draw.randrange(1, tiny_models.VOCAB) for _ in range(draw.randint(1, 50))]
        head = draw.choice(SHARED)[: draw.randint(16, 64)] if draw.random() < 0.5 else ()
        prompt = tail[:6] * 8 if draw.random() < 0.2 else [*head, *tail]
        found.append((tuple(prompt), SamplingParams(max_tokens=draw.choice((2, 8, 30, 60)), **draw.choice(kinds))))
    return found


def _serve(
    llm: LLM, draw: random.Random, requests: list[tuple[tuple[int, ...], SamplingParams]]
) -> list[tuple[RequestOutput, str]]:
    """The output of each request, and the texts of its steps; some requests are aborted."""
    engine, names, done, texts = llm.engine, [], {}, {}
    left = list(requests)
    while left or engine.has_unfinished_requests():
        while left and draw.random() < 0.5:
            prompt, params = left.pop(0)
            names.append(engine.add_request(prompt, params, streaming=draw.random() < 0.5))
            texts[names[-1]] = ""
        if names and draw.random() < 0.02:
            engine.abort_request(draw.choice(names))
        for step in engine.step():
            texts[step.request_id] += step.text
            if step.request_output is not None:
                assert step.request_id not in done
                done[step.request_id] = step.request_output
    assert engine.failure is None
    return [(done[name], texts[name]) for name in names]


def _same(found: CompletionOutput, alone: CompletionOutput, room: int) -> None:
    """Tokens, text, logprobs; an abort, or the end of the context, cuts them off."""
    cut = found.finish_reason == "abort" or len(alone.token_ids) > room
    count = len(found.token_ids) if cut else len(alone.token_ids)
    assert found.token_ids == alone.token_ids[:count]
    assert cut or (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
    for one, other in zip(found.logprobs or (), alone.logprobs or ()):
        assert (one.token_id, one.rank, len(one.top_logprobs)) == (other.token_id, other.rank, 2)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_each_request_says_what_it_says_alone(base: LLM, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and from the ninth seed on in padded steps, with graphs in turn, as on a GPU."""
    draw = random.Random(seed)
    llm = _other(
        base, kv_cache_tokens=draw.choice((128, 144, 160, 256)), max_num_seqs=draw.choice((2, 3, 5, 8)),
        max_num_batched_tokens=draw.choice((8, 17, 64, 256)), enable_prefix_caching=draw.random() < 0.8,
        num_speculative_tokens=draw.choice((0, 0, 4)),
    )  # fmt: skip
    llm.engine._async_scheduling = draw.random() < 0.5
    if seed >= 8:
        llm = _set_ahead(_as_on_a_gpu(llm, monkeypatch, graphs=seed % 2 == 0), True)
    requests = [one for one in _requests(draw, 10) if len(one[0]) < llm.engine.max_model_len]
    for (prompt, params), (found, text) in zip(requests, _serve(llm, draw, requests)):
        alone = base.generate([prompt], params)[0]
        _same(found.outputs[0], alone.outputs[0], llm.engine.max_model_len - len(prompt))
        assert text == found.outputs[0].text
        if found.outputs[0].finish_reason != "abort":
            ranks = [[one and one.rank for one in scores.prompt_logprobs or ()] for scores in (found, alone)]
            assert ranks[0] == ranks[1]
    assert _drained(llm)
    assert not llm.engine.runner.storage.k[:, 0].any(), "padding writes nowhere"
    pool = llm.engine.scheduler.cache.pool
    assert pool.free + pool.index.idle == pool.pages - 1, "every page is free or cached"


def test_the_loads_do_what_they_are_for(base: LLM) -> None:
    """They preempt, find prefixes and abort."""
    llm = _other(base, kv_cache_tokens=144, max_num_seqs=8)
    draw = random.Random(1)
    done = _serve(llm, draw, [one for one in _requests(draw, 40) if len(one[0]) < llm.engine.max_model_len])
    stats = llm.engine.stats()
    assert stats.num_preemptions > 1
    assert stats.cached_tokens > 100
    reasons = {found.outputs[0].finish_reason for found, _ in done}
    assert {"stop", "length", "abort"} <= reasons


def test_a_grammar_that_fails_ends_its_request_alone(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is cut off by a limit of the library's is no finished text."""
    pytest.importorskip("llguidance")
    assert base.tokenizer is not None
    llm = _other(base, kv_cache_tokens=512)
    assert llm.engine.input_processor.grammars is not None
    wrong = llm.engine.input_processor.grammars.compile(StructuredOutputs(regex="ab"))
    with pytest.raises(GrammarError, match="failed in the middle of the text"):
        wrong.advance(base.tokenizer.encode("z")[0])
    monkeypatch.setattr(llm.engine.input_processor.grammars, "compile", lambda wanted: wrong)
    free = SamplingParams(max_tokens=5)
    done = llm.generate(
        ["the sea", "the sea"], [free, SamplingParams(structured_outputs=StructuredOutputs(regex="ab"))]
    )
    assert done[0].outputs == base.generate("the sea", free)[0].outputs
    assert "failed in the middle of the text" in str(done[1].error)
    assert "\n" not in str(done[1].error), "one line, without the library's state"
    assert _drained(llm)
