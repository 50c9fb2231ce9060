"""The only numeric comparison in the project.

A result is right when its error against the reference in float64 is at most twice the error torch itself makes in
the same dtype, plus a few roundings of the output's scale. NaN never passes. Uninitialised memory is poisoned while
a call is checked, so an element nobody wrote shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    rounded = actual.dtype if input_dtype is None else input_dtype
    rounding = torch.finfo(rounded).eps * float(exact.masked_fill(infinite, 0).abs().max())
    own = 0.0 if torch_own is None else float(_error(torch_own, exact, infinite).nan_to_num(nan=0.0).max())
    narrow = tolerance.floor if rounded != torch.float32 or tolerance.floor32 is None else tolerance.floor32
    limit = tolerance.factor * own + narrow * rounding
    largest = float(error.max())
    if largest > limit:
        return Report(name, False, largest, limit, _where(name, actual, exact, error, limit))
    if half_rule and actual.dtype == torch.float16:
        worst = float(error.masked_fill(exact.abs() > 1, 0).max())
        if worst >= HALF_LIMIT:
            return Report(name, False, worst, HALF_LIMIT, f"{name}: error {worst:.2e} in float16 at order one")
    return Report(name, True, largest, limit)


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
) -> list[Report]:
    """Check a backend (by name) or any function of the operator's signature on one case, forward and backward."""
    inputs = op.make_inputs(case, dtype, device, seed)
    wanted = wanted_gradients(op, case, inputs) if gradients else []
    exact_inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = execute(op.observed(op.plain), exact_inputs, case.options, wanted)
    # Torch's own attempt: its best backend; for that backend itself, the reference run in the same dtype.
    if implementation == "torch":
        own = execute(op.observed(op.plain), inputs, case.options, wanted)
    else:
        own = execute(op.observed(op.call), inputs, {**case.options, "backend": "torch"}, wanted)
    with poisoned():
        if callable(implementation):
            mine = execute(op.observed(implementation), inputs, case.options, wanted)
        else:
            mine = execute(op.observed(op.call), inputs, {**case.options, "backend": implementation}, wanted)
    through = op.tolerance.through
    coarse = through or (dtype if op.tolerance.of_inputs == "all" else None)
    coarse_gradients = dtype if op.tolerance.of_inputs else None
    reports = [
        compare(
            name,
            mine.outputs[name],
            exact.outputs[name],
            own.outputs[name],
            op.tolerance,
            coarse,
            half_rule=through is None,
        )
        for name in exact.outputs
    ]
    reports += [
        compare(
            f"d{name}", mine.gradients[name], exact.gradients[name], own.gradients[name], op.tolerance, coarse_gradients
        )
        for name in wanted
    ]
    return reports + _dtypes(mine, own)


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
