"""The timer: on the CPU for real, on a simulated GPU for its queueing, and on a GPU against plain event loops."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core import timing
from flashkernel.core.device import KNOWN
from flashkernel.core.timing import Timing, measure, peak_bytes, rotation

CPU = torch.device("cpu")


def test_statistics_are_those_of_the_samples() -> None:
    samples = [float(value) for value in range(1, 101)]
    found = timing._summary(samples, "cpu")
    assert (found.min, found.max, found.mean, found.repeats) == (1.0, 100.0, 50.5, 100)
    assert found.std == pytest.approx(np.std(samples))
    assert (found.p50, found.p95, found.p99) == pytest.approx((50.5, 95.05, 99.01))
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert set(found.as_dict()) >= {"mean", "std", "min", "max", "p50", "p95", "p99", "repeats", "mode", "notes"}


class Clock:
    """A clock that stands still, but for the calls that are timed: other processes do not show in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def takes(self, *seconds: float) -> Callable[[], None]:
        """A call that takes so long: the first time, the second time, and so on; the last figure holds from then on."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_cpu_time_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure(lambda: time.sleep(0.002), device=CPU, warmup=2, repeats=20)
    assert real.mode == "cpu"
    assert real.repeats == 20
    assert 2.0 <= real.min <= real.p50 <= real.p95 <= real.p99 <= real.max
    found = measure(Clock(monkeypatch).takes(0.002), device=CPU, warmup=2, repeats=20)
    assert (found.min, found.p50, found.max) == pytest.approx((2.0, 2.0, 2.0))


def test_warm_up_and_repeats_are_what_was_asked_for_and_rotate() -> None:
    counts = [0, 0, 0]

    def count(index: int) -> Callable[[], None]:
        def call() -> None:
            counts[index] += 1

        return call

    found = measure([count(0), count(1), count(2)], device="cpu", warmup=100, repeats=1000)
    assert found.repeats == 1000
    assert sum(counts) == 2 + 100 + 1000  # two to learn how long a call takes
    assert max(counts) - min(counts) <= 3


def test_long_calls_are_capped_by_the_budget_but_never_below_five(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = measure(clock.takes(0.02), device=CPU, budget_s=0.2)
    assert 9 <= found.repeats <= 11
    assert clock.now < 1.0
    assert measure(clock.takes(0.02), device=CPU, budget_s=0.001).repeats == 5


def test_a_call_that_grows_slower_is_still_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = Clock(monkeypatch).takes(*[0.0001] * 4, 0.02)
    assert measure(slower, device=CPU, warmup=0, budget_s=0.2).repeats < 30


def test_build_makes_the_rotation_once() -> None:
    built = []

    def build() -> list[Callable[[], None]]:
        built.append(True)
        return [lambda: None]

    measure(build=build, device=CPU, warmup=0, repeats=10)
    assert built == [True]


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    measure(lambda: None, device=CPU, warmup=0, repeats=7, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 7) for done in range(1, 8)]


def test_interruption_propagates() -> None:
    calls = 0

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted, device=CPU, warmup=5, repeats=100)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"mode": "events"}, "cannot time device 'cpu'"),
        ({"mode": "graph"}, "cannot time device 'cpu'"),
        ({"repeats": 1}, "at least 5 repeats"),
        ({"build": lambda: [lambda: None]}, "not both"),
        ({"calls": None}, "either as calls or as build"),
        ({"calls": []}, "rotation is empty"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(**{"calls": lambda: None, "device": CPU, **arguments})


def test_rotation_outgrows_the_cache_and_is_bounded() -> None:
    assert rotation(1 << 20, CPU) == 1
    with devices.pretend(KNOWN["h200"]):
        l2 = KNOWN["h200"].l2_bytes
        for size in (l2 // 10, l2 // 3, l2, 2 * l2):
            assert rotation(size, CPU) * size >= 3 * l2
        assert rotation(10 * l2, CPU) == 1
        assert rotation(1, CPU) == 64
        assert rotation(0, CPU) == 1


def test_peak_memory_is_unknown_on_a_cpu() -> None:
    assert peak_bytes(lambda: torch.ones(10), CPU) is None


class Gpu:
    """A simulated GPU: one stream that runs behind a host whose clock only moves when work is done on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture_fails: bool = False) -> None:
        self.host = self.device = 0.0  # milliseconds
        self.pending = self.max_pending = 0
        self.capturing: list[float] | None = None
        self.slept = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                gpu.host += 0.001
                gpu.device = self.at = max(gpu.device, gpu.host)

            def query(self) -> bool:
                return gpu.host >= self.at

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Stream:
            def wait_stream(self, other: object) -> None:
                pass

        class CUDAGraph:
            def replay(self) -> None:
                gpu.launch(0.01, sum(self.work))

        @contextmanager
        def capture(graph: CUDAGraph, stream: Stream):
            gpu.capturing = []
            try:
                yield
                if capture_fails:
                    raise RuntimeError("operation not permitted when stream is capturing\nmore")
            finally:
                graph.work, gpu.capturing = gpu.capturing, None

        @contextmanager
        def nothing(*args: object):
            yield

        def synchronize(*args: object) -> None:
            gpu.host = max(gpu.host, gpu.device)

        def sleep(cycles: int) -> None:
            gpu.slept += 1
            gpu.launch(0.001, cycles / 2e6)

        for name, fake in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": CUDAGraph,
            "graph": capture,
            "stream": nothing,
            "device": nothing,
            "synchronize": synchronize,
            "_sleep": sleep,
            "current_stream": lambda *args: Stream(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host / 1e3)

    def launch(self, host_ms: float, device_ms: float) -> None:
        self.host += host_ms
        if self.capturing is not None:
            self.capturing.append(device_ms)
        else:
            self.device = max(self.device, self.host) + device_ms

    def call(self, host_ms: float, device_ms: float) -> Callable[[], None]:
        return lambda: self.launch(host_ms, device_ms)


