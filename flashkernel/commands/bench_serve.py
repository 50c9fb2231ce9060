"""`flashkernel bench serve`: loads of requests against the engine, this server or any with OpenAI's API."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashkernel.commands.options import AnyDevice, Commit, ModelDtype, Save
from flashkernel.lab import progress

if TYPE_CHECKING:
    from flashkernel.lab.engine_options import EngineOptions
    from flashkernel.lab.serve_records import ServeRecord
    from flashkernel.lab.serving import Load, Timeline

Serve = Callable[["Load", "float | None"], "list[Timeline]"]


def serve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="As `e2e` names models (random weights), or as `serve` does.")
    ] = "llama-3.2-1b",
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", "--url", help="A server, such as http://127.0.0.1:8000/v1; by default an engine here."
        ),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(help="short, mixed or chat; repeatable, by default all, if no lengths are given."),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="A file of lengths: JSON pairs, or lines of prompt,answer.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt lengths to draw from, as 100:1024.")] = None,
    answers: Annotated[str, typer.Option(help="Answer lengths to draw from, as 20:400.")] = "20:400",
    requests: Annotated[int, typer.Option(min=1, help="Requests to draw.")] = 256,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second, in Poisson arrivals; repeatable. By default all come at once."),
    ] = None,
    rate_share: Annotated[
        list[float] | None,
        typer.Option(help="Rates that are this share of a saved best throughput, of --rate-of; repeatable."),
    ] = None,
    rate_of: Annotated[str, typer.Option(help="Whose best throughput --rate-share is of.")] = "vllm",
    passes: Annotated[int, typer.Option(min=1, help="How often each load is served.")] = 2,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling.")] = 0.6,
    ttft_limit: Annotated[float | None, typer.Option(min=0.0, help="Goodput: most ms to the first token.")] = None,
    itl_limit: Annotated[
        float | None, typer.Option(min=0.0, help="Goodput: most ms between tokens, at a request's p99.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="A server's key.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What the server calls the model.")] = None,
    implementation: Annotated[str | None, typer.Option(help="What records call the server, as vllm.")] = None,
    peer_version: Annotated[str | None, typer.Option(help="Its version; by default what the server says.")] = None,
    peer_file: Annotated[
        Path | None,
        typer.Option("--import", help="Take what another engine measured from this file; nothing is served."),
    ] = None,
    peer_command: Annotated[
        str | None,
        typer.Option(help="First run this script of another engine, and keep what it writes of its loads."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=2, help="A server's prompts are tokens below it.")] = 32000,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that the engine computes at the same time.")] = 256,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the engine's KV cache, in tokens.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="The engine's weights: int4, int8, fp8, mxfp4 or plain. Of a server: what it has."),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="The engine's keys and values: int8, float8_e4m3fn, ... Of a server: what it has."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that prompt look-up drafts, at --temperature 0. Of a server: what it has."),
    ] = None,
    dtype: ModelDtype = None,
    device: AnyDevice = None,
    save: Save = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for charts.")] = None,
    commit: Commit = None,
) -> None:
    """Serve loads of requests: tokens/s, time to first token, between tokens and in all, goodput against the rate."""
    with progress.report_errors():
        from flashkernel.lab import results, selection, serve_import, serve_peer, serve_records, serving
        from flashkernel.lab.engine_options import EngineOptions
        from flashkernel.lab.packages import require

        chosen = EngineOptions(quantization, kv_cache_dtype, num_speculative_tokens or None)
        if base_url is None and peer_file is None:
            chosen.checked()
            if chosen.num_speculative_tokens and temperature:
                raise ValueError("bench serve: prompt look-up drafts for greedy requests alone; give --temperature 0")
        loads = _loads(load, lengths, prompts, answers, requests)
        limits = {name: value for name, value in (("ttft", ttft_limit), ("itl", itl_limit)) if value is not None}
        facts_of_peer = {"model": model, "implementation": implementation or "vllm", "dtype": dtype or "bfloat16"}
        if peer_file is not None:
            _import(peer_file, {**facts_of_peer, **chosen.fields()}, peer_version, save, device, commit)
            return
        if plot is not None:
            require("matplotlib.figure", "flashkernel bench serve --plot")
        if base_url is not None:
            if peer_command is not None:
                raise ValueError("bench serve: --peer-command stands beside an engine here; leave out --base-url")
            server = serving.Server(base_url, served_model_name or model, api_key, vocab_size)
            server.connect()
            serve_import.check_server(base_url, server.model, api_key)
        words = None if peer_command is None else serve_peer.words_of(peer_command, peer_version)
        shares = rate_share or []
        rates = {} if words and shares else _rates(loads, rate or [], shares, rate_of, model, save)
        machine = selection.hardware(device).name
        file = None
        if save is not None:
            file = results.ResultsFile(save / "serve.json", results.describe_run(machine, {}, commit))
        earlier = file.before["records"] if file is not None and file.before is not None else []
        good = {record.key for record in earlier if record.comparable}
    records: dict[tuple[str, str, str], ServeRecord] = {}

    def write(found: list[ServeRecord]) -> None:
        """Saves records; a load that failed does not replace one that was served before."""
        if file is not None:
            file.add([record for record in found if record.comparable or record.key not in good])

    def keep(found: list[ServeRecord]) -> None:
        new = [record for record in found if record.key not in records]  # others have got their start_s
        records.update((record.key, record) for record in found)
        write(found)
        for record in new:
            progress.log(serve_records.line(record))
            if not record.comparable and record.key in good:
                progress.log(f"{record.case}: the record of an earlier run stays in {save}")

    failed = False
    total = len(loads) * (len(rate or []) + len(shares) or 1) * passes
    with progress.progress_bar(total) as bar, progress.keep_results() as stopped:
        if words is not None:
            bar.describe(serve_peer.name_of(words))
            failed = not _peer(words, {**facts_of_peer, **chosen.fields()}, peer_version, keep)
        with progress.report_errors():
            rates = rates or _rates(loads, rate or [], shares, rate_of, model, save)
            bar.describe("starting")
            if base_url is None:
                sizes = {"max_num_seqs": max_num_seqs, "kv_cache_tokens": kv_cache_tokens}
                _warn_of_cpu(device, passes * sum(load.tokens * len(rates[load.name]) for load in loads))
                run, facts = _engine(model, device, dtype, temperature, sizes, chosen, bar)
            else:
                asked = (base_url, model, implementation, dtype, peer_version, api_key)
                run, facts = partial(server.run, temperature=temperature), partial(_server_facts, chosen, *asked)
        bar.describe("serving")
        for record in serving.measure(run, loads, lambda load: rates[load.name], passes, limits, facts):
            keep([record])
            bar.next(record.case)
    if stopped.code and records:
        write(list(records.values()))  # the interruption may have come while the last one was written
    found = list(records.values()) if file is None else file.merged()["records"]  # with what others reached before
    if found:
        typer.echo(serve_records.table(found))
    if plot is not None and records:
        with progress.report_errors():
            from flashkernel.lab.plot import PlotError
            from flashkernel.lab.plot import plot as draw

            where = machine if base_url is None or device is not None else base_url
            try:
                draw({"records": found, "device": where, "ceilings": {}}, plot / "serve.png")
            except PlotError as error:
                progress.log(str(error))
    progress.exit_with(stopped, failed=failed or any(not record.comparable for record in records.values()))


def _warn_of_cpu(device: str | None, tokens: int) -> None:
    from flashkernel.lab import selection

    if selection.device(device).type == "cpu" and tokens > 8192:
        progress.log(
            f"on a CPU the engine reads and writes {tokens:,} tokens, which may take hours; "
            "shorten it with --model smollm2 --prompts 20:60 --answers 5:20 --requests 8 --passes 1"
        )


def _peer(
    words: list[str], facts: dict[str, Any], version: str | None, keep: Callable[[list[ServeRecord]], None]
) -> bool:
    """Runs another engine's script and keeps its records as they come; False if it failed."""
    from flashkernel.lab import serve_import, serve_peer

    name, date = serve_peer.name_of(words), datetime.now(timezone.utc).isoformat(timespec="seconds")
    known: list[ServeRecord] = []
    try:
        with closing(serve_peer.run_peer(words, progress.log)) as runs:  # Ctrl-C ends the script, too
            for entries in runs:
                found = serve_import.entry_records(entries, version, date, source=name, **facts)
                keep([record for record in found if record not in known])
                known = found
        if not known:
            raise ValueError(f"bench serve: {name} wrote nothing of its loads")
    except ValueError as error:
        progress.log(str(error))
        return False
    return True


