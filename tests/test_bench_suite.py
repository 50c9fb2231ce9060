"""Long benchmark runs: checks that are run once, kernels compiled ahead, resumed runs, first compiles, launch cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.core import check, nvrtc, roofline
from flashkernel.core.device import KNOWN
from flashkernel.core.op import Baseline, Case, Op
from flashkernel.lab import (
    bench,
    first_use,
    first_use_tables,
    host_tables,
    launch_cost,
    precompile,
    results,
    selection,
    suites,
    verification,
)
from flashkernel.lab.results import Record
from flashkernel.ops import registry
from flashkernel.ops.norm.spec import RMS_NORM

CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings("somewhere", 0.01, {"float32": 0.1})
TURING = suites.find("turing")
SMALL = Case("small", {"rows": 8, "width": 16}, present=("weight",), check_axes={"rows": 4})


def right(op: Op, case: Case) -> Callable[..., Any]:
    return op.plain


def overwriting(op: Op, case: Case) -> Callable[..., Any]:
    """Right, and leaves zeros where its input was."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = op.plain(x, weight)
        x.detach().zero_()
        return found

    return run


def norm(*baselines: str) -> Op:
    return replace(RMS_NORM, baselines=tuple(Baseline(name, f"{__name__}:{name}") for name in baselines))


