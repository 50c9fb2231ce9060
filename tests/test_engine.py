"""The engine: batching, chunks, preemption, prefix reuse, streams, stops, seeds, aborts, failures, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.engine import LLM, EngineOptions, Event, RequestError, SamplingParams, Transformer, build_engine
from flashkernel.engine.core import Engine
from flashkernel.engine.runner import Runner, ladder, prompt_ladder
from flashkernel.engine.tokenizer import TextStream, Tokenizer

LENGTHS = (3, 40, 17, 65, 1, 29)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", path)
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> LLM:
    """A model with room for everything, whose answers others are held against."""
    return LLM(folder, device="cpu", cache_tokens=4096, page_size=16)


def _other(base: LLM, **options: Any) -> LLM:
    """The same weights under other options."""
    return LLM(base.model, base.tokenizer, **{"page_size": 16, **options})


def _tokens(llm: LLM, prompts: list[list[int]], params: Any) -> list[tuple[int, ...]]:
    return [done.tokens for done in llm.generate(prompts, params)]


def _drained(llm: LLM) -> bool:
    """Nothing is held or queued; a step that was launched ahead may be left to read."""
    if llm.engine._launched:
        assert llm.engine.step() == []
    cache = llm.engine.scheduler.cache
    return not llm.engine.busy and not cache.sequences and cache.pool.in_use == 0 and not llm._inboxes


def _greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether a step is launched before the tokens of the one before are read, as on a GPU."""
    return request.param


def _set_ahead(llm: LLM, ahead: bool) -> LLM:
    llm.engine._ahead = ahead
    return llm


def test_a_batch_of_mixed_lengths_is_each_alone(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048, prefix_caching=False), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    params = [_greedy(count) for count in (5, 12, 1, 7, 20, 3)]
    alone = [base.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, params)]
    assert _tokens(llm, prompts, params) == alone
    assert [len(tokens) for tokens in alone] == [5, 12, 1, 7, 20, 3]
    assert _drained(llm)


def test_prompts_in_chunks(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048, step_tokens=16, most_sequences=4), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    assert _tokens(llm, prompts, _greedy(6)) == _tokens(base, prompts, _greedy(6))
    assert llm.engine.stats().steps >= sum(LENGTHS) // 16


def test_preemption_loses_nothing(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=160, step_tokens=32, most_sequences=8), ahead)
    prompts = tiny_models.prompts((30, 25, 40, 10, 33, 18))
    params = [_greedy(count, temperature=1.0 * (count % 2), seed=count) for count in (60, 41, 50, 71, 30, 80)]
    done = llm.generate(prompts, params)
    assert [one.tokens for one in done] == _tokens(base, prompts, params)
    assert llm.engine.stats().preemptions > 0
    assert sum(one.preemptions for one in done) == llm.engine.stats().preemptions
    assert {one.reason for one in done} == {"length"}
    assert _drained(llm)


def test_preemption_keeps_what_penalties_count(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=96, most_sequences=4), ahead)
    prompts = tiny_models.prompts((20, 20, 20))
    params = _greedy(60, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    assert _tokens(llm, prompts, params) == _tokens(base, prompts, params)
    assert llm.engine.stats().preemptions > 0


def test_one_sequence_may_fill_the_pool(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=48), ahead)
    assert llm.engine.context == 48
    prompts = tiny_models.prompts((20, 40))
    done = llm.generate(prompts, _greedy(100))
    assert [len(one.tokens) for one in done] == [28, 8]
    assert [one.reason for one in done] == ["length", "length"]
    assert _drained(llm)


def test_a_thousand_requests_on_a_small_pool(base: LLM) -> None:
    llm = _other(base, cache_tokens=256, most_sequences=16)
    engine = llm.engine
    names = [engine.add_request([1 + number % 300, 2, 3], _greedy(2), streaming=False) for number in range(1000)]
    assert engine.stats().waiting == 1000
    order = []
    while engine.busy:
        order += [event.request_id for event in engine.step() if event.completion is not None]
    assert order == names, "first come, first served"
    assert engine.stats().finished == 1000
    assert _drained(llm)


