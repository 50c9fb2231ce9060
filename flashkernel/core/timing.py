"""The only timer: warmed-up, repeated measurements of a computation on a GPU or a CPU.

`measure` takes a rotation of calls, the same computation over several input sets, so that no call finds its inputs in
the L2 cache (`rotation` gives the number of sets). It has three modes:

- `events`: CUDA events around each call. A microsecond kernel ends before the host can launch the next one, so the
  device first sleeps while a batch of launches queues up behind it: the times are those of the device alone.
- `graph`: the rotation is captured into a CUDA graph, and events go around its replays. The times include nothing of
  the host, not even the gap between two launches. A sample is the time of a replay divided by the calls in it, so the
  spread is that of replays, which is narrower than that of single calls.
- `cpu`: the host's clock around each call.

`auto` times long calls with events. Where calls are short, or the host is slower than the device, it takes a few events
first; if they confirm it, a graph is timed instead. If the calls cannot be captured, it returns the times by events,
and `Timing.notes` has the reason.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from flashkernel.core.device import properties

Call = Callable[[], Any]
Progress = Callable[[int, int], None]  # (samples taken, samples wanted)

MODES = ("auto", "events", "graph", "cpu")
MIN_REPEATS = 5
MAX_BATCH = 256  # calls queued at once, each some kernels and two events: the driver holds about 1024 launches
BATCH_MS = 250.0  # long calls go in smaller batches, so that progress shows and Ctrl-C works
CYCLES_PER_MS = 2_500_000  # of torch.cuda._sleep on a fast GPU; a slower clock only sleeps longer
GRAPH_BELOW_MS = 0.2  # calls longer than this gain nothing from a graph
SAMPLE = 20  # events that decide whether a graph is timed
GRAPH_CALLS, GRAPH_MS, MAX_GRAPH_CALLS = 20, 0.2, 400  # a graph holds at least so many calls and so much work
COLD_L2 = 3  # a rotation touches this many times the L2 cache
MAX_SETS = 64


@dataclass(frozen=True)
class Timing:
    """Statistics of one call's duration in milliseconds, over `repeats` samples."""

    mean: float
    std: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float
    repeats: int
    mode: str  # "events", "graph" or "cpu"
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def rotation(bytes_per_set: int, device: torch.device) -> int:
    """The number of input sets of this size that keep the L2 cache cold when used in turn: 1 on a CPU, at most 64."""
    if bytes_per_set <= 0:
        return 1
    return max(1, min(MAX_SETS, math.ceil(COLD_L2 * properties(device).l2_bytes / bytes_per_set)))


def measure(
    calls: Call | Sequence[Call] | None = None,
    *,
    device: torch.device | str,
    build: Callable[[], Sequence[Call]] | None = None,
    mode: str = "auto",
    warmup: int = 100,
    repeats: int = 1000,
    budget_s: float = 2.0,
    progress: Progress | None = None,
) -> Timing:
    """Time one call of a rotation.

    Args:
        calls: The call, or a rotation of calls.
        device: The device that the calls run on.
        build: Makes the rotation, instead of `calls`. It runs on the timed stream, once for each mode tried: a backward
            pass can be captured into a graph only if its forward pass ran on the capturing stream.
        mode: "auto", "events", "graph" or "cpu".
        warmup: Calls before the samples, within a quarter of the budget.
        repeats: Samples to take, at least 5.
        budget_s: Seconds to take them in; where they do not fit, fewer are taken, at least 5.
        progress: Called with (samples taken, samples wanted), from zero again for each mode tried.

    Returns:
        Statistics of the samples in milliseconds per call.
    """
    device = torch.device(device)
    if mode not in MODES:
        raise ValueError(f"measure: mode is {mode!r}; it must be one of {', '.join(MODES)}")
    if (calls is None) == (build is None):
        raise ValueError("measure: give the rotation either as calls or as build, not both")
    if repeats < MIN_REPEATS or warmup < 0 or budget_s <= 0:
        raise ValueError(
            f"measure: repeats={repeats}, warmup={warmup}, budget_s={budget_s}; "
            f"need at least {MIN_REPEATS} repeats, no negative warm-up and a positive budget"
        )
    if (mode in ("events", "graph") and device.type != "cuda") or (mode == "cpu" and device.type == "cuda"):
        raise ValueError(f"measure: mode {mode!r} cannot time device {str(device)!r}; use mode='auto'")
    make = build if build is not None else (lambda: [calls] if callable(calls) else list(calls or ()))
    request = _Request(make, warmup, repeats, budget_s, progress or (lambda done, total: None))
    if device.type != "cuda":
        return _measure_cpu(request)
    with torch.cuda.device(device):
        if mode == "graph":
            return _measure_graph(request)
        return _measure_events(request) if mode == "events" else _measure_auto(request)


