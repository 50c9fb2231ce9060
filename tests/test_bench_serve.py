"""`flashkernel bench serve`: loads, arrivals, percentiles, an engine here and a server, files and charts."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from running_server import NAME, comes, other, serve
from served_model import base_fixture, folder_fixture  # noqa: F401
from typer.testing import CliRunner

import flashkernel
from flashkernel.cli import app
from flashkernel.core import build_counter
from flashkernel.core import device as devices
from flashkernel.core.shapes import MODELS, Model
from flashkernel.engine import LLM
from flashkernel.engine.dummy_weights import tiny_transformer
from flashkernel.engine.model_runner import ModelRunner
from flashkernel.lab import plot, results, serve_import, serve_records, serving
from flashkernel.lab.serving import Load, Server, Timeline, summarize


def test_loads_are_the_same_every_time(tmp_path: Path) -> None:
    assert Load.named("chat") == Load.named("chat")
    assert len(Load.named("mixed").lengths) == 256
    assert all(100 <= prompt <= 1024 and 20 <= answer <= 60 for prompt, answer in Load.named("short").lengths)
    path = tmp_path / "own.csv"
    path.write_text("prompt,answer\n10,3\n7,2\n")
    assert Load.from_file(path).lengths == ((10, 3), (7, 2))
    path.write_text("[[4, 5]]")
    assert Load.from_file(path) == Load("own", ((4, 5),))
    path.write_text("nothing")
    with pytest.raises(ValueError, match="no pairs"):
        Load.from_file(path)
    with pytest.raises(ValueError, match="unknown load"):
        Load.named("huge")


def test_arrivals_are_a_poisson_process() -> None:
    load = Load("many", ((1, 1),) * 4000)
    assert set(load.arrivals(None)) == {0.0}
    times = load.arrivals(50.0)
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_a_summary_counts_what_came() -> None:
    quick, slow = Timeline(0.0, 3), Timeline(0.5, 2)
    for now in (0.1, 0.2, 0.4):
        quick.token(now)
    slow.token(2.5)
    record = summarize([quick, slow], {"ttft": 500.0}, model="m", load="l", pass_name="first", implementation="engine",
                       kind="backend", dtype="float32", rate=None)  # fmt: skip
    assert (record.out_tokens, record.failed, record.seconds) == (4, 1, 2.5)
    assert record.ttft_ms == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert record.itl_ms is not None
    assert record.itl_ms["p99"] == pytest.approx(200.0)
    assert record.goodput == 0.5
    assert not record.comparable
    assert serve_records.ServeRecord.from_dict(record.as_dict()) == record
    assert record.as_dict()["pass"] == "first"


@pytest.mark.parametrize(("compiled", "shown"), [(None, ""), (0, "warm"), (212, "cold")])
def test_records_say_whether_caches_were_cold_and_the_host_busy(compiled: int | None, shown: str) -> None:
    one = Timeline(0.0, 1)
    one.token(0.1)
    record = summarize([one], None, model="m", load="l", pass_name="first", implementation="engine", kind="backend",
                       dtype="float32", rate=None, start_s=30.0, compiled_at_start=compiled,
                       host_busy=None if compiled is None else 0.25)  # fmt: skip
    assert serve_records.ServeRecord.from_dict(record.as_dict()) == record
    head, _, row = ([cell.strip() for cell in line.split("|")] for line in serve_records.table([record]).splitlines())
    assert row[head.index("caches")] == shown
    assert row[head.index("start, s")] == "30"
    assert ("host busy" in head) == (compiled is not None)
    assert compiled is None or row[head.index("host busy")] == "25%"
    assert ("host busy 25% of the steps" in serve_records.line(record)) == (compiled is not None)
    assert ("caches cold at the start (212 kernels compiled)" in serve_records.line(record)) == (shown == "cold")


def test_the_command_records_what_its_engine_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = ModelRunner.warm_up

    def cold(self: ModelRunner, *given: Any) -> None:
        build_counter.note("compiled")
        warm_up(self, *given)

    monkeypatch.setattr(ModelRunner, "warm_up", cold)
    tiny_models.save("llama", tmp_path / "tiny")
    options = ("--prompts", "3:9", "--answers", "2:3", "--requests", "3", "--passes", "1", "--device", "cpu")
    done = _bench("--model", str(tmp_path / "tiny"), *options, "--kv-cache-tokens", "512", "--save", str(tmp_path))
    assert done.exit_code == 0, done.output
    (record,) = results.load(tmp_path / "serve.json")["records"]
    assert (record.compiled_in_service, record.caches) == (0, "cold")
    assert "| cold |" in done.stdout


@pytest.mark.parametrize("rate", [None, 200.0])
def test_an_engine_serves_a_load(rate: float | None) -> None:
    llm = LLM(tiny_transformer(), kv_cache_tokens=512)
    timelines = serving.run_engine(llm, Load.drawn("tiny", 6, (3, 20), (2, 6)), rate, 0.6)
    assert all(one.complete and one.count == one.wanted for one in timelines)
    assert all(len(one.gaps) == one.count - 1 for one in timelines)
    assert llm.engine.stats().num_used_blocks == 0


def test_a_load_that_fails_replaces_no_record(base: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was served before stays; without it, the failure is saved."""
    options = ("--load", "short", "--passes", "1", "--model", "tiny", "--served-model-name", NAME, "--vocab-size", "50")
    monkeypatch.setitem(serving.LOADS, "short", (3, (3, 9), (2, 3)))

    async def broken(*given: Any) -> None:
        raise OSError("the connection was lost")

    with serve(other(base)) as running:
        found = []
        for folder, code in (("a", 0), ("a", 1), ("b", 1)):
            if code:
                monkeypatch.setattr(Server, "_stream", broken)
            done = _bench("--base-url", running.url, *options, "--save", str(tmp_path / folder))
            assert done.exit_code == code, done.output
            assert ("the record of an earlier run stays" in done.output) == (len(found) == 1)
            (record,) = results.load(tmp_path / folder / "serve.json")["records"]
            found.append((record.failed, record.comparable))
    assert found == [(0, True), (0, True), (3, False)]


