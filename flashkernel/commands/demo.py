"""The demonstration: a paragraph by a small model, or every operator checked and timed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.options import Formatted, Names, OnDevice
from flashkernel.lab import screen
from flashkernel.lab.screen import Format

if TYPE_CHECKING:
    import torch

    from flashkernel.lab.demo import Summary
    from flashkernel.lab.paragraph import Telling


def demo(
    names: Names = None,
    device: OnDevice = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check every operator against its reference, and time it against PyTorch.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --check: one dtype, and the forward pass alone is timed.")
    ] = False,
    random: Annotated[bool, typer.Option("--random", help="A tiny random model; nothing is fetched.")] = False,
    format: Formatted = Format.table,
) -> None:
    """Let a small model write a paragraph on this machine, and say which kernels served and how fast."""
    with screen.clear_errors():
        from flashkernel.lab import selection

        place = selection.device(device)
        if not check and (names or quick):
            raise ValueError("demo: operators and --quick belong to --check; without it a model writes a paragraph")
        if not check:
            _paragraph(place, not random, format)
            return
        chosen = selection.operators(names)
    from flashkernel.lab import demo as demonstration

    summaries: list[Summary] = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        steps = list(demonstration.steps(chosen, place, quick, summaries))
        bar = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(bar, description=escape(step.title))
            step.run()
            progress.advance(bar)
    screen.show(format, [summary.as_dict() for summary in summaries], [screen.demo_table(summaries)])
    problems = [problem for summary in summaries for problem in summary.problems]
    for problem in problems:
        screen.tell(problem)
    screen.leave(stopped, failed=bool(problems))


def _paragraph(device: torch.device, fetching: bool, format: Format) -> None:
    from flashkernel.core.device import facts
    from flashkernel.lab import paragraph

    llm = paragraph.open_model(device, screen.tell, fetching)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    name = "A random model" if llm.config.architecture == "random" else "SmolLM2-135M-Instruct"
    screen.tell(f"{name} in {dtype} on {facts(device).name}\n\n{paragraph.QUESTION}\n")
    text, tokens = "", []
    try:
        for event in paragraph.write(llm):
            text += event.text
            tokens += [] if event.token is None else [event.token]
            if format is Format.table:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        if format is Format.table:
            sys.stdout.write("\n\n")
        screen.tell("... and a few tokens more, in turns with Transformers")
        tellings = paragraph.race(llm, tokens, screen.tell)
    except KeyboardInterrupt:
        raise typer.Exit(screen.INTERRUPTED) from None
    served = paragraph.served(llm)
    found: dict[str, Any] = {"text": text, "tellings": [one.as_dict() for one in tellings], "served": served}
    screen.show(format, [found], [_speeds(tellings), _backends(served)])
    if len(tellings) == 2:
        screen.tell(paragraph.agreement(*tellings))


def _speeds(tellings: list[Telling]) -> Table:
    table = Table("implementation")
    for heading in ("tokens", "first token, ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for one in tellings:
        table.add_row(one.implementation, str(len(one.tokens)), f"{one.first_ms:.0f}", f"{one.tokens_per_s:.1f}")
    return table


def _backends(served: list[dict[str, str]]) -> Table:
    table = Table("operator", "backend for the prompt", "backend for each token")
    for row in served:
        table.add_row(row["operator"], row["prompt"] or "-", row["token"] or "-")
    return table
