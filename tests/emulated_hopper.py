"""Hopper kernels without a GPU: an H200 whose Gluon kernels run in the emulator, and the cases it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.dispatch import explain
from flashkernel.core.op import Case, Op

H200 = devices.KNOWN["h200"]


@contextmanager
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *launchers: Any) -> Iterator[None]:
    """Runs the launches of these modules in the emulator, on 3 SMs, and others in Triton's interpreter.

    Tests that run on a GPU, or only compile, are left as they are.
    """
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("compile"):
        yield
        return
    for launcher in launchers:
        monkeypatch.setattr(launcher, "launch", gluon_emulator.launch)
    with devices.pretend(replace(H200, sms=3)):
        yield


def served_cases(op: Op) -> list[Case]:
    """The declared cases that the backend takes in float16."""
    with devices.pretend(H200):
        return [case for case in op.cases if torch.float16 in case.dtypes and _serves(op, case)]


def _serves(op: Op, case: Case) -> bool:
    inputs = op.make_inputs(case, torch.float16, "cpu")
    verdicts = explain(op.call, **inputs, **case.options).verdicts
    return next(verdict.reason for verdict in verdicts if verdict.backend == "hopper") is None


def check_case(op: Op, case: Case) -> None:
    """A case in float16 against the reference, with gradients where it has them."""
    reports = list(verify(op, case, torch.float16, "hopper", "cpu"))
    assert reports
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)