def test_a_server_is_measured_and_saved(base: LLM, tmp_path: Path) -> None:
    lengths = tmp_path / "tiny.json"
    lengths.write_text(json.dumps([[5, 3], [8, 4], [3, 2]]))
    with serve(other(base)) as running:
        done = CliRunner().invoke(app, [
            "bench", "serve", "--base-url", running.url, "--served-model-name", NAME, "--vocab-size", "50",
            "--lengths", str(lengths), "--rate", "100", "--passes", "1", "--ttft-limit", "60000",
            "--implementation", "engine", "--model", "tiny", "--save", str(tmp_path), "--plot",
            str(tmp_path / "charts"),
        ])  # fmt: skip
        refused = Server(running.url, "another", vocab_size=50).run(Load("one", ((3, 2),)), None, 0.0)
    assert done.exit_code == 0, done.output
    assert "| tiny | tiny | 100/s | first | engine |" in done.stdout
    (record,) = results.load(tmp_path / "serve.json")["records"]
    assert (record.out_tokens, record.failed, record.goodput) == (9, 0, 1.0)
    assert (record.compiled_at_start, record.compiled_in_service) == (0, 0), "as the server's /metrics say"
    assert (tmp_path / "charts" / "serve.png").read_bytes().startswith(b"\x89PNG")
    assert refused[0].error is not None
    assert "404" in refused[0].error


