"""Whether operators are right, and how fast they and models are: check, bench, step, e2e, tune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.commands.options import Cases, Commit, Direction, Dtypes, Formatted, ModelDtype, Names, OnDevice
from flashkernel.commands.random_check import (
    Limits,
    RandomCalls,
    RandomSeconds,
    RandomSeed,
    RandomSizes,
    RandomTimeout,
    RandomWorkers,
    check_random,
)
from flashkernel.lab import screen
from flashkernel.lab.screen import Format

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID

    from flashkernel.core.op import Case, Op
    from flashkernel.lab.bench import Settings
    from flashkernel.lab.results import Record

CPU_BUDGET_S, GPU_BUDGET_S = 0.1, 1.0


def check(
    names: Names = None,
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend; repeatable.")] = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    case: Cases = None,
    random: Annotated[bool, typer.Option("--random", help="Check random calls, drawn from the declarations.")] = False,
    seconds: RandomSeconds = None,
    calls: RandomCalls = None,
    seed: RandomSeed = None,
    sizes: RandomSizes = None,
    workers: RandomWorkers = None,
    timeout: RandomTimeout = 120.0,
    format: Formatted = Format.table,
) -> None:
    """Run the declared test cases of operators on this machine, or random calls; exit 1 if one fails.

    Random calls run in worker processes; each failure is printed with the command that repeats it.
    """
    if random or any(value is not None for value in (seconds, calls, seed, sizes, workers)):
        if not random or case or dtype:
            screen.tell(
                "--random draws cases and dtypes itself; leave --case and --dtype out"
                if random
                else "--seconds, --calls, --seed, --sizes and --workers belong to --random"
            )
            raise typer.Exit(2)
        limits = Limits(seconds, calls, seed, sizes.value if sizes else None, workers, timeout)
        return check_random(names, backend, device, limits, format)
    from flashkernel.lab import checks

    with screen.clear_errors():
        from flashkernel.lab import selection

        place = selection.device(device)
        chosen = selection.operators(names)
        backends = selection.implementations(chosen, backend, baselines=False)
        dtypes = selection.dtypes(dtype)
        cases = selection.cases(chosen, case, lambda op: op.cases)
    outcomes: list[checks.Outcome] = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        tasks = [task for op in chosen for task in checks.tasks(op, cases[op.name], dtypes, backends, place)]
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=str(task) if isinstance(task, checks.Task) else "")
            outcomes.append(checks.run(task, place) if isinstance(task, checks.Task) else task)
            progress.advance(bar)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    tables = [screen.check_summary(outcomes)]
    if failed:
        failures = Table(
            "operator", "case", "dtype", "backend", "what is wrong", title="failures", title_justify="left"
        )
        for outcome in failed:
            failures.add_row(
                outcome.op, outcome.case, outcome.dtype, outcome.backend, f"[red]{escape(outcome.message)}[/]"
            )
        tables.append(failures)
    screen.show(format, [outcome.as_dict() for outcome in outcomes], tables)
    screen.leave(stopped, failed=bool(failed))


def bench(
    names: Names = None,
    case: Cases = None,
    dtype: Dtypes = None,
    direction: Annotated[list[Direction] | None, typer.Option(help="Only this direction; repeatable.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this backend or baseline; repeatable.")] = None,
    device: OnDevice = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Merge the records into DIR/<op>.json.")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds per measurement; 1 on a GPU, 0.1 on a CPU.")
    ] = None,
    scale: Annotated[
        int | None, typer.Option(min=0, help="Shrink cases to this many input elements; 0: never. On a CPU 2^20.")
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Time the host's part of calls instead, beside torch's own calls.")
    ] = False,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Time operators against their baselines, all in one run, each checked first. Ctrl-C keeps what was measured."""
    if host:
        return _bench_host(names, case, device, save, commit, format)
    with screen.clear_errors():
        from flashkernel.lab import selection
        from flashkernel.lab.bench import Settings

        place = selection.device(device)
        chosen = selection.operators(names)
        on_cpu = place.type == "cpu"
        most = scale if scale is not None else selection.CPU_ELEMENTS if on_cpu else 0
        work = selection.bench_work(chosen, case, selection.dtypes(dtype), selection.hardware(str(place)), most)
        settings = Settings(
            place,
            directions=[one.value for one in direction] if direction else None,
            implementations=selection.implementations(chosen, impl),
            budget_s=budget or (CPU_BUDGET_S if on_cpu else GPU_BUDGET_S),
        )
    if most:
        screen.tell(f"cases have at most {most} input elements, as in 16384x4096~256x4096; --scale 0 runs them whole")
    records: list[Record] = []
    notes: dict[str, None] = {}
    with screen.progress() as progress, screen.keeping_results() as stopped:
        _run_bench(work, settings, save, commit, records, notes, progress)
    screen.show_records(format, records)
    for note in notes:
        screen.tell(note)
    screen.leave(stopped, failed=any(record.kind == "backend" and not record.counts for record in records))