def test_prefixes_are_computed_once(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    (shared,) = tiny_models.prompts((64,))
    prompts = [[*shared, number + 1] for number in range(8)]
    done = llm.generate(prompts, _greedy(4))
    assert [one.cached_tokens for one in done] == [0] + [64] * 7
    pages = llm.engine.scheduler.cache.pool
    assert pages.index.idle <= 4 + 8  # the shared ones, and at most one more for each
    assert [one.tokens for one in done] == _tokens(
        _other(base, cache_tokens=2048, prefix_caching=False), prompts, _greedy(4)
    )
    again = llm.generate(prompts[:1], _greedy(4))[0]
    assert again.cached_tokens == 64
    assert again.tokens == done[0].tokens


def test_a_conversation_finds_its_earlier_turns(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    (prompt,) = tiny_models.prompts((30,))
    first = llm.generate([prompt], _greedy(40))[0]
    second = llm.generate([[*prompt, *first.tokens, 5, 6, 7]], _greedy(4))[0]
    assert second.cached_tokens == 64  # 70 tokens, of which full pages are found
    assert second.tokens == base.generate([[*prompt, *first.tokens, 5, 6, 7]], _greedy(4))[0].tokens


def test_seeds_repeat_in_any_company(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    warm = {"temperature": 1.2, "top_p": 0.95}
    params = [_greedy(12, seed=seed, **warm) for seed in range(len(prompts))]
    together = _tokens(llm, prompts, params)
    assert together == [base.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, params)]
    assert together == _tokens(llm, prompts, params)
    other = _tokens(llm, prompts, [_greedy(12, seed=seed + 100, **warm) for seed in range(len(prompts))])
    assert together != other
    unseeded = [_tokens(llm, prompts[:1], _greedy(12, **warm))[0] for _ in range(3)]
    assert len(set(unseeded)) > 1, "without a seed every draw is new"


def test_streams_say_what_generate_says(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    done = base.generate("the sea and", _greedy(30, logprobs=2))[0]
    events = list(llm.stream("the sea and", _greedy(30, logprobs=2)))
    assert [event.token for event in events] == list(done.tokens)
    assert "".join(event.text for event in events) == done.text
    assert events[-1].completion is not None
    assert events[-1].completion.text == done.text
    assert [event.logprob.token for event in events if event.logprob] == list(done.tokens)
    assert all(event.completion is None for event in events[:-1])
    timing = events[-1].completion.timing
    assert timing.first_token is not None
    assert timing.arrived <= timing.first_token <= timing.finished


def test_streams_interleave_and_may_be_left(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    expected = base.generate("the wind", _greedy(20))[0].tokens
    left, kept = llm.stream("the sea", _greedy(100)), llm.stream("the wind", _greedy(20))
    found = []
    for _ in range(5):
        next(left)
        found.append(next(kept).token)
    assert llm.engine.stats().running == 2
    left.close()
    found += [event.token for event in kept]
    assert tuple(found) == expected
    list(llm.stream("x", _greedy(1)))
    assert _drained(llm)


def test_several_streams(base: LLM) -> None:
    llm = _other(base, cache_tokens=2048)
    params = [_greedy(6), _greedy(4)]
    events = list(llm.stream_many(["the sea", "the wind"], params))
    expected = base.generate(["the sea", "the wind"], params)
    for number, done in enumerate(expected):
        assert tuple(event.token for place, event in events if place == number) == done.tokens
    assert [place for place, _ in events[:4]] == [0, 1, 0, 1], "they take turns"


def test_threads_share_a_model(base: LLM) -> None:
    llm = _other(base, cache_tokens=2048)
    prompts = tiny_models.prompts(LENGTHS)
    expected, found = _tokens(base, prompts, _greedy(8)), {}

    def ask(number: int) -> None:
        found[number] = llm.generate([prompts[number]], _greedy(8))[0].tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(len(prompts))] == expected
    assert _drained(llm)


def test_a_server_drives_the_engine_in_a_thread(base: LLM) -> None:
    llm = _other(base, cache_tokens=512)
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
        engine.abort(long)
        engine.abort("nobody")
        assert _waits_for(lambda: sum(event.completion is not None for event in events) == 4)
    finally:
        leave.set()
        thread.join(10)
    ends = {event.request_id: event.completion for event in events if event.completion}
    assert [ends[name].reason for name in names] == ["length"] * 3
    assert ends[long].reason == "abort"
    assert _drained(llm)


def _waits_for(condition: Any, seconds: float = 30) -> bool:
    waiter = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return True
        waiter.wait(0.02)
    return False


def test_aborts_at_every_stage(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=256, most_sequences=2, step_tokens=16), ahead)
    engine = llm.engine
    names = [engine.add_request(prompt, _greedy(50)) for prompt in tiny_models.prompts((40, 40, 5))]
    events = engine.step()  # the first is in the middle of its prompt, the others wait
    for name in (names[2], names[0]):
        engine.abort(name)
    while engine.busy:
        events += engine.step()
    ends = {event.request_id: event.completion for event in events if event.completion}
    assert [ends[name].reason for name in names] == ["abort", "length", "abort"]
    assert ends[names[1]].tokens == base.generate([tiny_models.prompts((40, 40, 5))[1]], _greedy(50))[0].tokens
    assert ends[names[0]].tokens == ()
    assert _drained(llm)


def test_texts_end_at_stop_strings(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, cache_tokens=2048), ahead)
    whole = base.generate("the sea", _greedy(60))[0].text
    stop = whole[12:16]
    cut = whole[: whole.index(stop)]
    params = _greedy(60, stop=("never to be found", stop))
    done = llm.generate("the sea", params)[0]
    assert (done.text, done.reason) == (cut, "stop")
    pieces = [event.text for event in llm.stream("the sea", params)]
    assert "".join(pieces) == cut
    assert len(done.tokens) < 60
    assert _drained(llm)


def test_texts_end_at_stop_tokens(base: LLM) -> None:
    (prompt,) = tiny_models.prompts((10,))
    tokens = base.generate([prompt], _greedy(20))[0].tokens
    done = base.generate([prompt], _greedy(20, stop_tokens=(tokens[7],)))[0]
    assert done.tokens == tokens[: tokens.index(tokens[7]) + 1]
    assert done.reason == "stop"
    config = base.config
    assert config.stop_tokens == (0,)


def test_the_models_own_end(folder: Path, base: LLM) -> None:
    from dataclasses import replace

    (prompt,) = tiny_models.prompts((10,))
    tokens = base.generate([prompt], _greedy(20))[0].tokens
    model = Transformer(replace(base.config, stop_tokens=(tokens[4],)), base.model.outer, base.model.layers)
    llm = LLM(model, base.tokenizer, cache_tokens=256)
    place = tokens.index(tokens[4])
    done = llm.generate([prompt], SamplingParams(max_tokens=20))[0]
    assert (done.tokens, done.reason) == (tokens[: place + 1], "stop")
    assert base.tokenizer is not None
    assert done.text == base.tokenizer.decode(tokens[:place]), "the end itself is no text"
    assert llm.generate([prompt], _greedy(20))[0].tokens == tokens


def test_held_back_text_is_given_in_the_end() -> None:
    made = Tokenizer(tiny_models.tokenizer())
    for text, stops, expected in (
        ("abc STO", ("STOP",), "abc STO"),
        ("abc STOP def", ("STOP",), "abc "),
        ("aab", ("ab",), "a"),
        ("naïve ☃ snow", ("zzz",), "naïve ☃ snow"),
        ("one two", ("two", "one t"), ""),
    ):
        stream, shown = TextStream(made, stops, True), ""
        for token in made.encode(text):
            if not stream.stopped:
                stream.push(token)
                shown += stream.take()
                assert expected.startswith(shown)
        stream.close()
        assert shown + stream.take(final=True) == expected == stream.text


def test_half_a_character_at_the_end_becomes_a_mark() -> None:
    made = Tokenizer(tiny_models.tokenizer())
    stream = TextStream(made, (), True)
    for token in made.encode("a☃")[:-1]:
        stream.push(token)
    assert stream.take() == "a"
    stream.close()
    assert stream.take(final=True).startswith("\N{REPLACEMENT CHARACTER}")


def test_chat_uses_the_models_template(base: LLM) -> None:
    messages = [{"role": "user", "content": "the sea"}]
    done = base.chat(messages, _greedy(5))
    assert base.tokenizer is not None
    prompt = base.tokenizer.encode("user: the sea<|end|>\nassistant:")
    assert list(done.prompt_tokens) == prompt
    assert "".join(event.text for event in base.stream_chat(messages, _greedy(5))) == done.text
    for wrong in ([], "hello", [{"content": "no role"}], [3]):
        with pytest.raises(ValueError, match="chat:"):
            base.chat(wrong)  # type: ignore[arg-type]
    bare = Tokenizer(base.tokenizer.backend, template="{{ raise_exception('alternate') }}")
    with pytest.raises(ValueError, match="does not take this conversation: alternate"):
        bare.render(messages)
    sly = Tokenizer(base.tokenizer.backend, template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="template"):
        sly.render(messages)
    with pytest.raises(ValueError, match="without a chat template"):
        Tokenizer(base.tokenizer.backend).render(messages)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1] * 256, "the prompt has 256 tokens; the context holds 256"),
        ([1, 999], "token 999 is not in the vocabulary, which has 0 to 319"),
        ([-1], "token -1 is not in the vocabulary"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Any, message: str, base: LLM) -> None:
    llm = _other(base, cache_tokens=512)
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], prompt])
    assert llm.generate([[1, 2]], _greedy(2))[0].reason == "length"
    assert _drained(llm), "a refused prompt leaves no trace of its neighbours"


