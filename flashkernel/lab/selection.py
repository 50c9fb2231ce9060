"""Operators, cases, dtypes and devices by the names that users type, and cases scaled down to the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashkernel.core import device as devices
from flashkernel.core.dispatch import Explanation, explain
from flashkernel.core.op import Case, Op, count
from flashkernel.lab import builds

CPU_ELEMENTS = 2**20  # input elements of a benchmark case on a CPU; the declared shapes would take hours
MIN_ROWS = 64
ALIGNED = 16
WHOLE = 64  # tiles and groups of quantized weights divide it, or are multiples
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class UnknownNameError(ValueError):
    """An unknown name; the message lists the known ones."""


def operators(names: Sequence[str] | None) -> list[Op]:
    """The named operators, or all of them."""
    from flashkernel.ops import registry

    known = registry()
    return list(known.values()) if not names else [known[_one("operator", name, known)] for name in names]


def cases(
    ops: Iterable[Op], patterns: Sequence[str] | None, of: Callable[[Op], Sequence[Case]]
) -> dict[str, list[Case]]:
    """By operator, the cases whose names match one of the globs; UnknownNameError for a glob that matches none."""
    found = {op.name: list(of(op)) for op in ops}
    names = dict.fromkeys(case.name for group in found.values() for case in group)
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError(f"{', '.join(found)}: no case matches {pattern!r}; known cases: {', '.join(names)}")
    if not patterns:
        return found
    return {
        op: [case for case in group if any(fnmatchcase(case.name, pattern) for pattern in patterns)]
        for op, group in found.items()
    }


def dtypes(names: Sequence[str] | None) -> list[torch.dtype] | None:
    """The named dtypes; None if there are no names, so that each case's own dtypes are used."""
    short = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64"}
    return [DTYPES[_one("dtype", short.get(name, name), DTYPES)] for name in names] if names else None


def implementations(ops: Iterable[Op], names: Sequence[str] | None, baselines: bool = True) -> list[str] | None:
    """The names, each a backend, build or baseline of one of the operators; None if there are no names."""
    ops = list(ops)
    known = dict.fromkeys(backend.name for op in ops for backend in op.backends)
    if baselines:
        known.update(dict.fromkeys(builds.BUILDS if builds.CUDA in known else ()))
        known.update(dict.fromkeys(baseline.name for op in ops for baseline in op.baselines))
    what = "implementation" if baselines else "backend"
    return [_one(what, name, known) for name in names] if names else None