def peak_bytes(call: Call, device: torch.device | str) -> int | None:
    """Peak memory of `call` above what was allocated before it, its result included; None on a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


@dataclass(frozen=True)
class _Request:
    make: Callable[[], Sequence[Call]]
    warmup: int
    repeats: int
    budget_s: float
    progress: Progress

    def calls(self) -> Sequence[Call]:
        made = self.make()
        if not made:
            raise ValueError("measure: the rotation is empty; give at least one call")
        return made

    def samples(self, call_s: float) -> int:
        """Samples that fit the budget, from MIN_REPEATS to `repeats`."""
        return max(MIN_REPEATS, min(self.repeats, int(self.budget_s / max(call_s, 1e-9))))

    def warmups(self, call_s: float) -> int:
        """Warm-up calls, within a quarter of the budget."""
        return min(self.warmup, int(self.budget_s / 4 / max(call_s, 1e-9)))


def _summary(samples: Sequence[float], mode: str, notes: Sequence[str] = ()) -> Timing:
    values = np.asarray(samples, dtype=np.float64)
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    mean, std = float(values.mean()), float(values.std())
    return Timing(mean, std, float(values.min()), float(values.max()), p50, p95, p99, len(values), mode, tuple(notes))


def _measure_cpu(request: _Request) -> Timing:
    calls = request.calls()
    calls[0]()  # imports, lazy initialization
    start = time.perf_counter()
    calls[-1]()
    call_s = time.perf_counter() - start
    for index in range(request.warmups(call_s)):
        calls[index % len(calls)]()
    wanted, samples = request.samples(call_s), []
    deadline = time.perf_counter() + request.budget_s
    for index in range(wanted):
        call = calls[index % len(calls)]
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        samples.append((end - start) * 1e3)
        request.progress(len(samples), wanted)
        if end > deadline and len(samples) >= MIN_REPEATS:
            break
    return _summary(samples, "cpu")


def _measure_events(request: _Request, sample: int | None = None) -> Timing:
    """Times calls by events; with at most `sample` of them where calls are short or the host issues them slowly."""
    calls = request.calls()
    host_ms, call_ms = _probe(calls)
    warmups = request.warmups(call_ms / 1e3)
    _run(calls, warmups if sample is None else min(warmups, sample))
    host_ms, call_ms = _probe(calls)  # again, now that nothing compiles
    wanted = request.samples(call_ms / 1e3)
    # Where the device is slower than the host it has work queued anyway, and may start as soon as two calls wait.
    outrun = call_ms < 2 * host_ms
    if sample is not None and (outrun or call_ms < GRAPH_BELOW_MS):
        wanted = min(wanted, sample)
    batch = min(MAX_BATCH, wanted, max(MIN_REPEATS, int(BATCH_MS / call_ms)))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(batch)]
    for start, end in pairs:
        start.record()  # torch creates an event at its first record
        end.record()
    torch.cuda.synchronize()
    lead_ms = 1.5 * (host_ms + 0.01) * (batch if outrun else 2)  # 10 us: two event records
    samples: list[float] = []
    behind, batches, attempts = 0, 0, 0
    while len(samples) < wanted:
        size = min(batch, wanted - len(samples))
        caught_up = _run_batch(calls, pairs[:size], len(samples), lead_ms)
        if outrun and caught_up and attempts < 3 and batch > 8:
            attempts, batch, lead_ms = attempts + 1, batch // 2, lead_ms * 1.5  # shorter queue, longer sleep
            continue
        batches, behind = batches + 1, behind + (outrun and caught_up)
        samples += [start.elapsed_time(end) for start, end in pairs[:size]]
        request.progress(len(samples), wanted)
    notes = [f"the host fell behind the device in {behind} of {batches} batches: launch gaps are in the figures"]
    return _summary(samples, "events", notes if behind else ())


def _run(calls: Sequence[Call], count: int) -> None:
    for index in range(count):
        calls[index % len(calls)]()
    torch.cuda.synchronize()


def _probe(calls: Sequence[Call], count: int = 4) -> tuple[float, float]:
    """(host milliseconds, total milliseconds) of a call, from a few back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return (launched - start) * 1e3 / count, (done - start) * 1e3 / count


