"""The command line through its own runner, over one small operator that its tests declare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashkernel.ops
from flashkernel.cli import app
from flashkernel.core import roofline
from flashkernel.core.op import Baseline, Case, Op
from flashkernel.lab import results
from flashkernel.ops.norm.spec import RMS_NORM

BENCHES = tuple(
    Case(name, {"rows": rows, "width": 16}, present=("weight",), dtypes=(torch.float32,))
    for name, rows in (("first", 8), ("second", 4), ("third", 2))
)


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


def use_one_small_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator with three small cases, and ceilings that need no measuring."""
    register(monkeypatch, "eager")
    ceilings = roofline.Ceilings("test machine", 0.01, {"float32": 0.1, "float16": 0.1})
    monkeypatch.setattr(roofline, "ceilings", lambda device, dtypes=None: ceilings)


def register(monkeypatch: pytest.MonkeyPatch, *baselines: str) -> None:
    made = tuple(Baseline(name, f"{__name__}:{name}") for name in baselines)
    op = replace(RMS_NORM, baselines=made, benches=BENCHES, cases=RMS_NORM.cases[:2])
    monkeypatch.setattr(flashkernel.ops, "registry", lambda: {"rms_norm": op})


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def bench(*arguments: str, code: int = 0) -> Any:
    return run("bench", "rms_norm", "--budget", "0.01", "--device", "cpu", *arguments, code=code)


def save_host_times(folder: Path) -> None:
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
