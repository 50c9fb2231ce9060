"""Suites of cases, estimates for GPUs that are not here, and the generated pages about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.core import roofline
from flashkernel.core.device import KNOWN
from flashkernel.lab import bench as lab_bench
from flashkernel.lab import estimates, profile_targets, report_blocks, results, selection, suites, tables, turing_tables
from flashkernel.lab.profile_records import KernelProfile, ProfileRecord
from flashkernel.lab.results import GenerationRecord, Record
from flashkernel.ops import registry

CEILINGS = roofline.Ceilings("NVIDIA H200", 4.0, {"float16": 800.0, "float32": 50.0})
TURING = suites.find("turing")


def record(op: str, case: str, name: str, ms: float, dtype: str = "float16", **changes: Any) -> Record:
    """A record that moves 1 GB and does 1 TFLOP."""
    point = roofline.point(1e12, 1e9, ms, dtype, CEILINGS)
    kind = "baseline" if name in ("eager", "max_autotune") else "backend"
    base = Record(
        op, case, {}, dtype, "fwd", name, kind, True, dict.fromkeys(results.STATISTICS, ms), point.tflops, point.tbs,
        point.roof, point.bound,
    )  # fmt: skip
    return replace(base, **changes)


def files(*records: Any, name: str = "turing") -> dict[str, dict[str, Any]]:
    return {name: {"device": "NVIDIA H200", "records": list(records)}}


def invoke(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


class TestSuite:
    def test_the_grid(self) -> None:
        sizes = {
            (case.axes["batch"], case.axes["queries"], case.axes["head_dim"]) for case in TURING.cases["attention"]
        }
        assert sizes == {(b, n, d) for b in (1, 4, 8) for n in (512, 1024, 2048, 4096) for d in (64, 128)}
        names = [case.name for cases in TURING.cases.values() for case in cases]
        assert len(set(names)) == len(names) == 4 * 24 + 12
        for cases in TURING.cases.values():
            assert all(case.dtypes == (torch.float16, torch.float32) for case in cases)

    @pytest.mark.parametrize("name", TURING.cases)
    def test_operators_accept_the_cases(self, name: str) -> None:
        op = registry()[name]
        for case in TURING.cases[name]:
            for dtype in case.dtypes:
                assert lab_bench.directions_of(op, case, dtype) == ["fwd"]
                assert selection.explain_case(op, case, dtype, KNOWN["h200"]).chosen
            small = case.at(**case.check_axes)
            assert selection.shapes_only(op, small, torch.float16)

    def test_max_autotune_compiles_eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def compile(function: Any, **how: Any) -> Any:
            seen.append(how)
            return function

        monkeypatch.setattr(torch, "compile", compile)
        op = registry()["sum"]
        found = suites.max_autotune(op, TURING.cases["sum"][0])
        assert torch.equal(found(torch.ones(2, 3)), torch.tensor([3.0, 3.0]))
        assert seen == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]
        with pytest.raises(ValueError, match="no eager baseline"):
            suites.max_autotune(replace_baselines(op), TURING.cases["sum"][0])

    def test_a_suite_is_saved_in_one_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: CEILINGS)
        monkeypatch.setattr(suites, "max_autotune", lambda op, case: lambda x: x.sum(-1))
        invoke(
            "bench", "--suite", "turing", "--case", "*-b1-n512", "--case", "row-sum-b1-n512-d64", "--dtype", "float32",
            "--scale", "20000", "--budget", "0.01", "--device", "cpu", "--max-autotune", "all", "--save",
            str(tmp_path), "sum", "linear",
        )  # fmt: skip
        assert [path.name for path in tmp_path.iterdir()] == ["turing.json"]
        found = results.load(tmp_path / "turing.json")["records"]
        assert {one.op for one in found} == {"sum", "linear"}
        assert {"eager", "max_autotune"} <= {one.implementation for one in found if one.op == "sum"}

    def test_mistakes(self) -> None:
        assert "unknown suite 'x'; known: turing" in invoke("bench", "--suite", "x", code=2).stderr
        assert "--suite" in invoke("bench", "sum", "--max-autotune", "all", code=2).stderr


def replace_baselines(op: Any) -> Any:
    """The operator's name and no baselines; not an Op, which would register itself."""

    class Bare:
        name, baselines = op.name, ()

    return Bare()


