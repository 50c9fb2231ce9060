"""What the engine says: seeds, streams, stops, text, chat, refusals, and the command line."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
import torch
from scripted_model import count_compiled_templates
from tiny_engine import LENGTHS, _drained, _greedy, _other, _set_ahead, _tokens
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.engine import LLM, RequestError, SamplingParams, Transformer
from flashkernel.engine.detokenizer import IncrementalDetokenizer
from flashkernel.engine.tokenizer import Tokenizer


def test_seeds_repeat_in_any_company(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    prompts = tiny_models.prompts(LENGTHS)
    warm = {"temperature": 1.2, "top_p": 0.95}
    params = [_greedy(12, seed=seed, **warm) for seed in range(len(prompts))]
    together = _tokens(llm, prompts, params)
    assert together == [base.generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params)]
    assert together == _tokens(llm, prompts, params)
    other = _tokens(llm, prompts, [_greedy(12, seed=seed + 100, **warm) for seed in range(len(prompts))])
    assert together != other
    unseeded = [_tokens(llm, prompts[:1], _greedy(12, **warm))[0] for _ in range(3)]
    assert len(set(unseeded)) > 1, "without a seed every draw is new"


def test_torchs_default_device_is_not_asked(folder: Path, base: LLM) -> None:
    prompts = [[1, 5, 7, 9, 4, 3], [2, 3]]
    expected = [one.outputs[0].token_ids for one in base.generate(prompts, _greedy(12))]
    with torch.device("meta"):
        llm = LLM(folder, device="cpu", kv_cache_tokens=1024, block_size=16)
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, _greedy(12))] == expected


def test_streams_say_what_generate_says(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    done = base.generate("the sea and", _greedy(30, logprobs=2))[0]
    events = list(llm.stream("the sea and", _greedy(30, logprobs=2)))
    assert [event.token_id for event in events] == list(done.outputs[0].token_ids)
    assert "".join(event.text for event in events) == done.outputs[0].text
    assert events[-1].request_output is not None
    assert events[-1].request_output.outputs[0].text == done.outputs[0].text
    assert [event.logprob.token_id for event in events if event.logprob] == list(done.outputs[0].token_ids)
    assert all(event.request_output is None for event in events[:-1])
    metrics = events[-1].request_output.metrics
    assert metrics.first_token_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_streams_interleave_and_may_be_left(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    expected = base.generate("the wind", _greedy(20))[0].outputs[0].token_ids
    left, kept = llm.stream("the sea", _greedy(100)), llm.stream("the wind", _greedy(20))
    found = []
    for _ in range(5):
        next(left)
        found.append(next(kept).token_id)
    assert llm.engine.stats().num_running == 2
    left.close()
    found += [event.token_id for event in kept]
    assert tuple(found) == expected
    list(llm.stream("x", _greedy(1)))
    assert _drained(llm)


def test_a_stream_that_nobody_reads_is_aborted(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=2048)
    for unread in (llm.stream("the sea", _greedy(100)), llm.stream_batch(["a", "b"], _greedy(100))):
        assert llm.engine.has_unfinished_requests()
        del unread
    list(llm.stream("x", _greedy(1)))
    assert llm.engine.stats().generation_tokens == 1
    assert _drained(llm)


def test_another_thread_may_step_at_any_moment(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may be finished before `add_requests` has returned to the thread that waits for it."""
    llm = _other(base, kv_cache_tokens=2048)
    add = llm.engine.add_requests

    def add_and_step(requests: Any) -> None:
        add(requests)
        while llm.engine.has_unfinished_requests():
            llm._step()

    monkeypatch.setattr(llm.engine, "add_requests", add_and_step)
    expected = base.generate("the sea", _greedy(4))[0].outputs[0]
    steps = llm.stream("the sea", _greedy(4))
    assert llm._queues, "its outputs are kept"
    assert [step.token_id for step in steps] == list(expected.token_ids)
    assert _drained(llm)


def test_a_step_costs_the_same_however_many_prompts_wait(base: LLM) -> None:
    class Counted(dict[str, Any]):
        looked_up = 0

        def __getitem__(self, key: str) -> Any:
            self.looked_up += 1
            return super().__getitem__(key)

    llm = _other(base, kv_cache_tokens=256, max_num_seqs=2)
    llm._queues = queues = Counted()
    llm.generate([[1, 2]] * 60, _greedy(3))
    assert queues.looked_up <= 60


