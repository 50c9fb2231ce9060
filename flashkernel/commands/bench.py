"""Operators timed: `flashkernel bench` against baselines, `flashkernel tune` over launch configs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.bench_host import bench_first_use, bench_host
from flashkernel.commands.options import Cases, Commit, Direction, Dtypes, Formatted, Names, OnDevice, Save
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    import torch

    from flashkernel.core.op import Case, Op
    from flashkernel.core.roofline import Ceilings
    from flashkernel.lab import precompile
    from flashkernel.lab.bench import BenchOptions
    from flashkernel.lab.precompile import Work
    from flashkernel.lab.results import Record, ResultsFile
    from flashkernel.lab.suites import Suite

CPU_BUDGET_S, GPU_BUDGET_S = 0.1, 1.0
LADDER_SIZE = 4096


class Autotuned(str, Enum):
    sample = "sample"
    all = "all"


def bench(
    names: Names = None,
    case: Cases = None,
    dtype: Dtypes = None,
    direction: Annotated[list[Direction] | None, typer.Option(help="Only this direction; repeatable.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this backend or baseline; repeatable.")] = None,
    device: OnDevice = None,
    save: Save = None,
    budget: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds per measurement; 1 on a GPU, 0.1 on a CPU.")
    ] = None,
    scale: Annotated[
        int | None, typer.Option(min=0, help="Shrink cases to this many input elements; 0: never. On a CPU 2^20.")
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Time the host side of calls instead, against torch's own functions.")
    ] = False,
    first_use: Annotated[
        bool,
        typer.Option(
            "--first-use", help="Time the first compile of CUDA C++ kernels instead; --device h200 needs no GPU."
        ),
    ] = False,
    suite: Annotated[
        str | None, typer.Option(help="A grid over several operators, saved as DIR/<suite>.json: turing, moe.")
    ] = None,
    max_autotune: Annotated[
        Autotuned | None,
        typer.Option("--max-autotune", help="Of a suite: time torch.compile(mode='max-autotune') on these cases too."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile kernels ahead; 0: none. Of a suite on a GPU one per core."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --save: leave out what the file has of this commit and versions.")
    ] = False,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="With --save: leave out the cases that DIR has our times of, of any commit and in any file, and with "
            "--impl and --max-autotune theirs.",
        ),
    ] = False,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Time the rungs of the GEMM ladder instead, against cuBLAS.")
    ] = False,
    size: Annotated[int | None, typer.Option(min=1, help=f"Of --ladder: M, N and K, {LADDER_SIZE} by default.")] = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Time operators against their baselines in one run; each is checked first. Ctrl-C keeps finished results."""
    if host:
        return bench_host(names, case, device, save, commit, format)
    if first_use:
        return bench_first_use(names, device, save, commit, format)
    if ladder:
        return _bench_ladder(names, size or LADDER_SIZE, dtype, device, save, budget, commit, format)
    with progress.report_errors():
        from flashkernel.lab import precompile, selection, suites
        from flashkernel.lab.bench import BenchOptions

        target = selection.device(device)
        on_cpu = target.type == "cpu"
        most = scale if scale is not None else selection.CPU_ELEMENTS if on_cpu else 0
        grid = None if suite is None else suites.find(suite)
        if size is not None:
            raise ValueError("--size goes with --ladder; --case selects the sizes of operators")
        if max_autotune and grid is None:
            raise ValueError("--max-autotune goes with --suite; --impl compile times torch.compile's default mode")
        if resume and save is None:
            raise ValueError("--resume goes with --save, whose folder has the finished cases")
        if missing and (save is None or resume):
            raise ValueError("--missing goes with --save, whose folder has the cases, and without --resume")
        chosen = selection.operators(names or (None if grid is None else list(grid.cases)))
        benches = (lambda op: op.benches) if grid is None else (lambda op: grid.cases.get(op.name, ()))
        hardware = selection.hardware(str(target))
        work = selection.bench_work(chosen, case, selection.dtypes(dtype), hardware, most, benches)
        options = BenchOptions(
            target,
            directions=[one.value for one in direction] if direction else None if grid is None else grid.directions,
            implementations=selection.implementations(chosen, impl),
            budget_s=budget or (CPU_BUDGET_S if on_cpu else GPU_BUDGET_S if grid is None else grid.budget_s),
            baselines=[suites.MAX_AUTOTUNE] if max_autotune else [],
        )
    if most:
        progress.log(
            f"cases are shrunk to at most {most} input elements, as in 16384x4096~256x4096; --scale 0 does not"
        )
    ahead = workers if workers is not None else 0 if on_cpu or grid is None else precompile.default_workers()
    run = _Run(
        work,
        options,
        save,
        commit,
        grid,
        autotune_all=max_autotune is Autotuned.all,
        workers=ahead,
        resume=resume,
        missing=missing,
    )
    with progress.progress_bar(len(work)) as bar, progress.keep_results() as stopped:
        run.measure(bar)
    output.show_records(format, run.records, selection.hardware(str(target)).name, run.ceilings)
    for note in run.notes:
        progress.log(note)
    nothing = not run.records and not stopped.code and not run.resumed
    if nothing:
        progress.log("nothing was timed: no selected implementation can run the selected cases and directions here")
    wrong = any(record.kind == "backend" and not record.comparable for record in run.records)
    progress.exit_with(stopped, failed=wrong or nothing)


