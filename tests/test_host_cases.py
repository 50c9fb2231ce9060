"""The calls of `flashkernel bench --host`: every public operator has one, and each computes what it should."""

from __future__ import annotations

import pytest
import torch

import flashkernel as fk
from flashkernel.lab import host, host_cases
from flashkernel.ops import registry

CPU = torch.device("cpu")
OTHERS = {"argmax"}  # public, and declared with another operator


def test_every_public_operator_has_a_case() -> None:
    public = {name for name in fk.__all__ if name in registry()}
    assert public | OTHERS == set(registry()) | OTHERS, "a declared operator is public under its own name"
    timed = {case.name.split("-")[0] for case in host_cases.CASES}
    assert sorted((public | OTHERS) - timed) == []
    assert all(case.op in registry() for case in host_cases.CASES)


@pytest.mark.parametrize("case", host_cases.CASES, ids=lambda case: case.name)
def test_a_case_is_right_and_can_be_timed_in_every_direction(case: host_cases.Case) -> None:
    dtype = host.dtype_of(CPU)
    host_cases.prepare(CPU, dtype)
    call = case.make(CPU, dtype)
    assert host.check_result(registry()[case.op], call) is None
    runners = [lambda *given: call.function(*given, **call.options()), *([call.torch_own] if call.torch_own else [])]
    for run in runners:
        for direction in ("fwd", "fwd-grad", "bwd") if call.differentiable else ("fwd",):
            host.make_step(run, call.tensors, direction)()
    if call.torch_own is not None:
        with torch.no_grad():
            ours, theirs = (run(*call.tensors).double() for run in runners)
        theirs = theirs if theirs.shape == ours.shape else theirs.transpose(1, 2)  # torch's attention has heads first
        assert torch.allclose(ours, theirs, rtol=0.0, atol=0.03 * float(ours.abs().max()))
