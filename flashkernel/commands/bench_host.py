"""What `flashkernel bench` times on the host: calls until they return (`--host`), first compiles (`--first-use`)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    from flashkernel.lab.results import Record


def bench_host(
    names: Sequence[str] | None, only: Sequence[str] | None, device: str | None, save: Path | None, commit: str | None,
    format: Format,
) -> None:  # fmt: skip
    """Times the host side of public functions, and on a GPU of CUDA C++ launches; exits 1 if a result is wrong."""
    with progress.report_errors():
        from flashkernel.core import cpp, env, roofline
        from flashkernel.core.native import build
        from flashkernel.lab import host, host_cases, launch_cost, selection
        from flashkernel.lab.results import ResultsFile

        target = selection.device(device)
        wanted = {op.name for op in selection.operators(names)}
        known = [*host_cases.CASES, *(() if target.type == "cpu" else launch_cost.CASES)]
        chosen = _matching(only, [case.name for case in known])
        cases = [case for case in host_cases.CASES if case.op in wanted and case.name in chosen]
        launches = [case for case in known[len(host_cases.CASES) :] if case.op in wanted and case.name in chosen]
    records: list[Record] = []
    if env.replaying_in_cpp():
        progress.log("compiling the extension that replays calls in C++, unless it was compiled before")
        try:
            build.build()
        except cpp.CompileError as error:
            progress.log(str(error))
            raise typer.Exit(1) from None
    if target.type == "cpu":
        progress.log(
            f"on a CPU the functions compute before they return, so {len(cases)} functions may take many minutes; "
            "name operators or --case for fewer"
        )
    with progress.progress_bar(len(cases) + len(launches)) as bar, progress.keep_results() as stopped:
        file = None
        if save is not None:
            bar.describe("measuring memory bandwidth and matmul rate")
            with progress.report_errors():
                file = ResultsFile.in_folder(save, host.OP, roofline.ceilings(target, [host.dtype_of(target)]), commit)
        measured = chain(host.measure(cases, target), launch_cost.measure(launches, target))
        for case, found in zip([*cases, *launches], measured):
            bar.describe(case.name)
            bar.advance()
            records += found
            if file is not None:
                file.add(found)
    name = selection.hardware(str(target)).name
    output.show(format, [record.as_dict() for record in records], output.host_rich_tables(records, name))
    progress.exit_with(stopped, failed=any(not record.correct for record in records))


def _matching(patterns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """The names that match one of the globs; ValueError for a glob that matches none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no case matches {pattern!r}; known cases: {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def bench_first_use(
    names: Sequence[str] | None, device: str | None, save: Path | None, commit: str | None, format: Format
) -> None:
    """Times the first compile of CUDA C++ kernels for a GPU that need not be here; exits 1 where one takes too long."""
    with progress.report_errors():
        from flashkernel.lab import first_use, first_use_tables, selection
        from flashkernel.lab.results import ResultsFile, describe_run

        gpu = selection.hardware(device)
        wanted = None if names is None else [op.name for op in selection.operators(names)]
        found = first_use.instances(gpu, wanted)
        path = None if save is None else save / f"{first_use_tables.OP}.json"
        file = None if path is None else ResultsFile(path, describe_run(gpu.name, {}, commit))
    records: list[Record] = []
    with progress.progress_bar(len(found)) as bar, progress.keep_results() as stopped, progress.report_errors():
        for of_kernel in first_use.measure(found, gpu, bar.describe):
            records += of_kernel
            if file is not None:
                file.add(of_kernel)
            bar.advance()
            bar.log_line(" ".join(first_use_tables.rows(of_kernel)[0]))
    output.show(format, [record.as_dict() for record in records], [first_use_tables.rich_table(records, gpu.name)])
    late = first_use_tables.late(records)
    for message in late:
        progress.log(message)
    progress.exit_with(stopped, failed=bool(late))
