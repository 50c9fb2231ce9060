"""What commands write to standard error: messages and progress bars; and how a long command ends.

Results go to standard output (`flashkernel.lab.output`), so a pipe or a file receives results alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flashkernel.core import signals
from flashkernel.lab.packages import MissingPackageError

INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT
FILE_WIDTH = 160  # columns where the output is not a terminal


@dataclass
class Stop:
    """Why a run ended early: its exit code, 0 for a run that completed."""

    code: int = 0


@dataclass(frozen=True)
class Bar:
    """A progress bar on a terminal. Standard error that is not a terminal gets lines instead (`log_line`)."""

    progress: Progress
    task: TaskID

    @property
    def drawn(self) -> bool:
        return not self.progress.disable

    def describe(self, text: str) -> None:
        """Shows what is being worked on."""
        self.progress.update(self.task, description=escape(text))

    def advance(self, steps: int = 1) -> None:
        self.progress.advance(self.task, steps)

    def next(self, text: str) -> None:
        """Starts the next step: shows what it is and counts it."""
        self.describe(text)
        self.advance()

    def set_completed(self, completed: float, total: float | None) -> None:
        self.progress.update(self.task, completed=completed, total=total)

    def log_line(self, text: str) -> None:
        """Logs a line where no bar is drawn, so that a log file shows progress too."""
        if not self.drawn:
            log(text)


def stderr_console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def log(text: str) -> None:
    """Prints a message to standard error."""
    stderr_console().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(total: float | None = None, description: str = "") -> Iterator[Bar]:
    """Yields a progress bar with the elapsed time; it is drawn only where standard error is a terminal."""
    console = stderr_console()
    progress = Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield Bar(progress, progress.add_task(escape(description), total=total))


@contextmanager
def keep_results() -> Iterator[Stop]:
    """Ends the block on Ctrl-C, on SIGTERM or on a lost GPU: what was measured is still printed."""
    from flashkernel.lab.bench import DeviceLostError

    stop = Stop()
    try:
        with signals.handled(signal.SIGTERM, signal.default_int_handler):  # as `timeout` sends it
            yield stop
    except KeyboardInterrupt:
        stop.code = INTERRUPTED
        log("interrupted; results measured until now follow")
    except DeviceLostError as error:
        stop.code = 1
        log(f"{error}; results measured until now follow; run again without the implementation that failed last")


@contextmanager
def report_errors() -> Iterator[None]:
    """Prints unknown names, bad values, bad files (exit code 2) and missing packages (1) without a traceback."""
    try:
        yield
    except MissingPackageError as error:
        log(str(error))
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        log(str(error))
        raise typer.Exit(2) from None


def exit_with(stop: Stop, failed: bool) -> None:
    """Exits the command with the code of an early stop, or with 1 if something failed."""
    code = stop.code or int(failed)
    if code:
        raise typer.Exit(code)
