"""The generated matrix for the CUDA C++ backends, on the CPU: kernels compiled by g++ (tests/cuda_emulator)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_emulator import emulated, unavailable

from flashkernel.core.check import verify
from flashkernel.core.dispatch import explain
from flashkernel.core.op import Case, Op
from flashkernel.ops import registry

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


BUILDS = (  # (dtype, architecture that the source is compiled for)
    (torch.float16, 75), (torch.float16, 80), (torch.bfloat16, 80), (torch.float32, 80), (torch.bfloat16, 90),
)  # fmt: skip

# A kernel takes a second to compile for the CPU. Every run has an operator's first case and these, each in one of its
# builds in turn; `--whole-matrix` has all cases in all builds.
EVERY_RUN = {
    "odd", "odd-dims", "odd-pairs", "several-tiles", "gpt-oss", "everything", "dropout",
    "split-verify", "paged-16", "paged-split", "int8-paged-split", "gelu", "gelu-tanh", "many-rows", "no-rows",
    "no-keys", "wide", "mask-causal", "interleaved", "partial", "by-token", "lengths", "mask-by-batch",
}  # fmt: skip


def _matrix(whole: bool) -> Iterator[object]:
    taken = 0
    for op in registry().values():
        if not any(backend.name == "cuda" for backend in op.backends):
            continue
        for case in op.cases:
            if not (whole or case is op.cases[0] or case.name in EVERY_RUN):
                continue
            builds = [(dtype, arch) for dtype, arch in BUILDS if _serves(op, case, dtype, arch)]
            if builds and not whole:
                builds = [builds[taken % len(builds)]]
                taken += 1
            for dtype, arch in builds:
                name = str(dtype).removeprefix("torch.")
                yield pytest.param(op, case, dtype, arch, id=f"{op.name}-{case.name}-{name}-sm{arch}")


def _serves(op: Op, case: Case, dtype: torch.dtype, arch: int) -> bool:
    """Whether the backend takes a case; tests/test_matrix.py shows the reasons of those that it declines."""
    if dtype not in case.dtypes:
        return False
    with emulated(arch):
        inputs = op.make_inputs(case, dtype, "cpu")
        verdicts = explain(op.call, **inputs, **case.options).verdicts
    return next(verdict.reason for verdict in verdicts if verdict.backend == "cuda") is None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--whole-matrix")
    metafunc.parametrize("op, case, dtype, arch", [] if unavailable() else list(_matrix(whole)))


def test_matrix(op: Op, case: Case, dtype: torch.dtype, arch: int) -> None:
    """As tests/test_matrix.py, with the gradients where the backend has a backward pass."""
    with emulated(arch):
        gradients = op.backend("cuda").offers(op.backward)
        failures = [report.message for report in verify(op, case, dtype, "cuda", gradients=gradients) if not report.ok]
    assert not failures, "\n".join(failures)