def test_several_streams(base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=2048)
    params = [_greedy(6), _greedy(4)]
    events = list(llm.stream_batch(["the sea", "the wind"], params))
    expected = base.generate(["the sea", "the wind"], params)
    for number, done in enumerate(expected):
        assert tuple(event.token_id for place, event in events if place == number) == done.outputs[0].token_ids
    assert [place for place, _ in events[:4]] == [0, 1, 0, 1], "they take turns"


def test_texts_end_at_stop_strings(base: LLM, ahead: bool) -> None:
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    whole = base.generate("the sea", _greedy(60))[0].outputs[0].text
    stop = whole[12:16]
    cut = whole[: whole.index(stop)]
    params = _greedy(60, stop=("never to be found", stop))
    done = llm.generate("the sea", params)[0]
    assert (done.outputs[0].text, done.outputs[0].finish_reason) == (cut, "stop")
    pieces = [event.text for event in llm.stream("the sea", params)]
    assert "".join(pieces) == cut
    assert len(done.outputs[0].token_ids) < 60
    assert _drained(llm)


def test_stop_strings_wait_for_the_least_tokens(base: LLM, ahead: bool) -> None:
    """What the first `min_tokens` tokens wrote ends nothing."""
    llm = _set_ahead(_other(base, kv_cache_tokens=2048), ahead)
    pieces = [step.text for step in base.stream("the sea", _greedy(60))]
    whole, stop = "".join(pieces), pieces[2][:1]
    assert len(llm.generate("the sea", _greedy(60, stop=stop))[0].outputs[0].token_ids) <= 3
    for least in (3, 10, 30, 60):
        params = _greedy(60, stop=stop, min_tokens=least)
        done = llm.generate("the sea", params)[0].outputs[0]
        place = whole.find(stop, len("".join(pieces[:least])))
        assert (done.text, done.finish_reason) == ((whole, "length") if place < 0 else (whole[:place], "stop"))
        assert "".join(step.text for step in llm.stream("the sea", params)) == done.text
    assert _drained(llm)


def test_each_request_has_as_many_log_probabilities_as_it_asked_for(base: LLM) -> None:
    """Those of one step are computed together."""
    prompts = tiny_models.prompts((5, 9, 7))
    params = [_greedy(6, logprobs=count) for count in (1, 4, 0)]
    for done, prompt, one in zip(base.generate(prompts, params), prompts, params):
        found = done.outputs[0].logprobs
        assert found is not None
        assert {len(each.top_logprobs) for each in found} == {one.logprobs}
        alone = base.generate([prompt], one)[0].outputs[0].logprobs
        assert alone is not None
        assert [each.top_logprobs for each in found] == [
            tuple((token, pytest.approx(score, abs=1e-4)) for token, score in each.top_logprobs) for each in alone
        ]


def test_the_text_of_a_token_is_decoded_once() -> None:
    class Counting:
        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend, self.decoded = backend, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def decode(self, *given: Any, **named: Any) -> str:
            self.decoded += 1
            return self.backend.decode(*given, **named)

    backend = Counting(tiny_models.tokenizer())
    made, plain = Tokenizer(backend), Tokenizer(tiny_models.tokenizer())  # type: ignore[arg-type]
    tokens = plain.encode("the sea and the wind")
    for _ in range(3):
        assert [made.token_text(token) for token in tokens] == [plain.decode([token]) for token in tokens]
    assert backend.decoded == len(set(tokens))


def test_a_stop_string_may_begin_before_it_may_end_the_text() -> None:
    made = Tokenizer(tiny_models.tokenizer())
    for stops, expected in ((("bc",), "ab"), (("b", "cccc"), "ab"), (("abb",), ""), (("zz", "bbc"), "a")):
        stream = IncrementalDetokenizer(made, stops, True)
        for number, token in enumerate(made.encode("abbcd")):
            if not stream.stopped:
                stream.append(token, may_stop=number >= 2)
        assert (stream.text, stream.stopped) == (expected, True)