def known_names(what: str, names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The names, each of which must be known; all known ones if there are no names."""
    among = dict.fromkeys(known)
    return [_one(what, name, among) for name in names] if names else list(among)


def device(name: str | None) -> torch.device:
    """A device of this machine: "cpu", "cuda" or "cuda:1" in any case; by default its GPU, if it has one.

    Example:
        >>> device("CPU")
        device(type='cpu')
    """
    name = None if name is None else name.lower()
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count()
    if name != "cpu" and (kind != "cuda" or (index and not index.isdigit()) or int(index or 0) >= count):
        here = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise UnknownNameError(f"device {name!r} is not on this machine; its devices: {here}")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")


def hardware(name: str | None) -> devices.Device:
    """Properties of a device of this machine, or of a GPU that need not be in it, such as "h200"; in any case.

    Example:
        >>> hardware("H200").name
        'NVIDIA H200'
    """
    if name is not None and name.lower() in devices.KNOWN:
        return devices.KNOWN[name.lower()]
    try:
        return devices.properties(device(name))
    except UnknownNameError as error:
        raise UnknownNameError(
            f"{error}; known GPUs (which need not be in this machine): {', '.join(devices.KNOWN)}"
        ) from None


def bench_dtypes(case: Case, wanted: Sequence[torch.dtype] | None, hardware: devices.Device) -> list[torch.dtype]:
    """The dtypes to time a case in: those wanted, else the case's own; float32 on a CPU, which emulates 16-bit ones,
    and float16 for bfloat16 on a GPU without it."""
    if wanted:
        return list(wanted)
    if hardware.kind == "cpu":
        return [torch.float32]
    half = devices.half_dtype(hardware)
    return list(dict.fromkeys(half if dtype == torch.bfloat16 else dtype for dtype in case.dtypes))


def bench_work(
    ops: Sequence[Op],
    patterns: Sequence[str] | None,
    wanted: Sequence[torch.dtype] | None,
    hardware: devices.Device,
    most: int,
    benches: Callable[[Op], Sequence[Case]] = lambda op: op.benches,
) -> list[tuple[Op, Case, torch.dtype]]:
    """(operator, case, dtype) of every benchmark; cases are scaled down to `most` input elements if it is not 0."""
    selected = cases(ops, patterns, benches)
    return [
        (op, case, dtype)
        for op in ops
        for case in (scaled_once(op, selected[op.name], most) if most else selected[op.name])
        for dtype in bench_dtypes(case, wanted, hardware)
    ]


def explain_case(
    op: Op, case: Case, dtype: torch.dtype, hardware: devices.Device, backend: str | None = None
) -> Explanation:
    """Which backend dispatch picks for a case on some hardware, and why not each other one; allocates nothing."""
    with devices.pretend(hardware):
        return explain(op.call, **shapes_only(op, case, dtype), **case.options, backend=backend)


def declined(op: Op, case: Case, dtype: torch.dtype, hardware: devices.Device, implementation: str) -> str | None:
    """The reason why a backend or a build such as "cuda_sm75" does not support a case on some hardware, or None."""
    with builds.build(implementation):
        answer = explain_case(op, case, dtype, hardware)
    name = builds.backend_of(implementation)
    return next((one.reason for one in answer.verdicts if one.backend == name), f"{op.name} has no backend {name}")


def shapes_only(op: Op, case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The inputs of a case as meta tensors: shapes, strides and dtypes without data."""
    with FakeTensorMode():
        drawn = op.make_inputs(case, dtype, "cpu")
    return {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for name, value in drawn.items()
    }


def with_axes(case: Case, settings: Sequence[str], op: Op) -> Case:
    """The case with axes changed as in "rows=128" or, for several leading dims, "rows=2x64".

    Values are as wide as keys unless value_dim is given, where they were in the case.
    """
    changed: dict[str, Any] = {}
    for setting in settings:
        axis, _, value = setting.partition("=")
        if axis not in case.axes:
            raise UnknownNameError(f"{op.name} has no axis {axis!r}; it has {', '.join(case.axes)}")
        sizes = value.split("x")
        if not all(size.isdigit() for size in sizes):
            raise UnknownNameError(f"{setting!r} has no size for axis {axis}; write {axis}=128 or {axis}=2x64")
        changed[axis] = int(sizes[0]) if len(sizes) == 1 else tuple(int(size) for size in sizes)
    if "head_dim" in changed and case.axes.get("value_dim") == case.axes["head_dim"]:
        changed.setdefault("value_dim", changed["head_dim"])
    return replace(case, axes=op.with_sizes(case.axes, changed))


def scaled(op: Op, case: Case, most: int) -> Case:
    """The case with its axes halved until its inputs have at most `most` elements, named "16384x4096~256x4096".

    The first axis (rows) is halved down to `MIN_ROWS`, then the largest axis.
    """
    axes = dict(case.axes)
    while _elements(op, case, axes) > most:
        smaller = (op.with_sizes(axes, found) for found in _halvings(axes))
        found = next((one for one in smaller if one != axes and _possible(op, replace(case, axes=one))), None)
        if found is None:
            break
        axes = found
    if axes == dict(case.axes):
        return case
    sizes = "x".join("x".join(map(str, size)) if isinstance(size, tuple) else str(size)
                     for size in axes.values() if _is_size(size) and size not in ((), 0))  # fmt: skip
    checked = {axis: size for axis, size in case.check_axes.items()
               if _is_size(size) and count(size) <= count(axes[axis])}  # fmt: skip
    checked = {axis: size for axis, size in op.with_sizes(axes, checked).items() if size != axes[axis]}
    if not _possible(op, replace(case, axes={**axes, **checked})):  # some of the sizes to be checked were larger
        checked = {}
    return replace(case, name=f"{case.name}~{sizes}", axes=axes, check_axes=checked)


def scaled_once(op: Op, available: Sequence[Case], most: int) -> list[Case]:
    """All cases scaled down, without those that become equal to an earlier one."""
    seen: dict[Any, Case] = {}
    for case in (scaled(op, case, most) for case in available):
        seen.setdefault((tuple(case.axes.items()), repr(case.options), case.present, case.layout, case.gradients), case)
    return list(seen.values())


def _one(what: str, name: str, known: Mapping[str, Any]) -> str:
    if name not in known:
        raise UnknownNameError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return name


def _elements(op: Op, case: Case, axes: Mapping[str, Any]) -> int:
    given = (spec for name, spec in op.inputs.items() if not spec.optional or name in case.present)
    return sum(math.prod(spec.shape(axes)) for spec in given)


def _is_size(value: Any) -> bool:
    """Whether an axis is a size, or several; others say what kind a call is of: a name, a switch, a share, None."""
    return isinstance(value, tuple) or (isinstance(value, int) and not isinstance(value, bool))


def _largest(size: Any) -> int:
    return max(size, default=1) if isinstance(size, tuple) else int(size)


def _halvings(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields changes of the axes, in order of preference: one size halved, or to whole tiles of quantized weights.

    Where axes are tuples, equal sizes may be one dimension named twice (as in a mask); they are also halved together.
    """
    first, sizes = next(iter(axes)), [axis for axis, size in axes.items() if _is_size(size)]
    by_size = sorted(sizes, key=lambda name: -_largest(axes[name]))
    for axis in dict.fromkeys([first, *by_size] if count(axes[first]) > MIN_ROWS else by_size):
        largest = _largest(axes[axis])
        if largest > 1:
            yield {axis: _halved(axes[axis], largest)}
            if _has_tuples(axes):
                yield {name: _halved(axes[name], largest) for name in sizes}
            if isinstance(axes[axis], int) and largest // 2 > WHOLE:
                yield {axis: largest // 2 // WHOLE * WHOLE}


def _halved(size: Any, largest: int) -> Any:
    """Multiples of 16 stay multiples where they are larger: products of 16-bit matrices want them."""
    if isinstance(size, tuple):
        return tuple(_halved(entry, largest) for entry in size)
    if size != largest:
        return size
    half = largest // 2
    return half if largest % ALIGNED or half <= ALIGNED else half // ALIGNED * ALIGNED


def _has_tuples(axes: Mapping[str, Any]) -> bool:
    return any(isinstance(size, tuple) for size in axes.values())


def _possible(op: Op, case: Case) -> bool:
    """True if the operator accepts these sizes, and has something to do; sizes that are independent of each other are
    always accepted."""
    if not case.options and all(_is_size(size) and not isinstance(size, tuple) for size in case.axes.values()):
        return True
    try:
        explain_case(op, case, torch.float32, devices.properties(torch.device("cpu")))
    except ValueError:
        return False
    return all(cost.flops >= 0 and cost.bytes > 0 for cost in op.cost(case, torch.float32).values())
