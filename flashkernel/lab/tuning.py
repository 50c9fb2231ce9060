"""The search for launch configs: searches every tunable kernel that a case launches, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flashkernel.core import check, cuda, device, tune
from flashkernel.core.device import Device, properties
from flashkernel.core.dispatch import BackendError
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Case, Op
from flashkernel.core.timing import Timing
from flashkernel.lab.bench import Inputs, input_sets
from flashkernel.lab.selection import shapes_only


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


def kernels_of_space(op: Op, case: Case, dtype: torch.dtype, gpu: Device, backend: str | None) -> list[cuda.Kernel]:
    """The CUDA C++ kernels that a search for a case launches on such a GPU: of all valid configs, forward; Triton's
    are compiled by the search itself. No GPU is needed: inputs are shapes, and launches are recorded."""
    options = {**case.options, "backend": backend}
    call = partial(_call, op, options, [], shapes_only(op, case, dtype))
    with device.pretend(gpu), collect_launches(), cuda.recorded_launches() as launches:
        try:
            with tune.collect_picks() as seen:
                call()
        except BackendError:  # it does not serve this call
            return []
        for (tunable, _), shape in seen.items():
            for config in tunable.space(gpu, shape):
                # Where two launches of a call share a tunable, a config may be valid for one of them alone.
                with tune.override(tunable, config), suppress(ValueError):
                    call()
    return list({(one.kernel.module.options, one.kernel.name): one.kernel for one in launches}.values())


def compile_ahead(
    work: Iterable[tuple[Op, Case, torch.dtype]], gpu: Device, backend: str | None, log: Callable[[str], None]
) -> int:
    """Compiles the CUDA C++ kernels of searches side by side, into the disk cache; returns how many there are."""
    found = {
        (one.module.options, one.name): one
        for op, case, dtype in work
        for one in kernels_of_space(op, case, dtype, gpu, backend)
    }
    if found:
        log(f"compiling {len(found)} kernels")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for made in [pool.submit(one.module.compile, one.name, gpu.arch) for one in found.values()]:
                made.exception()  # the search reports configs that do not compile
    return len(found)


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
