"""Saved results: `flashkernel tables` prints them, `flashkernel plot` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashkernel.commands.options import Formatted
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    from rich.table import Table

    from flashkernel.core.roofline import Ceilings


def tables(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RESULTS]", help="A results file or folder; by default results/.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Regenerate the result blocks in README.md and the docs.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a result block is stale; writes nothing.")] = False,
    root: Annotated[Path, typer.Option(help="The project folder, which holds results/ and README.md.")] = Path("."),
    format: Formatted = Format.table,
) -> None:
    """Print saved results, or regenerate the tables in the docs from them. Archived results are left out."""
    from flashkernel.lab import results
    from flashkernel.lab import tables as result_tables

    with progress.report_errors():
        if not write and not check:
            where = folder or root / "results"
            others = _without_times(where)
            found = {} if where.name in results.OTHERS and others else results.find(where, required=not others)
            for file in found.values() if format is Format.table else ():
                output.show_records(format, file["records"], file["device"], _ceilings(file))
            values = [record.as_dict() for file in found.values() for record in file["records"]]
            if format is Format.table or not values:  # JSON and CSV are one document, of times where there are some
                output.show(format, [value for other, _ in others for value in other], [one for _, one in others])
            else:
                output.show(format, values, ())
            return
        stale = []
        for path in result_tables.documents(root):
            text = path.read_text(encoding="utf-8")
            fresh = result_tables.regenerate(text, root / "results")
            if fresh != text:
                stale.append(path)
                if write and not check:
                    results.replace_text(path, fresh)
    for path in stale:
        progress.log(f"{path}: " + ("stale; run flashkernel tables --write" if check else "written"))
    if check and stale:
        raise typer.Exit(1)


def plot(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results folder or one of its files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the PNG files go.")] = Path("."),
) -> None:
    """Draw a chart of each results file: rooflines of operators, tokens/s of models, host time of calls, perplexity.

    Perplexity is drawn against size, and against speed where RESULTS has both. A chart is named after its file.
    Archived results are drawn only if RESULTS names them. Exit 1 if nothing could be drawn.
    """
    from flashkernel.lab import quality, results
    from flashkernel.lab.plot import PlotError
    from flashkernel.lab.plot import plot as draw
    from flashkernel.lab.quality_plots import plot_quality, plot_quality_against_speed

    with progress.report_errors():
        kept = folder if folder.name == results.QUALITY else folder / results.QUALITY
        if kept.is_file():
            path = out / f"{kept.stem}.png"
            plot_quality(quality.load(kept)["records"], path)
            output.stdout_console().print(str(path), highlight=False, soft_wrap=True)
        if kept == folder:
            return
        files = results.find(folder, required=not kept.is_file())
        drawings = {out / f"{name}.png": partial(draw, file) for name, file in files.items()}
        if kept.is_file():
            drawings[out / "quality_speed.png"] = partial(
                plot_quality_against_speed, quality.load(kept)["records"], files
            )
        drawn = kept.is_file()
        for path, draw_one in drawings.items():
            try:
                draw_one(path)
            except PlotError as error:
                progress.log(str(error))
                continue
            drawn = True
            output.stdout_console().print(str(path), highlight=False, soft_wrap=True)
        if not drawn:
            raise typer.Exit(1)


def _without_times(path: Path) -> list[tuple[list[Mapping[str, Any]], Table]]:
    """Perplexities and losses by router at a path: the values and the table of each file."""
    from flashkernel.lab import moe_study, quality, results
    from flashkernel.lab.tables import rich_from_markdown

    found: list[tuple[list[Mapping[str, Any]], Table]] = []
    for file in [path] if path.is_file() else [path / results.QUALITY, path / results.MOE_STUDY]:
        if file.name == results.QUALITY and file.is_file():
            records = quality.load(file)["records"]
            title = "perplexity, and bits of an element with its scales"
            found.append(([asdict(one) for one in records], rich_from_markdown(quality.markdown(records), title)))
        elif file.name == results.MOE_STUDY and file.is_file():
            study = moe_study.load(file)
            title = f"loss and utilization of experts by router, {study['device']}"
            found.append((study["routers"], rich_from_markdown(moe_study.markdown(study["routers"]), title)))
    return found


def _ceilings(file: dict[str, Any]) -> Ceilings | None:
    from flashkernel.core.roofline import Ceilings

    return Ceilings.from_dict(file["ceilings"]) if file["records"] and file["ceilings"] else None
