"""Requests of mixed lengths, all at once or in Poisson arrivals, against an engine in this process or any server with
OpenAI's API: time to first token, time between tokens, whole requests, tokens/s, and goodput."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flashkernel.engine import LLM, SamplingParams
from flashkernel.lab.serve_records import ServeRecord, percentiles

# name -> requests, prompt lengths, answer lengths; drawn from random.Random(0) alone, so that any engine gets the same
LOADS = {
    "short": (64, (100, 1024), (20, 60)),
    "mixed": (256, (100, 1024), (100, 1024)),
    "chat": (1000, (20, 800), (20, 400)),
}
PASSES = ("first", "second")
CONNECT_S = 10.0  # until a server must have answered
IDLE_S = 0.0005  # between looks for a request that is due
READ_BYTES = 2**16  # of a stream at once


@dataclass(frozen=True)
class Load:
    """Requests to send: (prompt tokens, answer tokens) each."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def named(cls, name: str) -> Load:
        """One of LOADS; ValueError for another name."""
        if name not in LOADS:
            raise ValueError(f"bench serve: unknown load {name!r}; known are {', '.join(LOADS)}")
        return cls.drawn(name, *LOADS[name])

    @classmethod
    def drawn(cls, name: str, count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
        """`count` requests with lengths drawn between the bounds, both included."""
        draw = random.Random(0)
        return cls(name, tuple((draw.randint(*prompts), draw.randint(*answers)) for _ in range(count)))

    @classmethod
    def from_file(cls, path: Path) -> Load:
        """Lengths from a JSON list of pairs, or from lines of "prompt,answer"; ValueError if it has others."""
        text = path.read_text(encoding="utf-8")
        try:
            rows = json.loads(text) if text.lstrip().startswith("[") else list(csv.reader(text.splitlines()))
            pairs = tuple((int(prompt), int(answer)) for prompt, answer in rows if str(prompt).strip().isdigit())
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: it has no pairs of prompt and answer lengths ({error})") from error
        if not pairs or min(min(pair) for pair in pairs) < 1:
            raise ValueError(f"{path}: it has no pairs of prompt and answer lengths, each at least 1")
        return cls(path.stem, pairs)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random tokens, the same every time."""
        draw = random.Random(1)
        return [[draw.randrange(vocab_size) for _ in range(prompt)] for prompt, _ in self.lengths]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(prompt + answer for prompt, answer in self.lengths)

    def arrivals(self, rate: float | None) -> list[float]:
        """Seconds after the start at which each request is sent: all at 0, or a Poisson process of `rate` a second."""
        if rate is None:
            return [0.0] * len(self.lengths)
        draw, now, times = random.Random(2), 0.0, []
        for _ in self.lengths:
            times.append(now)
            now += draw.expovariate(rate)
        return times


@dataclass
class Timeline:
    """When a request was sent and its tokens came, in seconds."""

    sent: float
    wanted: int  # tokens
    first: float | None = None
    last: float | None = None
    count: int = 0
    gaps: list[float] = field(default_factory=list)  # between tokens; several tokens of one message share a gap
    error: str | None = None

    def token(self, now: float, tokens: int = 1) -> None:
        """Notes tokens that came together."""
        if self.first is None:
            self.first = now
            tokens_after = tokens - 1
        else:
            assert self.last is not None
            self.gaps.append(now - self.last)
            tokens_after = tokens - 1
        self.gaps += [0.0] * tokens_after
        self.last = now
        self.count += tokens

    @property
    def complete(self) -> bool:
        return self.error is None and self.count >= self.wanted

    def within(self, limits: Mapping[str, float]) -> bool:
        """Whether the request kept its limits, in ms: its first token, and the 99th percentile of its gaps."""
        if not self.complete or self.first is None:
            return False
        gaps = percentiles(self.gaps)
        slow = 1e3 * (self.first - self.sent) > limits.get("ttft", math.inf)
        return not slow and (gaps is None or gaps["p99"] <= limits.get("itl", math.inf))


def summarize(timelines: Sequence[Timeline], limits: Mapping[str, float] | None, **facts: Any) -> ServeRecord:
    """The record of a load; `facts` are further fields."""
    began = min(one.sent for one in timelines)
    ended = max((one.last or one.sent) for one in timelines)
    seconds, tokens = max(ended - began, 1e-9), sum(one.count for one in timelines)
    done = [one for one in timelines if one.complete]
    return ServeRecord(
        requests=len(timelines),
        seconds=seconds,
        out_tokens=tokens,
        out_tokens_per_s=tokens / seconds,
        requests_per_s=len(done) / seconds,
        failed=len(timelines) - len(done),
        ttft_ms=percentiles([one.first - one.sent for one in done if one.first is not None]),
        itl_ms=percentiles([gap for one in done for gap in one.gaps]),
        e2e_ms=percentiles([one.last - one.sent for one in done if one.last is not None]),
        goodput=None if not limits else sum(one.within(limits) for one in timelines) / len(timelines),
        limits_ms=dict(limits) if limits else None,
        error=next((one.error for one in timelines if one.error is not None), None),
        **facts,
    )


def run_engine(llm: LLM, load: Load, rate: float | None, temperature: float) -> list[Timeline]:
    """Serves a load with an engine of this process. Without a rate, tokens are not streamed: gaps are then means."""
    engine, streaming = llm.engine, rate is not None
    prompts, arrivals = load.prompts(llm.config.vocab_size), load.arrivals(rate)
    began = time.monotonic()
    timelines = [Timeline(began + at, answer) for at, (_, answer) in zip(arrivals, load.lengths)]
    by_id: dict[str, Timeline] = {}
    sent = 0
    while sent < len(timelines) or engine.has_unfinished_requests():
        now = time.monotonic()
        while sent < len(timelines) and timelines[sent].sent <= now:
            answer = timelines[sent].wanted
            params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=temperature, seed=sent)
            by_id[engine.add_request(prompts[sent], params, streaming=streaming)] = timelines[sent]
            sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(IDLE_S)
            continue
        for output in engine.step():
            one = by_id[output.request_id]
            if streaming and output.token_id is not None:
                one.token(time.monotonic())
            if output.request_output is not None:
                one.error = output.request_output.error
                if not streaming:
                    _fill(one, output.request_output)
    return timelines


def _fill(one: Timeline, done: Any) -> None:
    """Takes times from the metrics of a request that was not streamed."""
    metrics, count = done.metrics, len(done.outputs[0].token_ids)
    one.first, one.last, one.count = metrics.first_token_time, metrics.finished_time, count
    if count > 1 and one.first is not None:
        one.gaps = [(metrics.finished_time - one.first) / (count - 1)] * (count - 1)


@dataclass(frozen=True)
class Server:
    """A server with OpenAI's API.

    Args:
        base_url: Such as http://127.0.0.1:8000/v1.
        model: What it calls the model.
        api_key: Sent as a bearer token.
        vocab_size: Prompts are tokens below it.
        timeout: Seconds of a request.

    Raises:
        ValueError: `base_url` is no address.
    """

    base_url: str
    model: str
    api_key: str | None = None
    vocab_size: int = 32000
    timeout: float = 600.0

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.base_url)
            known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:  # a port that is none
            known = False
        if not known:
            raise ValueError(
                f"bench serve: --base-url is {self.base_url!r}; it must be an address such as http://127.0.0.1:8000/v1"
            )

    @property
    def _address(self) -> tuple[str, int]:
        url = urlsplit(self.base_url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def connect(self) -> None:
        """Connects once, before a load is sent; OSError with what to do where nothing answers."""
        try:
            socket.create_connection(self._address, timeout=CONNECT_S).close()
        except OSError as error:
            raise OSError(
                f"bench serve: nothing answers at {self.base_url} ({error}); start the server first"
            ) from error

    def run(self, load: Load, rate: float | None, temperature: float) -> list[Timeline]:
        """Sends a load; a request that fails has an `error`."""
        work = self._run(load, rate, temperature)
        try:
            import uvloop
        except ImportError:
            return asyncio.run(work)
        return uvloop.run(work)  # the client must be faster than the server

    async def _run(self, load: Load, rate: float | None, temperature: float) -> list[Timeline]:
        began = time.monotonic()
        work = [
            self._request(began + at, prompt, answer, temperature, seed)
            for seed, (at, prompt, (_, answer)) in enumerate(
                zip(load.arrivals(rate), load.prompts(self.vocab_size), load.lengths)
            )
        ]
        return list(await asyncio.gather(*work))

    async def _request(self, at: float, prompt: list[int], answer: int, temperature: float, seed: int) -> Timeline:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        one = Timeline(time.monotonic(), answer)
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": answer, "min_tokens": answer, "ignore_eos": True,
            "temperature": temperature, "seed": seed, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            await asyncio.wait_for(self._stream(body, one), self.timeout)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            one.error = f"{type(error).__name__}: {error}"
        return one

    async def _stream(self, body: Mapping[str, Any], one: Timeline) -> None:
        """Posts a request and notes the tokens of its events."""
        url = urlsplit(self.base_url)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        host, port = self._address
        reader, writer = await asyncio.open_connection(host, port, ssl=secure, limit=2**20)
        try:
            data = json.dumps(body).encode()
            key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
            head = (
                f"POST {url.path.rstrip('/')}/completions HTTP/1.1\r\nHost: {url.netloc}\r\n{key}"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            status = await reader.readline()
            while (await reader.readline()).strip():
                pass
            if b" 200 " not in status:
                rest = (await reader.read(2000)).decode(errors="replace")
                raise ValueError(f"{status.decode().strip()}: {rest.strip()[:300]}")
            async for event in _events(reader):
                _note(event, one)
        finally:
            writer.close()


def _note(event: bytes, one: Timeline) -> None:
    """Notes the tokens of an event. Usage at the end says how many there were, also if texts were merged or empty.

    Most events are text alone and are not parsed: at tens of thousands a second the client would be what is measured.
    A text that has these marks itself has them with backslashes.
    """
    now = time.monotonic()
    if b'"choices":[{' in event and b'"usage":{' not in event and b'"error":' not in event:
        one.token(now)
        return
    parsed = json.loads(event)
    if parsed.get("error"):
        raise ValueError(str(parsed["error"]))
    usage = parsed.get("usage")
    if parsed.get("choices"):
        one.token(now)
    if usage and usage.get("completion_tokens", 0) > one.count:
        one.gaps += [0.0] * (usage["completion_tokens"] - one.count)
        one.count = usage["completion_tokens"]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The JSON of each event of a stream; lines of chunked transfer that are no data are skipped."""
    rest = b""
    while data := await reader.read(READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                text = line[len(b"data: ") :].strip()
                if text == b"[DONE]":
                    return
                yield text


def measure(
    serve: Callable[[Load, float | None], list[Timeline]],
    loads: Sequence[Load],
    rates: Callable[[Load], Sequence[float | None]],
    passes: int,
    limits: Mapping[str, float] | None,
    facts: Callable[[], dict[str, Any]],
) -> Iterator[ServeRecord]:
    """Serves every load at every rate, `passes` times; yields a record of each.

    Args:
        serve: Serves a load at a rate.
        loads: What to send.
        rates: The rates of a load, in requests a second; None: all at once.
        passes: How often each is served.
        limits: Of goodput, in ms: "ttft" and "itl".
        facts: Further fields of records, asked after each.
    """
    for load in loads:
        for rate in rates(load):
            for index in range(passes):
                name = PASSES[index] if index < len(PASSES) else f"{index + 1}th"
                timelines = serve(load, rate)
                yield summarize(timelines, limits, load=load.name, rate=rate, pass_name=name, **facts())
