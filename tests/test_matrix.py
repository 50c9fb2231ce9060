"""The generated matrix: every operator, case, dtype and backend, forward and backward, on the CPU and on the GPU.

Triton and Hopper kernels run a case in one of its dtypes in turn, on a GPU the first case in all (CUDA C++ and torch
run all): a kernel has all dtypes, a case one of them. `--whole-matrix` has the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashkernel.core.check import verify, wanted_gradients
from flashkernel.core.op import Backend, Case, Op, grid_of_cases
from flashkernel.ops import registry


def _runs_on(backend: Backend, device: str, dtype: torch.dtype) -> bool:
    if device == "cuda":
        return True
    # Triton's interpreter computes bfloat16 wrongly: it is covered on the GPU.
    return backend.name in ("torch", "cpp") or (backend.name == "triton" and dtype != torch.bfloat16)


def _in_turn(op: Op, case: Case, dtype: torch.dtype, backend: Backend, device: str) -> bool:
    """Whether this dtype is the case's turn. What costs is compiling a kernel, or interpreting one."""
    place = op.cases.index(case)
    if backend.name not in ("triton", "hopper") or (device == "cuda" and place == 0):
        return True
    served = [one for one in case.dtypes if _runs_on(backend, device, one)]
    if backend.name == "hopper":  # declines float32 and float64
        served = [one for one in served if one.itemsize == 2] or served
    return dtype == served[place % len(served)]


def _matrix() -> Iterator[object]:
    for device in ("cpu", "cuda"):
        for op in registry().values():
            for case, dtype in grid_of_cases(op):
                for backend in op.backends:
                    if backend.name != "reference" and _runs_on(backend, device, dtype):
                        name = str(dtype).removeprefix("torch.")
                        marks = [pytest.mark.gpu] if device == "cuda" else []
                        if not _in_turn(op, case, dtype, backend, device):
                            marks.append(pytest.mark.whole_matrix)
                        yield pytest.param(
                            op, case, dtype, backend, device,
                            id=f"{op.name}-{case.name}-{name}-{backend.name}-{device}", marks=marks,
                        )  # fmt: skip


@pytest.mark.parametrize("op, case, dtype, backend, device", list(_matrix()))
def test_matrix(op: Op, case: Case, dtype: torch.dtype, backend: Backend, device: str) -> None:
    """A backend that serves a case is right; one that declines says why."""
    inputs = op.make_inputs(case, dtype, device)
    if reason := _declines(op, case, inputs, backend):
        pytest.skip(f"{backend.name} declines: {reason}")
    wanted = wanted_gradients(op, case, inputs)
    leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}
    gradients = _declines(op, case, leaves, backend) is None  # else the forward pass alone is checked
    reports = verify(op, case, dtype, backend.name, device, gradients=gradients)
    failures = [report.message for report in reports if not report.ok]
    assert not failures, "\n".join(failures)


def _declines(op: Op, case: Case, inputs: dict[str, torch.Tensor], backend: Backend) -> str | None:
    from flashkernel.core.dispatch import explain

    verdicts = explain(op.call, **inputs, **case.options).verdicts
    return next(verdict.reason for verdict in verdicts if verdict.backend == backend.name)
