"""Host time of a call whose kernel is CUDA C++, against the same call by Triton.

Both are measured twice: as calls are repeated, which replays the recorded launch, and with replay suspended, where
cuda-core or Triton's own launcher does the work. The limit is Triton's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from flashkernel.core import replay_switch
from flashkernel.lab import host, host_cases
from flashkernel.lab.host_tables import CUDA, NO_REPLAY, OP, TRITON
from flashkernel.lab.results import Record
from flashkernel.lab.training import statistics
from flashkernel.ops import registry

CASES = tuple(
    replace(case, name=f"launch-{case.name}")
    for case in host_cases.CASES
    if case.name in ("softmax", "sum", "rope", "linear-1", "linear-64", "attention-causal", "decode_attention")
)


def measure(cases: Sequence[host_cases.Case], device: torch.device) -> Iterator[list[Record]]:
    """Yields the records of each case: forward calls by CUDA C++ and by Triton."""
    dtype = host.dtype_of(device)
    for case in cases:
        calls = {name: _by(name, case.make(device, dtype)) for name in (CUDA, TRITON)}
        wrong = {name: host.check_result(registry()[case.op], call) for name, call in calls.items()}
        steps = {name: _step(call) for name, call in calls.items()}
        yield [
            record
            for direction, settings in (("fwd", nullcontext), (NO_REPLAY, replay_switch.suspended))
            for record in _records(case, direction, settings, steps, wrong, str(dtype).removeprefix("torch."), device)
        ]


def _by(backend: str, call: host_cases.Call) -> host_cases.Call:
    return replace(call, function=partial(call.function, backend=backend))


def _step(call: host_cases.Call) -> Callable[[], Any]:
    return host.make_step(lambda *given: call.function(*given, **call.options()), call.tensors, "fwd")


def _records(
    case: host_cases.Case, direction: str, settings: Callable[[], Any], steps: dict[str, Callable[[], Any]],
    wrong: dict[str, str | None], dtype: str, device: torch.device,
) -> list[Record]:  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in steps}
    with settings(), torch.no_grad():
        for step in steps.values():
            for _ in range(host.WARMUP):
                step()
        for _ in range(host.ROUNDS):  # alternately: a busy host slows both alike
            for name, step in steps.items():
                times[name].append(host.host_seconds(step, device))
    medians = {name: float(np.median(seconds)) * 1e6 for name, seconds in times.items()}
    return [
        Record(
            OP, case.name, {}, dtype, direction, name, "backend", wrong[name] is None, statistics(seconds), mode="host",
            note=wrong[name], host_us=medians[name], limit_us=medians[TRITON] if name == CUDA else None,
        )
        for name, seconds in times.items()
    ]  # fmt: skip
