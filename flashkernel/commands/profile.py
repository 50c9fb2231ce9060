"""Kernels under a profiler: `flashkernel profile`; what they would take on another GPU: `flashkernel roofline`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flashkernel.commands.options import Cases, Commit, Dtypes, Formatted, Names, OnDevice, Save
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    import torch

    from flashkernel.core.device import Device
    from flashkernel.core.roofline import Ceilings
    from flashkernel.lab.profile_records import ProfileRecord
    from flashkernel.lab.profile_session import Outcome
    from flashkernel.lab.profile_worker import Target
    from flashkernel.lab.results import ResultsFile

WORKERS, WORKER_GIB, WARM_UP_TIMEOUT_S = 8, 16, 300.0


class Tool(str, Enum):
    auto = "auto"
    ncu = "ncu"
    torch = "torch"


def profile(
    names: Names = None,
    every: Annotated[bool, typer.Option("--all", help="Every operator on every kernel backend.")] = False,
    case: Cases = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this backend, or a build such as cuda_sm75; repeatable. By default all with kernels."),
    ] = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    tool: Annotated[Tool, typer.Option(help="auto: Nsight Compute if installed, else torch's profiler.")] = Tool.auto,
    save: Save = None,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="With --save: leave out the passes of operators on backends (with --case, of cases) that DIR has "
            "profiles of.",
        ),
    ] = False,
    show: Annotated[
        Path | None, typer.Option("--show", metavar="DIR", help="Print the profiles saved in this results folder.")
    ] = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Profile kernels with Nsight Compute: occupancy, throughput, stalls, registers, roofline, and what bounds them.

    Without --case, the most representative benchmark case is profiled. --save keeps DIR/profiles/<backend>.json; Ctrl-C
    keeps what was profiled, and the same command with --missing profiles the rest.
    """
    if show is not None:
        return _show(show, names, backend, format)
    with progress.report_errors():
        from flashkernel.lab import profile_session, profile_targets, selection

        if missing and save is None:
            raise ValueError("--missing goes with --save, whose folder has the profiles")
        if not names and not every and not missing:
            raise ValueError("name the operators to profile, or give --all or --missing")
        target = selection.device(device)
        hardware, chosen = selection.hardware(str(target)), selection.operators(names)
        wanted = selection.implementations(chosen, backend)
        notes: list[str] = []
        work = list(profile_targets.select(chosen, case, wanted, selection.dtypes(dtype), hardware, notes.append))
        ncu = None if tool is Tool.torch or target.type == "cpu" else profile_session.find_ncu()
        if ncu is None and tool is Tool.ncu:
            raise ValueError("ncu is not on the PATH, or the device is no GPU; --tool torch gives names and durations")
        selected = len(work)
        if missing and save is not None:
            work = _missing(work, save, ncu, ["case"] * bool(case) + ["dtype"] * bool(dtype))
    for note in notes:
        progress.log(note)
    if not selected:
        progress.log("nothing was profiled: no selected backend can run the selected cases here")
        raise typer.Exit(1)
    if missing:
        progress.log(f"{save} has profiles of {selected - len(work)} of {selected}; {len(work)} are left")
        if not work:
            return
    if ncu is None and tool is not Tool.torch and target.type != "cpu":
        progress.log("ncu (Nsight Compute) is not on the PATH: torch's profiler gives names and durations, no counters")
    run = _Run(work, target, hardware, ncu, save, commit)
    # Each target is a step when it is warmed up, and another when it is profiled.
    with progress.progress_bar(2 * len(work)) as bar, progress.keep_results() as stopped:
        run.measure(bar)
    output.show(format, [record.as_dict() for record in run.records], [_table(run.records, hardware.name)])
    failed = [record for record in run.records if record.error is not None]
    for record in failed:
        progress.log(f"{record.op} {record.case} {record.implementation} {record.direction}: {record.error}")
    progress.exit_with(stopped, failed=bool(failed) or not (run.records or stopped.code))


def _missing(work: Sequence[Target], save: Path, ncu: str | None, fields: Sequence[str]) -> list[Target]:
    """The targets without a profile in the results folder; of torch's profiler's where there is no ncu."""
    from flashkernel.lab import profile_targets, results

    files = results.load_folder(save / results.PROFILES).values()
    done = profile_targets.profiled(files, ("ncu", "torch") if ncu is None else ("ncu",))
    return profile_targets.missing(work, done, *fields)


def _table(records: Sequence[ProfileRecord], device: str) -> Table:
    from flashkernel.lab import profile_tables

    return profile_tables.rich_table(records, device)


def _show(folder: Path, names: Sequence[str] | None, backends: Sequence[str] | None, format: Format) -> None:
    with progress.report_errors():
        from flashkernel.lab import results

        files = results.load_folder(folder / results.PROFILES)
        if not files:
            raise ValueError(f"{folder} holds no profiles; flashkernel profile --all --save {folder} makes some")
        kept = [
            record
            for name, file in files.items()
            for record in file["records"]
            if (not names or record.op in names) and (not backends or name in backends)
        ]
    device = next(iter(files.values()))["device"]
    output.show(format, [record.as_dict() for record in kept], [_table(kept, device)])


