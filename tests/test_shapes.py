"""Random shapes, strides, dtypes and optional inputs, for every operator that declares the ranges of its axes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashkernel.core.check import verify
from flashkernel.core.dispatch import explain
from flashkernel.core.op import LAYOUTS, Case, Op
from flashkernel.ops import registry

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st


@st.composite
def random_cases(draw: st.DrawFn, op: Op) -> Case:
    """A declared case with other sizes, another layout and other leading dims."""
    case = draw(st.sampled_from([case for case in op.cases if case.gradients]))
    sizes: dict[str, object] = {}
    for axis, (least, most, step) in op.ranges.items():
        size = st.integers(0, (most - least) // step).map(lambda index, least=least, step=step: least + index * step)
        leading = any(f"*{axis}" in spec.dims for spec in op.inputs.values())
        sizes[axis] = draw(st.lists(size, min_size=0, max_size=3).map(tuple) if leading and most < 12 else size)
    optional = [name for name, spec in op.inputs.items() if spec.optional and name in case.present]
    layouts = [layout for layout in LAYOUTS if op.written is None or layout != "expanded"]  # no tensor to write to
    return replace(
        case, axes=op.with_sizes(case.axes, sizes), layout=draw(st.sampled_from(layouts)), present=tuple(optional)
    )


def _ranged() -> list[Op]:
    return [op for op in registry().values() if op.ranges]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("op", _ranged(), ids=lambda op: op.name)
def test_random_shapes(op: Op, backend: str) -> None:
    if not any(candidate.name == backend for candidate in op.backends):
        pytest.skip(f"{op.name} has no {backend} backend")

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(random_cases(op), st.sampled_from([torch.float32, torch.float16]), st.integers(0, 3))
    def run(case: Case, dtype: torch.dtype, seed: int) -> None:
        if torch.Size(op.inputs[next(iter(op.inputs))].shape(case.axes)).numel() > 4096:
            return
        verdicts = explain(op.call, **op.make_inputs(case, dtype, "cpu", seed), **case.options).verdicts
        assume(all(verdict.reason is None for verdict in verdicts if verdict.backend == backend))
        failures = [report.message for report in verify(op, case, dtype, backend, seed=seed) if not report.ok]
        assert not failures, f"{case}\n" + "\n".join(failures)

    run()
