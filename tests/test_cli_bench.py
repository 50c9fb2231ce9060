"""The command line: bench, and the tables and plots of what it saved."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from command_line import bench, register, run, save_host_times, use_one_small_operator

from flashkernel.lab import results
from flashkernel.ops.norm.spec import RMS_NORM


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

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench("--case", "first", "--save", str(tmp_path))
        for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
            monkeypatch.setitem(sys.modules, name, None)
        text = run("plot", str(tmp_path), "--out", str(tmp_path / "charts"), code=1).output
        assert "pip install 'flashkernel[plot]'" in text
