"""What was measured: tables, plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flashkernel.commands.options import Formatted
from flashkernel.lab import screen
from flashkernel.lab.screen import Format


def tables(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RESULTS]", help="Print the tables of this folder or file.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Regenerate the result blocks in README.md and the docs.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a result block is stale; writes nothing.")] = False,
    root: Annotated[Path, typer.Option(help="The project's folder, which holds results/ and README.md.")] = Path("."),
    format: Formatted = Format.table,
) -> None:
    """Print saved results, or regenerate the tables in the docs from them."""
    from flashkernel.lab import tables as tabling
    from flashkernel.lab.results import replace_text

    with screen.clear_errors():
        if not write and not check:
            for found in _saved(folder or root / "results"):
                screen.show_records(format, found["records"])
            return
        stale = []
        for path in tabling.documents(root):
            text = path.read_text(encoding="utf-8")
            fresh = tabling.regenerate(text, root / "results")
            if fresh != text:
                stale.append(path)
                if write and not check:
                    replace_text(path, fresh)
    for path in stale:
        screen.tell(f"{path}: " + ("stale; run flashkernel tables --write" if check else "written"))
    if check and stale:
        raise typer.Exit(1)


def plot(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results folder or one of its files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the PNG files go.")] = Path("."),
) -> None:
    """Draw a chart of each operator's results: the roofline, and shares of the roof."""
    from flashkernel.lab.plot import PlotError
    from flashkernel.lab.plot import plot as draw

    with screen.clear_errors():
        for found in _saved(folder):
            if not found["records"] or found["records"][0].op == "e2e":
                continue  # whole models have no place under an operator's roof
            path = out / f"{found['records'][0].op}.png"
            try:
                draw(found, path)
            except PlotError as error:
                screen.tell(str(error))
                raise typer.Exit(1) from None
            screen.out().print(str(path), highlight=False, soft_wrap=True)


def _saved(place: Path) -> list[dict[str, Any]]:
    """Results files at a path: the file itself, those of a folder, or those of its folders."""
    from flashkernel.lab.results import load, load_folder

    if place.is_file():
        return [load(place)]
    found = [file for folder in (place, *sorted(place.glob("*/"))) for file in load_folder(folder).values()]
    if not found:
        raise ValueError(f"{place} holds no results; flashkernel bench --save {place} makes some")
    return found
