"""Declares an operator by the usual names of its package's modules, so that a declaration says what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flashkernel.core import backends
from flashkernel.core.op import Backend, Baseline, Case, Cost, Op


class Workload(NamedTuple):
    """What an operator is checked and timed on, as `Op` documents it."""

    cases: tuple[Case, ...]
    benches: tuple[Case, ...]
    cost: Callable[[Case, torch.dtype], Mapping[str, Cost]]


def declare(
    package: str,
    name: str,
    summary: str,
    *,
    workload: Workload | None = None,
    kernels: Iterable[Backend] = (),
    baselines: Iterable[str | Baseline] = (),
    **fields: Any,
) -> Op:
    """Returns an operator whose functions are `package.api:name`, `package.reference:name` and `package.torch:name`.

    Args:
        package: The operator's package.
        name: The operator's name.
        summary: A few words, for tables.
        workload: Its cases, benchmarks and cost; None where `fields` have them.
        kernels: Backends of kernel modules, in order of preference; torch's and the reference follow them.
        baselines: Names of functions in `package.baselines` ("compile" is `compiled`, since `compile` is Python's).
        fields: Further fields of `Op`; `function` and `reference` where they have other names.
    """
    found = tuple(Baseline(one, _baseline(package, one)) if isinstance(one, str) else one for one in baselines)
    functions = {"function": f"{package}.api:{name}", "reference": f"{package}.reference:{name}"}
    if workload is not None:
        fields |= workload._asdict()
    composites = (backends.torch_native(f"{package}.torch:{name}"), backends.reference(f"{package}.reference:{name}"))
    return Op(
        name=name, summary=summary, backends=(*kernels, *composites), baselines=found, **{**functions, **fields}
    )  # fmt: skip


def _baseline(package: str, name: str) -> str:
    return f"{package}.baselines:{'compiled' if name == 'compile' else name}"
