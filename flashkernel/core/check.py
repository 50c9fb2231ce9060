"""The only numeric comparison in the project.

A result is right when its error against the reference in float64 is at most twice the error torch itself makes in
the same dtype, plus a few roundings of the output's scale. NaN never passes. Uninitialised memory is poisoned while
a call is checked, so an element nobody wrote shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from flashkernel.core.op import Case, Op, Tolerance

HALF_LIMIT = 1e-3  # largest error allowed in float16 where the exact value is of order one


@dataclass(frozen=True)
class Report:
    """The outcome of one comparison: the largest error, what was allowed, and a sentence where it failed."""

    name: str
    ok: bool
    error: float
    limit: float
    message: str = ""


@dataclass(frozen=True)
class Run:
    """Outputs and gradients of one execution, by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def compare(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    torch_own: torch.Tensor | None = None,
    tolerance: Tolerance = Tolerance(),
    input_dtype: torch.dtype | None = None,
    half_rule: bool = False,
) -> Report:
    """Compare with the exact result, allowing for the error of torch's own result in the same dtype."""
    if actual.shape != expected.shape:
        return _failed(name, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return Report(name, True, 0.0, 0.0)
    if not actual.is_floating_point():
        wrong = int((actual != expected.to(actual.dtype)).sum())
        return Report(name, wrong == 0, float(wrong), 0.0, f"{wrong} of {actual.numel()} differ" if wrong else "")
    if bool(actual.isnan().any()):
        return _failed(name, f"{int(actual.isnan().sum())} of {actual.numel()} are NaN")
    exact = expected.to(device=actual.device, dtype=torch.float64)
    infinite = exact.isinf()
    if bool((infinite & (actual.double() != exact)).any()) or bool((~infinite & actual.isinf()).any()):
        return _failed(name, "infinities stand where they should not")
    error = _error(actual, exact, infinite)
    limit = _limit(actual.dtype if input_dtype is None else input_dtype, exact, torch_own, tolerance)
    largest = float(error.max())
    if largest > limit:
        return Report(name, False, largest, limit, _where(name, actual, exact, error, limit))
    if half_rule and actual.dtype == torch.float16:
        worst = float(error.masked_fill(exact.abs() > 1, 0).max())
        if worst >= HALF_LIMIT:
            return Report(name, False, worst, HALF_LIMIT, f"{name}: error {worst:.2e} in float16 at order one")
    return Report(name, True, largest, limit)


def _limit(rounded: torch.dtype, exact: torch.Tensor, torch_own: torch.Tensor | None, tolerance: Tolerance) -> float:
    """The largest error allowed of a result that is rounded to `rounded`."""
    infinite = exact.isinf()
    rounding = torch.finfo(rounded).eps * float(exact.masked_fill(infinite, 0).abs().max())
    own = 0.0 if torch_own is None else float(_error(torch_own, exact, infinite).nan_to_num(nan=0.0).max())
    narrow = tolerance.floor if rounded != torch.float32 or tolerance.floor32 is None else tolerance.floor32
    return tolerance.factor * own + narrow * rounding


def _error(values: torch.Tensor, exact: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return (values.to(exact.device).double() - exact).abs().masked_fill(skip, 0)


def _failed(name: str, message: str) -> Report:
    return Report(name, False, float("inf"), 0.0, f"{name}: {message}")


def _where(name: str, actual: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, limit: float) -> str:
    place = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: error {float(error.max()):.3e} above {limit:.3e} at {place} "
        f"({float(actual[place]):.6g}, expected {float(exact[place]):.6g}; {int((error > limit).sum())} of "
        f"{error.numel()} too large)"
    )


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN (or a huge integer), so that unwritten elements are seen."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.device.type == "meta":
                return tensor
            with torch.no_grad():
                return tensor.fill_(_poison(tensor.dtype))

        return made

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
    ):
        yield


def execute(
    function: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    wanted: Sequence[str],
    cotangent_seed: int = 1,
) -> Run:
    """Call a function and, where `wanted` names inputs, pull random cotangents back through it."""
    leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}
    outputs = named(function(**leaves, **options))
    if not wanted:
        return Run({name: value.detach() for name, value in outputs.items()}, {})
    roots = {name: value for name, value in outputs.items() if value.requires_grad}
    weights = [_cotangent(value, cotangent_seed + index) for index, value in enumerate(roots.values())]
    grads = torch.autograd.grad(list(roots.values()), [leaves[name] for name in wanted], weights, allow_unused=True)
    return Run(
        {name: value.detach() for name, value in outputs.items()},
        {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in zip(wanted, grads)},
    )