@pytest.fixture
def no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_end_broken_capture", lambda stream: None)


def test_events_measure_a_short_kernel_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    found = measure(gpu.call(host_ms=0.02, device_ms=0.003), device="cuda:0", mode="events")
    assert found.mode == "events"
    assert found.repeats == 1000
    assert found.p99 == pytest.approx(0.003)  # an event loop without the queue would have read 0.02
    assert found.notes == ()
    assert gpu.slept == 4  # batches of 256


def test_events_do_not_wait_where_the_kernel_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    found = measure(gpu.call(host_ms=0.02, device_ms=40.0), device="cuda:0", mode="auto")
    assert (found.mode, found.repeats) == ("events", 49)
    assert found.p50 == pytest.approx(40.0)
    assert gpu.slept == 9  # batches of a quarter of a second
    assert gpu.device < 3.5e3


@pytest.mark.parametrize("stalled_ms, hopeless", [(1.0, False), (10.0, True)])
def test_events_try_again_and_say_when_the_host_fell_behind(
    monkeypatch: pytest.MonkeyPatch, stalled_ms: float, hopeless: bool
) -> None:
    gpu = Gpu(monkeypatch)
    calls = 0

    def stalling() -> None:
        nonlocal calls
        calls += 1
        gpu.launch(0.02 if calls < 120 else stalled_ms, 0.003)  # far slower than when the queue was planned

    found = measure(stalling, device="cuda:0", mode="events")
    assert found.repeats == 1000
    if hopeless:
        assert "the host fell behind the device in" in found.notes[0]
        assert found.max > 1.0
    else:
        assert found.notes == ()
        assert found.max == pytest.approx(0.003)  # nothing of the batches that failed is kept


def test_auto_prefers_a_graph_for_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    found = measure([gpu.call(0.02, 0.003), gpu.call(0.02, 0.005)], device="cuda:0")
    assert (found.mode, found.repeats, found.notes) == ("graph", 1000, ())
    assert found.p50 == pytest.approx(0.004)


def test_a_graph_holds_enough_work_for_events_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    sizes: list[int] = []
    real = timing._capture
    monkeypatch.setattr(timing, "_capture", lambda calls, stream: sizes.append(len(calls)) or real(calls, stream))
    measure([gpu.call(0.02, 0.002)] * 3, device="cuda:0", mode="graph")
    first, second = sizes
    assert first == 21  # whole rotations
    assert second % 3 == 0
    assert second * 0.002 >= 0.1
    sizes.clear()
    measure([gpu.call(0.02, 0.1)], device="cuda:0", mode="graph")
    assert sizes == [20]


def test_auto_falls_back_to_events_and_says_so(monkeypatch: pytest.MonkeyPatch, no_recovery: None) -> None:
    gpu = Gpu(monkeypatch, capture_fails=True)
    found = measure(gpu.call(0.02, 0.003), device="cuda:0")
    assert found.mode == "events"
    assert found.notes == (
        "timed with events, since a CUDA graph could not be captured: operation not permitted when stream is capturing",
    )
    assert isinstance(found, Timing)
    with pytest.raises(RuntimeError, match="not permitted"):
        measure(gpu.call(0.02, 0.003), device="cuda:0", mode="graph")