class TestEstimates:
    def test_roof_by_efficiency(self) -> None:
        """1 GB and 1 TFLOP: 1.25 ms of compute on the H200 at 800 TFLOP/s, 15.4 ms at the T4's 65."""
        (one,) = estimates.estimates(files(record("attention", "c", "cuda_sm75", 2.5)), "t4")
        assert one.efficiency == pytest.approx(0.5)
        assert one.roof_ms == pytest.approx(1e3 / 65)
        assert one.ms == pytest.approx(2e3 / 65)
        assert (one.bound, one.bytes, one.flops) == ("compute", pytest.approx(1e9), pytest.approx(1e12))
        assert one.measured_on == "NVIDIA H200"

    def test_memory_bound(self) -> None:
        moved = record("sum", "c", "cuda_sm75", 0.5, tflops=0.0, tbs=2.0, roof=0.5, bound="memory")
        (one,) = estimates.estimates(files(moved), "t4")
        assert one.bound == "memory"
        assert one.ms == pytest.approx(2 * 1e9 / 320e9 * 1e3)

    def test_the_build_for_turing_goes_before_triton(self) -> None:
        case = registry()["sum"].benches[0].name
        triton = record("sum", case, "triton", 2.5)
        assert [one.implementation for one in estimates.estimates(files(triton), "t4")] == ["triton"]
        both = files(record("sum", case, "cuda_sm75", 5.0), triton, record("sum", case, "cuda", 1.0))
        assert [one.implementation for one in estimates.estimates(both, "t4")] == ["cuda_sm75"]

    def test_float16_goes_before_bfloat16_of_equal_size(self) -> None:
        case = registry()["sum"].benches[0].name
        half, brain = record("sum", case, "triton", 2.5), record("sum", case, "triton", 5.0)
        found = estimates.estimates(files(replace(brain, dtype="bfloat16"), half), "t4")
        assert [(one.dtype, one.measured_dtype) for one in found] == [("float16", "float16")]
        (one,) = estimates.estimates(files(replace(brain, dtype="bfloat16")), "t4")
        assert (one.dtype, one.measured_dtype) == ("float16", "bfloat16")

    def test_what_gives_no_estimate(self) -> None:
        case = registry()["attention"].benches[0].name
        found = files(
            record("attention", case, "triton", 2.5),  # Triton has no tensor cores on Turing
            record("sum", "no such case", "triton", 2.5),
            record("sum", "wrong", "cuda_sm75", 2.5, correct=False),
            replace(record("sum", "failed", "cuda_sm75", 2.5), ms=None, error="no"),
        )
        assert not estimates.estimates(found, "t4")
        huge = record("sum", "huge", "cuda_sm75", 2.5, tbs=8000.0)  # 20 TB
        assert not estimates.estimates(files(huge), "t4")
        with pytest.raises(ValueError, match="no data sheet of 'b200'"):
            estimates.estimates(found, "b200")

    def test_the_command(self, tmp_path: Path) -> None:
        file = results.ResultsFile.in_folder(tmp_path, "sum", CEILINGS, "abc")
        assert file is not None
        file.add([record("sum", "c", "cuda_sm75", 2.5)])
        (one,) = json.loads(invoke("roofline", "--device", "T4", "--from", str(tmp_path), "-f", "json").stdout)
        assert one["implementation"] == "cuda_sm75"
        shown = invoke("roofline", "--from", str(tmp_path)).stdout
        assert "estimates for Tesla T4" in shown
        assert "measured on another GPU" in shown
        assert "no record" in invoke("roofline", "rope", "--from", str(tmp_path), code=2).stderr


def attention(batch: int, length: int, name: str, ms: float, **changes: Any) -> Record:
    axes = {"batch": batch, "queries": length, "head_dim": 64}
    return record("attention", f"attention-b{batch}-n{length}-d64", name, ms, axes=axes, **changes)


def grid() -> list[Record]:
    """FlashAttention 2 and 4 times as fast as eager, row sums as fast."""
    return [
        attention(1, 512, "cuda_sm75", 1.0),
        attention(1, 512, "triton", 0.5),
        attention(1, 512, "eager", 2.0),
        attention(8, 4096, "cuda_sm75", 1.0, peak_bytes=67_000_000),
        attention(8, 4096, "eager", 4.0, peak_bytes=9_000_000_000),
        attention(8, 4096, "max_autotune", 3.0),
        record("sum", "row-sum-b1-n512-d64", "cuda_sm75", 1.0),
        record("sum", "row-sum-b1-n512-d64", "eager", 1.0),
    ]


def criteria(found: Any, profiles: Any = None) -> list[list[str]]:
    lines = turing_tables.success(found, profiles or {}).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


