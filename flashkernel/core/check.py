"""The only numeric comparison in the project.

A result is correct if its error against the reference in float64 is at most twice the error of torch's own backend in
the same dtype, plus a few roundings of the output's largest value. NaN never passes. Uninitialized memory is filled
with NaN while a call is checked, so that elements which no kernel writes are found.
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

HALF_LIMIT = 1e-3  # largest error allowed in float16 where the exact value is at most 1


@dataclass(frozen=True)
class Report:
    """The outcome of one comparison: the largest error, the limit, and a message if it failed."""

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

    def to(self, device: torch.device | str) -> Run:
        """The same values on a device."""
        return Run(
            *({name: value.to(device) for name, value in kind.items()} for kind in (self.outputs, self.gradients))
        )


Expected = tuple[Run, Run]  # exact results in float64, results that set the limit


def compare(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    torch_own: torch.Tensor | None = None,
    tolerance: Tolerance = Tolerance(),
    input_dtype: torch.dtype | None = None,
    half_rule: bool = False,
) -> Report:
    """Compare a result with the exact one.

    Args:
        name: Name of the output, for messages.
        actual: The result to check.
        expected: The exact result, in float64.
        torch_own: The result of torch's own backend in the same dtype; its error widens the limit.
        tolerance: The operator's.
        input_dtype: What intermediate results are rounded to; the limit's roundings are of this dtype or the result's,
            whichever is coarser. None: the result's.
        half_rule: Also require an error below HALF_LIMIT in float16 where the exact value is at most 1.
    """
    if actual.shape != expected.shape:
        return _failed(name, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return Report(name, True, 0.0, 0.0)
    if not actual.is_floating_point():
        steps = tolerance.integer_steps
        differs = actual != expected.to(actual.dtype) if not steps else (actual.long() - expected.long()).abs() > steps
        wrong = int(differs.sum())
        return Report(name, wrong == 0, float(wrong), 0.0, f"{wrong} of {actual.numel()} differ" if wrong else "")
    if bool(actual.isnan().any()):
        return _failed(name, f"{int(actual.isnan().sum())} of {actual.numel()} are NaN")
    exact = expected.to(device=actual.device, dtype=torch.float64)
    infinite = exact.isinf()
    if bool((infinite & (actual.double() != exact)).any()) or bool((~infinite & actual.double().isinf()).any()):
        return _failed(name, "infinities stand where they should not")
    error = _error(actual, exact, infinite)
    limit = _limit(_coarser(actual.dtype, input_dtype), exact, torch_own, tolerance)
    largest = float(error.max())
    if largest > limit:
        return Report(name, False, largest, limit, _where(name, actual, exact, error, limit))
    if half_rule and actual.dtype == torch.float16:
        worst = float(error.masked_fill(exact.abs() > 1, 0).max())
        if worst >= HALF_LIMIT:
            return Report(name, False, worst, HALF_LIMIT, f"{name}: error {worst:.2e} in float16 at order one")
    return Report(name, True, largest, limit)


def _coarser(result: torch.dtype, intermediate: torch.dtype | None) -> torch.dtype:
    """The one of two dtypes with the larger rounding error."""
    return result if intermediate is None else max(result, intermediate, key=lambda dtype: torch.finfo(dtype).eps)


def _limit(rounded: torch.dtype, exact: torch.Tensor, torch_own: torch.Tensor | None, tolerance: Tolerance) -> float:
    """The largest error allowed of a result that is rounded to dtype `rounded`."""
    infinite = exact.isinf()
    rounding = torch.finfo(rounded).eps * float(exact.masked_fill(infinite, 0).abs().max())
    torch_error = 0.0 if torch_own is None else float(_error(torch_own, exact, infinite).nan_to_num(nan=0.0).max())
    narrow = tolerance.floor if rounded != torch.float32 or tolerance.floor32 is None else tolerance.floor32
    return tolerance.factor * torch_error + narrow * rounding


def _error(values: torch.Tensor, exact: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return (values.to(exact.device).double() - exact).abs().masked_fill(skip, 0)


def _failed(name: str, message: str) -> Report:
    return Report(name, False, float("inf"), 0.0, f"{name}: {message}")


def _where(name: str, actual: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, limit: float) -> str:
    position = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: error {float(error.max()):.3e} above {limit:.3e} at {position} "
        f"({float(actual[position]):.6g}, expected {float(exact[position]):.6g}; {int((error > limit).sum())} of "
        f"{error.numel()} too large)"
    )


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def float32_sums() -> Iterator[None]:
    """Let cuBLAS add partial sums in float32 inside. By default torch allows it to add them in 16 bits, where a result
    is off by more roundings than one."""
    flags = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(flags, name) for name in names]
    for name in names:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before):
            setattr(flags, name, value)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the results of torch.empty, empty_like and new_empty with NaN (or the largest integer) inside."""

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
    draw_on: torch.device | str | None = None,
) -> Run:
    """Call a function; where `wanted` names inputs, compute their gradients for random output gradients.

    Those are drawn on the outputs' device, or on `draw_on`.
    """
    leaves = {name: value.detach().requires_grad_(name in wanted) for name, value in inputs.items()}
    outputs = named(function(**leaves, **options))
    if not wanted:
        return Run({name: value.detach() for name, value in outputs.items()}, {})
    roots = {name: value for name, value in outputs.items() if value.requires_grad}
    weights = [_cotangent(value, cotangent_seed + index, draw_on) for index, value in enumerate(roots.values())]
    grads = torch.autograd.grad(list(roots.values()), [leaves[name] for name in wanted], weights, allow_unused=True)
    return Run(
        {name: value.detach() for name, value in outputs.items()},
        {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in zip(wanted, grads)},
    )