def test_other_refusals(base: LLM) -> None:
    with pytest.raises(ValueError, match="2 settings were given for 1 prompts"):
        base.generate([[1]], [_greedy(1)] * 2)
    silent = LLM(base.model, None, cache_tokens=256)
    with pytest.raises(RequestError, match="without a tokenizer; give prompts as lists of tokens"):
        silent.generate("the sea")
    with pytest.raises(RequestError, match="stop strings need text"):
        silent.generate([[1]], SamplingParams(stop="x"))
    assert silent.generate([[1]], _greedy(3))[0].text == ""
    engine = base.engine
    engine.add_request([1], _greedy(1), request_id="twice")
    with pytest.raises(RequestError, match="'twice' is being served already"):
        engine.add_request([1], _greedy(1), request_id="twice")
    engine.abort("twice")
    engine.step()
    assert not engine.busy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 0}, "context is 0"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of float32"),
        ({"cache_dtype": "int4"}, "cache_dtype is 'int4'"),
        ({"memory": 1.5}, "memory is 1.5"),
        ({"page_size": 24}, "page_size is 24"),
        ({"device": "tpu"}, "is no device"),
        ({"device": "meta"}, "not on 'meta'"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, **wrong)


def test_a_failed_step_ends_its_requests_and_nothing_else(
    base: LLM, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    llm = _set_ahead(_other(base, cache_tokens=512), ahead)
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
    assert llm.generate([prompt], _greedy(10))[0].tokens == base.generate([prompt], _greedy(10))[0].tokens


class _EagerGraph:
    """Stands in for a CUDA graph: runs what would be replayed, into the same tensors."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.result = compute, compute()

    def replay(self) -> None:
        for old, fresh in zip(self.result, self.compute()):
            if old is not None:
                old.copy_(fresh)


def test_padded_steps_at_fixed_addresses(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs do, without a GPU: steps are padded, and read and write the tensors they were made with."""
    llm = _other(base, cache_tokens=1024, most_sequences=6, prefix_caching=False)
    llm.engine.runner.graphs = True

    def capture(runner: Runner, compute: Callable[[], Any], plan: Any) -> tuple[_EagerGraph, Any]:
        made = _EagerGraph(compute)
        return made, made.result

    monkeypatch.setattr(Runner, "_capture", capture)
    prompts = tiny_models.prompts((5, 40, 17, 9, 30))
    params = [_greedy(count, temperature=0.9 * (count % 2), seed=count) for count in (9, 14, 3, 11, 20)]
    expected = _tokens(base, prompts, params)
    for _ in range(3):  # a size of prompts is captured when it comes again
        assert _tokens(llm, prompts, params) == expected
    graphs = llm.engine.runner._captured
    assert {graph.sequences for graph in graphs if not graph.prompts} == {1, 2, 4, 6}
    assert {(graph.sequences, graph.tokens) for graph in graphs if graph.prompts} == {(6, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_gpu_says_what_transformers_says(name: str, graphs: bool, tmp_path: Path) -> None:
    """In float32, with preemption, penalties and draws among the requests."""
    model = tiny_models.save(name, tmp_path)
    llm = LLM(tmp_path, device="cuda", dtype="float32", cache_tokens=256, most_sequences=8, graphs=graphs)
    prompts = tiny_models.prompts((3, 17, 41, 30, 60))
    greedy = [done.tokens for done in llm.generate(prompts, _greedy(24))]
    assert greedy == [tuple(tiny_models.hf_greedy(model, prompt, 24)) for prompt in prompts]
    params = [_greedy(60, temperature=1.0, top_k=20, repetition_penalty=1.1, logprobs=1, seed=one) for one in range(5)]
    drawn = [done.tokens for done in llm.generate(prompts, params)]
    assert drawn == [llm.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, params)]
    assert llm.engine.stats().preemptions > 0
    assert bool(llm.engine.runner._captured) == graphs
    assert _drained(llm)


PROMPTS = prompt_ladder(4096)


def test_the_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(256)[-3:] == [192, 224, 256]
    assert prompt_ladder(300) == [64, 128, 192, 256]
    assert all(after <= max(before + 64, 1.25 * before) for before, after in pairwise(PROMPTS))
    assert all(after <= max(2 * before, before + 64) for before, after in zip(ladder(1000), ladder(1000)[1:]))


def test_the_engine_can_be_built_alone(base: LLM) -> None:
    engine: Engine = build_engine(base.model, None, EngineOptions(cache_tokens=64))
    name = engine.add_request([1, 2, 3], _greedy(2))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    assert [event.request_id for event in events] == [name, name]
    assert engine.step() == []
    assert not engine.wait(0.0)


@pytest.fixture
def command(folder: Path) -> Any:
    runner = CliRunner()
    return lambda *words, text=None: runner.invoke(app, [*words, "--model", str(folder), "--device", "cpu"], input=text)


def test_generate_on_the_command_line(command: Any, base: LLM) -> None:
    done = command("generate", "the sea", "-n", "8", "--plain")
    assert done.exit_code == 0
    expected = base.generate("the sea", SamplingParams(max_tokens=8))[0]
    assert done.stdout == expected.text + "\n"
    assert f"{len(expected.prompt_tokens)} tokens in, {len(expected.tokens)} out" in done.stderr
    piped = command("generate", "-", "-n", "8", "--plain", text="the sea")
    assert piped.stdout == done.stdout
    asked = command("generate", "the sea", "-n", "8")
    assert asked.stdout == base.chat([{"role": "user", "content": "the sea"}], SamplingParams(max_tokens=8)).text + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", " "), "the prompt is empty"),
        (("generate", "x", "--top-p", "3"), "top_p is 3.0"),
        (("generate", "x", "-n", "0"), "max_tokens is 0"),
        (("generate", "the sea " * 200, "--plain"), "the context holds 256"),
        (("generate", "x", "--dtype", "int3"), "dtype is 'int3'"),
    ],
)
def test_wrong_values_on_the_command_line(words: tuple[str, ...], message: str, command: Any) -> None:
    done = command(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_on_the_command_line(command: Any, base: LLM) -> None:
    first = base.chat([{"role": "user", "content": "the sea"}], SamplingParams(max_tokens=8)).text
    done = command("chat", "-n", "8", "--temperature", "0", text="the sea\n\n/new\nthe sea\n/exit\nnever read\n")
    assert done.exit_code == 0
    assert done.stdout == f"{first}\n{first}\n"


def test_a_long_conversation_drops_its_oldest_messages(command: Any) -> None:
    done = command(
        "chat", "-n", "40", "--temperature", "0", text="the sea and the wind and the sand on the shore\n" * 8
    )
    assert done.exit_code == 0
    assert "outgrown the context" in done.stderr
    assert done.stdout.count("\n") >= 8