@pytest.mark.parametrize("seed", [4, -4, 2**64 - 1])
def test_the_first_completion_has_the_seed_itself(base: LLM, seed: int) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=seed)
    alone = base.generate("the sea", params)[0].outputs[0].token_ids
    found = base.generate("the sea", replace(params, n=3))[0].outputs
    assert found[0].token_ids == alone
    assert len({one.token_ids for one in found}) == 3


def test_texts_end_at_stop_tokens(base: LLM) -> None:
    (prompt,) = tiny_models.prompts((10,))
    tokens = base.generate([prompt], _greedy(20))[0].outputs[0].token_ids
    done = base.generate([prompt], _greedy(20, stop_token_ids=(tokens[7],)))[0]
    assert done.outputs[0].token_ids == tokens[: tokens.index(tokens[7]) + 1]
    assert done.outputs[0].finish_reason == "stop"
    config = base.config
    assert config.eos_token_ids == (0,)


def test_the_models_own_end(folder: Path, base: LLM) -> None:
    (prompt,) = tiny_models.prompts((10,))
    tokens = base.generate([prompt], _greedy(20))[0].outputs[0].token_ids
    model = Transformer(replace(base.config, eos_token_ids=(tokens[4],)), base.model.weights, base.model.layers)
    llm = LLM(model, base.tokenizer, kv_cache_tokens=256)
    place = tokens.index(tokens[4])
    done = llm.generate([prompt], SamplingParams(max_tokens=20))[0]
    assert (done.outputs[0].token_ids, done.outputs[0].finish_reason) == (tokens[: place + 1], "stop")
    assert base.tokenizer is not None
    assert done.outputs[0].text == base.tokenizer.decode(tokens[:place]), "the end itself is no text"
    assert llm.generate([prompt], _greedy(20))[0].outputs[0].token_ids == tokens


def test_stop_strings_may_be_as_long_as_a_request() -> None:
    """They take no time of the other requests."""
    made = Tokenizer(tiny_models.tokenizer())
    stream = IncrementalDetokenizer(made, ("z" * 20_000, "ab" * 10_000, " sea" * 9 + "!"), True)
    shown, began = "", time.process_time()
    for token in made.encode("the sea and ab" + " sea" * 500):
        stream.append(token)
        shown += stream.next_text()
    assert shown == stream.text[:-36], "the end may go on as the last of them"
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_a_long_text_makes_no_token_slower(stops: tuple[str, ...]) -> None:
    """A text is not copied, or searched from its beginning, for each token."""
    made = Tokenizer(tiny_models.tokenizer())
    stream = IncrementalDetokenizer(made, stops, True)
    stream._extend("a" * 50_000_000)
    assert len(stream.next_text()) == 50_000_000
    tokens = made.encode("the sea and " * 60)
    began, shown = time.process_time(), ""
    for token in tokens:
        stream.append(token)
        shown += stream.next_text()
    took = time.process_time() - began
    assert shown == made.decode(tokens)
    assert took < 0.3, "a copy of the text takes 10 ms"


def test_held_back_text_is_given_in_the_end() -> None:
    made = Tokenizer(tiny_models.tokenizer())
    for text, stops, expected in (
        ("abc STO", ("STOP",), "abc STO"),
        ("abc STOP def", ("STOP",), "abc "),
        ("aab", ("ab",), "a"),
        ("naïve ☃ snow", ("zzz",), "naïve ☃ snow"),
        ("one two", ("two", "one t"), ""),
    ):
        stream, shown = IncrementalDetokenizer(made, stops, True), ""
        for token in made.encode(text):
            if not stream.stopped:
                stream.append(token)
                shown += stream.next_text()
                assert expected.startswith(shown)
        stream.finish()
        assert shown + stream.next_text(finished=True) == expected == stream.text


def test_half_a_character_at_the_end_becomes_a_mark() -> None:
    made = Tokenizer(tiny_models.tokenizer())
    stream = IncrementalDetokenizer(made, (), True)
    for token in made.encode("a☃")[:-1]:
        stream.append(token)
    assert stream.next_text() == "a"
    stream.finish()
    assert stream.next_text(finished=True).startswith("\N{REPLACEMENT CHARACTER}")


def test_a_tokenizer_may_know_more_tokens_than_the_model(base: LLM) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "sea": 1, "pad": 320}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    llm = LLM(base.model, Tokenizer(words), kv_cache_tokens=256)
    with pytest.raises(RequestError, match="token 320 is not in the vocabulary, which has 0 to 319"):
        llm.generate(["sea", "sea pad"])
    assert llm.generate(["sea"], _greedy(2))[0].prompt_token_ids == (1,)
    assert _drained(llm)


