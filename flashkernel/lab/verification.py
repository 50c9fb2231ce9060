"""Checks of the implementations that a benchmark times.

A benchmark checks at small sizes (`Case.check_axes`), so cases that differ only in a batch or a length often have the
same check. A `Verifier` runs each check once in a run, and computes what results are compared with once for all
implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from flashkernel.core import check
from flashkernel.core.op import Case, Op

Key = tuple[Any, ...]


class Verifier:
    """The checks of one run, each with its reports."""

    def __init__(self) -> None:
        self._reports: dict[Key, list[check.Report]] = {}
        self._expected: tuple[Key, check.Expected] | None = None  # of the latest case: it may be large

    def verify(
        self,
        op: Op,
        case: Case,
        dtype: torch.dtype,
        name: str,
        implementation: str | Callable[..., Any],
        device: torch.device,
        *,
        gradients: bool,
        prepare: Callable[[], Any] = lambda: None,
    ) -> list[check.Report]:
        """The reports of `check.verify`, of this call or of an earlier one on the same case and dtype.

        Args:
            op: the operator.
            case: a case at the sizes of its check.
            dtype: dtype of the inputs.
            name: what tells this implementation from the others of the operator.
            implementation: as `check.verify` takes it.
            device: where it runs.
            gradients: check the gradients too; without them the call runs under no_grad, as it is timed.
            prepare: called before the check, if it is not known yet, with the same settings of torch: torch.compile
                compiles again for others.
        """
        checked = (op.name, *case_key(case), dtype, str(device), gradients)
        key = (*checked, name)
        if key not in self._reports:
            with nullcontext() if gradients else torch.no_grad():
                with check.float32_sums():
                    prepare()
                expected = self._expect(checked, op, case, dtype, implementation, device, gradients)
                self._reports[key] = check.verify(
                    op, case, dtype, implementation, device, gradients=gradients, expected=expected
                )
        return self._reports[key]

    def _expect(
        self,
        key: Key,
        op: Op,
        case: Case,
        dtype: torch.dtype,
        implementation: Any,
        device: torch.device,
        gradients: bool,
    ) -> check.Expected:
        key = (*key, implementation == "torch")
        if self._expected is None or self._expected[0] != key:
            self._expected = None  # freed before the next one is computed
            self._expected = key, check.expect(op, case, dtype, implementation, device, gradients=gradients)
        return self._expected[1]

    def forget_expected(self) -> None:
        """Frees what results are compared with; the reports stay."""
        self._expected = None


def case_key(case: Case) -> Key:
    """Equal for cases with the same inputs and options; their names and check sizes may differ."""
    plain = replace(case, name="", check_axes={})
    return tuple(_hashable(getattr(plain, name)) for name in plain.__dataclass_fields__)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(one)) for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_hashable, value))
    return value if value.__hash__ is not None else id(value)