def _cotangent(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Random weights for an output; rounded to bfloat16, so that every dtype sees the same ones exactly."""
    if value.device.type == "meta":
        return torch.empty_like(value)
    generator = torch.Generator(value.device).manual_seed(seed)
    return torch.randn(value.shape, generator=generator, device=value.device).bfloat16().to(value.dtype)


def named(outputs: Any) -> dict[str, torch.Tensor]:
    """Outputs of a call as a dictionary: none, one tensor, or a tuple of them."""
    if outputs is None:
        return {}
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    return {f"output{index}": value for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}


def verify(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    implementation: str | Callable[..., Any],
    device: torch.device | str = "cpu",
    *,
    gradients: bool = True,
    seed: int = 0,
    draws: int = 1,
) -> list[Report]:
    """Check a backend (by name) or any function of the operator's signature on one case, forward and backward.

    Few elements make torch's own error a matter of luck: with `draws` above 1, the inputs are drawn on the CPU, alike
    on every machine, and an error too large is compared with the largest limit of so many draws of the inputs.
    """
    inputs = op.make_inputs(case, dtype, device, seed, "cpu" if draws > 1 else None)
    wanted = wanted_gradients(op, case, inputs) if gradients else []
    exact, own = _expected(op, case, implementation, inputs, wanted)
    with poisoned():
        if callable(implementation):
            mine = execute(op.observed(implementation), inputs, case.options, wanted)
        else:
            mine = execute(op.observed(op.call), inputs, {**case.options, "backend": implementation}, wanted)
    half_rule = op.tolerance.through is None and draws == 1
    reports = [
        compare(name, mine.outputs[name], exact.outputs[name], own.outputs[name], op.tolerance,
                _coarse(op, dtype, False), half_rule)
        for name in exact.outputs
    ]  # fmt: skip
    reports += [
        compare(f"d{name}", mine.gradients[name], exact.gradients[name], own.gradients[name], op.tolerance,
                _coarse(op, dtype, True))
        for name in wanted
    ]  # fmt: skip
    if draws > 1 and any(not report.ok and math.isfinite(report.error) for report in reports):
        limits = _largest_limits(op, case, dtype, implementation, device, wanted, mine, range(seed + 1, seed + draws))
        if implementation == "torch" and torch.device(device).type == "cpu":  # whose attention approximates exp
            limits = {name: 2 * limit for name, limit in limits.items()}
        reports = [
            replace(report, ok=True, limit=limits[report.name], message="")
            if report.error <= limits.get(report.name, 0.0)
            else report
            for report in reports
        ]
    return reports + _dtypes(mine, own)


def _expected(
    op: Op, case: Case, implementation: Any, inputs: Mapping[str, torch.Tensor], wanted: Sequence[str]
) -> tuple[Run, Run]:
    """(the exact results, torch's own): its best backend; for that backend itself, the reference in the same dtype."""
    exact_inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = execute(op.observed(op.plain), exact_inputs, case.options, wanted)
    if implementation == "torch":
        return exact, execute(op.observed(op.plain), inputs, case.options, wanted)
    return exact, execute(op.observed(op.call), inputs, {**case.options, "backend": "torch"}, wanted)


def _coarse(op: Op, dtype: torch.dtype, gradients: bool) -> torch.dtype | None:
    """What results are rounded to on the way; None: their own dtype."""
    if gradients:
        return dtype if op.tolerance.of_inputs else None
    return op.tolerance.through or (dtype if op.tolerance.of_inputs == "all" else None)


def _largest_limits(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    implementation: Any,
    device: torch.device | str,
    wanted: Sequence[str],
    mine: Run,
    seeds: Iterable[int],
) -> dict[str, float]:
    """By name of the report, the largest limit over draws of the inputs."""
    limits: dict[str, float] = {}
    for seed in seeds:
        inputs = op.make_inputs(case, dtype, device, seed, "cpu")
        exact, own = _expected(op, case, implementation, inputs, wanted)
        for gradients, prefix in ((False, ""), (True, "d")):
            kind = "gradients" if gradients else "outputs"
            for name, value in getattr(mine, kind).items():
                if not value.is_floating_point() or not value.numel():
                    continue
                rounded = _coarse(op, dtype, gradients) or value.dtype
                limit = _limit(rounded, getattr(exact, kind)[name].double(), getattr(own, kind)[name], op.tolerance)
                limits[prefix + name] = max(limits.get(prefix + name, 0.0), limit)
    return limits


def wanted_gradients(op: Op, case: Case, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """The inputs of a case whose gradients exist."""
    if not (op.differentiable and case.gradients):
        return []
    return [name for name, value in inputs.items() if value.is_floating_point() and op.inputs[name].grad]


def _dtypes(mine: Run, own: Run) -> list[Report]:
    """Outputs and gradients must come in the dtypes that torch gives."""
    pairs = [(name, mine.outputs[name].dtype, own.outputs[name].dtype) for name in own.outputs]
    pairs += [(f"d{name}", mine.gradients[name].dtype, own.gradients[name].dtype) for name in own.gradients]
    return [_failed(name, f"dtype {got}, expected {want}") for name, got, want in pairs if got != want]