def _rates(
    loads: list[Load], rates: list[float], shares: list[float], whose: str, model: str, save: Path | None
) -> dict[str, list[float | None]]:
    """The rates of each load, by its name; None is all at once."""
    from flashkernel.lab import results, serve_import

    wrong = [value for value in (*rates, *shares) if not 0 < value < math.inf]
    if wrong:
        raise ValueError(f"bench serve: a rate is {wrong[0]:g}; it must be above 0")
    if not shares:
        return {load.name: [*rates] or [None] for load in loads}
    if save is None or not (save / "serve.json").exists():
        raise ValueError(f"bench serve: --rate-share is of what {whose} reached; --save names the folder that has it")
    known = results.load(save / "serve.json")["records"]
    return {
        load.name: [
            *rates, *(serve_import.share_of_best(known, whose, model, load.name, share) for share in shares),
        ]
        for load in loads
    }  # fmt: skip


def _server_facts(
    chosen: EngineOptions,
    base_url: str,
    model: str,
    implementation: str | None,
    dtype: str | None,
    version: str | None,
    api_key: str | None = None,
) -> dict[str, Any]:
    """What the records of a server say about it; a baseline says which version of it was measured, where and when."""
    from flashkernel.lab import serve_import

    facts: dict[str, Any] = {"model": model, "implementation": implementation or base_url, "dtype": dtype or ""}
    facts |= chosen.fields()
    if implementation == "engine":
        return {**facts, "kind": "backend", **serve_import.engine_counts(base_url, api_key)}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    version = version or serve_import.server_version(base_url)
    return {**facts, "kind": "baseline", "version": version, "date": now, "source": base_url}