def roofline(
    names: Names = None,
    device: Annotated[str, typer.Option(help="The GPU to estimate for, which need not be here: t4.")] = "t4",
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="A device's results folder.")] = Path(
        "results/h200"
    ),
    format: Formatted = Format.table,
) -> None:
    """Estimate kernel times on another GPU from its data sheet and the efficiency measured at hand.

    An estimate is the GPU's roofline time divided by the share of the roof that was reached where it was measured.
    """
    with progress.report_errors():
        from flashkernel.lab import estimates, results, selection

        wanted = {op.name for op in selection.operators(names)}
        files = results.load_folder(source)
        found = [one for one in estimates.estimates(files, device.lower()) if one.op in wanted]
        if not found:
            raise ValueError(f"{source} has no record that an estimate for {device} can be made from")
    output.show(format, [one.as_dict() for one in found], [estimates.rich_table(found, device.lower())])


class _Run:
    """A run of the profiler; `records` keeps what was profiled when it is interrupted."""

    def __init__(
        self,
        work: Sequence[Target],
        device: torch.device,
        hardware: Device,
        ncu: str | None,
        save: Path | None,
        commit: str | None,
    ) -> None:
        self.work, self.device, self.hardware, self.ncu = work, device, hardware, ncu
        self.save, self.commit = save, commit
        self.records: list[ProfileRecord] = []
        self.files: dict[str, ResultsFile | None] = {}

    def measure(self, bar: progress.Bar) -> None:
        """Measures the ceilings, warms up in parallel, then profiles; records are saved as each process ends."""
        from flashkernel.core import roofline
        from flashkernel.lab.results import PROFILES, ResultsFile

        bar.describe("measuring memory bandwidth and matmul rates")
        dtypes = list(dict.fromkeys(target.dtype for target in self.work))
        ceilings = roofline.ceilings(self.device, dtypes)
        with progress.report_errors():
            for name in dict.fromkeys(target.implementation for target in self.work):
                folder = None if self.save is None else self.save / PROFILES
                self.files[name] = ResultsFile.in_folder(folder, name, ceilings, self.commit)
        ready = self._warm_up(bar, ceilings)
        try:
            self._profile(ready, self.ncu, ceilings, bar)
        except _ToolFailure as failure:
            progress.log(f"ncu: {failure}; torch's profiler gives names and durations, no counters")
            self._profile(failure.left, None, ceilings, bar)

    def _warm_up(self, bar: progress.Bar, ceilings: Ceilings) -> list[Target]:
        """Compiles what all targets need, in several processes; the targets that ran. One target needs no such run."""
        from flashkernel.core.worker_pool import WorkerPool
        from flashkernel.lab.profile_session import Outcome
        from flashkernel.lab.profile_worker import warm_up

        if len(self.work) < 2:
            bar.advance(len(self.work))
            return list(self.work)
        room = self.hardware.memory_bytes // (WORKER_GIB * 2**30)
        workers = max(1, min(WORKERS, (os.cpu_count() or 2) // 2, room, len(self.work)))
        pool, failures = WorkerPool(warm_up, (str(self.device),), workers, WARM_UP_TIMEOUT_S), {}
        for target, done, reason in pool.run([one] for one in self.work):
            error = reason if done is None else done.error
            bar.next(f"compiled {target.op} {target.case} {target.implementation}")
            if error:
                failures[target] = error
                self._keep(target, Outcome(error=error), "ncu" if self.ncu else "torch", ceilings)
        bar.advance(len(failures))
        return [target for target in self.work if target not in failures]

    def _profile(self, work: Sequence[Target], ncu: str | None, ceilings: Ceilings, bar: progress.Bar) -> None:
        from flashkernel.lab import profile_session

        left = list(work)
        starting = "profiling {0.op} {0.case} {0.dtype} {0.implementation}".format
        try:
            for target, outcome in profile_session.run(
                work, self.device, self.hardware.arch, ncu, lambda target: bar.next(starting(target))
            ):
                left.remove(target)
                self._keep(target, outcome, "torch" if ncu is None else "ncu", ceilings)
        except profile_session.ToolError as error:
            if ncu is None:
                raise
            raise _ToolFailure(str(error), left) from None

    def _keep(self, target: Target, outcome: Outcome, tool: str, ceilings: Ceilings) -> None:
        """Adds the records of a target, and saves them."""
        from flashkernel.lab import profile_targets

        made = profile_targets.records(target, outcome, tool, ceilings)
        self.records += made
        file = self.files[target.implementation]
        if file is not None and made:
            file.add(made)


class _ToolFailure(RuntimeError):
    """ncu does not run here; `left` has the targets that it did not profile."""

    def __init__(self, message: str, left: Sequence[Target]) -> None:
        super().__init__(message)
        self.left = list(left)