def test_engine_options_are_passed_on_and_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plain, quantized, and with drafts: a row each, and a second run replaces the one with the same options."""
    monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(32, 64, 4, 2, 8, 2, 128))
    lengths = tmp_path / "tiny.json"
    lengths.write_text(json.dumps([[12, 40], [9, 30]]))
    shared = ("--lengths", str(lengths), "--save", str(tmp_path), "--device", "cpu", "--passes", "1", "--temperature",
              "0", "--kv-cache-tokens", "1024")  # fmt: skip
    int8 = ("--quantization", "int8", "--kv-cache-dtype", "int8")
    drafts = ("--num-speculative-tokens", "3")
    for options in ((), int8, drafts, int8):
        done = _bench(*shared, *options)
        assert done.exit_code == 0, done.output
    found = {record.runner: record for record in results.load(tmp_path / "serve.json")["records"]}
    assert list(found) == ["engine", "engine (3 drafted)", "engine (int8, KV int8)"]
    assert (found["engine (int8, KV int8)"].quantization, found["engine"].quantization) == ("int8", None)
    assert 0 < found["engine (3 drafted)"].accepted <= 1
    assert found["engine"].accepted is None
    assert "| engine (int8, KV int8) |" in done.stdout


def test_a_baseline_of_other_formats_is_no_baseline() -> None:
    common: dict[str, Any] = {
        "model": "m", "load": "l", "pass_name": "first", "dtype": "bfloat16", "requests": 1, "rate": None,
        "seconds": 1.0, "out_tokens": 1, "requests_per_s": 1.0,
    }  # fmt: skip
    ours, plain, int4 = (
        serve_records.ServeRecord(
            implementation=name, kind=kind, quantization=format, out_tokens_per_s=speed, **common
        )
        for name, kind, format, speed in (
            ("engine", "backend", "int4", 30.0), ("vllm", "baseline", None, 10.0), ("vllm", "baseline", "int4", 20.0),
        )
    )  # fmt: skip
    assert serve_records.ratio(ours, [ours, plain]) == ""
    assert serve_records.ratio(ours, [ours, plain, int4]) == "1.50x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantization", "int3"], "quantization is 'int3'"),
        (["--num-speculative-tokens", "4"], "give --temperature 0"),
        (["--prompts", "9:3"], "two lengths"),
        (["--rate", "0"], "a rate is 0; it must be above 0"),
        (["--rate-share", "0.7"], "--save names the folder that has it"),
        (["--import", "nothing.json"], "it cannot be read"),
        (["--temperature", "-1"], "Invalid value for"),
        (["--ttft-limit", "-1"], "Invalid value for"),
        (["--kv-cache-tokens", "0"], "Invalid value for"),
        (["--base-url", "localhost:8000"], "it must be an address such as http://127.0.0.1:8000/v1"),
        (["--base-url", "ftp://localhost/v1"], "it must be an address such as http://127.0.0.1:8000/v1"),
        (["--base-url", "http://localhost:port"], "it must be an address such as http://127.0.0.1:8000/v1"),
        (["--base-url", "http://127.0.0.1:1/v1"], "nothing answers at http://127.0.0.1:1/v1"),
        (["--base-url", "http:///v1"], "it must be an address such as http://127.0.0.1:8000/v1"),
        (["--peer-command", "nowhere.sh", "--peer-version", "1"], "'nowhere.sh', which is no program"),
        (["--peer-command", " ", "--peer-version", "1"], "runs nothing"),
        (["--peer-command", "true"], "give --peer-version"),
        (["--peer-command", "true", "--base-url", "http://127.0.0.1:1/v1"], "leave out --base-url"),
    ],
)
def test_wrong_options_are_told(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", *options])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_a_long_run_on_a_cpu_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(*given: Any) -> Any:
        raise ValueError("starts")

    monkeypatch.setattr("flashkernel.commands.bench_serve._engine", starts)
    text = " ".join(_bench("--device", "cpu").stderr.split())
    tokens = 2 * sum(sum(map(sum, Load.named(name).lengths)) for name in serving.LOADS)
    assert f"on a CPU the engine reads and writes {tokens:,} tokens, which may take hours" in text
    assert text.endswith("starts")
    assert "hours" not in _bench("--device", "cpu", "--prompts", "5:9", "--requests", "2").stderr


def test_a_chart_names_the_device_or_the_server(base: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr("flashkernel.lab.plot.plot", lambda found, path: titles.append(found["device"]))
    options = ("--prompts", "3:4", "--answers", "2:3", "--requests", "2", "--passes", "1", "--plot", str(tmp_path))
    monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(32, 64, 4, 2, 8, 2, 128))
    assert _bench("--device", "cpu", "--kv-cache-tokens", "512", *options).exit_code == 0
    with serve(other(base)) as running:
        peer = ("--url", running.url, "--served-model-name", NAME, "--vocab-size", "50")
        assert _bench(*peer, *options).exit_code == 0
    assert titles == [devices.properties(torch.device("cpu")).name, running.url]


def test_servers_that_cannot_be_measured_replace_nothing(
    base: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address where nobody listens, of another page, with another key or model."""
    monkeypatch.setattr(Server, "run", lambda *given, **named: pytest.fail("it was served"))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{one.getsockname()[1]}/v1"
    shared = ("--save", str(tmp_path), "--load", "short")
    with serve(other(base), api_key="secret") as running:
        for url, options, message in (
            (nobody, (), "nothing answers at"),
            (running.url, (), "status 401; give its --api-key"),
            (running.url.removesuffix("/v1"), ("--api-key", "secret"), "status 404; its path mostly ends in /v1"),
            (running.url, ("--api-key", "secret"), "serves tiny, not llama-3.2-1b; give --served-model-name"),
            (running.url.removesuffix("v1") + "health?", ("--api-key", "secret"), "has no list of models"),
        ):
            done = _bench("--base-url", url, *options, *shared)
            assert done.exit_code == 2, done.output
            assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "serve.json").exists()


