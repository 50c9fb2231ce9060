"""What a patch replaced in a model, what not, and why."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("attention", "rope", "norm", "mlp", "layer", "loss")


@dataclass(frozen=True)
class Entry:
    """All modules of one class that met the same fate; `kernel` is None where they were left alone, for `reason`."""

    part: str
    module: str
    count: int
    kernel: str | None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of `patch`: print it, or read `replaced`, `left` and `as_dict()`."""

    model: str
    entries: tuple[Entry, ...]

    @property
    def replaced(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kernel is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kernel is None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "replaced": [asdict(entry) for entry in self.replaced],
            "left": [asdict(entry) for entry in self.left],
        }

    def __rich__(self) -> Table:
        table = Table("part", "module", "count", "now", "note", title=f"{self.model} on FlashKernel")
        for entry in self.entries:
            table.add_row(
                entry.part, entry.module, str(entry.count), entry.kernel or "[dim]as it was[/dim]", entry.reason
            )
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140, no_color=True).print(self)
        return text.getvalue()