def _run_batch(calls: Sequence[Call], pairs: Sequence[tuple[Any, Any]], first: int, lead_ms: float) -> bool:
    """Queue a batch behind a sleeping device and wait for it; True if the device woke before all was queued."""
    torch.cuda._sleep(int(lead_ms * CYCLES_PER_MS))
    for index, (start, end) in enumerate(pairs, first):
        start.record()
        calls[index % len(calls)]()
        end.record()
    caught_up = pairs[0][0].query()
    torch.cuda.synchronize()
    return caught_up


def _measure_auto(request: _Request) -> Timing:
    timing = _measure_events(request, SAMPLE)
    complete = timing.repeats != SAMPLE or request.repeats <= SAMPLE
    if timing.p50 >= GRAPH_BELOW_MS and not timing.notes:  # where the host fell behind, the call itself may be short
        return timing if complete else _measure_events(request)
    try:
        return _measure_graph(request)
    except Exception as error:  # the call does something that cannot be captured; the note has the message
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
    timing = timing if complete else _measure_events(request)
    notes = (*timing.notes, f"timed with events, since a CUDA graph could not be captured: {reason}")
    return Timing(**{**asdict(timing), "notes": notes})


def _measure_graph(request: _Request) -> Timing:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = list(request.calls())
        _, call_ms = _probe(calls, 2 * len(calls))  # each set twice: no lazy set-up may be left for the capture
        _run(calls, request.warmups(call_ms / 1e3))
        rounds = math.ceil(GRAPH_CALLS / len(calls))
        graph = _capture(calls * rounds, stream)
        _, replay_ms = _probe([graph.replay])
        if replay_ms < GRAPH_MS:  # too short for events to resolve well: capture more rounds
            rounds = min(math.ceil(rounds * GRAPH_MS / replay_ms), max(rounds, MAX_GRAPH_CALLS // len(calls)))
            graph = _capture(calls * rounds, stream)
        return _summary(_replay(request, graph, rounds * len(calls)), "graph")


def _capture(calls: Sequence[Call], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            _end_broken_capture(stream)
        raise
    return graph


def _end_broken_capture(stream: torch.cuda.Stream) -> None:
    """Capture an empty graph: after a failed capture, torch's random generator stays in capture mode until one ends."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros(1, device="cuda")


def _replay(request: _Request, graph: torch.cuda.CUDAGraph, per_replay: int) -> list[float]:
    """Milliseconds per call, one sample for each replay."""
    replays: list[Call] = [graph.replay]
    _, replay_ms = _probe(replays)
    wanted = request.samples(replay_ms / 1e3)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(wanted)]
    samples: list[float] = []
    for first in range(0, wanted, 64):
        batch = pairs[first : first + 64]
        _run_batch(replays, batch, 0, lead_ms=0.2)
        samples += [start.elapsed_time(end) / per_replay for start, end in batch]
        request.progress(len(samples), wanted)
    return samples
