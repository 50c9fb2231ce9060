"""The search for launch configs: whatever a case's kernels pick is searched, one kernel after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flashkernel.core import check, tune
from flashkernel.core.device import facts
from flashkernel.core.op import Case, Op
from flashkernel.core.timing import Timing
from flashkernel.lab.bench import Inputs, input_sets


@dataclass(frozen=True)
class Finding:
    """The best config of one kernel on one case, with the time of the whole call under it and under the default."""

    op: str
    case: str
    kernel: str
    config: str
    ms: float
    default_ms: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tune_case(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    tell: Callable[[str], None] = lambda text: None,
    backend: str | None = None,
) -> Iterator[Finding]:
    """Search every kernel that a call and its backward launch; results are kept on disk as they are found."""
    sets = input_sets(op, case, dtype, device)
    wanted = check.wanted_gradients(op, case, sets[0])
    call = partial(_call, op, {**case.options, "backend": backend}, wanted)
    with tune.watching() as seen:
        call(sets[0])
    for (tunable, _), shape in seen.items():
        times: dict[Any, float] = {}

        def report(config: Any, outcome: Timing | str, times: dict[Any, float] = times) -> None:
            if isinstance(outcome, Timing):
                times[config] = outcome.p50

        tell(f"{op.name} {case.name}: searching {tunable.name}")
        rotation = lambda config, tunable=tunable: [partial(_under, tunable, config, call, one) for one in sets]  # noqa: E731
        best = tune.search(tunable, facts(device), shape, rotation, report=report)
        default = tunable.heuristic(facts(device), shape)
        yield Finding(op.name, case.name, tunable.name, str(best), times[best], times.get(default, float("nan")))


def _call(op: Op, options: dict[str, Any], wanted: list[str], inputs: Inputs) -> Any:
    if not wanted:
        with torch.no_grad():
            return op.call(**inputs, **options)
    return check.execute(op.call, inputs, options, wanted)


def _under(tunable: tune.Tunable, config: Any, call: Callable[[Inputs], Any], inputs: Inputs) -> Any:
    with tune.override(tunable, config):
        return call(inputs)