@pytest.mark.parametrize("host_ms", [0.02, 0.5])
def test_what_waits_for_the_device_keeps_both_notes(
    monkeypatch: pytest.MonkeyPatch, no_recovery: None, host_ms: float
) -> None:
    """A call that waits for its result lets the device idle, and on a busy host takes longer than a graph is for."""
    gpu = Gpu(monkeypatch, capture_fails=True)

    def waiting() -> None:
        gpu.launch(host_ms, 0.003)
        torch.cuda.synchronize()

    found = measure(waiting, device="cuda:0", warmup=10, repeats=50)
    assert found.mode == "events"
    behind, captured = found.notes
    assert "the host fell behind the device in" in behind
    assert "could not be captured: operation not permitted" in captured


def test_a_graph_is_tried_where_launch_gaps_are_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)

    def waiting() -> None:
        gpu.launch(0.5, 0.003)
        if gpu.capturing is None:
            torch.cuda.synchronize()

    found = measure(waiting, device="cuda:0", warmup=10, repeats=50)
    assert (found.mode, found.notes) == ("graph", ())
    assert found.p50 == pytest.approx(0.003)


def test_an_interrupted_capture_is_not_a_fallback(monkeypatch: pytest.MonkeyPatch, no_recovery: None) -> None:
    gpu = Gpu(monkeypatch)

    def interrupted() -> None:
        gpu.launch(0.02, 0.003)
        if gpu.capturing is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted, device="cuda:0")


def _plain_loop(call: Callable[[], object], count: int = 50) -> float:
    """Median milliseconds by the simplest event loop, for calls long enough that the host does not matter."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for _ in range(5):
        call()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in pairs]))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_large_copy_is_timed_as_by_a_plain_loop() -> None:
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    found = measure(lambda: target.copy_(source), device="cuda")
    assert found.mode == "events"
    assert found.notes == ()
    assert found.p50 == pytest.approx(_plain_loop(lambda: target.copy_(source)), rel=0.1)
    assert found.min <= found.p50 <= found.p99 <= found.max


@pytest.mark.gpu
@pytest.mark.alone
def test_graph_and_events_agree_on_a_fifty_microsecond_kernel() -> None:
    size = 1 << 24
    while True:  # grow until it takes about 50 us on this GPU
        x = torch.randn(size, device="cuda")
        y = torch.empty_like(x)
        if _plain_loop(lambda x=x, y=y: torch.add(x, 1.0, out=y)) > 0.04:
            break
        size *= 2
    events = measure(lambda: torch.add(x, 1.0, out=y), device="cuda", mode="events")
    graph = measure(lambda: torch.add(x, 1.0, out=y), device="cuda", mode="graph")
    assert events.notes == ()
    assert graph.p50 == pytest.approx(events.p50, rel=0.3)


@pytest.mark.gpu
@pytest.mark.alone
def test_tiny_kernels_are_timed_without_launch_gaps() -> None:
    x = torch.randn(1024, device="cuda")
    y = torch.empty_like(x)
    found = measure(lambda: torch.add(x, 1.0, out=y), device="cuda")
    assert found.mode == "graph"
    assert found.p50 < 0.005  # a plain loop reads the host's 10 us or more
    events = measure(lambda: torch.add(x, 1.0, out=y), device="cuda", mode="events")
    assert events.p50 < 0.02
    assert events.notes == ()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_backward_pass_is_captured_when_built_on_the_stream() -> None:
    def build() -> list[Callable[[], object]]:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        y = torch.tanh(x)
        dy = torch.randn_like(y)
        return [lambda: torch.autograd.grad(y, x, dy, retain_graph=True)]

    assert measure(build=build, device="cuda", mode="graph").p50 < 1.0
    assert measure(build=build, device="cuda").mode == "graph"


@pytest.mark.gpu
@pytest.mark.alone
def test_what_cannot_be_captured_falls_back_and_leaves_torch_whole() -> None:
    x = torch.randn(1024, device="cuda")
    found = measure(lambda: float(x.sum()), device="cuda", warmup=10, repeats=50)  # synchronizes
    assert found.mode == "events"
    assert "could not be captured" in found.notes[-1]  # behind the note that the host fell behind
    assert torch.randn(16, device="cuda").isfinite().all()  # the generator is not left believing in a capture
    assert measure(lambda: torch.add(x, 1.0), device="cuda", mode="graph").mode == "graph"
    with pytest.raises(Exception, match=r"captur|permitted"):
        measure(lambda: float(x.sum()), device="cuda", mode="graph")


@pytest.mark.gpu
def test_peak_memory_counts_what_the_call_adds() -> None:
    x = torch.randn(1 << 22, device="cuda")  # 16 MiB

    def call() -> torch.Tensor:
        return (x + 1) * 2  # two temporaries alive at once, 32 MiB

    call()
    assert peak_bytes(call, "cuda") == 2 * x.nbytes
    assert peak_bytes(lambda: x.add_(1), "cuda") == 0
