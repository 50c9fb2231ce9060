"""Launch configs: the order of choice, the search, and a cache that several processes share."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core import files, tune
from flashkernel.core.device import KNOWN, Device
from flashkernel.core.timing import Timing
from flashkernel.core.tune import Tunable, cache_path, override, pick, search

CPU = devices.properties(torch.device("cpu"))
GPU = KNOWN["h200"]


@dataclass(frozen=True)
class Config:
    block: int
    warps: int = 4
    order: tuple[int, ...] = (0, 1)
    scale: float = 1.0


def _heuristic(device: Device, shape: Mapping[str, int]) -> Config:
    return Config(shape["width"])


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[Config]:
    for block in (64, 128, 256):
        for warps in (4, 8):
            yield Config(block, warps)


def _valid(config: Config, device: Device, shape: Mapping[str, int]) -> str | None:
    return f"block {config.block} is below the width {shape['width']}" if config.block < shape["width"] else None


def _make(name: str = "example") -> Tunable:
    return Tunable(name, Config, _heuristic, _space, _valid, lambda shape: (shape["width"], shape.get("dtype", "f32")))


TUNABLE = _make()
SHAPE = {"width": 128}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    tune.clear_cache()
    yield
    tune.clear_cache()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[Config, float]:
    """Replace the timer: `run` gives a config itself, and the table its time (1 ms unless it says otherwise)."""
    table: dict[Config, float] = {}

    def measure(config: Config, **options: object) -> Timing:
        ms = table.get(config, 1.0)
        return Timing(ms, 0.0, ms, ms, ms, ms, ms, 5, "cpu")

    monkeypatch.setattr(tune, "measure", measure)
    return table


def _identity(config: Config) -> Config:
    return config


def _file(device: Device = CPU) -> Path:
    return cache_path(TUNABLE, device)


def test_the_heuristic_serves_where_nothing_was_searched() -> None:
    calls: list[Mapping[str, int]] = []
    counted = Tunable("counted", Config, lambda d, s: calls.append(s) or Config(s["width"]), _space, _valid, _bucket)
    assert pick(counted, GPU, {"width": 100}) == Config(100)
    assert pick(counted, GPU, {"width": 101}) == Config(100)  # the same bucket: decided once
    assert len(calls) == 1
    assert pick(counted, KNOWN["t4"], {"width": 101}) == Config(101)
    assert pick(counted, GPU, {"width": 300}) == Config(300)


def _bucket(shape: Mapping[str, int]) -> tuple[int]:
    return (shape["width"].bit_length(),)


def test_an_override_is_scoped_nests_and_beats_the_rest(clock: dict[Config, float]) -> None:
    before = pick(TUNABLE, CPU, SHAPE)
    with override(TUNABLE, Config(256)):
        assert pick(TUNABLE, CPU, SHAPE) == Config(256)
        with override("example", Config(512)):
            assert pick(TUNABLE, CPU, SHAPE) == Config(512)
            assert pick(_make("other"), CPU, SHAPE) == Config(128)
        assert pick(TUNABLE, CPU, SHAPE) == Config(256)
    assert pick(TUNABLE, CPU, SHAPE) == before
    with pytest.raises(KeyError), override(TUNABLE, Config(256)):
        raise KeyError
    assert pick(TUNABLE, CPU, SHAPE) == before


def test_an_override_reaches_other_threads() -> None:
    """A GPU's backward pass runs on a thread of autograd's own."""
    seen: list[Config] = []
    with override(TUNABLE, Config(256)):
        thread = threading.Thread(target=lambda: seen.append(pick(TUNABLE, CPU, SHAPE)))
        thread.start()
        thread.join()
    assert seen == [Config(256)]


def test_an_override_that_cannot_serve_raises() -> None:
    with override(TUNABLE, Config(64)), pytest.raises(ValueError, match="block 64 is below the width 128"):
        pick(TUNABLE, CPU, SHAPE)
    with pytest.raises(TypeError, match="takes a Config"), override(TUNABLE, 3):
        pass
    with override("example", 3), pytest.raises(TypeError, match="takes a Config"):
        pick(TUNABLE, CPU, SHAPE)


def test_the_fastest_valid_config_is_found_kept_and_read_back(clock: dict[Config, float]) -> None:
    clock[Config(64, 8)] = 0.001  # not valid for this width
    clock[Config(256, 8)] = 0.5
    heard: dict[Config, object] = {}
    best = search(TUNABLE, CPU, SHAPE, _identity, report=lambda config, outcome: heard.update({config: outcome}))
    assert best == Config(256, 8)
    assert heard[Config(64, 8)] == "block 64 is below the width 128"
    assert isinstance(heard[Config(128)], Timing)
    assert len(heard) == 6  # the heuristic's config is part of the space and timed once
    assert pick(TUNABLE, CPU, SHAPE) == best
    tune.clear_cache()
    assert pick(TUNABLE, CPU, SHAPE) == best
    assert pick(TUNABLE, CPU, {"width": 64}) == Config(64)  # another bucket
    assert pick(TUNABLE, GPU, SHAPE) == Config(128)  # another device
    stored = json.loads(_file().read_text())
    assert stored["schema"] == tune.SCHEMA
    assert stored["device"] == CPU.name
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["entries"]['[128, "f32"]']["ms"] == 0.5


def test_noise_does_not_unseat_the_heuristic(clock: dict[Config, float]) -> None:
    clock[Config(256, 8)] = 0.99
    assert search(TUNABLE, CPU, SHAPE, _identity) == Config(128)


def test_configs_that_fail_to_run_are_passed_over(clock: dict[Config, float]) -> None:
    clock[Config(256, 8)] = 0.5

    def run(config: Config) -> Config:
        if config.warps == 8:
            raise MemoryError("out of shared memory")
        return config

    heard: dict[Config, object] = {}
    assert search(TUNABLE, CPU, SHAPE, run, report=lambda c, o: heard.update({c: o})) == Config(128)
    assert heard[Config(256, 8)] == "MemoryError: out of shared memory"

    def nothing_runs(config: Config) -> Config:
        raise MemoryError

    with pytest.raises(RuntimeError, match="no config could run"):
        search(TUNABLE, CPU, SHAPE, nothing_runs)


def test_a_search_measures_for_real() -> None:
    slow = {4: 0.03, 8: 0.0}  # a difference that a busy machine does not turn around
    best = search(TUNABLE, CPU, SHAPE, lambda c: lambda: time.sleep(slow[c.warps]), warmup=1, repeats=5, budget_s=0.05)
    assert best.warps == 8


def test_an_interrupted_search_keeps_nothing(clock: dict[Config, float]) -> None:
    def run(config: Config) -> Config:
        if config.block == 256:
            raise KeyboardInterrupt
        return config

    with pytest.raises(KeyboardInterrupt):
        search(TUNABLE, CPU, SHAPE, run)
    assert not _file().exists()


def test_a_pretended_device_is_not_searched(clock: dict[Config, float]) -> None:
    with devices.pretend(GPU):
        with pytest.raises(ValueError, match="is not here"):
            search(TUNABLE, GPU, SHAPE, _identity)
        assert pick(TUNABLE, GPU, SHAPE) == Config(128)


def test_picks_are_collected() -> None:
    with tune.collect_picks() as outer, tune.collect_picks() as inner:
        pick(TUNABLE, CPU, SHAPE)
        pick(TUNABLE, CPU, SHAPE)
    pick(TUNABLE, CPU, {**SHAPE, "width": 4096})
    assert [tunable for tunable, _ in inner] == [TUNABLE]
    assert list(inner.values()) == [SHAPE]
    assert outer == inner


def _stored(**changes: object) -> str:
    entry = {"config": {"block": 256, "warps": 8, "order": [1, 0], "scale": 2}}
    return json.dumps({**tune._stamp(TUNABLE, CPU), "entries": {'[128, "f32"]': entry}, **changes})


def _entry(**values: object) -> dict[str, object]:
    return {'[128, "f32"]': {"config": {"block": 256, "warps": 8, "order": [1, 0], "scale": 1.0, **values}}}


def _write(text: str | bytes) -> None:
    _file().parent.mkdir(parents=True, exist_ok=True)
    _file().write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_good_file_is_used() -> None:
    _write(_stored())
    assert pick(TUNABLE, CPU, SHAPE) == Config(256, 8, (1, 0), 2)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "cannot be read as JSON"),
        ("{not json", "cannot be read as JSON"),
        (b"\xff\xfe\x00binary", "cannot be read as JSON"),
        ("[]", "not a table of launch configs"),
        ("null", "not a table of launch configs"),
        ("{}", "not a table of launch configs"),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(text: str | bytes, words: str) -> None:
    _write(text)
    with pytest.warns(UserWarning, match=words):
        assert pick(TUNABLE, CPU, SHAPE) == Config(128)


def test_every_truncation_of_a_file_is_ignored_with_a_warning() -> None:
    text = _stored()
    for length in range(0, len(text), 7):
        _write(text[:length])
        tune.clear_cache()
        with pytest.warns(UserWarning, match="ignored"):
            assert pick(TUNABLE, CPU, SHAPE) == Config(128)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"schema": 0}, "its schema is 0"),
        ({"device": "NVIDIA H100"}, "its device is 'NVIDIA H100'"),
        ({"versions": {"torch": "1.0"}}, "its versions is"),
        ({"tunable": "another"}, "its tunable is 'another'"),
        ({"entries": []}, "not a table"),
        ({"entries": {'[128, "f32"]': 3}}, "expected the fields"),
        ({"entries": {'[128, "f32"]': {"config": {"block": 256}}}}, "expected the fields"),
        ({"entries": _entry(block="wide")}, "block is 'wide', expected int"),
        ({"entries": _entry(block=256.0)}, "block is 256.0, expected int"),
        ({"entries": _entry(block=True)}, "block is True, expected int"),
        ({"entries": _entry(warps=None)}, "warps is None, expected int"),
        ({"entries": _entry(other=1)}, "expected the fields"),
        ({"entries": _entry(block=64)}, "below the width"),
    ],
)
def test_foreign_old_and_invalid_entries_are_ignored_with_a_warning(changes: dict[str, object], words: str) -> None:
    _write(_stored(**changes))
    with pytest.warns(UserWarning, match=words):
        assert pick(TUNABLE, CPU, SHAPE) == Config(128)


def test_a_damaged_file_is_replaced_by_the_next_search(clock: dict[Config, float]) -> None:
    clock[Config(256, 8)] = 0.5
    _write("{not json")
    with pytest.warns(UserWarning, match="cannot be read as JSON"):
        search(TUNABLE, CPU, SHAPE, _identity)
    tune.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick(TUNABLE, CPU, SHAPE) == Config(256, 8)


def test_an_unwritable_cache_is_warned_about_once(
    clock: dict[Config, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    clock[Config(256, 8)] = 0.5
    with pytest.warns(UserWarning, match="cannot be written"):
        assert search(TUNABLE, CPU, SHAPE, _identity) == Config(256, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert search(TUNABLE, CPU, {"width": 256}, _identity) == Config(256, 8)
    assert pick(TUNABLE, CPU, SHAPE) == Config(256, 8)  # lasts for the process


def test_a_read_only_folder_is_warned_about(
    clock: dict[Config, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = _file().parent
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # the superuser may write anywhere: refuse on the folder's behalf

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(files.tempfile, "mkstemp", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        search(TUNABLE, CPU, SHAPE, _identity)
    assert pick(TUNABLE, CPU, SHAPE) == Config(128)
    folder.chmod(0o755)


def test_a_failed_write_leaves_the_old_file_and_no_litter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    files.write_whole(path, "old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def _write_many(me: int, each: int, together: Barrier) -> None:
    warnings.simplefilter("error")
    together.wait()
    for number in range(each):
        entry = {"config": {"block": 1000 + me, "warps": 4, "order": [0, 1], "scale": 1.0}}
        tune._save(TUNABLE, CPU, tune._key((100 * me + number, "f32")), entry)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_at_once_lose_nothing() -> None:
    writers, each = 4, 25
    forked = multiprocessing.get_context("fork")
    together = forked.Barrier(writers)
    running = [forked.Process(target=_write_many, args=(me, each, together)) for me in range(writers)]
    for process in running:
        process.start()
    reads = 0
    while any(process.is_alive() for process in running):  # a reader never sees half a file
        if _file().exists():
            json.loads(_file().read_text())
            reads += 1
        time.sleep(0.001)
    assert [process.exitcode for process in running] == [0] * writers
    entries = json.loads(_file().read_text())["entries"]
    assert set(entries) == {json.dumps([100 * me + n, "f32"]) for me in range(writers) for n in range(each)}
    assert reads > 0
    assert not list(_file().parent.glob("*.tmp"))


def test_names_must_fit_a_file() -> None:
    with pytest.raises(ValueError, match="it names a file"):
        _make("../escape")


def test_a_pick_is_cheap() -> None:
    pick(TUNABLE, GPU, SHAPE)
    start = time.thread_time()  # of this thread alone, whatever else the machine does
    for _ in range(10_000):
        pick(TUNABLE, GPU, SHAPE)
    assert (time.thread_time() - start) / 10_000 < 10e-6


@pytest.mark.gpu
@pytest.mark.alone
def test_a_search_on_a_gpu_prefers_less_work() -> None:
    gpu = devices.properties(torch.device("cuda"))
    x = torch.randn(1 << 22, device="cuda")
    tunable = Tunable("work", Config, _heuristic, _space, lambda config, device, shape: None, lambda shape: (1,))

    def run(config: Config):
        def call() -> None:
            for _ in range(config.block // 32):
                torch.add(x, 1.0, out=x)

        return call

    best = search(tunable, gpu, {"width": 256}, run, warmup=5, repeats=50)
    assert best.block == 64
    tune.clear_cache()
    assert pick(tunable, gpu, {"width": 256}).block == 64
