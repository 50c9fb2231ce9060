"""Benchmark cases of products, experts and quantized weights as an H200 runs them, on tensors without data: inputs,
references and baselines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from flashkernel.core.device import KNOWN
from flashkernel.core.op import Case, Op, resolve
from flashkernel.lab import bench, selection, suites
from flashkernel.ops import registry

H200 = KNOWN["h200"]
NAMES = (
    "matmul", "matmul_dact", "linear", "mlp", "grouped_matmul", "grouped_weight_gradient", "quantized_linear",
    "moe_route", "moe_sort", "moe_experts",
)  # fmt: skip
UNKNOWN_WITHOUT_DATA = (DataDependentOutputException, DynamicOutputShapeException)  # a loop over groups


def _benches() -> list[Any]:
    """Those of the operators and of the suites; of cases that differ in their numbers the first and the last."""
    found = []
    for name in NAMES:
        op = registry()[name]
        cases = [*op.benches, *suites.cases_of(name)]
        kinds: dict[str, list[Case]] = {}
        for case in cases:
            kinds.setdefault(re.sub(r"\d+", "", case.name), []).append(case)
        chosen = {case.name: case for group in kinds.values() for case in (group[0], group[-1])}
        found += [pytest.param(op, case, id=f"{name}-{case.name}") for case in chosen.values()]
    return found


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What baselines ask torch; the functions that it would compile run as they are."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize(("op", "case"), _benches())
def test_inputs_references_and_baselines(op: Op, case: Case, h200: None) -> None:
    for dtype in selection.bench_dtypes(case, None, H200):
        _check(op, case, dtype)


def _check(op: Op, case: Case, dtype: torch.dtype) -> None:
    assert selection.explain_case(op, case, dtype, H200).chosen
    assert bench.directions_of(op, case, dtype)
    for one in (case, case.at(**case.check_axes)):
        inputs = op.make_inputs(one, dtype)
        try:
            expected = _results(op.observed(op.plain)(**inputs, **one.options))
        except UNKNOWN_WITHOUT_DATA:
            expected = None
        for baseline in op.baselines:
            try:
                function = resolve(baseline.target)(op, one)
            except (ImportError, ValueError):  # not installed, or not for this case
                continue
            try:
                found = _results(function(**inputs, **bench._options_taken(function, one.options)))
            except UNKNOWN_WITHOUT_DATA:
                continue
            if expected is not None:
                shapes = [tuple(x.shape) for x in found]
                assert shapes == [tuple(x.shape) for x in expected[: len(found)]], baseline.name


def _results(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)
