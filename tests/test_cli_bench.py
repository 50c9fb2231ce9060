"""The command line: bench, and the tables and plots of what it saved."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import bench, register, run, save_host_times, use_one_small_operator

import flashkernel as fk
from flashkernel.lab import results
from flashkernel.ops.norm.spec import RMS_NORM

RESULTS = Path(__file__).resolve().parents[1] / "results"


@pytest.fixture(autouse=True)
def _one_small_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_small_operator(monkeypatch)


class TestBench:
    def test_table(self) -> None:
        text = bench("--case", "first").stdout
        assert "vs best baseline" in text
        assert "first" in text
        assert "second" not in text

    def test_header_names_device_dtype_units_and_roof(self) -> None:
        from flashkernel.core.device import properties

        text = bench("--case", "first").stdout
        assert f"rms_norm on {properties(torch.device('cpu')).name}, float32: median time in ms (% of the roof)" in text
        assert text.count("ms (% of roof)") == 2, "a unit for each implementation"
        assert "memory 10 GB/s" in text
        assert "fwd: forward; bwd: backward alone" in text

    def test_nothing_timed_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        text = bench("--impl", "triton", code=1).output
        assert "nothing was timed" in text
        assert "needs a CUDA GPU" in text

    def test_json(self) -> None:
        found = json.loads(bench("--case", "f*", "--direction", "fwd", "--format", "json").stdout)
        assert [(one["implementation"], one["direction"], one["correct"]) for one in found] == [
            ("torch", "fwd", True),
            ("eager", "fwd", True),
        ]

    def test_csv(self) -> None:
        found = list(csv.DictReader(io.StringIO(bench("--case", "first", "--format", "csv").stdout)))
        assert len(found) == 4
        assert all(float(one["ms.p50"]) > 0 for one in found)
        assert found[0]["axes"] == "rows=8 width=16"

    def test_scaling_is_said(self) -> None:
        result = bench("--case", "first", "--scale", "64", "--format", "json")
        assert json.loads(result.stdout)[0]["axes"] == {"rows": 4, "width": 8}
        assert "at most 64 input elements" in result.output

    def test_save_merges(self, tmp_path: Path) -> None:
        bench("--save", str(tmp_path))
        bench("--save", str(tmp_path), "--case", "first", "--direction", "fwd", "--commit", "abc123")
        found = results.load(tmp_path / "rms_norm.json")
        assert found["commit"] == "abc123"
        assert {(one.case, one.direction) for one in found["records"]} == {
            ("first", "fwd"), ("second", "fwd"), ("second", "bwd"), ("third", "fwd"), ("third", "bwd"),
        }  # fmt: skip

    def test_interrupt_keeps_finished_cases(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        register(monkeypatch, "interrupted")
        text = bench("--save", str(tmp_path), code=130).stdout
        assert "first" in text
        assert "third" not in text
        saved = results.load(tmp_path / "rms_norm.json")["records"]
        assert {one.case for one in saved} == {"first"}
        assert len(saved) == 4

    def test_wrong_baseline_is_shown_and_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        register(monkeypatch, "wrong")
        result = bench("--case", "first", "--save", str(tmp_path))
        assert "wrong: output: error" in result.output
        saved = {
            (one.implementation, one.direction): one for one in results.load(tmp_path / "rms_norm.json")["records"]
        }
        assert not saved["wrong", "fwd"].correct
        assert saved["torch", "fwd"].correct

    def test_wrong_backend_fails_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RMS_NORM.backend("torch").__dict__, "run", lambda x, *rest, **options: x * 1)
        bench("--case", "first", code=1)

    def test_another_devices_file_is_refused(self, tmp_path: Path) -> None:
        header = {**dict.fromkeys(results.HEADER, ""), "device": "NVIDIA H200", "records": []}
        (tmp_path / "rms_norm.json").write_text(json.dumps(header))
        assert "holds measurements of NVIDIA H200" in bench("--save", str(tmp_path), code=2).output

    @pytest.mark.parametrize(
        "arguments, listed",
        [
            (("--case", "nothing"), "first, second, third"),
            (("--impl", "nothing"), "triton, torch, reference, eager"),
            (("--dtype", "int3"), "float32, float16"),
            (("--device", "cuda:99"), "cpu"),
            (("--direction", "sideways"), "fwd"),
        ],
    )
    def test_unknown_names(self, arguments: tuple[str, ...], listed: str) -> None:
        text = bench(*arguments, code=2).output
        assert listed in text
        assert "Traceback" not in text


class TestTables:
    def test_write_and_check(self, tmp_path: Path) -> None:
        readme = tmp_path / "README.md"
        room = tmp_path / "flashkernel" / "ops" / "norm" / "README.md"
        room.parent.mkdir(parents=True)
        for path in (readme, room):
            path.write_text("before\n<!-- results:rms_norm -->\n<!-- /results -->\nafter\n")
        bench("--case", "first", "--save", str(tmp_path / "results" / "cpu"))
        root = ("--root", str(tmp_path))
        assert str(room) in run("tables", "--check", *root, code=1).output
        assert "first" not in room.read_text()
        run("tables", "--write", *root)
        for path in (readme, room):
            assert path.read_text().startswith("before\n<!-- results:rms_norm -->\n")
            assert "| first | float32 | fwd |" in path.read_text()
        run("tables", "--check", *root)
        bench("--case", "second", "--save", str(tmp_path / "results" / "cpu"))
        run("tables", "--check", *root, code=1)

    def test_print(self, tmp_path: Path) -> None:
        bench("--case", "first", "--save", str(tmp_path / "results" / "cpu"))
        assert "first" in run("tables", "--root", str(tmp_path)).stdout
        assert len(json.loads(run("tables", str(tmp_path / "results" / "cpu"), "--format", "json").stdout)) == 4

    def test_units(self, tmp_path: Path) -> None:
        bench("--case", "first", "--save", str(tmp_path))
        save_host_times(tmp_path)
        text = run("tables", str(tmp_path)).stdout
        assert "rms_norm on test machine, float32: median time in ms (% of the roof)" in text
        assert "flashkernel, us" in text
        assert "torch, us" in text

    def test_archived_results_are_left_out(self, tmp_path: Path) -> None:
        bench("--case", "second", "--save", str(tmp_path / "h200" / "archive"))
        bench("--case", "first", "--save", str(tmp_path / "h200"))
        for folder in (tmp_path, tmp_path / "h200"):
            assert {one["case"] for one in json.loads(run("tables", str(folder), "-f", "json").stdout)} == {"first"}
        named = json.loads(run("tables", str(tmp_path / "h200" / "archive"), "-f", "json").stdout)
        assert {one["case"] for one in named} == {"second"}

    @pytest.mark.parametrize(
        "name, heading, first",
        [
            ("h200/serve.json", "first token, ms", "llama-3.2-1b"),
            ("quality.json", "perplexity", "smollm2"),
            ("cpu/moe_study.json", "entropy of loads", "softmax"),
        ],
    )
    def test_every_results_file_is_shown(self, name: str, heading: str, first: str, tmp_path: Path) -> None:
        text = run("tables", str(RESULTS / name)).stdout
        assert heading in text
        assert first in text
        assert json.loads(run("tables", str(RESULTS / name), "-f", "json").stdout)
        shutil.copy(str(RESULTS / name), tmp_path)
        assert run("tables", str(tmp_path)).stdout == text

    def test_nothing_to_print(self, tmp_path: Path) -> None:
        assert "holds no results" in run("tables", str(tmp_path), code=2).output


class TestPlot:
    def test_chart(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        bench("--case", "first", "--save", str(tmp_path))
        run("plot", str(tmp_path), "--out", str(tmp_path / "charts"))
        assert (tmp_path / "charts" / "rms_norm.png").read_bytes().startswith(b"\x89PNG")

    def test_archived_results_are_never_drawn_over_current_ones(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        bench("--case", "first", "--save", str(tmp_path / "h200"))
        archive = tmp_path / "h200" / "archive"
        bench("--case", "second", "--save", str(archive))
        (archive / "rms_norm.json").rename(archive / "rms_norm-old.json")
        charts = tmp_path / "charts"
        assert run("plot", str(tmp_path / "h200"), "--out", str(charts)).stdout.split() == [
            str(charts / "rms_norm.png")
        ]
        before = (charts / "rms_norm.png").read_bytes()
        run("plot", str(archive / "rms_norm-old.json"), "--out", str(charts))
        assert (charts / "rms_norm.png").read_bytes() == before
        assert (charts / "rms_norm-old.png").exists()

    def test_devices_do_not_overwrite_each_other(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        for device in ("h200", "t4"):
            bench("--case", "first", "--save", str(tmp_path / device))
        run("plot", str(tmp_path), "--out", str(tmp_path / "charts"))
        assert sorted(path.parent.name for path in (tmp_path / "charts").rglob("*.png")) == ["h200", "t4"]

    def test_host_times(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        save_host_times(tmp_path)
        run("plot", str(tmp_path / "host.json"), "--out", str(tmp_path))
        assert (tmp_path / "host.png").read_bytes().startswith(b"\x89PNG")

    def test_nothing_to_draw_does_not_end_the_others(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        bench("--case", "first", "--save", str(tmp_path))
        header = {**dict.fromkeys(results.HEADER, ""), "ceilings": {}, "records": []}
        (tmp_path / "empty.json").write_text(json.dumps(header))
        result = run("plot", str(tmp_path), "--out", str(tmp_path))
        assert "empty: no record is both correct and timed" in result.output
        assert (tmp_path / "rms_norm.png").exists()

    def test_nothing_drawn_is_a_failure(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        header = {**dict.fromkeys(results.HEADER, ""), "ceilings": {}, "records": []}
        (tmp_path / "empty.json").write_text(json.dumps(header))
        assert "there is nothing to draw" in run("plot", str(tmp_path), "--out", str(tmp_path), code=1).output

    @pytest.mark.parametrize("saved", ["first_use", "training_step", "turing"])
    def test_every_part_of_a_chart_has_data(self, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long names of kernels left no space for their bars, memory that was not measured was an empty chart, and a
        suite was drawn as its first operator."""
        pytest.importorskip("matplotlib")
        from flashkernel.lab import plot

        figure = plot.new_figure("a test", layout="constrained")
        monkeypatch.setattr(plot, "new_figure", lambda *a, **k: figure)
        file = results.load(RESULTS / "h200" / f"{saved}.json")
        if saved == "training_step":
            file["records"] = [replace(record, peak_bytes=None) for record in file["records"]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plot.plot(file, tmp_path / f"{saved}.png")
        axes = figure.get_axes() or [one for part in figure.subfigs for one in part.get_axes()]
        operators = {record.op for record in file["records"]}
        assert len(axes) == {"first_use": 2, "training_step": 1}.get(saved, 2 * len(operators))
        assert all(one.patches or one.collections for one in axes)
        assert all(one.get_window_extent().width > 100 for one in axes)

    def test_pyplot_keeps_its_backend_and_no_figure(self, tmp_path: Path) -> None:
        matplotlib = pytest.importorskip("matplotlib")
        from matplotlib import pyplot

        pyplot.switch_backend("svg")
        try:
            bench("--case", "first", "--save", str(tmp_path))
            run("plot", str(tmp_path), "--out", str(tmp_path))
            fk.causal().image(tmp_path / "mask.png", 32)
            usage = fk.ExpertUsage(layers=1)
            usage.add(0, fk.moe_route(torch.randn(4, 2), fk.Router("softmax", 1)))
            usage.plot(tmp_path / "usage.png")
            assert matplotlib.get_backend() == "svg"
            assert not pyplot.get_fignums()
        finally:
            pyplot.switch_backend("agg")

    @pytest.mark.parametrize("command", ["tables", "plot"])
    def test_files_that_hold_no_times_say_what_shows_them(self, command: str, tmp_path: Path) -> None:
        for path, message in {
            "h200/profiles": f"flashkernel profile --show {RESULTS / 'h200'} prints them",
            "h200/profiles/hopper.json": f"flashkernel profile --show {RESULTS / 'h200'} prints them",
            "cuda_resources.json": "the blocks of results:cuda_resources in the docs show it",
        }.items():
            more = ("--out", str(tmp_path)) if command == "plot" else ()
            assert message in run(command, str(RESULTS / path), *more, code=2).output
        assert not list(tmp_path.iterdir())

    def test_perplexities_alone(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        shutil.copy(RESULTS / "quality.json", tmp_path)
        assert run("plot", str(tmp_path), "--out", str(tmp_path)).stdout.split() == [str(tmp_path / "quality.png")]

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench("--case", "first", "--save", str(tmp_path))
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        text = run("plot", str(tmp_path), "--out", str(tmp_path / "charts"), code=1).output
        assert "pip install 'flashkernel[plot]'" in text
