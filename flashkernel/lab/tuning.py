"""The search for launch configs: searches every tunable kernel that a case launches, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flashkernel.core import check, tune
from flashkernel.core.device import properties
from flashkernel.core.op import Case, Op
from flashkernel.core.timing import Timing
from flashkernel.lab.bench import Inputs, input_sets


@dataclass(frozen=True)
class TuningResult:
    """The best config of one kernel on one case, and the median ms of the whole call with it and with the default."""

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
    log: Callable[[str], None] = lambda text: None,
    backend: str | None = None,
) -> Iterator[TuningResult]:
    """Searches every kernel that a call and its backward launch; each result is saved to disk when it is found."""
    sets = input_sets(op, case, dtype, device)
    wanted = check.wanted_gradients(op, case, sets[0])
    call = partial(_call, op, {**case.options, "backend": backend}, wanted)
    with tune.collect_picks() as seen:
        call(sets[0])
    for (tunable, _), shape in seen.items():
        times: dict[Any, float] = {}

        def report(config: Any, outcome: Timing | str, times: dict[Any, float] = times) -> None:
            if isinstance(outcome, Timing):
                times[config] = outcome.p50

        log(f"{op.name} {case.name}: searching {tunable.name}")
        rotation = lambda config, tunable=tunable: [partial(_with_config, tunable, config, call, one) for one in sets]  # noqa: E731
        best = tune.search(tunable, properties(device), shape, rotation, report=report)
        default = tunable.heuristic(properties(device), shape)
        yield TuningResult(op.name, case.name, tunable.name, str(best), times[best], times.get(default, float("nan")))


def _call(op: Op, options: dict[str, Any], wanted: list[str], inputs: Inputs) -> Any:
    if not wanted:
        with torch.no_grad():
            return op.call(**inputs, **options)
    return check.execute(op.call, inputs, options, wanted)


def _with_config(tunable: tune.Tunable, config: Any, call: Callable[[Inputs], Any], inputs: Inputs) -> Any:
    with tune.override(tunable, config):
        return call(inputs)
