"""Many requests of all kinds on a small pool: nothing is lost, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import openai
from running_server import NAME, Running, comes, other, serve
from served_model import _one_thread, base_fixture, folder_fixture  # noqa: F401

from flashkernel.engine import LLM, SamplingParams

PROMPTS = ("the sea", "the wind and the sand", "shore", "and the island of the sea")
KINDS = ("whole", "whole", "stream", "leave", "wrong", "penalized", "restricted", "scored", "response")
ROUNDS, EACH = 4, 60


def _client(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=120)


async def _ask(client: openai.AsyncOpenAI, draw: random.Random) -> tuple[str, Any]:
    """One request of a random kind: (prompt, its text), or (kind, None) if nothing is expected of it."""
    prompt, count = draw.choice(PROMPTS), draw.randint(1, 12)
    options: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0}
    kind = draw.choice(KINDS)
    user = [{"role": "user", "content": prompt}]
    if kind == "wrong":
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**{**options, "top_p": 7.0})
        return "wrong", None
    if kind == "leave":
        stream = await client.completions.create(**{**options, "max_tokens": 40}, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return "leave", None
    if kind == "penalized":
        await client.completions.create(
            **{**options, "temperature": 0.8}, presence_penalty=1.0, logit_bias={"5": 2}, n=2
        )
        return "penalized", None
    if kind == "restricted":
        wanted = {"type": "regex", "regex": "(wind|sea){1,4}"}
        found = await client.chat.completions.create(
            model=NAME, messages=user, extra_body={"response_format": wanted}, logprobs=True, top_logprobs=2
        )
        assert re.fullmatch("(wind|sea){1,4}", found.choices[0].message.content)
        return "restricted", None
    if kind == "scored":
        found = await client.completions.create(**options, echo=True, logprobs=1)
        assert found.choices[0].text.startswith(prompt)
        assert all(score is not None for score in found.choices[0].logprobs.token_logprobs[1:])
        return "scored", None
    if kind == "response":
        events = await client.responses.create(model=NAME, input=prompt, max_output_tokens=count, stream=True)
        assert [event.type async for event in events][-1] in ("response.completed", "response.incomplete")
        return "response", None
    if kind == "stream":
        stream = await client.completions.create(**options, stream=True)
        return f"{prompt}|{count}", "".join([chunk.choices[0].text async for chunk in stream])
    return f"{prompt}|{count}", (await client.completions.create(**options)).choices[0].text


async def _load(running: Running, seed: int) -> list[tuple[str, Any]]:
    draw = random.Random(seed)
    async with _client(running) as client:
        return list(await asyncio.gather(*(_ask(client, random.Random(draw.random())) for _ in range(EACH))))


@pytest.mark.parametrize("processes", [0, 2])
def test_nothing_is_lost_and_nothing_grows(base: LLM, processes: int) -> None:
    """Clients that leave, requests that fail and a pool that runs dry; every other answer is right."""
    llm = other(base, kv_cache_tokens=128, block_size=16, max_num_seqs=6)
    expected: dict[str, str] = {}
    with serve(llm, api_server_count=processes) as running:
        objects: list[int] = []
        resident: list[float] = []
        for number in range(ROUNDS):
            for key, text in asyncio.run(_load(running, number)):
                if text is None:
                    continue
                prompt, count = key.split("|")
                if key not in expected:
                    params = SamplingParams(max_tokens=int(count))
                    expected[key] = base.generate(prompt, params)[0].outputs[0].text
                assert text == expected[key]
            _settle(running)
            gc.collect()
            objects.append(len(gc.get_objects()))
            resident.append(_resident_mb())
        stats = llm.engine.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_running == stats.num_waiting == 0
        assert not running.engine._sinks
        assert not llm.engine._unfinished
        assert objects[-1] < objects[0] + 3000, f"Python objects after each round: {objects}"
        assert resident[-1] < resident[1] + 20, f"MB after each round, of which the first fills caches: {resident}"
        assert threading.active_count() < 60


def _resident_mb() -> float:
    """Memory of this process."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        return 0.0
    return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _settle(running: Running) -> None:
    """Waits until aborted requests have returned their blocks."""
    for _ in range(500):
        if not running.llm.engine.has_unfinished_requests() and running.llm.engine.stats().num_used_blocks == 0:
            return
        threading.Event().wait(0.02)


def test_a_stop_in_the_middle_answers_everyone(base: LLM) -> None:
    """Told to stop, the server finishes what runs; what it cannot finish gets status 503."""
    llm = other(base, kv_cache_tokens=256, block_size=16, max_num_seqs=4)

    async def all_of_them(running: Running) -> list[Any]:
        async with _client(running) as client:
            work = [
                asyncio.create_task(
                    client.completions.create(
                        model=NAME, prompt="the sea", max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
                    )
                )
                for _ in range(40)
            ]
            while llm.engine.stats().num_finished < 4:
                await asyncio.sleep(0.005)
            running.server.should_exit = True
            return list(await asyncio.gather(*work, return_exceptions=True))

    with serve(llm, grace=0.5) as running:
        found = asyncio.run(all_of_them(running))
    right = base.generate("the sea", SamplingParams(max_tokens=30, ignore_eos=True))[0].outputs[0].text
    done = [one for one in found if not isinstance(one, BaseException)]
    assert len(done) >= 4
    assert all(one.choices[0].text == right for one in done)
    for one in found:
        if isinstance(one, BaseException):
            assert isinstance(one, openai.APIStatusError), repr(one)
            assert one.status_code == 503
    assert llm.engine.stats().num_used_blocks == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("processes", [0, 2])
def test_a_thousand_requests_and_a_signal(folder: Path, base: LLM, tmp_path: Path, processes: int) -> None:
    """SIGTERM to the command, with a thousand requests under way: each has its text or is told why not."""
    told = tmp_path / "stderr"
    options = ("--device", "cpu", "--port", "0", "--grace", "0.5", "--max-num-seqs", "16")
    options += ("--api-server-count", str(processes))
    with told.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "flashkernel", "serve", str(folder), *options],
            stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    settings: dict[str, Any] = {
        "model": NAME, "prompt": "the sea", "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    found: Counter[str] = Counter()

    async def ask(client: openai.AsyncOpenAI, streaming: bool) -> None:
        try:
            if streaming:
                stream = await client.completions.create(**settings, stream=True)
                text = "".join([chunk.choices[0].text async for chunk in stream])
            else:
                text = (await client.completions.create(**settings)).choices[0].text
            found[text] += 1
        except openai.APIStatusError as error:
            found[f"status {error.status_code}"] += 1
        except openai.APIError as error:  # in a stream that has begun; a lost connection is one as well
            found["told in its stream" if error.message == "the server is shutting down" else repr(error)] += 1

    async def ask_all(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            work = [asyncio.create_task(ask(client, number % 2 == 0)) for number in range(1000)]
            while found.total() < 50:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*work)

    try:
        assert comes(lambda: "/v1 (Ctrl-C stops)" in told.read_text(), 120), told.read_text()
        address = re.search(r"http://\S+/v1", told.read_text())
        assert address is not None
        asyncio.run(ask_all(address[0]))
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait(10)
    right = base.generate("the sea", SamplingParams(max_tokens=20, ignore_eos=True))[0].outputs[0].text
    assert found.total() == 1000
    assert found[right] >= 50
    assert set(found) <= {right, "status 503", "told in its stream"}
    assert "Traceback" not in told.read_text()