def _bench_host(
    names: Sequence[str] | None, only: Sequence[str] | None, device: str | None, save: Path | None, commit: str | None,
    format: Format,
) -> None:  # fmt: skip
    """Host microseconds of public functions; exit 1 if a result is wrong."""
    with screen.clear_errors():
        from flashkernel.core import roofline
        from flashkernel.lab import host, selection
        from flashkernel.lab.results import ResultsFile, describe_run

        place = selection.device(device)
        wanted = {op.name for op in selection.operators(names)}
        known = selection.known("case", only, [case.name for case in host.CASES]) if only else None
        cases = [case for case in host.CASES if case.op in wanted and (known is None or case.name in known)]
        file = None
        if save is not None:
            ceilings = roofline.ceilings(place, ["bfloat16"])
            file = ResultsFile(save / f"{host.OP}.json", describe_run(ceilings.device, ceilings.as_dict(), commit))
    records: list[Record] = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        bar = progress.add_task("", total=len(cases))
        for case, found in zip(cases, host.measure(cases, place)):
            progress.update(bar, description=case.name, advance=1)
            records += found
            if file is not None:
                file.add(found)
    screen.show(format, [record.as_dict() for record in records], [screen.host_table(records)])
    screen.leave(stopped, failed=any(not record.correct for record in records))