class _Run:
    """A benchmark run; its attributes keep what was measured when it is interrupted."""

    def __init__(
        self,
        work: Sequence[tuple[Op, Case, torch.dtype]],
        options: BenchOptions,
        save: Path | None,
        commit: str | None,
        suite: Suite | None = None,
        *,
        autotune_all: bool = False,
        workers: int = 0,
        resume: bool = False,
        missing: bool = False,
    ) -> None:
        self.work, self.options, self.save, self.commit, self.suite = work, options, save, commit, suite
        self.autotune_all, self.workers, self.resume, self.missing = autotune_all, workers, resume, missing
        self.records: list[Record] = []
        self.notes: dict[str, None] = {}
        self.ceilings: Ceilings | None = None
        self.resumed = 0  # cases left out, since the file has them

    def measure(self, bar: progress.Bar) -> None:
        """Measures case by case; a case is saved once all of its implementations are measured."""
        from flashkernel.core import roofline
        from flashkernel.lab.bench import frozen_objects
        from flashkernel.lab.results import ResultsFile

        bar.describe("measuring memory bandwidth and matmul rates")
        dtypes = list(dict.fromkeys(dtype for _, _, dtype in self.work))
        self.ceilings = roofline.ceilings(self.options.device, dtypes)
        options = replace(
            self.options, ceilings=self.ceilings, on_progress=bar.describe, on_note=lambda text: self._note(text)
        )
        names = dict.fromkeys(self._file(op) for op, _, _ in self.work)
        with progress.report_errors():
            files = {name: ResultsFile.in_folder(self.save, name, self.ceilings, self.commit) for name in names}
        work = [(op, case, dtype, self._options_of(op, case, options)) for op, case, dtype in self.work]
        if self.resume or self.missing:
            work = self._unfinished(work, files, bar)
        self._compile_ahead(work, bar)
        with frozen_objects():
            self._measure(work, files, bar)

    def _measure(self, work: Sequence[Work], files: Mapping[str, ResultsFile | None], bar: progress.Bar) -> None:
        from flashkernel.lab import tables
        from flashkernel.lab.bench import bench as measure

        for op, case, dtype, of_op in work:
            of_case = []
            for record in measure(op, case, dtype, of_op):
                of_case.append(record)
                self.records.append(record)
            file = files[self._file(op)]
            if of_case and file is not None:
                file.add(of_case)
            bar.advance()
            if of_case:
                bar.log_line(tables.line(of_case))

    def _unfinished(
        self, work: Sequence[Work], files: Mapping[str, ResultsFile | None], bar: progress.Bar
    ) -> list[Work]:
        """The work that no earlier run of this commit (of any, if only what is missing is wanted) has finished."""
        from flashkernel.lab.bench import candidates
        from flashkernel.lab.results import finished, timed

        there = {name: file for name, file in files.items() if file is not None}
        whole = timed(self.save) if self.missing and self.save is not None else {}
        done = {name: whole if self.missing else finished(file.path, file.header) for name, file in there.items()}
        left = []
        for op, case, dtype, options in work:
            key = (op.name, case.name, str(dtype).removeprefix("torch."))
            found = done[self._file(op)].get(key, set())
            wanted = {candidate.name for candidate in candidates(op, case, dtype, options)} if found else set()
            if self.missing:  # else what an earlier commit had no baseline of would count
                asked = (baseline.name for baseline in self.options.baselines)
                wanted &= {*(self.options.implementations or ()), *asked}
            if found and wanted <= found:
                bar.advance()
            else:
                left.append((op, case, dtype, options))
        self.resumed = len(work) - len(left)
        progress.log(f"{self.resumed} of {len(work)} cases are in the file; {len(left)} are left")
        return left

    def _compile_ahead(self, work: Sequence[Work], bar: progress.Bar) -> None:
        """Compiles kernels in worker processes; what fails there is compiled when it is timed."""
        from flashkernel.lab import precompile

        planned = precompile.batches(work) if self.workers else []
        if not planned:
            return
        if self.options.baselines:
            importlib.import_module("torch._inductor.compile_fx")  # seconds, that the first timed case would take
        total, done = sum(map(len, planned)), 0

        def report(task: precompile.Task) -> None:
            nonlocal done
            done += 1
            bar.describe(f"compiling ahead, {done} of {total} calls: {task}")
            if done % 50 == 0 or done == total:
                bar.log_line(f"compiling ahead in {self.workers} processes: {done} of {total} calls")

        bar.log_line(f"compiling ahead in {self.workers} processes: {total} calls")
        for failure in precompile.run(planned, self.options, self.workers, report):
            self._note(failure)

    def _file(self, op: Op) -> str:
        """A suite has one file for all its operators."""
        return op.name if self.suite is None else self.suite.name

    def _options_of(self, op: Op, case: Case, options: BenchOptions) -> BenchOptions:
        """A suite times implementations of its own choice, unless some are named, and max-autotune on some cases."""
        if self.suite is None or options.implementations:
            return options
        autotuned = options.baselines if self.autotune_all or self.suite.times_autotuned(case) else ()
        named = (*self.suite.implementations[op.name], *(baseline.name for baseline in autotuned))
        return replace(options, implementations=named)

    def _note(self, text: str) -> None:
        self.notes[text] = None


