"""`flashkernel bench serve`: loads, arrivals, percentiles, an engine here and a server, files and charts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from running_server import NAME, other, serve
from served_model import base_fixture, folder_fixture  # noqa: F401
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.engine import LLM
from flashkernel.engine.dummy_weights import tiny_transformer
from flashkernel.lab import results, serve_records, serving
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


@pytest.mark.parametrize("rate", [None, 200.0])
def test_an_engine_serves_a_load(rate: float | None) -> None:
    llm = LLM(tiny_transformer(), kv_cache_tokens=512)
    timelines = serving.run_engine(llm, Load.drawn("tiny", 6, (3, 20), (2, 6)), rate, 0.6)
    assert all(one.complete and one.count == one.wanted for one in timelines)
    assert all(len(one.gaps) == one.count - 1 for one in timelines)
    assert llm.engine.stats().num_used_blocks == 0


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
    assert (tmp_path / "charts" / "serve.png").read_bytes().startswith(b"\x89PNG")
    assert refused[0].error is not None
    assert "404" in refused[0].error


def test_wrong_options_are_told() -> None:
    done = CliRunner().invoke(app, ["bench", "serve", "--prompts", "9:3"])
    assert done.exit_code == 2
    assert "two lengths" in done.stderr
