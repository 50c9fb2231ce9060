"""The report of `patch`: what was replaced in a model, what was not, and why."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("attention", "rope", "norm", "mlp", "layer", "loss")


@dataclass(frozen=True)
class Entry:
    """Modules of one class that `patch` treated alike.

    Args:
        part: "attention", "rope", "norm", "mlp", "layer" or "loss".
        module: Name of the class.
        count: Number of modules.
        kernel: What replaces them; None if they were left as they are.
        reason: Why they were left, or a note.

    Example:
        >>> from flashkernel.hf import Entry
        >>> Entry("norm", "LlamaRMSNorm", 5, "rms_norm").count
        5
    """

    part: str
    module: str
    count: int
    kernel: str | None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `patch` did; `print` shows it as a table.

    Args:
        model: Name of the model's class.
        entries: One for each part and class of modules.

    Example:
        >>> from flashkernel.hf import Entry, Report
        >>> report = Report("LlamaForCausalLM", (Entry("norm", "LlamaRMSNorm", 5, "rms_norm"),))
        >>> report.replaced[0].kernel, report.skipped
        ('rms_norm', ())
    """

    model: str
    entries: tuple[Entry, ...]

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """Entries of modules that were replaced."""
        return tuple(entry for entry in self.entries if entry.kernel is not None)

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """Entries of modules that were left as they are."""
        return tuple(entry for entry in self.entries if entry.kernel is None)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "model": self.model,
            "replaced": [asdict(entry) for entry in self.replaced],
            "skipped": [asdict(entry) for entry in self.skipped],
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