def _bench_ladder(
    names: Sequence[str] | None, size: int, dtypes: Sequence[str] | None, device: str | None, save: Path | None,
    budget: float | None, commit: str | None, format: Format,
) -> None:  # fmt: skip
    """Times the rungs of the GEMM ladder and cuBLAS; exits 1 if a result is wrong."""
    with progress.report_errors():
        from flashkernel.core import roofline
        from flashkernel.lab import ladder, ladder_tables, selection
        from flashkernel.lab.results import ResultsFile

        if names not in (None, [], ["gemm"]):
            given = ", ".join(names or ())
            raise ValueError(f"--ladder times the rungs of the GEMM ladder, not {given}; name gemm or nothing")
        target = selection.device(device)
        if target.type != "cuda":
            raise ValueError("--ladder times GPU kernels; this machine has no GPU, or --device names none")
        kinds = selection.dtypes(dtypes or ["float16"]) or []
    records: list[Record] = []
    ceilings: Ceilings | None = None
    with progress.progress_bar(len(kinds)) as bar, progress.keep_results() as stopped:
        bar.describe("measuring memory bandwidth and matmul rates")
        ceilings = roofline.ceilings(target, kinds)
        with progress.report_errors():
            file = ResultsFile.in_folder(save, ladder_tables.OP, ceilings, commit)
        for kind in kinds:
            of_product = []
            for record in ladder.measure(size, kind, target, ceilings, budget or GPU_BUDGET_S, bar.describe):
                of_product.append(record)
                records.append(record)
            if file is not None:
                file.add(of_product)
            bar.advance()
    output.show_records(format, records, selection.hardware(str(target)).name, ceilings)
    progress.exit_with(stopped, failed=any(not record.correct for record in records))


def tune(
    names: Names = None,
    case: Cases = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="Search this backend's kernels, not those that dispatch picks.")
    ] = None,
    format: Formatted = Format.table,
) -> None:
    """Search launch configs of benchmark cases on this GPU; the best are saved to disk and used from then on."""
    with progress.report_errors():
        from flashkernel.lab import selection, tuning

        target = selection.device(device)
        if target.type != "cuda":
            progress.log("tune searches launch configs of GPU kernels; this machine has no GPU, or --device names none")
            raise typer.Exit(1)
        chosen, hardware = selection.operators(names), selection.hardware(str(target))
        work = selection.bench_work(chosen, case, selection.dtypes(dtype), hardware, 0)
    results: list[tuning.TuningResult] = []
    with progress.progress_bar(len(work)) as bar, progress.keep_results() as stopped:
        tuning.compile_ahead(work, hardware, backend, bar.describe)
        for op, one, kind in work:
            for result in tuning.tune_case(op, one, kind, target, bar.describe, backend):
                results.append(result)
                bar.log_line(f"{result.op} {result.case} {result.kernel}: {result.ms:.4f} ms, {result.config}")
            bar.advance()
    title = f"median time of the whole call on {hardware.name}"
    table = Table("operator", "case", "kernel", "best config", "best, ms", "default, ms", title=title)
    for result in results:
        times = (f"{result.ms:.4f}", f"{result.default_ms:.4f}")
        table.add_row(result.op, escape(result.case), result.kernel, escape(result.config), *times)
    output.show(format, [result.as_dict() for result in results], [table])
    progress.exit_with(stopped, failed=False)
