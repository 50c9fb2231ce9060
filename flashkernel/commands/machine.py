"""What is installed and which backend runs: doctor, ops, explain."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.options import AnyDevice, Formatted, Names
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format


def doctor(format: Formatted = Format.table) -> None:
    """Show installed packages, GPUs, environment and the backend of each operator, and what to install."""
    from flashkernel.lab.doctor import diagnose

    findings = list(diagnose())
    table = Table("", "name", "status", "detail", "how to fix it")
    colors = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    topic = ""
    for found in findings:
        shown = "" if found.topic == topic else found.topic
        topic = found.topic
        status = f"[{colors[found.status]}]{found.status}[/]"
        table.add_row(shown, found.name, status, escape(found.detail), escape(found.advice))
    output.show(format, [found.as_dict() for found in findings], [table])
    if any(found.status == "broken" for found in findings):
        raise typer.Exit(1)


def ops(
    names: Names = None,
    device: AnyDevice = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the inputs; by default the one models use on the device.")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Give the reason where a backend does not support the call.")
    ] = False,
    format: Formatted = Format.table,
) -> None:
    """Show which backends support each operator on a device, and which one is the default."""
    with progress.report_errors():
        from flashkernel.core import device as devices
        from flashkernel.lab import selection

        hardware = selection.hardware(device)
        wanted = (selection.dtypes([dtype] if dtype else None) or [devices.model_dtype(hardware)])[0]
        chosen = selection.operators(names)
        answers = {op.name: selection.explain_case(op, op.benches[0], wanted, hardware) for op in chosen}
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
    output.show(format, values, [table])


def explain(
    name: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    axes: Annotated[
        list[str] | None, typer.Argument(metavar="[AXIS=SIZE]...", help="Sizes to change, as in rows=4096.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Start from this case; by default the first benchmark.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the inputs; by default the one models use on the device.")
    ] = None,
    device: AnyDevice = None,
    backend: Annotated[str | None, typer.Option(help="Explain the call with backend=... set to this one.")] = None,
    format: Formatted = Format.table,
) -> None:
    """Explain which backend a call runs on and why each other one does not. Launches and allocates nothing."""
    with progress.report_errors():
        from flashkernel.core import device as devices
        from flashkernel.lab import selection

        hardware = selection.hardware(device)
        (op,) = selection.operators([name])
        selection.implementations([op], [backend] if backend else None, baselines=False)
        wanted = (selection.dtypes([dtype] if dtype else None) or [devices.model_dtype(hardware)])[0]
        start = selection.cases([op], [case] if case else None, lambda op: (*op.benches, *op.cases))[name][0]
        answer = selection.explain_case(op, selection.with_axes(start, axes or [], op), wanted, hardware, backend)
    if format is Format.table:
        output.stdout_console().print(str(answer), markup=False, highlight=False)
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
    output.show(format, values, [])