def step(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens a step; repeatable.")] = None,
    model: Annotated[str, typer.Option(help="gpt-oss or llama-3.2-1b.")] = "gpt-oss",
    impl: Annotated[
        list[str] | None, typer.Option(help="An attention that Transformers knows, or hf_patch; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; by default 4 of gpt-oss, all of Llama.")] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts of each layer of gpt-oss.")] = 8,
    vocab: Annotated[int | None, typer.Option(min=2, help="Words; by default the model's own.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 8,
    device: OnDevice = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Merge into DIR/training_step.json.")] = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Time training steps of a Transformers model with one implementation after another, and weigh their memory.

    Example: flashkernel step --model llama-3.2-1b --tokens 4096
    """
    with screen.clear_errors():
        from flashkernel.core import roofline
        from flashkernel.lab import selection, training
        from flashkernel.lab.results import ResultsFile, describe_run

        place = selection.device(device)
        training.build(model, layers, experts, vocab)  # an unknown one is told now
        file = None
        if save is not None:
            ceilings = roofline.ceilings(place, ["bfloat16"])
            header = describe_run(ceilings.device, ceilings.as_dict(), commit)
            file = ResultsFile(save / f"{training.OP}.json", header)
    records: list[Record] = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        names = impl or training.IMPLEMENTATIONS[model]
        lengths = tokens or [2048, 4096, 8192]
        bar = progress.add_task("", total=len(names) * len(lengths))
        for length in lengths:
            case: list[Record] = []
            for record in training.measure(length, names, place, model, layers, experts, vocab, steps):
                case.append(record)
                progress.update(bar, description=f"{record.implementation} {length}", advance=1)
            records += case
            if file is not None:
                file.add(case)
    screen.show_records(format, records)
    screen.leave(stopped, failed=any(not record.counts for record in records if record.kind == "backend"))


def e2e(
    more: Annotated[
        list[int] | None, typer.Argument(metavar="[BATCH]...", help="Further batches, as in --batch 1 16 64.", min=1)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="gpt2-124m, smollm2-135m, llama-3.2-1b or llama-3.1-8b; repeatable."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="engine, hf_sdpa, hf_eager, hf_patch or hf_compile; repeatable, by default all."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences; repeatable, by default 1, 16, 64.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate after each.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Take all contenders so often, in turn: a host that is busy slows them alike.")
    ] = 1,
    dtype: ModelDtype = None,
    device: OnDevice = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Merge the records into DIR/e2e.json.")] = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Generate with whole models, in the engine and in Transformers: time to the first token, tokens per second."""
    with screen.clear_errors():
        import torch

        from flashkernel.core import roofline
        from flashkernel.lab import endtoend, generation_tables, selection
        from flashkernel.lab.results import Generation, ResultsFile, describe_run

        place = selection.device(device)
        names = selection.known("contender", contender, endtoend.CONTENDERS)
        models = selection.known("model", model, endtoend.NAMES) if model else endtoend.DEFAULTS
        kind = (selection.dtypes([dtype] if dtype else None) or [endtoend.default_dtype(place)])[0]
        work = endtoend.Work([*(batch or []), *(more or [])] or [1, 16, 64], prompt, new, rounds)
        ceilings = roofline.ceilings(place, [])
        header = describe_run(ceilings.device, ceilings.as_dict(), commit)
        file = None if save is None else ResultsFile(save / "e2e.json", header)
    records: list[Generation] = []
    absent = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        bar = progress.add_task("", total=len(models) * len(names) * len(work.batches) * rounds)
        for name in models:
            progress.update(bar, description=f"making {name}")
            try:
                subject = endtoend.Subject(name, place, kind)
            except (ValueError, OSError, torch.OutOfMemoryError) as error:
                absent.append(name)
                screen.tell(f"{name}: {error}")
                continue
            for record in endtoend.measure(subject, names, work, ceilings.copy_tbs, partial(_describe, progress, bar)):
                records = [one for one in records if one.key != record.key] + [record]
                progress.advance(bar)
                if file is not None:
                    file.add([record])
                if progress.disable:  # in a log, a line for each record stands for the bar
                    screen.tell(generation_tables.line(record))
            del subject
    screen.show_records(format, records)
    wrong = any(not record.counts for record in records if record.implementation == "engine")
    screen.leave(stopped, failed=wrong or bool(absent))


def _describe(progress: Progress, bar: TaskID, text: str) -> None:
    progress.update(bar, description=escape(text))


def tune(
    names: Names = None,
    case: Cases = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    format: Formatted = Format.table,
) -> None:
    """Search launch configs for benchmark cases on this GPU; the best are kept on disk and used from then on."""
    with screen.clear_errors():
        from flashkernel.lab import selection
        from flashkernel.lab.tuning import Finding, tune_case

        place = selection.device(device)
        if place.type != "cuda":
            screen.tell("tune searches launch configs of GPU kernels; there is no GPU here, or --device names none")
            raise typer.Exit(1)
        chosen, hardware = selection.operators(names), selection.hardware(str(place))
        work = selection.bench_work(chosen, case, selection.dtypes(dtype), hardware, 0)
    found: list[Finding] = []
    with screen.keeping_results() as stopped:
        for op, one, kind in work:
            found += tune_case(op, one, kind, place, screen.tell)
    table = Table("operator", "case", "kernel", "config", "ms", "default ms")
    for finding in found:
        times = (f"{finding.ms:.4f}", f"{finding.default_ms:.4f}")
        table.add_row(finding.op, finding.case, finding.kernel, escape(finding.config), *times)
    screen.show(format, [finding.as_dict() for finding in found], [table])
    screen.leave(stopped, failed=False)


def _run_bench(
    work: Sequence[tuple[Op, Case, torch.dtype]],
    settings: Settings,
    save: Path | None,
    commit: str | None,
    records: list[Record],
    notes: dict[str, None],
    progress: Progress,
) -> None:
    """Measure case by case, into `records`; a case is saved once all of its implementations are through."""
    from flashkernel.core import roofline
    from flashkernel.lab import tables
    from flashkernel.lab.bench import bench as measure
    from flashkernel.lab.results import ResultsFile, describe_run

    bar = progress.add_task("measuring the roof", total=len(work))
    ceilings = roofline.ceilings(settings.device, list(dict.fromkeys(dtype for _, _, dtype in work)))
    settings = replace(
        settings,
        ceilings=ceilings,
        step=lambda text: progress.update(bar, description=escape(text)),
        note=lambda text: notes.setdefault(text),
    )
    files: dict[str, ResultsFile] = {}
    if save is not None:
        with screen.clear_errors():
            header = describe_run(ceilings.device, ceilings.as_dict(), commit)
            files = {op.name: ResultsFile(save / f"{op.name}.json", header) for op, _, _ in work}
    for op, case, dtype in work:
        mine = []
        for record in measure(op, case, dtype, settings):
            mine.append(record)
            records.append(record)
        if mine and save is not None:
            files[op.name].add(mine)
        progress.advance(bar)
        if progress.disable and mine:  # in a log, a line for each case stands for the bar
            screen.tell(tables.line(mine))