def _bytes_tokenizer() -> Tokenizer:
    """Words and bytes, as SentencePiece's models have them: bytes are decoded in runs."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "▁sea": 257, "b": 258}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    kinds = tokenizers.decoders
    backend.decoder = kinds.Sequence([kinds.Replace("▁", " "), kinds.ByteFallback(), kinds.Fuse()])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([258, *(1 + byte for byte in "\n☃".encode()), 257], "b\n☃ sea"),
        ([1 + ord("\n"), 1 + 0xE2, 257, 258], "\n\ufffd seab"),  # the newline is shown before the run is invalid
        ([258, 1 + ord("x"), 1 + 0xE2], "bx\ufffd"),
    ],
)
def test_bytes_that_are_no_text(token_ids: list[int], expected: str) -> None:
    """What was decoded before they came stays; what comes after them is decoded."""
    stream, shown = IncrementalDetokenizer(_bytes_tokenizer(), (), True), ""
    for token in token_ids:
        stream.append(token)
        shown += stream.next_text()
    stream.finish()
    assert shown + stream.next_text(finished=True) == stream.text == expected


def test_the_text_of_a_token_has_its_space() -> None:
    """SentencePiece's decoders strip it from the first token; texts of tokens make the text of all."""
    made = _bytes_tokenizer()
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    made.backend.decoder = tokenizers.decoders.Sequence([made.backend.decoder, strip])
    token_ids = [258, 257, 1 + ord("x"), 257, 320]
    assert "".join(map(made.token_text, token_ids)) == made.decode(token_ids) == "b seax sea"
    plain = Tokenizer(tiny_models.tokenizer())
    assert "".join(map(plain.token_text, plain.encode("the sea"))) == "the sea"


def test_random_bytes_break_no_stream() -> None:
    draw, made = random.Random(0), _bytes_tokenizer()
    for _ in range(300):
        stream = IncrementalDetokenizer(made, (), True)
        for _ in range(20):
            stream.append(draw.randrange(259))
        for token in (258, 257, 258):
            stream.append(token)
        stream.finish()
        assert stream.text.endswith("b seab")


def test_chat_uses_the_models_template(base: LLM) -> None:
    messages = [{"role": "user", "content": "the sea"}]
    done = base.chat(messages, _greedy(5))
    assert base.tokenizer is not None
    prompt = base.tokenizer.encode("user: the sea<|end|>\nassistant:")
    assert list(done.prompt_token_ids) == prompt
    assert "".join(event.text for event in base.stream_chat(messages, _greedy(5))) == done.outputs[0].text
    for wrong in ([], "hello", [{"content": "no role"}], [3]):
        with pytest.raises(ValueError, match="chat:"):
            base.chat(wrong)  # type: ignore[arg-type]
    bare = Tokenizer(base.tokenizer.backend, chat_template="{{ raise_exception('alternate') }}")
    with pytest.raises(ValueError, match="does not take this conversation: alternate"):
        bare.render_chat(messages)
    sly = Tokenizer(base.tokenizer.backend, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="template"):
        sly.render_chat(messages)
    with pytest.raises(ValueError, match="without a chat template"):
        Tokenizer(base.tokenizer.backend).render_chat(messages)


def test_content_in_parts_is_one_text(base: LLM) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]
    whole = base.chat([{"role": "user", "content": "the sea"}], _greedy(2)).prompt_token_ids
    assert base.chat([{"role": "user", "content": parts}], _greedy(2)).prompt_token_ids == whole
    with pytest.raises(ValueError, match=r"a message has the part {'type': 'image_url'}; text is known"):
        base.chat([{"role": "user", "content": [*parts, {"type": "image_url"}]}])
    assert base.tokenizer is not None
    adding = Tokenizer(base.tokenizer.backend, chat_template="{{ 'user: ' + messages[0].content }}")
    with pytest.raises(ValueError, match="template does not take this conversation: can only concatenate str"):
        adding.render_chat([{"role": "user", "content": None}])