class TestSuccess:
    def test_without_results_nothing_is_measured(self) -> None:
        assert [row[2:] for row in criteria({})] == [["not measured", "not measured"]] * 5
        assert turing_tables.speedups({}) is None

    def test_figures(self) -> None:
        correct, long, faster, *_ = criteria(files(*grid()))
        assert correct[2].startswith("4 of 4 runs correct; without GeLU + linear, RoPE")
        assert correct[3] == "no"  # three kernels have no figures
        assert long[2:] == ["batch 8, cuda_sm75, 67 MB beyond its inputs (eager: 9000 MB)", "yes"]
        assert faster[2:] == [
            "tiled FlashAttention up to 4.0x (cuda_sm75), parallel reduction up to 1.0x (cuda_sm75)", "yes",
        ]  # fmt: skip

    def test_failures(self) -> None:
        wrong = replace(attention(8, 4096, "cuda_sm75", 1.0), correct=False, ms=None, error="out of memory: no")
        correct, long, faster, *_ = criteria(files(wrong, attention(8, 4096, "eager", 4.0)))
        assert correct[2].startswith("0 of 1 runs correct")
        assert long[2:] == ["cuda_sm75: out of memory: no", "no"]
        assert faster[3] == "not measured"

    def test_profiles(self) -> None:
        wanted = sorted(profile_targets.passes("NVIDIA H200"))
        forward = {(op.name, backend.name, "fwd") for op in registry().values() for backend in op.backends
                   if backend.name in ("cuda", "triton", "hopper")}  # fmt: skip
        assert {one for one in wanted if one[2] == "fwd"} == forward
        kernel = KernelProfile("k", 1, 1.0)
        records = [ProfileRecord(op, "c", {}, "float16", kind, name, "ncu", (kernel,)) for op, name, kind in wanted]
        row = criteria({}, files(*records))[3]
        assert row[2].startswith(f"{len(wanted)} of {len(wanted)}: forward and backward")
        assert row[3] == "yes"
        assert criteria({}, files(*records[1:]))[3][3] == "no"
        by_torch = [replace(one, tool="torch") for one in records]
        assert criteria({}, files(*by_torch))[3][3] == "not measured"

    def test_generation(self) -> None:
        def one(name: str, kind: str, speed: float) -> GenerationRecord:
            return GenerationRecord("llama", name, kind, "float16", 1, 8, 8, True, 1.0, 1.0, speed)

        row = criteria(files(one("engine", "backend", 30.0), one("hf_sdpa", "baseline", 10.0), name="e2e"))[4]
        assert row[2:] == ["engine 3.00x to 3.00x (`e2e.json`)", "yes"]
        slow = criteria(files(one("engine", "backend", 10.5), one("hf_sdpa", "baseline", 10.0), name="e2e"))[4]
        assert slow[3] == "no"

    def test_speedups(self) -> None:
        text = turing_tables.speedups(files(*grid()))
        assert text is not None
        row = "| tiled FlashAttention | float16 | cuda_sm75 | 2 of 2 | 2.00x, 2.00x, 4.00x | 3.00x (1) |"
        assert row in text.splitlines()
        assert "| parallel reduction | float16 | cuda_sm75 | 1 of 1 | 1.00x, 1.00x, 1.00x | not measured |" in text


class TestBlocks:
    def test_reports_are_regenerated(self, tmp_path: Path) -> None:
        file = results.ResultsFile.in_folder(tmp_path / "h200", "turing", CEILINGS, "abc")
        assert file is not None
        file.add(grid())
        kernel = KernelProfile("row_kernel", 1, 10.0, dram_pct=91.0, l2_pct=40.0, sm_pct=3.0)
        profiled = results.ResultsFile.in_folder(tmp_path / "h200" / results.PROFILES, "cuda", CEILINGS, "abc")
        assert profiled is not None
        profiled.add([ProfileRecord("sum", "c", {}, "float16", "fwd", "cuda", "ncu", (kernel,), roof=0.9)])
        names = list(report_blocks.REPORTS)
        text = "".join(f"{name}\n<!-- report:{name} -->\nstale\n<!-- /report -->\n" for name in names)
        fresh = tables.regenerate(text, tmp_path)
        assert "stale" not in fresh
        assert "`row_kernel`" in fresh
        assert "Estimated for a Tesla T4 from measurements on one NVIDIA H200" in fresh
        assert tables.regenerate(fresh, tmp_path) == fresh

    def test_without_results(self, tmp_path: Path) -> None:
        text = "<!-- report:profiles -->\n<!-- /report -->\n"
        assert report_blocks.UNMEASURED in tables.regenerate(text, tmp_path)
        with pytest.raises(ValueError, match="no report 'x'"):
            tables.regenerate("<!-- report:x -->\n<!-- /report -->", tmp_path)