def _import(
    path: Path,
    facts: dict[str, Any],
    version: str | None,
    save: Path | None,
    device: str | None,
    commit: str | None,
) -> None:
    """Puts what another engine measured beside our own records of the same loads."""
    from flashkernel.lab import results, selection, serve_import, serve_records

    records = serve_import.read_peer_file(path, version=version, **facts)
    if save is None:
        typer.echo(serve_records.table(records))
        return
    header: dict[str, Any] = {}
    if not (save / "serve.json").exists():
        header = results.describe_run(selection.hardware(device).name, {}, commit)
    found = serve_import.add_to_file(save / "serve.json", records, header)
    progress.log(f"{path}: {len(records)} records of {facts['implementation']} are now in {save / 'serve.json'}")
    typer.echo(serve_records.table(found))


def _loads(
    names: list[str] | None, lengths: Path | None, prompts: str | None, answers: str, requests: int
) -> list[Load]:
    from flashkernel.lab.serving import LOADS, Load

    found = [Load.named(name) for name in names or []]
    if lengths is not None:
        found.append(Load.from_file(lengths))
    if prompts is not None:
        bounds = _bounds("prompts", prompts), _bounds("answers", answers)
        found.append(Load.drawn(f"{requests} x {prompts} in {answers} out", requests, *bounds))
    return found or [Load.named(name) for name in LOADS]


def _bounds(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not low.isdigit() or not (high or low).isdigit() or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"bench serve: --{name} is {text!r}; it must be two lengths, such as 100:1024")
    return int(low), int(high or low)


def _engine(
    model: str,
    device: str | None,
    dtype: str | None,
    temperature: float,
    sizes: dict[str, Any],
    chosen: EngineOptions,
    bar: progress.Bar,
) -> tuple[Serve, Callable[[], dict[str, Any]]]:
    """An engine in this process: how it serves, and the facts of its records."""
    from flashkernel.core import build_counter
    from flashkernel.core import device as devices
    from flashkernel.engine import LLM
    from flashkernel.engine.dummy_weights import dummy_transformer
    from flashkernel.lab import generation, selection, serving

    def on_start(what: str, done: int, total: int) -> None:
        bar.describe(f"{model}: {what} {done} of {total}")

    target = selection.device(device)
    weights: Any = model
    if model in generation.SHAPES:
        kind = (selection.dtypes([dtype] if dtype else None) or [devices.model_dtype(devices.properties(target))])[0]
        key, shape = generation.SHAPES[model]
        weights = dummy_transformer(generation.MODELS[key], target, kind, **shape)
    began = time.monotonic()
    more: dict[str, Any] = {} if model in generation.SHAPES else {"device": str(target), "dtype": dtype}
    llm = LLM(weights, start_progress=on_start, enable_prefix_caching=False, **more, **sizes, **chosen.fields())
    start_s = time.monotonic() - began
    built = build_counter.counts()
    progress.log(
        f"{model}: ready after {start_s:.1f} s, {llm.engine.runner.num_graphs} graphs; "
        f"{llm.engine.stats().compiled_at_start} kernels were compiled, and {built.loaded} loaded from caches"
    )

    before = [llm.engine.stats()]  # of the load that is served

    def run(load: Load, rate: float | None) -> list[Timeline]:
        before[0] = llm.engine.stats()
        return serving.run_engine(llm, load, rate, temperature)

    def facts() -> dict[str, Any]:
        stats = llm.engine.stats()
        drafted = stats.num_draft_tokens - before[0].num_draft_tokens
        accepted = stats.num_accepted_tokens - before[0].num_accepted_tokens
        took, waited = stats.step_s - before[0].step_s, stats.wait_s - before[0].wait_s
        name = str(llm.model.dtype).removeprefix("torch.")
        return {"model": model, "implementation": "engine", "kind": "backend", "dtype": name, "start_s": start_s,
                "compiled_at_start": stats.compiled_at_start, "compiled_in_service": stats.compiled_in_service,
                **chosen.fields(), "accepted": accepted / drafted if drafted else None,
                "host_busy": 1 - waited / took if target.type == "cuda" and took else None}  # fmt: skip

    return run, facts
