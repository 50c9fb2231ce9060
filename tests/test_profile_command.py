"""The command profile: what it saves and shows, an interrupt, a machine without ncu, mistakes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run as invoke

import flashkernel.ops
from flashkernel.core import roofline
from flashkernel.core.op import Case
from flashkernel.lab import profile_session, results, selection
from flashkernel.lab.profile_records import KernelProfile
from flashkernel.lab.profile_session import Outcome
from flashkernel.lab.profile_worker import Target
from flashkernel.ops.norm.spec import RMS_NORM

CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings("test machine", 4.0, {"float32": 50.0, "bfloat16": 800.0, "float16": 800.0})


@pytest.fixture(name="small_operator")
def small_operator_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(
        Case(name, {"rows": rows, "width": 16}, present=("weight",), dtypes=(torch.float32,))
        for name, rows in (("first", 8), ("second", 4))
    )
    op = replace(RMS_NORM, benches=cases)
    monkeypatch.setattr(flashkernel.ops, "registry", lambda: {"rms_norm": op})
    monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: CEILINGS)


def profiled(targets: Any, device: Any, arch: int, ncu: Any, on_start: Any) -> Iterator[tuple[Target, Outcome]]:
    """Stands in for the session: every target has a memory-bound kernel forward, and "second" is interrupted."""
    for target in targets:
        on_start(target)
        if target.case == "second":
            raise KeyboardInterrupt
        found = KernelProfile(
            "k", 1, 10.0, "132", "256", dram_pct=91.2, l2_pct=40.0, sm_pct=3.0, achieved_occupancy=50.0,
            theoretical_occupancy=75.0,
        )  # fmt: skip
        yield target, Outcome({"fwd": (found,)})


@pytest.mark.usefixtures("small_operator")
class TestCommand:
    def run(self, folder: Path, *arguments: str, code: int = 0) -> Any:
        return invoke("profile", "rms_norm", "--backend", "torch", "--device", "cpu", "--save", str(folder), *arguments,
                      code=code)  # fmt: skip

    def test_profiles_are_saved_and_shown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profile_session, "run", profiled)
        done = self.run(tmp_path, "--case", "first", "--commit", "abc")
        assert "bound by memory" in " ".join(done.stdout.split())
        (file,) = results.load_folder(tmp_path / results.PROFILES).values()
        assert (file["commit"], [record.case for record in file["records"]]) == ("abc", ["first"])
        self.run(tmp_path, "--case", "first")
        (file,) = results.load_folder(tmp_path / results.PROFILES).values()
        assert len(file["records"]) == 1
        shown = json.loads(invoke("profile", "--show", str(tmp_path), "--format", "json").stdout)
        assert [(one["op"], one["meaning"]) for one in shown] == [("rms_norm", "bound by memory: DRAM at 91% of peak")]
        with pytest.raises(ValueError, match="holds no results"):
            results.find(tmp_path)  # profiles are no measurements of speed

    def test_only_what_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each run goes on where the one before was interrupted, until nothing is left."""
        monkeypatch.setattr("flashkernel.commands.profile._Run._warm_up", lambda self, bar, ceilings: self.work)
        ran: list[str] = []

        def one_more(targets: Any, *others: Any) -> Iterator[tuple[Target, Outcome]]:
            ran.append(targets[0].case)
            yield targets[0], Outcome(dict.fromkeys(("fwd", "bwd"), (KernelProfile("k", 1, 10.0),)))
            if len(targets) > 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(profile_session, "run", one_more)
        arguments = ("--case", "*", "--missing", "--tool", "torch")
        assert "0 of 2; 2 are left" in self.run(tmp_path, *arguments, code=130).stderr
        assert "1 of 2; 1 are left" in self.run(tmp_path, *arguments).stderr
        assert "2 of 2; 0 are left" in self.run(tmp_path, *arguments).stderr
        assert ran == ["first", "second"]
        (file,) = results.load_folder(tmp_path / results.PROFILES).values()
        assert [(record.case, record.direction) for record in file["records"]] == [
            ("first", "fwd"), ("first", "bwd"), ("second", "fwd"), ("second", "bwd"),
        ]  # fmt: skip
        assert "--save" in invoke("profile", "--missing", code=2).stderr

    @pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_keeps_results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
        monkeypatch.setattr("flashkernel.commands.profile._Run._warm_up", lambda self, bar, ceilings: self.work)

        def stopped(*given: Any) -> Iterator[tuple[Target, Outcome]]:
            for target, outcome in profiled(*given):
                yield target, outcome
                os.kill(os.getpid(), sent)

        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(profile_session, "run", stopped)
        self.run(tmp_path, "--case", "*", code=130)
        (file,) = results.load_folder(tmp_path / results.PROFILES).values()
        assert [record.case for record in file["records"]] == ["first"]
        assert signal.getsignal(signal.SIGTERM) is before

    def test_an_interrupt_keeps_results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profile_session, "run", profiled)
        monkeypatch.setattr("flashkernel.commands.profile._Run._warm_up", lambda self, bar, ceilings: self.work)
        self.run(tmp_path, "--case", "*", code=130)
        (file,) = results.load_folder(tmp_path / results.PROFILES).values()
        assert [record.case for record in file["records"]] == ["first"]

    def test_where_ncu_fails_torchs_profiler_takes_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.commands.profile import _Run
        from flashkernel.lab.progress import progress_bar

        tools = []

        def failing(targets: Any, device: Any, arch: int, ncu: Any, on_start: Any) -> Any:
            tools.append(ncu)
            if ncu is not None:
                raise profile_session.ToolError("ERR_NVGPUCTRPERM")
            return profiled(targets, device, arch, ncu, on_start)

        monkeypatch.setattr(profile_session, "run", failing)
        run = _Run([Target("rms_norm", "first", "float32", "torch")], CPU, selection.hardware("cpu"), "ncu", None, None)
        with progress_bar() as bar:
            run.measure(bar)
        assert tools == ["ncu", None]
        assert [record.tool for record in run.records] == ["torch"]

    def test_mistakes(self, tmp_path: Path) -> None:
        assert "--all" in invoke("profile", code=2).stderr
        assert "holds no profiles" in invoke("profile", "--show", str(tmp_path), code=2).stderr
        assert "unknown implementation" in invoke("profile", "rms_norm", "--backend", "none", code=2).stderr


def test_on_a_cpu_torchs_operators_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: CEILINGS)
    folder = str(tmp_path)
    invoke("profile", "max", "--backend", "torch", "--device", "cpu", "--case", "decode-16x4096", "--save", folder)
    (file,) = results.load_folder(tmp_path / results.PROFILES).values()
    assert [(record.direction, record.tool) for record in file["records"]] == [("fwd", "torch")]
    assert file["records"][0].kernels
    assert file["device"] == CEILINGS.device


def test_where_nothing_can_run_nothing_is_complete(tmp_path: Path) -> None:
    arguments = ("profile", "attention", "--backend", "hopper", "--device", "cpu", "--save", str(tmp_path))
    for more in ((), ("--missing",)):
        stopped = invoke(*arguments, *more, code=1)
        assert "no selected backend can run the selected cases here" in stopped.stderr
        assert not list(tmp_path.iterdir())