def invoke(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


class TestVerifier:
    def test_cases_with_the_same_check_share_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = {"verify": 0, "expect": 0}
        for name in counts:
            real = getattr(check, name)

            def counted(*given: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                counts[name] += 1
                return real(*given, **options)

            monkeypatch.setattr(check, name, counted)
        options = bench.BenchOptions(CPU, CEILINGS, directions=["fwd"], budget_s=0.01)
        longer = replace(SMALL, name="longer", axes={"rows": 32, "width": 16})
        records = [one for case in (SMALL, longer) for one in bench.bench(norm("right"), case, torch.float32, options)]
        assert [one.implementation for one in records] == ["torch", "right"] * 2
        assert all(one.comparable for one in records)
        assert counts == {"verify": 2, "expect": 2}  # the torch backend is compared with another result
        other = replace(SMALL, check_axes={"rows": 5})
        assert all(one.comparable for one in bench.bench(norm("right"), other, torch.float32, options))
        assert counts["verify"] == 4

    def test_what_overwrites_its_inputs_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, seen = bench.input_sets, []

        def noted(*given: Any) -> Any:
            seen.append(made(*given))
            return seen[-1]

        monkeypatch.setattr(bench, "input_sets", noted)
        options = bench.BenchOptions(CPU, CEILINGS, directions=["fwd"], budget_s=0.01)
        records = list(bench.bench(norm("overwriting", "right"), SMALL, torch.float32, options))
        assert [(one.implementation, one.correct) for one in records] == [
            ("torch", True), ("overwriting", True), ("right", True),
        ]  # fmt: skip
        assert len(seen) == 2  # torch and the first baseline share one
        assert not seen[0][0]["x"].any()
        assert seen[1][0]["x"].all()

    def test_a_key_tells_options_apart(self) -> None:
        tensor = torch.ones(2)
        keys = [
            verification.case_key(replace(SMALL, options=options))
            for options in ({}, {"a": [1, 2]}, {"a": [1, 3]}, {"a": tensor}, {"a": tensor})
        ]
        assert len({hash(key) for key in keys}) == len(set(keys)) == 4
        assert verification.case_key(replace(SMALL, name="other", check_axes={})) == verification.case_key(SMALL)

    def test_expected_results_may_come_from_another_device(self) -> None:
        op = registry()["softmax"]
        for case in op.cases[:4]:
            reports = check.verify(op, case, torch.float32, "torch", CPU, expected_on=CPU)
            assert reports
            assert all(report.ok for report in reports), reports
        invoke(
            "check", "softmax", "--backend", "torch", "--dtype", "float32", "--expected-on", "cpu", "--device", "cpu"
        )
        invoke("check", "softmax", "--random", "--expected-on", "cpu", code=2)


class TestPrecompile:
    def test_batches(self) -> None:
        options = bench.BenchOptions(CPU, implementations=["right", "torch"])
        op = norm("right")
        longer = replace(SMALL, name="longer", axes={"rows": 32, "width": 16})
        found = precompile.batches([(op, case, torch.float32, options) for case in (SMALL, longer)])
        assert [[(task.case.axes["rows"], task.is_check) for task in batch] for batch in found] == [
            [(4, True)], [(8, False)], [(32, False)],
        ]  # fmt: skip
        assert {task.implementation for batch in found for task in batch} == {"right"}  # torch has nothing to compile

    def test_kernels_of_an_operator_share_a_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        op = registry()["sum"]

        def two(op: Op, case: Case, dtype: torch.dtype, options: Any) -> Any:
            for name, kind in (("triton", "backend"), ("max_autotune", "baseline")):
                yield bench.Candidate(name, kind, op.plain, {}, name)

        monkeypatch.setattr(precompile, "candidates", two)
        options = bench.BenchOptions(CPU)
        cases = TURING.cases["sum"]
        found = precompile.batches([(op, case, torch.float16, options) for case in cases])
        assert [len(batch) for batch in found[-2:]] == [7, 7]  # numbers of rows, that of the check among them
        assert all(len(batch) == 1 and batch[0].implementation == "max_autotune" for batch in found[:-2])
        assert len(found) == 2 + 2 * (7 + 1)

    def test_failures_are_reported_and_the_rest_goes_on(self) -> None:
        op = registry()["sum"]
        tasks = [
            precompile.Task("sum", Case("plain", {"rows": 4, "width": 8}), torch.float32, name, True)
            for name in ("torch", "max_autotune")
        ]
        broken = Baseline("max_autotune", "flashkernel.lab.suites:absent")
        options = bench.BenchOptions(CPU, baselines=[broken])
        done: list[Any] = []
        failures = list(precompile.run([[task] for task in tasks], options, 1, done.append))
        assert done == tasks
        assert len(failures) == 1
        assert "sum plain float32: max_autotune was not compiled ahead" in failures[0]
        assert op.name == "sum"


class TestSuiteRuns:
    def run(self, folder: Path, *more: str) -> Any:
        return invoke(
            "bench", "--suite", "turing", "sum", "--case", "row-sum-b8-n1024-d64", "--dtype", "float32", "--scale",
            "20000", "--budget", "0.01", "--device", "cpu", "--save", str(folder), *more,
        )  # fmt: skip

    @pytest.fixture(autouse=True)
    def no_compiling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: CEILINGS)
        monkeypatch.setattr(suites, "max_autotune", lambda op, case: lambda x: x.sum(-1))

    def test_a_sample_is_autotuned(self, tmp_path: Path) -> None:
        assert len(TURING.autotuned) == 18
        self.run(tmp_path, "--case", "gelu-linear-b4-n512", "linear", "--max-autotune", "sample")
        found = results.load(tmp_path / "turing.json")["records"]
        assert {one.case.partition("~")[0] for one in found if one.implementation == "max_autotune"} == {
            "row-sum-b8-n1024-d64"
        }
        assert len({one.case for one in found}) == 2

    def test_a_resumed_run_leaves_out_what_is_finished(self, tmp_path: Path) -> None:
        self.run(tmp_path, "--commit", "a")
        before = (tmp_path / "turing.json").read_text()
        again = self.run(tmp_path, "--commit", "a", "--resume")
        assert "1 of 1 cases are in the file; 0 are left" in again.stderr
        assert (tmp_path / "turing.json").read_text() == before
        more = self.run(tmp_path, "--commit", "a", "--resume", "--max-autotune", "all")
        assert "0 of 1 cases are in the file; 1 are left" in more.stderr
        assert "0 of 1" in self.run(tmp_path, "--commit", "b", "--resume").stderr
        self.run(tmp_path, "--commit", "b", "--case", "gelu-linear-b4-n512", "--resume", "linear")
        found = results.load(tmp_path / "turing.json")
        assert results.finished(tmp_path / "turing.json", found).keys() == {one.key for one in found["records"]}
        assert results.finished(tmp_path / "turing.json", {**found, "commit": "a"}) == {}
        assert results.finished(tmp_path / "absent.json", found) == {}

    def test_only_what_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of any commit; what failed is missing, and so is an implementation that is asked for by name."""
        self.run(tmp_path, "--commit", "a", "--impl", "torch")
        before = (tmp_path / "turing.json").read_text()
        assert "1 of 1 cases are in the file" in self.run(tmp_path, "--commit", "b", "--missing").stderr
        assert "1 of 1" in self.run(tmp_path, "--missing", "--impl", "torch").stderr
        assert (tmp_path / "turing.json").read_text() == before
        (tmp_path / "turing.json").rename(tmp_path / "sum.json")  # as a run without the suite saves it
        assert "1 of 1" in self.run(tmp_path, "--missing").stderr
        (tmp_path / "sum.json").rename(tmp_path / "turing.json")
        assert "0 of 1" in self.run(tmp_path, "--missing", "--impl", "torch", "--impl", "eager").stderr
        assert "0 of 1" in self.run(tmp_path, "--missing", "--max-autotune", "all").stderr
        found = results.load(tmp_path / "turing.json")
        results.write(tmp_path / "turing.json", {**found, "records": [replace(one, correct=one.kind != "backend")
                                                                      for one in found["records"]]})  # fmt: skip
        assert "0 of 1" in self.run(tmp_path, "--missing").stderr

    def test_mistakes(self) -> None:
        assert "--save" in invoke("bench", "sum", "--resume", code=2).stderr
        assert "--save" in invoke("bench", "sum", "--missing", code=2).stderr
        assert "no case matches 'x*'" in invoke("bench", "--host", "--case", "x*", "--device", "cpu", code=2).stderr


class TestFirstUse:
    def test_kernels_of_all_operators(self) -> None:
        found = first_use.instances(KNOWN["h200"])
        named = {name for one in found for name in one.operators}
        assert {"attention", "rotary_attention", "decode_attention", "paged_attention", "linear", "rope"} <= named
        with pytest.raises(ValueError, match="name one of sm_75"):
            first_use.instances(selection.hardware("cpu"))

    @pytest.mark.skipif(nvrtc.can_compile() is not None, reason="NVRTC is not installed")
    def test_a_kernel_is_compiled_and_then_read(self, tmp_path: Path) -> None:
        invoke("bench", "sum", "--first-use", "--device", "h200", "--save", str(tmp_path), "--commit", "a")
        found = results.load(tmp_path / "first_use.json")
        assert found["device"] == "NVIDIA H200"
        compiled, cached = found["records"]
        assert (compiled.direction, cached.direction) == ("compile", "cached")
        assert compiled.case.startswith("reduce/kernel.cu: row_reduce<__half")
        assert 0 < cached.p50 < compiled.p50
        assert "| longest | |" in first_use_tables.markdown(found["records"])
        assert "row_reduce" in invoke("tables", str(tmp_path)).stdout
        slow = replace(compiled, ms=dict.fromkeys(results.STATISTICS, 2e4))
        assert first_use_tables.late([slow]) == [f"{slow.case}: compile takes 20000 ms, above 10000 ms"]


class TestLaunchCost:
    def test_calls_go_to_the_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a CPU both names stand for the torch backend: the records are those of a GPU, the times are not."""
        monkeypatch.setattr(launch_cost, "_by", lambda name, call: call)
        monkeypatch.setattr(launch_cost.host, "ROUNDS", 1)
        monkeypatch.setattr(launch_cost.host, "CALLS", 2)
        assert all(case.name.startswith("launch-") for case in launch_cost.CASES)
        assert len(launch_cost.CASES) == 7
        cases = [case for case in launch_cost.CASES if case.op in ("softmax", "sum")]
        found = [one for group in launch_cost.measure(cases, CPU) for one in group]
        assert [(one.case, one.direction, one.implementation) for one in found[:4]] == [
            ("launch-sum", "fwd", "cuda"), ("launch-sum", "fwd", "triton"),
            ("launch-sum", "fwd-no-replay", "cuda"), ("launch-sum", "fwd-no-replay", "triton"),
        ]  # fmt: skip
        assert all(one.correct and one.host_us for one in found)
        assert json.dumps([one.as_dict() for one in found])
        assert host_tables.side_by_side(found) == []
        assert len(host_tables.launch_rows(found)) == 2

    def test_the_table(self) -> None:
        records = [
            Record("host", "launch-rope", {}, "float16", direction, name, "backend", True, mode="host", host_us=us)
            for direction, name, us in (
                ("fwd", "cuda", 9.0), ("fwd", "triton", 9.5), ("fwd-no-replay", "cuda", 30.0),
                ("fwd-no-replay", "triton", 41.0),
            )
        ]  # fmt: skip
        text = host_tables.launch_markdown(records)
        assert text is not None
        assert text.splitlines()[-1] == "| rope | 9.0 | 9.5 | 30.0 | 41.0 |"
        assert host_tables.launch_markdown([]) is None
