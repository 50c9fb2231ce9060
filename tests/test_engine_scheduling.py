"""The engine's steps: batching, chunks, preemption, prefix reuse, threads, aborts, failures, padding."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from tiny_engine import LENGTHS, _drained, _greedy, _other, _set_ahead, _tokens

from flashkernel.engine import LLM, EngineArgs, LLMEngine, StepOutput, Transformer, build_engine
from flashkernel.engine.detokenizer import IncrementalDetokenizer


def test_a_batch_of_mixed_lengths_is_each_alone(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048, enable_prefix_caching=False), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    params = [_greedy(count) for count in (5, 12, 1, 7, 20, 3)]
    alone = [base.generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params)]
    assert _tokens(llm, prompts, params) == alone
    assert [len(tokens) for tokens in alone] == [5, 12, 1, 7, 20, 3]
    assert _drained(llm)


def test_prompts_in_chunks(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048, max_num_batched_tokens=16, max_num_seqs=4), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    assert _tokens(llm, prompts, _greedy(6)) == _tokens(base, prompts, _greedy(6))
    assert llm.engine.stats().num_steps >= sum(LENGTHS) // 16


def test_the_time_that_the_host_waits_is_counted(base: LLM, ahead: bool) -> None:
    """By steps whose device takes its time, which those of a CPU do not have."""
    llm = _set_ahead(_other(base), ahead)
    llm.generate([[1, 2, 3]], _greedy(4))
    before = llm.engine.stats()
    assert 0 == before.wait_s < before.step_s
    launch, device = llm.engine.runner.launch, SimpleNamespace(synchronize=lambda: time.sleep(0.01))
    llm.engine.runner.launch = lambda batch: dataclasses.replace(launch(batch), done=device)  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], _greedy(4))
    after = llm.engine.stats()
    assert 0.04 <= after.wait_s <= after.step_s - before.step_s


def test_preemption_loses_nothing(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=160, max_num_batched_tokens=32, max_num_seqs=8), ahead)
    prompts = tiny_models.prompts((30, 25, 40, 10, 33, 18))
    params = [_greedy(count, temperature=1.0 * (count % 2), seed=count) for count in (60, 41, 50, 71, 30, 80)]
    done = llm.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in done] == _tokens(base, prompts, params)
    assert llm.engine.stats().num_preemptions > 0
    assert sum(one.num_preemptions for one in done) == llm.engine.stats().num_preemptions
    assert {one.outputs[0].finish_reason for one in done} == {"length"}
    assert _drained(llm)


def test_preemption_keeps_what_penalties_count(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=96, max_num_seqs=4), ahead)
    prompts = tiny_models.prompts((20, 20, 20))
    params = _greedy(60, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    assert _tokens(llm, prompts, params) == _tokens(base, prompts, params)
    assert llm.engine.stats().num_preemptions > 0


def test_a_prompt_that_waits_for_blocks_is_looked_up_once(base: LLM, ahead: bool) -> None:
    """Not in every step: only when blocks came back. It is served as soon as there is room."""
    llm = _set_ahead(_other(base, kv_cache_tokens=384), ahead)
    cache, added = llm.engine.scheduler.cache, []
    add = cache.add

    def counting(tokens: Any = (), **how: Any) -> int:
        added.append(len(tokens))
        return add(tokens, **how)

    cache.add = counting  # type: ignore[method-assign]
    prompts = tiny_models.prompts((*range(17, 23), 150))
    assert _tokens(llm, prompts, _greedy(40)) == _tokens(base, prompts, _greedy(40))
    assert added.count(150) <= 3
    assert llm.engine.stats().num_steps > 60, "it waited"
    assert _drained(llm)


def test_one_sequence_may_fill_the_pool(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=48), ahead)
    assert llm.engine.max_model_len == 48
    prompts = tiny_models.prompts((20, 40))
    done = llm.generate(prompts, _greedy(100))
    assert [len(one.outputs[0].token_ids) for one in done] == [28, 8]
    assert [one.outputs[0].finish_reason for one in done] == ["length", "length"]
    assert _drained(llm)


def test_a_thousand_requests_on_a_small_pool(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=256, max_num_seqs=16)
    engine = llm.engine
    names = [engine.add_request([1 + number % 300, 2, 3], _greedy(2), streaming=False) for number in range(1000)]
    assert engine.stats().num_waiting == 1000
    order = []
    while engine.has_unfinished_requests():
        order += [event.request_id for event in engine.step() if event.request_output is not None]
    assert order == names, "first come, first served"
    assert engine.stats().num_finished == 1000
    assert _drained(llm)


def test_prefixes_are_computed_once(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    (shared,) = tiny_models.prompts((64,))
    prompts = [[*shared, number + 1] for number in range(8)]
    done = llm.generate(prompts, _greedy(4))
    assert [one.num_cached_tokens for one in done] == [0] + [64] * 7
    pages = llm.engine.scheduler.cache.pool
    assert pages.index.idle <= 4 + 8  # the shared ones, and at most one more for each
    assert [one.outputs[0].token_ids for one in done] == _tokens(
        _other(base, kv_cache_tokens=2048, enable_prefix_caching=False), prompts, _greedy(4)
    )
    again = llm.generate(prompts[:1], _greedy(4))[0]
    assert again.num_cached_tokens == 64
    assert again.outputs[0].token_ids == done[0].outputs[0].token_ids


def test_a_conversation_finds_its_earlier_turns(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    (prompt,) = tiny_models.prompts((30,))
    first = llm.generate([prompt], _greedy(40))[0]
    second = llm.generate([[*prompt, *first.outputs[0].token_ids, 5, 6, 7]], _greedy(4))[0]
    assert second.num_cached_tokens == 64  # 70 tokens, of which full pages are found
    assert (
        second.outputs[0].token_ids
        == base.generate([[*prompt, *first.outputs[0].token_ids, 5, 6, 7]], _greedy(4))[0].outputs[0].token_ids
    )


def test_threads_share_a_model(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=2048)
    prompts = tiny_models.prompts(LENGTHS)
    expected, found = _tokens(base, prompts, _greedy(8)), {}

    def ask(number: int) -> None:
        found[number] = llm.generate([prompts[number]], _greedy(8))[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(len(prompts))] == expected
    assert _drained(llm)


def test_a_server_drives_the_engine_in_a_thread(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=512)
    engine, events, leave = llm.engine, [], threading.Event()

    def serve() -> None:
        while not leave.is_set():
            if engine.wait(0.01):
                events.extend(engine.step())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        names = [engine.add_request("the sea", _greedy(5), request_id=f"mine-{number}") for number in range(3)]
        long = engine.add_request("the wind", _greedy(200))
        engine.abort_request(long)
        engine.abort_request("nobody")
        assert _waits_for(lambda: sum(event.request_output is not None for event in events) == 4)
    finally:
        leave.set()
        thread.join(10)
    ends = {event.request_id: event.request_output for event in events if event.request_output}
    assert [ends[name].outputs[0].finish_reason for name in names] == ["length"] * 3
    assert ends[long].outputs[0].finish_reason == "abort"
    assert _drained(llm)


def _waits_for(condition: Any, seconds: float = 30) -> bool:
    waiter = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return True
        waiter.wait(0.02)
    return False


def test_aborts_at_every_stage(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=256, max_num_seqs=2, max_num_batched_tokens=16), ahead)
    engine = llm.engine
    names = [engine.add_request(prompt, _greedy(50)) for prompt in tiny_models.prompts((40, 40, 5))]
    events = engine.step()  # the first is in the middle of its prompt, the others wait
    for name in (names[2], names[0]):
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        events += engine.step()
    ends = {event.request_id: event.request_output for event in events if event.request_output}
    assert [ends[name].outputs[0].finish_reason for name in names] == ["abort", "length", "abort"]
    assert (
        ends[names[1]].outputs[0].token_ids
        == base.generate([tiny_models.prompts((40, 40, 5))[1]], _greedy(50))[0].outputs[0].token_ids
    )
    assert ends[names[0]].outputs[0].token_ids == ()
    assert _drained(llm)


def test_an_abort_of_what_is_not_there_is_forgotten(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=512)
    for number in range(3):
        llm.engine.abort_request(f"refused-{number}")
    assert not llm.engine._aborted, "no step may come that would clear them"
    name = llm.engine.add_request([1, 2, 3], _greedy(50))
    llm.engine.abort_request(name)
    llm.engine.abort_request(name)
    assert [step.request_output is not None for step in llm.engine.step()] == [True]
    assert _drained(llm)


def test_a_failed_step_ends_its_requests_and_nothing_else(
    base: LLM, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=512), ahead)
    (prompt,) = tiny_models.prompts((40,))
    forward, calls = Transformer.forward, []

    def fail(self: Transformer, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is on fire")
        return forward(self, *args)

    monkeypatch.setattr(Transformer, "forward", fail)
    with pytest.raises(RuntimeError, match="the device is on fire"):
        llm.generate([prompt, prompt], _greedy(10))
    assert _drained(llm)
    assert llm.engine.scheduler.cache.pool.index.idle == 0, "what a failed step wrote cannot be found"
    assert (
        llm.generate([prompt], _greedy(10))[0].outputs[0].token_ids
        == base.generate([prompt], _greedy(10))[0].outputs[0].token_ids
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_that_cannot_be_made_ends_its_request_alone(
    base: LLM, monkeypatch: pytest.MonkeyPatch, ahead: bool, streaming: bool
) -> None:
    good, bad = tiny_models.prompts((20, 20))
    expected = base.generate([good, bad], _greedy(12))
    wrong = next(token for token in expected[1].outputs[0].token_ids if token not in expected[0].outputs[0].token_ids)
    append = IncrementalDetokenizer.append

    def fail(self: IncrementalDetokenizer, token_id: int, **how: Any) -> None:
        if token_id == wrong:
            raise OverflowError("no such token")
        append(self, token_id, **how)

    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)
    llm = _set_ahead(_other(base, kv_cache_tokens=512), ahead)
    names = [llm.engine.add_request(prompt, _greedy(12), streaming=streaming) for prompt in (good, bad, good)]
    done = {}
    while llm.engine.has_unfinished_requests():
        done |= {step.request_id: step.request_output for step in llm.engine.step() if step.request_output is not None}
    assert [done[name].outputs[0].finish_reason for name in names] == ["length", "error", "length"]
    assert done[names[1]].error == "OverflowError: no such token"
    assert done[names[2]].outputs[0] == expected[0].outputs[0]
    assert llm.engine.failure is None
    assert _drained(llm)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.2, "logprobs": 2}])
def test_logits_that_are_nan_end_their_request_alone(base: LLM, ahead: bool, how: dict[str, Any]) -> None:
    """A token whose embedding is NaN, in one prompt or drawn on the way."""
    good, bad = tiny_models.prompts((20, 20))
    weights = base.model.weights
    poisoned = next(token for token in bad if token not in good)
    params = _greedy(12, **how)
    expected = base.generate([good], params)[0]
    assert poisoned not in expected.outputs[0].token_ids
    embedding = weights.embedding.clone()
    embedding[poisoned] = torch.nan
    tied = weights.lm_head.data_ptr() == weights.embedding.data_ptr()
    lm_head = weights.lm_head.clone() if tied else weights.lm_head
    model = Transformer(
        base.config, dataclasses.replace(weights, embedding=embedding, lm_head=lm_head), base.model.layers
    )
    llm = _set_ahead(LLM(model, base.tokenizer, block_size=16, kv_cache_tokens=512), ahead)
    done = llm.generate([good, bad, good], params)
    assert [one.outputs[0].finish_reason for one in done] == ["length", "error", "length"]
    assert "NaN" in str(done[1].error)
    assert done[1].outputs[0].token_ids == ()
    assert [done[0].outputs[0].token_ids, done[2].outputs[0].token_ids] == [expected.outputs[0].token_ids] * 2
    assert llm.engine.failure is None
    assert _drained(llm)
    with pytest.raises(RuntimeError, match="logits are NaN"):
        llm.generate([bad], params)
    with pytest.raises(RuntimeError, match="logits are NaN"):
        list(llm.stream(bad, params))

    middle = expected.outputs[0].token_ids[4]  # now a token that is drawn after four good ones
    embedding = weights.embedding.clone()
    embedding[middle] = torch.nan
    model = Transformer(
        base.config, dataclasses.replace(weights, embedding=embedding, lm_head=lm_head), base.model.layers
    )
    llm = _set_ahead(LLM(model, base.tokenizer, block_size=16, kv_cache_tokens=512), ahead)
    events = llm.stream_batch([good], params)
    *_, (_, last) = events
    assert last.request_output is not None
    assert last.request_output.outputs[0].finish_reason == "error"
    if middle not in good:
        assert (
            last.request_output.outputs[0].token_ids
            == expected.outputs[0].token_ids[: expected.outputs[0].token_ids.index(middle) + 1]
        )
    assert _drained(llm)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "graphs"),
    [pytest.param(name, True, id=f"{name}-graphs") for name in tiny_models.NAMES]
    + [pytest.param(name, False, id=f"{name}-eager") for name in ("llama", "gpt_oss")],
)
def test_a_gpu_says_what_transformers_says(name: str, graphs: bool, tmp_path: Path) -> None:
    """In float32, with preemption, penalties and draws among the requests."""
    model = tiny_models.save(name, tmp_path)
    options = {"kv_cache_tokens": 256, "max_num_seqs": 8, "enforce_eager": not graphs, "warm_up": False}
    llm = LLM(tmp_path, device="cuda", dtype="float32", **options)
    prompts = tiny_models.prompts((3, 17, 41, 30, 60))
    greedy = [done.outputs[0].token_ids for done in llm.generate(prompts, _greedy(24))]
    assert greedy == [tuple(tiny_models.hf_greedy(model, prompt, 24)) for prompt in prompts]
    params = [_greedy(60, temperature=1.0, top_k=20, repetition_penalty=1.1, logprobs=1, seed=one) for one in range(5)]
    drawn = [done.outputs[0].token_ids for done in llm.generate(prompts, params)]
    assert drawn == [llm.generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params)]
    assert llm.engine.stats().num_preemptions > 0
    assert bool(llm.engine.runner._graphs) == graphs
    assert _drained(llm)


def test_the_engine_can_be_built_alone(base: LLM) -> None:
    engine: LLMEngine = build_engine(base.model, None, EngineArgs(kv_cache_tokens=64))
    name = engine.add_request([1, 2, 3], _greedy(2))
    events: list[StepOutput] = []
    while engine.has_unfinished_requests():
        events += engine.step()
    assert [event.request_id for event in events] == [name, name]
    assert engine.step() == []
    assert not engine.wait(0.0)
