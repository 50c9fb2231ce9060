"""Products of parameters of which `make test` executes a part; the rest is marked: `whole_matrix`, which runs with
`pytest --whole-matrix`, or `every_config`, which runs with `make compile-test-configs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

# GPUs, and dtypes there, that the machine code of kernels without matrix products is looked at for.
MACHINES = {
    "h200-bf16": ("h200", torch.bfloat16), "h200-fp32": ("h200", torch.float32), "a100-bf16": ("a100", torch.bfloat16),
    "t4-fp16": ("t4", torch.float16),
}  # fmt: skip


def in_turn(
    names: Iterable[object], builds: Sequence[object], others: pytest.MarkDecorator = pytest.mark.whole_matrix
) -> list[object]:
    """Every (name, build): each name with one of the builds in turn, and the others marked."""
    made = []
    for place, name in enumerate(names):
        for index, build in enumerate(builds):
            marks = () if index == place % len(builds) else (others,)
            made.append(pytest.param(name, build, id=f"{name}-{build}", marks=marks))
    return made


def on_machines(subjects: Iterable[Any]) -> list[object]:
    """Every (subject, GPU, dtype): each subject on one of the GPUs in turn; the rest `every_config`."""
    made = []
    for place, subject in enumerate(subjects):
        for index, (name, (gpu, dtype)) in enumerate(MACHINES.items()):
            marks = () if index == place % len(MACHINES) else (pytest.mark.every_config,)
            made.append(pytest.param(subject, gpu, dtype, id=f"{subject.name}-{name}", marks=marks))
    return made