def test_what_a_chat_template_is_given(base: LLM) -> None:
    assert base.tokenizer is not None
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name }} {{ enable_thinking }}"
    tokenizer = Tokenizer(base.tokenizer.backend, chat_template=template)
    llm = LLM(base.model, tokenizer, kv_cache_tokens=512, block_size=16)
    tools = [{"type": "function", "function": {"name": "wind"}}]
    given: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    messages = [{"role": "user", "content": "sea "}]
    done = llm.chat(messages, _greedy(2), **given)
    assert tokenizer.decode(done.prompt_token_ids) == "sea wind False"
    assert [one.token_id for one in llm.stream_chat(messages, _greedy(2), **given)] == list(done.outputs[0].token_ids)
    with pytest.raises(ValueError, match="the model's chat template has no tools"):
        base.chat(messages, tools=given["tools"])


def test_a_chat_template_is_compiled_once(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is said, and again for another template of the same tokenizer."""
    assert base.tokenizer is not None
    compiled = count_compiled_templates(monkeypatch)
    first, second = (f"{mark}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}" for mark in "12")
    one, same = (Tokenizer(base.tokenizer.backend, chat_template=first) for _ in range(2))
    for text in ("the sea", "wind"):
        for tokenizer in (one, same):
            assert tokenizer.render_chat([{"role": "user", "content": text}]) == "1" + text
    assert compiled == [first]
    one.chat_template = second
    assert one.render_chat([{"role": "user", "content": "wind"}]) == "2wind"
    assert one.template_variables == {"messages"}
    one.chat_template = "{{ tools }}"
    assert one.template_variables == {"tools"}


def test_templates_may_use_what_transformers_offers(base: LLM) -> None:
    assert base.tokenizer is not None
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    made = Tokenizer(base.tokenizer.backend, chat_template=template)
    assert made.render_chat([{"role": "user", "content": "the sea"}] * 2) == "the sea"
    made.chat_template = "{{ 'mér' | tojson }} {{ 'mér' | tojson(ensure_ascii=True) }}"
    assert made.render_chat([{"role": "user", "content": ""}]) == '"mér" "m\\u00e9r"'


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1] * 256, "the prompt has 256 tokens; max_model_len is 256"),
        ([1, 999], "token 999 is not in the vocabulary, which has 0 to 319"),
        ([-1], "token -1 is not in the vocabulary"),
        ([1, [2, 3]], "not a list with lists in it"),
        ([[1, 2]], "not 2-dim int64"),
        ("the \udc80 sea", "the text has a lone surrogate, which UTF-8 cannot encode"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Any, message: str, base: LLM) -> None:
    llm = _other(base, kv_cache_tokens=512)
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], prompt])
    assert llm.generate([[1, 2]], _greedy(2))[0].outputs[0].finish_reason == "length"
    assert _drained(llm), "a refused prompt leaves no trace of its neighbors"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            b"abc",
            "generate: prompts is bytes; it must be a str, a list of str, a list of token ids, or a list of lists",
        ),
        (bytearray(b"abc"), "prompts is bytearray"),
        ([b"abc"], "prompts has a bytes in it"),
        (["the sea", 3], "prompts has a int in it"),
        ({"prompt": "the sea"}, "prompts is dict"),
        (None, "prompts is NoneType"),
        (7, "prompts is int"),
    ],
)
def test_what_is_no_prompt(prompts: Any, message: str, base: LLM) -> None:
    with pytest.raises(TypeError, match=message):
        base.generate(prompts)
    with pytest.raises(TypeError, match=message.replace("generate:", "stream_batch:")):
        list(base.stream_batch(prompts))


def test_bytes_are_no_prompt_of_the_engine_either(base: LLM) -> None:
    with pytest.raises(TypeError, match="text \\(str\\) or a list of token ids, not bytes"):
        base.engine.add_request(b"abc")
    with pytest.raises(TypeError, match="not bytes"):
        base.stream(b"abc")


def test_every_way_to_give_prompts(base: LLM) -> None:
    import numpy as np
    import torch

    assert base.tokenizer is not None
    token_ids = base.tokenizer.encode("the sea")
    expected = base.generate("the sea", _greedy(4))[0].outputs[0].token_ids
    several = np.array([token_ids, token_ids])
    for prompts in (
        ["the sea"],
        token_ids,
        [token_ids],
        tuple(token_ids),
        torch.tensor(token_ids),
        several,
        ["the sea", token_ids],
    ):
        found = base.generate(prompts, _greedy(4))
        assert {output.outputs[0].token_ids for output in found} == {expected}
    assert [output.prompt for output in base.generate(["the sea", token_ids], _greedy(1))] == ["the sea", None]


def test_other_refusals(base: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling_params were given for 1 prompts"):
        base.generate([[1]], [_greedy(1)] * 2)
    for wrong, kind in (({"max_tokens": 1}, "dict"), ([{"max_tokens": 1}], "dict"), ("greedy", "str")):
        with pytest.raises(TypeError, match=f"sampling_params has a {kind} in it; it must be SamplingParams"):
            base.generate([[1]], wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tokenizer is str; it must be a Tokenizer"):
        LLM(base.model, "gpt2")  # type: ignore[arg-type]
    silent = LLM(base.model, None, kv_cache_tokens=256)
    with pytest.raises(RequestError, match="without a tokenizer; give prompts as lists of token ids"):
        silent.generate("the sea")
    with pytest.raises(RequestError, match="stop strings need text"):
        silent.generate([[1]], SamplingParams(stop="x"))
    assert silent.generate([[1]], _greedy(3))[0].outputs[0].text == ""
    engine = base.engine
    engine.add_request([1], _greedy(1), request_id="twice")
    with pytest.raises(RequestError, match="'twice' is being served already"):
        engine.add_request([1], _greedy(1), request_id="twice")
    with pytest.raises(RequestError, match="'same' is being served already"):
        engine.add_requests([("same", [1], _greedy(1), False)] * 2)
    engine.abort_request("twice")
    engine.step()
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of float32"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"block_size": 24}, "block_size is 24"),
        ({"device": "tpu"}, "is no device"),
        ({"device": "meta"}, "not on 'meta'"),
        ({"max_model_len": 257}, "max_model_len is 257; this model takes up to 256 tokens"),
        ({"max_model_len": 100, "kv_cache_tokens": 64}, "max_model_len is 100, and the KV cache holds 64 tokens"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "a model in torch.float32 stores keys and values in that dtype, or in 'float8",
        ),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and the Transformer is in torch.float32; leave it out"),
        ({"device": "tpu"}, "is no device"),
    ],
)
def test_a_loaded_model_stays_as_it_is(wrong: dict[str, Any], message: str, base: LLM) -> None:
    with pytest.raises(ValueError, match=message):
        _other(base, kv_cache_tokens=512, **wrong)
    assert _other(base, kv_cache_tokens=512, device="cpu", dtype="float32").engine.max_model_len == 256


@pytest.fixture
def command(folder: Path) -> Any:
    runner = CliRunner()
    return lambda *words, text=None: runner.invoke(app, [*words, "--model", str(folder), "--device", "cpu"], input=text)


def test_generate_on_the_command_line(command: Any, base: LLM) -> None:
    done = command("generate", "the sea", "-n", "8", "--plain")
    assert done.exit_code == 0
    expected = base.generate("the sea", SamplingParams(max_tokens=8))[0]
    assert done.stdout == expected.outputs[0].text + "\n"
    assert f"{len(expected.prompt_token_ids)} tokens in, {len(expected.outputs[0].token_ids)} out" in done.stderr
    piped = command("generate", "-", "-n", "8", "--plain", text="the sea")
    assert piped.stdout == done.stdout
    asked = command("generate", "the sea", "-n", "8")
    assert (
        asked.stdout
        == base.chat([{"role": "user", "content": "the sea"}], SamplingParams(max_tokens=8)).outputs[0].text + "\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", " "), "the prompt is empty"),
        (("generate", "x", "--top-p", "3"), "top_p is 3.0"),
        (("generate", "x", "-n", "0"), "max_tokens is 0"),
        (("generate", "the sea " * 200, "--plain"), "max_model_len is 256"),
        (("generate", "x", "--dtype", "int3"), "dtype is 'int3'"),
    ],
)
def test_wrong_values_on_the_command_line(words: tuple[str, ...], message: str, command: Any) -> None:
    done = command(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_on_the_command_line(command: Any, base: LLM) -> None:
    first = base.chat([{"role": "user", "content": "the sea"}], SamplingParams(max_tokens=8)).outputs[0].text
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