# What run_vllm.py of vLLM writes, among other lines: a line for each load, and all of it at the end.
SCRIPT = """
import json, sys, time
entries = json.loads(sys.argv[1])
print("loading weights", flush=True)
for name, entry in entries.items():
    print(*name.split(", "), entry, flush=True)
if "wait" in sys.argv:
    open(sys.argv[0] + ".waits", "w").close()
    time.sleep(600)
print(json.dumps({"start_s": 68.1, **entries}))
sys.exit("fail" in sys.argv)
"""


@pytest.fixture(name="script")
def script_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that writes what a load of three requests took."""
    monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(32, 64, 4, 2, 8, 2, 128))
    monkeypatch.setitem(serving.LOADS, "short", (3, (3, 9), (2, 3)))
    (tmp_path / "run_peer.py").write_text(SCRIPT)
    entries = {f"short, {turn}": _speed("short", 0.25) for turn in serving.PASSES}
    return shlex.join([sys.executable, str(tmp_path / "run_peer.py"), json.dumps(entries)])


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_of_another_engine_and_ours_in_one_run(tmp_path: Path, script: str, fails: bool) -> None:
    options = ("--load", "short", "--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "512", "--save",
               str(tmp_path))  # fmt: skip
    command = script + " fail" * fails
    done = _bench("--peer-command", command, "--peer-version", "0.24.0", *options, "--rate-share", "0.7")
    assert done.exit_code == fails, done.output
    assert ("ended with status 1" in " ".join(done.stderr.split())) == fails
    assert "loading weights" in done.stderr
    assert done.stderr.count("short first vllm: ") == 1
    found = results.load(tmp_path / "serve.json")["records"]
    share = float(f"{0.7 * 3 / 0.25:.3g}")
    assert [(one.implementation, one.pass_name, one.rate) for one in found] == [
        ("vllm", "first", None), ("vllm", "second", None), ("engine", "first", share), ("engine", "second", share),
    ]  # fmt: skip
    assert (found[0].version, found[0].source, found[0].start_s) == ("0.24.0", "run_peer.py", 68.1)


def test_what_came_before_an_interruption_is_kept(tmp_path: Path, script: str) -> None:
    """Of a script that is still at work; none of its processes remains."""
    own = (
        "from flashkernel.lab import serving; from flashkernel.cli import app;"
        'serving.LOADS["short"] = (3, (3, 9), (2, 3)); app()'
    )
    words = ["bench", "serve", "--peer-command", script + " wait", "--peer-version", "1", "--load", "short", "--save"]
    process = subprocess.Popen(
        [sys.executable, "-c", own, *words, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert comes((tmp_path / "run_peer.py.waits").exists, 120)
        saved = tmp_path / "serve.json"
        assert comes(lambda: saved.exists() and len(results.load(saved)["records"]) == 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "results measured until now follow" in err
    assert "| short | at once | second | vllm 1 |" in out
    assert len(results.load(saved)["records"]) == 2
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "run_peer.py")], capture_output=True, text=True)
    assert left.stdout == ""


def test_an_interruption_while_a_record_is_written_loses_none(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = results.write, []

    def interrupted(*given: Any) -> None:
        written.append(0)
        if len(written) == 2:
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(results, "write", interrupted)
    done = _bench("--peer-command", script, "--peer-version", "1", "--load", "short", "--save", str(tmp_path))
    assert done.exit_code == 130, done.output
    found = results.load(tmp_path / "serve.json")["records"]
    assert [record.pass_name for record in found] == ["first", "second"]


def test_goodput_is_drawn_as_a_share() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    common: dict[str, Any] = {
        "model": "m", "load": "l", "pass_name": "first", "implementation": "engine", "kind": "backend",
        "dtype": "bfloat16", "requests": 9, "seconds": 1.0, "out_tokens": 9, "out_tokens_per_s": 9.0,
        "requests_per_s": 9.0, "ttft_ms": {"p99": 20.0}, "itl_ms": {"p99": 4.0},
    }  # fmt: skip
    records = [
        serve_records.ServeRecord(rate=rate, goodput=share, **common) for rate, share in ((5.0, 1.0), (9.0, 0.98))
    ]
    figure = figures.Figure()
    plot._serving_at_rates(figure, records)
    first, following, goodput = figure.axes
    assert goodput.get_ylim() == (0, 105), "98% looks like 98%, not like nothing"
    assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
    assert all(axes.get_ylim()[0] == 0 for axes in (first, following))


def _speed(load: str, seconds: float) -> dict[str, float]:
    tokens = sum(answer for _, answer in Load.named(load).lengths)
    return {"s": seconds, "out_tokens_per_s": round(tokens / seconds, 1)}


PEER = {
    "start_s": 68.1,
    "short, first": _speed("short", 0.5),
    "chat, first": _speed("chat", 9.8),
    "chat, second": _speed("chat", 8.0),
    "b16": {"tokens_per_s": 5000.0, "ttft_ms": 20.0},  # a fixed batch, which is no load
}


def _bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *words])


def test_what_another_engine_measured_stands_beside_ours(tmp_path: Path) -> None:
    """Its own results file; its version, date and name are kept, and our header stays."""
    chat = Load.named("chat")
    ours = [
        serve_records.ServeRecord(
            model="llama-3.2-1b", load="chat", pass_name=turn, implementation="engine", kind="backend",
            dtype="bfloat16", requests=1000, rate=None, seconds=4.0, requests_per_s=250.0,
            out_tokens=(total := sum(answer for _, answer in chat.lengths)), out_tokens_per_s=total / 4,
        )
        for turn in serving.PASSES
    ]  # fmt: skip
    header = {**results.describe_run("NVIDIA H200", {}), "commit": "abc", "date": "2026-01-01"}
    results.ResultsFile(tmp_path / "serve.json", header).add(ours)
    peer = tmp_path / "vllm.json"
    peer.write_text(json.dumps(PEER))
    words = ("--import", str(peer), "--model", "llama-3.2-1b", "--save", str(tmp_path))
    assert "which version of vllm" in _bench(*words).stderr
    done = _bench(*words, "--peer-version", "0.24.0")
    assert done.exit_code == 0, done.output
    assert done.exit_code == _bench(*words, "--peer-version", "0.24.0").exit_code, "a second time replaces the first"
    found = results.load(tmp_path / "serve.json")
    assert (found["device"], found["commit"], found["date"]) == ("NVIDIA H200", "abc", "2026-01-01")
    theirs = [record for record in found["records"] if record.implementation == "vllm"]
    assert [(record.load, record.pass_name) for record in theirs] == [
        ("short", "first"), ("chat", "first"), ("chat", "second"),
    ]  # fmt: skip
    for record in theirs:
        assert (record.kind, record.version, record.source, record.start_s) == ("baseline", "0.24.0", "vllm.json", 68.1)
        assert record.date
        assert record.dtype == "bfloat16"
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines() if "| chat |" in row]
    assert [(row[3], row[4], row[-1]) for row in rows] == [
        ("first", "engine", "2.45x"), ("first", "vllm 0.24.0", ""),
        ("second", "engine", "2.00x"), ("second", "vllm 0.24.0", ""),
    ]  # fmt: skip


def test_files_that_are_none_of_these_loads(tmp_path: Path) -> None:
    path = tmp_path / "peer.json"
    for content, message in (
        ("[]", "does not say which version"),
        ('{"version": "1", "b16": {}}', "none of the loads"),
        ('{"version": "1", "chat, first": {"s": 2.0}}', "no s and out_tokens_per_s"),
        ('{"version": "1", "chat, first": {"s": 2.0, "out_tokens_per_s": 3}}', "made with other loads"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            serve_import.read_peer_file(path, "m", "vllm", "bfloat16", None)


def test_a_rate_is_a_share_of_what_another_reached(base: LLM, tmp_path: Path) -> None:
    """All at once, then at 70% of it: a server that is measured, and the engine's figures beside it."""
    lengths = tmp_path / "tiny.json"
    lengths.write_text(json.dumps([[5, 20], [8, 24], [3, 16], [4, 24]]))  # tokens of short ones may come without a gap
    shared = ("--model", "tiny", "--lengths", str(lengths), "--save", str(tmp_path), "--passes", "1")
    with serve(other(base)) as running:
        peer = ("--url", running.url, "--served-model-name", NAME, "--vocab-size", "50", "--implementation", "vllm")
        missing = _bench(*shared, *peer, "--rate-share", "0.7")
        assert "--save names the folder" in " ".join(missing.stderr.split())
        assert _bench(*shared, *peer).exit_code == 0
        best = results.load(tmp_path / "serve.json")["records"][0].requests_per_s
        rate = float(f"{0.7 * best:.3g}")
        assert "no load 'short'" in " ".join(
            _bench(*shared, "--load", "short", *peer, "--rate-share", "0.7").stderr.split()
        )
        limits = ("--ttft-limit", "60000", "--itl-limit", "60000", "--plot", str(tmp_path))
        assert _bench(*shared, *peer, "--rate-share", "0.7", *limits).exit_code == 0
        ours = ("--url", running.url, "--served-model-name", NAME, "--vocab-size", "50", "--implementation", "engine")
        done = _bench(*shared, *ours, "--rate-share", "0.7", *limits)
        assert done.exit_code == 0, done.output
    found = results.load(tmp_path / "serve.json")["records"]
    assert [(record.implementation, record.rate) for record in found] == [
        ("vllm", None), ("vllm", rate), ("engine", rate),
    ]  # fmt: skip
    assert found[0].version == flashkernel.__version__, "what the server says"
    assert found[0].source == running.url
    assert [record.goodput for record in found[1:]] == [1.0, 1.0]
    (row,) = [row for row in done.stdout.splitlines() if "| engine |" in row]
    first, following = re.fullmatch(r"first (\S+)x, next (\S+)x", row.split("|")[-2].strip()).groups()  # type: ignore[union-attr]
    assert float(first) == pytest.approx(found[1].ttft_ms["p99"] / found[2].ttft_ms["p99"], abs=0.006)
    assert float(following) == pytest.approx(found[1].itl_ms["p99"] / found[2].itl_ms["p99"], abs=0.006)
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_events_of_all_kinds_are_noted(pieces: int) -> None:
    """However they come in: text alone, text that looks like usage, usage, nothing, and an error."""
    texts = [" sea", 'x "usage":{"completion_tokens":9} "error":', ""]
    events = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in texts]
    lines = [json.dumps(event, separators=separators) for event in events for separators in ((",", ":"), None)]
    lines.append(json.dumps({"choices": [], "usage": {"completion_tokens": 8}}, separators=(",", ":")))
    wire = "".join(f"{len(line) + 8:x}\r\ndata: {line}\n\n\r\n" for line in [*lines, "[DONE]", "{"]).encode()

    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        for begin in range(0, len(wire), pieces):
            reader.feed_data(wire[begin : begin + pieces])
        reader.feed_eof()
        return [event async for event in serving._events(reader)]

    found = asyncio.run(read())
    assert [json.loads(event) for event in found] == [json.loads(line) for line in lines]
    one = Timeline(0.0, 8)
    counts = []
    for event in found:
        serving._note(event, one)
        counts.append(one.count)
    assert counts == [1, 2, 3, 4, 5, 6, 8]
    with pytest.raises(ValueError, match="too hot"):
        serving._note(b'{"error":{"message":"too hot"}}', one)