def _cotangent(value: torch.Tensor, seed: int, draw_on: torch.device | str | None) -> torch.Tensor:
    """A random output gradient; rounded to bfloat16, so that it is the same in every dtype."""
    if value.device.type == "meta":
        return torch.empty_like(value)
    where = torch.device(draw_on or value.device)
    drawn = torch.randn(value.shape, generator=torch.Generator(where).manual_seed(seed), device=where)
    return drawn.bfloat16().to(value.dtype).to(value.device)


def named(outputs: Any) -> dict[str, torch.Tensor]:
    """The outputs of a call (None, a tensor, or a tuple of tensors) as a dictionary."""
    if outputs is None:
        return {}
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    return {f"output{index}": value for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}


@float32_sums()
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
    expected: Expected | None = None,
    expected_on: torch.device | str | None = None,
) -> list[Report]:
    """Check an implementation on one case, forward and backward, with sums of torch's own products in float32.

    Args:
        op: The operator.
        case: The case.
        dtype: The dtype of its inputs.
        implementation: The name of a backend, or a function of the operator's signature.
        device: Where it runs.
        gradients: Check the gradients as well.
        seed: Of the inputs.
        draws: With few elements, torch's own error is a matter of chance. Above 1, the inputs are drawn on the CPU, the
            same on every machine, and an error above its limit is compared with the largest limit of this many draws.
        expected: What `expect` returned for this case, dtype and seed; computed here without it.
        expected_on: Where the expected results are computed; None: on `device`. With "cpu", the GPU runs the
            implementation alone: inputs and output gradients are drawn on the CPU and copied.

    Returns:
        A report for each output, gradient and wrong dtype.
    """
    draw_on = "cpu" if draws > 1 else expected_on
    inputs = op.make_inputs(case, dtype, device, seed, draw_on)
    wanted = wanted_gradients(op, case, inputs) if gradients else []
    if expected is None:
        at = {name: value.to(expected_on or value.device) for name, value in inputs.items()}
        expected = _expected(op, case, implementation, at, wanted, expected_on)
    exact, torch_run = expected
    with poisoned():
        if callable(implementation):
            actual = execute(op.observed(implementation), inputs, case.options, wanted, draw_on=expected_on)
        else:
            named_backend = {**case.options, "backend": implementation}
            actual = execute(op.observed(op.call), inputs, named_backend, wanted, draw_on=expected_on)
    if expected_on is not None:
        actual = actual.to(expected_on)
    tolerance = op.tolerance_of(case, dtype)
    ours = not callable(implementation)  # a baseline need not keep the rule for float16 to be compared with
    rounded_before = case.through or op.tolerance.through or op.tolerance.of_inputs == "all"
    half_rule = ours and case.half_rule and not rounded_before and draws == 1
    reports = [
        compare(name, actual.outputs[name], exact.outputs[name], torch_run.outputs[name], tolerance,
                _rounded_dtype(op, case, dtype, False), half_rule)
        for name in exact.outputs
    ]  # fmt: skip
    reports += [
        compare(f"d{name}", actual.gradients[name], exact.gradients[name], torch_run.gradients[name],
                tolerance.of_gradient(name), _rounded_dtype(op, case, dtype, True))
        for name in wanted
    ]  # fmt: skip
    if draws > 1 and any(not report.ok and math.isfinite(report.error) for report in reports):
        limits = _largest_limits(op, case, dtype, implementation, device, wanted, actual, range(seed + 1, seed + draws))
        if implementation == "torch" and torch.device(device).type == "cpu":  # whose attention approximates exp
            limits = {name: 2 * limit for name, limit in limits.items()}
        reports = [
            replace(report, ok=True, limit=limits[report.name], message="")
            if not report.ok and report.error <= limits.get(report.name, 0.0)
            else report
            for report in reports
        ]
    return reports + _dtypes(actual, torch_run)


