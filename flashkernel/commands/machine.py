"""What there is: doctor, ops, explain."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.options import AnyDevice, Formatted, Names
from flashkernel.lab import screen
from flashkernel.lab.screen import Format


def doctor(format: Formatted = Format.table) -> None:
    """Say what is installed, what the hardware offers, what will be used and what is missing."""
    from flashkernel.lab.doctor import examine

    findings = list(examine())
    table = Table("", "name", "status", "detail", "to get it")
    colours = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    topic = ""
    for found in findings:
        shown = "" if found.topic == topic else found.topic
        topic = found.topic
        status = f"[{colours[found.status]}]{found.status}[/]"
        table.add_row(shown, found.name, status, escape(found.detail), escape(found.advice))
    screen.show(format, [found.as_dict() for found in findings], [table])
    if any(found.status == "broken" for found in findings):
        raise typer.Exit(1)


def ops(
    names: Names = None,
    device: AnyDevice = None,
    dtype: Annotated[str | None, typer.Option(help="Ask for this dtype; by default what models use there.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Give the reason where a backend cannot serve.")] = False,
    format: Formatted = Format.table,
) -> None:
    """Show which backends serve each operator, and which one is the default."""
    with screen.clear_errors():
        from flashkernel.lab import selection

        hardware = selection.hardware(device)
        wanted = (selection.dtypes([dtype] if dtype else None) or [selection.default_dtype(hardware)])[0]
        chosen = selection.operators(names)
        answers = {op.name: selection.question(op, op.benches[0], wanted, hardware) for op in chosen}
        backends = list(dict.fromkeys(backend.name for op in chosen for backend in op.backends))
    values = [
        {
            "op": name,
            "backend": verdict.backend,
            "status": "default" if verdict.backend == answer.chosen else "no" if verdict.reason else "yes",
            "reason": verdict.reason or "",
        }
        for name, answer in answers.items()
        for verdict in answer.verdicts
    ]
    table = Table(
        "operator", *backends, title=f"{hardware.name}, {str(wanted).removeprefix('torch.')}", title_justify="left"
    )
    looks = {"default": "[bold green]default[/]", "yes": "[green]yes[/]", "no": "[red]no[/]", "": "[dim]-[/]"}
    for op in chosen:
        mine = {value["backend"]: value for value in values if value["op"] == op.name}
        cells = []
        for backend in backends:
            value = mine.get(backend, {"status": "", "reason": ""})
            reason = f": {escape(value['reason'])}" if why and value["reason"] else ""
            cells.append(looks[value["status"]] + reason)
        table.add_row(op.name, *cells)
    screen.show(format, values, [table])


def explain(
    name: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    axes: Annotated[list[str] | None, typer.Argument(metavar="[AXIS=SIZE]...", help="Sizes that differ.")] = None,
    case: Annotated[str | None, typer.Option(help="Start from this case; by default the first benchmark.")] = None,
    dtype: Annotated[str | None, typer.Option(help="The inputs' dtype; by default what models use there.")] = None,
    device: AnyDevice = None,
    backend: Annotated[str | None, typer.Option(help="Ask what happens where this backend is asked for.")] = None,
    format: Formatted = Format.table,
) -> None:
    """Say which backend a call would run on, and why not each other one. Nothing is launched or allocated."""
    with screen.clear_errors():
        from flashkernel.lab import selection

        hardware = selection.hardware(device)
        (op,) = selection.operators([name])
        selection.implementations([op], [backend] if backend else None, baselines=False)
        wanted = (selection.dtypes([dtype] if dtype else None) or [selection.default_dtype(hardware)])[0]
        start = selection.cases([op], [case] if case else None, lambda op: (*op.benches, *op.cases))[name][0]
        answer = selection.question(op, selection.with_axes(start, axes or [], op), wanted, hardware, backend)
    if format is Format.table:
        screen.out().print(str(answer), markup=False, highlight=False)
        return
    values = [
        {
            "op": op.name,
            "backend": verdict.backend,
            "chosen": verdict.backend == answer.chosen,
            "reason": verdict.reason or "",
        }
        for verdict in answer.verdicts
    ]
    screen.show(format, values, [])
