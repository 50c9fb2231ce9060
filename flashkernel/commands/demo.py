"""`flashkernel demo`: a text written by a small model, or every operator checked and timed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashkernel.commands.options import Formatted, Names, OnDevice
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    import torch

    from flashkernel.lab.demo_operators import Summary
    from flashkernel.lab.demo_text import DemoTiming


def demo(
    names: Names = None,
    device: OnDevice = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check every operator against its reference, and time it against PyTorch.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --check: one dtype, and the forward pass alone is timed.")
    ] = False,
    random: Annotated[bool, typer.Option("--random", help="Use a tiny random model; downloads nothing.")] = False,
    format: Formatted = Format.table,
) -> None:
    """Let a small model write a text on this machine; show its speed and the backend of each operator."""
    with progress.report_errors():
        from flashkernel.lab import selection

        target = selection.device(device)
        if not check and (names or quick):
            raise ValueError("demo: operators and --quick belong to --check; without it a model writes a text")
        if not check:
            _text(target, not random, format)
            return
        chosen = selection.operators(names)
    from flashkernel.lab import demo_operators

    summaries: list[Summary] = []
    with progress.progress_bar() as bar, progress.keep_results() as stopped:
        steps = list(demo_operators.steps(chosen, target, quick, summaries))
        bar.set_completed(0, len(steps))
        for step in steps:
            bar.describe(step.title)
            step.run()
            bar.advance()
    output.show(format, [summary.as_dict() for summary in summaries], [output.demo_table(summaries)])
    failures = [message for summary in summaries for message in summary.failure_messages]
    for message in failures:
        progress.log(message)
    progress.exit_with(stopped, failed=bool(failures))


def _text(device: torch.device, fetching: bool, format: Format) -> None:
    from flashkernel.core.device import properties
    from flashkernel.lab import demo_text

    llm = demo_text.open_model(device, progress.log, fetching)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    name = "A random model" if llm.config.architecture == "random" else "SmolLM2-135M-Instruct"
    progress.log(f"{name} in {dtype} on {properties(device).name}\n\n{demo_text.QUESTION}\n")
    text, tokens = "", []
    try:
        for event in demo_text.write(llm):
            text += event.text
            tokens += [] if event.token_id is None else [event.token_id]
            if format is Format.table:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        if format is Format.table:
            sys.stdout.write("\n\n")
        progress.log("... timing the engine and Transformers alternately")
        timings = demo_text.time_runners(llm, tokens, progress.log)
    except KeyboardInterrupt:
        raise typer.Exit(progress.INTERRUPTED) from None
    used = demo_text.backends_used(llm)
    found: dict[str, Any] = {"text": text, "timings": [one.as_dict() for one in timings], "backends": used}
    output.show(format, [found], [_speeds(timings), _backends(used)])
    if len(timings) == 2:
        progress.log(demo_text.agreement(llm, *timings))


def _speeds(timings: list[DemoTiming]) -> Table:
    table = Table("implementation")
    for heading in ("tokens", "first token, ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for one in timings:
        table.add_row(one.implementation, str(len(one.tokens)), f"{one.ttft_ms:.0f}", f"{one.tokens_per_s:.1f}")
    return table


def _backends(used: list[dict[str, str]]) -> Table:
    table = Table("operator", "backend for the prompt", "backend for each token")
    for row in used:
        table.add_row(row["operator"], row["prompt"] or "-", row["token"] or "-")
    return table