@float32_sums()
def expect(
    op: Op, case: Case, dtype: torch.dtype, implementation: Any, device: torch.device | str, *, gradients: bool = True
) -> Expected:
    """What `verify` compares an implementation with, on the inputs of seed 0.

    Implementations of a case share it, but for the torch backend, which has another.
    """
    inputs = op.make_inputs(case, dtype, device)
    return _expected(op, case, implementation, inputs, wanted_gradients(op, case, inputs) if gradients else [])


def _expected(
    op: Op,
    case: Case,
    implementation: Any,
    inputs: Mapping[str, torch.Tensor],
    wanted: Sequence[str],
    draw_on: torch.device | str | None = None,
) -> Expected:
    """(exact results, results of the torch backend; for that backend itself, of the reference in the same dtype)."""
    exact_inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = execute(op.observed(op.plain), exact_inputs, case.options, wanted, draw_on=draw_on)
    if implementation == "torch":
        return exact, execute(op.observed(op.plain), inputs, case.options, wanted, draw_on=draw_on)
    torch_backend = {**case.options, "backend": "torch"}
    return exact, execute(op.observed(op.call), inputs, torch_backend, wanted, draw_on=draw_on)


def _rounded_dtype(op: Op, case: Case, dtype: torch.dtype, gradients: bool) -> torch.dtype | None:
    """The dtype that intermediate results are rounded to; None: the result's own."""
    if gradients:
        return dtype if op.tolerance.of_inputs else None
    return case.through or op.tolerance.through or (dtype if op.tolerance.of_inputs == "all" else None)


def _largest_limits(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    implementation: Any,
    device: torch.device | str,
    wanted: Sequence[str],
    actual: Run,
    seeds: Iterable[int],
) -> dict[str, float]:
    """The largest limit over draws of the inputs, by the report's name."""
    limits: dict[str, float] = {}
    for seed in seeds:
        inputs = op.make_inputs(case, dtype, device, seed, "cpu")
        exact, torch_run = _expected(op, case, implementation, inputs, wanted)
        for gradients, prefix in ((False, ""), (True, "d")):
            kind = "gradients" if gradients else "outputs"
            for name, value in getattr(actual, kind).items():
                if not value.is_floating_point() or not value.numel():
                    continue
                rounded = _coarser(value.dtype, _rounded_dtype(op, case, dtype, gradients))
                tolerance = op.tolerance_of(case, dtype)
                tolerance = tolerance.of_gradient(name) if gradients else tolerance
                limit = _limit(rounded, getattr(exact, kind)[name].double(), getattr(torch_run, kind)[name], tolerance)
                limits[prefix + name] = max(limits.get(prefix + name, 0.0), limit)
    return limits


def wanted_gradients(op: Op, case: Case, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """The inputs of a case that have gradients."""
    if not (op.differentiable and case.gradients):
        return []
    # Elements of 8 bits are quantized data, which has no gradient.
    floats = [name for name, value in inputs.items() if value.is_floating_point() and value.element_size() > 1]
    return [name for name in floats if op.inputs[name].grad]


def _dtypes(actual: Run, torch_run: Run) -> list[Report]:
    """Failures for outputs and gradients whose dtypes differ from those of torch's backend."""
    dtypes = [(name, actual.outputs[name].dtype, torch_run.outputs[name].dtype) for name in torch_run.outputs]
    dtypes += [
        (f"d{name}", actual.gradients[name].dtype, torch_run.gradients[name].dtype) for name in torch_run.gradients
    ]
    return [_failed(name, f"dtype {got}, expected {want}") for name, got, want in dtypes if got != want]
