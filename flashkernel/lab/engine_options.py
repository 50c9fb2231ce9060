"""How the engine runs a model in a measurement: what differs from the default, in commands, records and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

PLAIN = "plain"  # weights as they are without a quantization


@dataclass(frozen=True)
class EngineOptions:
    """Fields of `EngineArgs` by their names there; None is the default. Records have the same fields.

    Example:
        >>> EngineOptions("int4", num_speculative_tokens=4).label
        'int4, 4 drafted'
        >>> EngineOptions().label
        ''
    """

    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_speculative_tokens: int | None = None
    enforce_eager: bool | None = None

    @property
    def label(self) -> str:
        """What tables write behind the engine's name."""
        parts = [
            self.quantization,
            None if self.kv_cache_dtype is None else f"KV {self.kv_cache_dtype}",
            None if self.num_speculative_tokens is None else f"{self.num_speculative_tokens} drafted",
            "eager" if self.enforce_eager else None,
        ]
        return ", ".join(part for part in parts if part)

    def named(self, implementation: str) -> str:
        """An implementation's name with these options: "engine (int4)"."""
        return f"{implementation} ({self.label})" if self.label else implementation

    def fields(self) -> dict[str, Any]:
        """The options that differ from the default."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def checked(self) -> EngineOptions:
        """The same options; ValueError for one that the engine does not know."""
        from flashkernel.engine import EngineArgs  # it imports the engine, which tables do not need

        EngineArgs(**self.fields())
        return self


def combinations(
    quantizations: Sequence[str], kv_cache_dtypes: Sequence[str], drafted: Sequence[int], dtype: str, eager: bool
) -> list[EngineOptions]:
    """Every combination, checked, in the order given; what a model of `dtype` has by default is None.

    Args:
        quantizations: "plain" is the model without a quantization.
        kv_cache_dtypes: `dtype` itself is the default.
        drafted: Numbers of speculative tokens; 0 is the default.
        dtype: Of weights and activations.
        eager: Each also with `enforce_eager`.
    """
    found = [
        EngineOptions(*chosen).checked()
        for chosen in product(
            [None if name == PLAIN else name for name in quantizations or [PLAIN]],
            [None if name == dtype else name for name in kv_cache_dtypes or [dtype]],
            [count or None for count in drafted or [0]],
            [None, True] if eager else [None],
        )
    ]
    return list(dict.fromkeys(found))


def options_of(record: Any) -> EngineOptions:
    """The options that a record was measured with."""
    return EngineOptions(*(getattr(record, one.name) for one in fields(EngineOptions)))
