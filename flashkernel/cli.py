"""The `flashkernel` command. Results go to standard output, progress and remarks to standard error.

Exit codes: 0 all well, 1 something failed its check or is broken, 2 a name or value that does not exist, 130 stopped by
Ctrl-C (what was measured until then is kept and printed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flashkernel.lab import screen
from flashkernel.lab.screen import Format

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from flashkernel.core.op import Case, Op
    from flashkernel.engine import LLM
    from flashkernel.lab.bench import Settings
    from flashkernel.lab.demo import Summary
    from flashkernel.lab.results import Record

CPU_BUDGET_S, GPU_BUDGET_S = 0.1, 1.0

app = typer.Typer(
    help="The kernels an LLM is made of: what runs here, whether it is right, and how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Direction(str, Enum):
    fwd = "fwd"
    bwd = "bwd"
    step = "fwd+bwd"


Names = Annotated[
    list[str] | None, typer.Argument(help="Operators; all of them where none is named.", show_default=False)
]
Formatted = Annotated[Format, typer.Option("--format", "-f", help="How results are printed.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, float16, bfloat16 or float64; repeatable.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Cases whose names match this glob; repeatable.")]
OnDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; by default the GPU, if there is one.")
]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder as Transformers saves it, a GGUF file, or smollm2 (fetched).")
]
MostTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this probability together.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")]
ModelDtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
AnyDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, or a GPU that need not be here: t4, h200, ...")
]


@app.command(epilog="Example: flashkernel doctor")
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


@app.command(epilog="Example: flashkernel ops --device t4 --why")
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


@app.command(epilog="Example: flashkernel explain rms_norm rows=4096 width=8192 --dtype bfloat16 --device h200")
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


@app.command(epilog="Example: flashkernel check rms_norm --backend triton --dtype float16")
def check(
    names: Names = None,
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend; repeatable.")] = None,
    dtype: Dtypes = None,
    device: OnDevice = None,
    case: Cases = None,
    format: Formatted = Format.table,
) -> None:
    """Run the declared test cases of operators on this machine; exit 1 if one fails."""
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


@app.command(epilog="Example: flashkernel bench rms_norm softmax --case '16384x4096' --save results/h200")
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
    commit: Annotated[str | None, typer.Option(help="The commit to record, where there is no git checkout.")] = None,
    format: Formatted = Format.table,
) -> None:
    """Time operators against their baselines, all in one run, each checked first. Ctrl-C keeps what was measured."""
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


@app.command(epilog="Example: flashkernel step --tokens 8192 --save results/h200")
def step(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens a step; repeatable.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="An attention that Transformers knows; repeatable.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    experts: Annotated[int, typer.Option(min=1, help="Experts of each layer.")] = 8,
    vocab: Annotated[int | None, typer.Option(min=2, help="Words; by default gpt-oss's own 201088.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 8,
    device: OnDevice = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Merge into DIR/training_step.json.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record, where there is no git checkout.")] = None,
    format: Formatted = Format.table,
) -> None:
    """Time training steps of a Transformers gpt-oss with one attention after another, and weigh their memory."""
    with screen.clear_errors():
        from flashkernel.core import roofline
        from flashkernel.lab import selection, training
        from flashkernel.lab.results import ResultsFile, describe_run

        place = selection.device(device)
        file = None
        if save is not None:
            ceilings = roofline.ceilings(place, ["bfloat16"])
            header = describe_run(ceilings.device, ceilings.as_dict(), commit)
            file = ResultsFile(save / f"{training.OP}.json", header)
    records: list[Record] = []
    with screen.progress() as progress, screen.keeping_results() as stopped:
        names = impl or training.IMPLEMENTATIONS
        lengths = tokens or [2048, 4096, 8192]
        bar = progress.add_task("", total=len(names) * len(lengths))
        size = vocab or training.MODELS["gpt-oss-20b"].vocab
        for length in lengths:
            case: list[Record] = []
            for record in training.measure(length, names, place, layers, experts, size, steps):
                case.append(record)
                progress.update(bar, description=f"{record.implementation} {length}", advance=1)
            records += case
            if file is not None:
                file.add(case)
    screen.show_records(format, records)
    screen.leave(stopped, failed=any(not record.counts for record in records if record.kind == "backend"))


@app.command(epilog="Example: flashkernel demo --quick")
def demo(
    names: Names = None,
    device: OnDevice = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check one dtype, and time the forward pass alone.")] = False,
    format: Formatted = Format.table,
) -> None:
    """Check every operator on this machine against its reference, and time it against plain PyTorch."""
    with screen.clear_errors():
        from flashkernel.lab import demo as demonstration
        from flashkernel.lab import selection

        place = selection.device(device)
        chosen = selection.operators(names)
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


@app.command(epilog='Example: flashkernel generate "Write a line about the sea." --temperature 0.7')
def generate(
    prompt: Annotated[str, typer.Argument(help="What to write or answer; - reads standard input.")],
    model: Model = "smollm2",
    max_tokens: MostTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the text; no chat template.")] = False,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Generate text with a language model, printed as it comes."""
    with screen.clear_errors():
        from flashkernel.engine import SamplingParams, console

        params = SamplingParams(max_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
        text = console.check_prompt(typer.get_text_stream("stdin").read() if prompt == "-" else prompt)
        llm = _load_model(model, device, dtype)
        try:
            done = console.generate(llm, text, params, plain=plain)
        except KeyboardInterrupt:
            raise typer.Exit(screen.INTERRUPTED) from None
    screen.tell(console.summary(done))


@app.command(epilog="Example: flashkernel chat --model ~/models/Llama-3.2-1B-Instruct")
def chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MostTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    seed: Seed = None,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Talk with a language model."""
    with screen.clear_errors():
        from flashkernel.engine import SamplingParams, console

        params = SamplingParams(max_tokens, temperature, top_k, top_p, seed=seed)
        llm = _load_model(model, device, dtype)
        console.chat(llm, params, system, screen.tell)


@app.command(epilog="Example: flashkernel serve ~/models/Llama-3.2-1B-Instruct --port 8000 --api-key-file key.txt")
def serve(
    model: Annotated[
        str, typer.Argument(help="A folder as Transformers saves it, a GGUF file, or smollm2.")
    ] = "smollm2",
    host: Annotated[str, typer.Option(help="The address to bind to; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; the last part of its path.")] = None,
    api_key: Annotated[str | None, typer.Option(help="A key that clients must send.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file that holds the key; other users see options.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(help="Requests computed at the same time.")] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; further ones are told to come again.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take, its wait included.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds requests have to finish after Ctrl-C.")] = 30.0,
    context: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer.")] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Room for keys and values, in tokens.")] = None,
    access_log: Annotated[bool, typer.Option(help="A line for each request.")] = True,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Serve a language model over HTTP, as OpenAI's API does."""
    with screen.clear_errors():
        from flashkernel.engine import server

        key = api_key if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
        options = server.ServerOptions(
            host, port, name, key, max_queue, timeout, grace=grace, access_log=access_log
        )  # fmt: skip
        listener = server.bind(options)
        limits = {"most_sequences": max_requests, "context": context, "cache_tokens": cache_tokens}
        llm = _load_model(model, device, dtype, **limits)
        try:
            server.serve(llm, options, listener, screen.tell)
        except KeyboardInterrupt:
            raise typer.Exit(screen.INTERRUPTED) from None


@app.command(epilog="Example: flashkernel tables --write")
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


@app.command(epilog="Example: flashkernel plot results/h200 --out charts")
def plot(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results folder or one of its files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the PNG files go.")] = Path("."),
) -> None:
    """Draw a chart of each operator's results: the roofline, and shares of the roof."""
    from flashkernel.lab.plot import PlotError
    from flashkernel.lab.plot import plot as draw

    with screen.clear_errors():
        for found in _saved(folder):
            path = out / f"{found['records'][0].op}.png"
            try:
                draw(found, path)
            except PlotError as error:
                screen.tell(str(error))
                raise typer.Exit(1) from None
            screen.out().print(str(path), highlight=False, soft_wrap=True)


@app.command("tune", epilog="Example: flashkernel tune rms_norm --case 16384x4096")
def tune_configs(
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


def _load_model(model: str, device: str | None, dtype: str | None, **options: Any) -> LLM:
    from flashkernel.engine import LLM

    with screen.progress() as progress:
        bar = progress.add_task(f"loading {model}", total=None)
        return LLM(
            model,
            device=device,
            dtype=dtype,
            **options,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


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


def _saved(place: Path) -> list[dict[str, Any]]:
    """Results files at a path: the file itself, those of a folder, or those of its folders."""
    from flashkernel.lab.results import load, load_folder

    if place.is_file():
        return [load(place)]
    found = [file for folder in (place, *sorted(place.glob("*/"))) for file in load_folder(folder).values()]
    if not found:
        raise ValueError(f"{place} holds no results; flashkernel bench --save {place} makes some")
    return found
