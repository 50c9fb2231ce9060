"""Text from a language model: generate, chat, serve."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashkernel.commands.options import (
    MaxTokens,
    Model,
    ModelDtype,
    OnDevice,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from flashkernel.lab import progress

if TYPE_CHECKING:
    from flashkernel.engine import LLM


def generate(
    prompt: Annotated[str, typer.Argument(help="What to write or answer; - reads standard input.")],
    model: Model = "smollm2",
    max_tokens: MaxTokens = 256,
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
    with progress.report_errors():
        from flashkernel.engine import SamplingParams, console

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ())
        )
        text = console.check_prompt(typer.get_text_stream("stdin").read() if prompt == "-" else prompt)
        llm = load_model(model, device, dtype, warm_up=False)  # one request compiles what it needs
        try:
            done = console.generate(llm, text, params, plain=plain)
        except KeyboardInterrupt:
            raise typer.Exit(progress.INTERRUPTED) from None
    progress.log(console.summary(done))


def chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    seed: Seed = None,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Talk with a language model."""
    with progress.report_errors():
        from flashkernel.engine import SamplingParams, console

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        llm = load_model(model, device, dtype, warm_up=False)
        console.chat(llm, params, system, progress.log)


def serve(
    model: Annotated[
        str, typer.Argument(help="A folder as Transformers saves it, a GGUF file, owner/name, or smollm2.")
    ] = "smollm2",
    host: Annotated[str, typer.Option(help="The address to bind to; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; the last part of its path.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="A key that clients must send.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file that holds the key; other users see options.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests computed at the same time.")] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; further ones are told to come again.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take, its wait included.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds requests have to finish after Ctrl-C.")] = 30.0,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer.")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache, in tokens.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens of one step.")] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may use the server (CORS); repeatable, * is any.")
    ] = None,
    access_log: Annotated[bool, typer.Option(help="A line for each request.")] = True,
    api_server_count: Annotated[
        int | None,
        typer.Option(help="Processes that serve the API; 0: the engine's. By default 1 for every 4 cores with a GPU."),
    ] = None,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Serve a language model over HTTP, as OpenAI's API does."""
    with progress.report_errors():
        from flashkernel.engine import server
        from flashkernel.lab import selection

        key = api_key if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
        options = server.ServerArgs(
            host, port, served_model_name, key, max_queue, timeout, grace=grace, access_log=access_log,
            allowed_origins=tuple(allowed_origin or ()), api_server_count=api_server_count,
        )  # fmt: skip
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "kv_cache_tokens": kv_cache_tokens,
                  "max_num_batched_tokens": max_num_batched_tokens}  # fmt: skip
        with server.bind(options) as listener, ExitStack() as stack:
            processes = server.start_processes(options, listener, selection.device(device).type)
            if processes is not None:
                stack.enter_context(processes)
            llm = load_model(model, device, dtype, **limits)
            try:
                server.serve(llm, options, listener, progress.log, processes)
            except KeyboardInterrupt:
                raise typer.Exit(progress.INTERRUPTED) from None


def load_model(model: str, device: str | None, dtype: str | None, **options: Any) -> LLM:
    from flashkernel.engine import LLM, hub

    hub.resolve(model)  # first of all, since pip draws a bar of its own
    with progress.progress_bar(description=f"loading {model}") as bar:

        def on_start(what: str, done: int, total: int) -> None:
            bar.describe(f"{model}: {what}")
            bar.set_completed(done, total)

        llm = LLM(model, device=device, dtype=dtype, **options, progress=bar.set_completed, start_progress=on_start)
    stats, graphs = llm.engine.stats(), llm.engine.runner.num_graphs
    if stats.warm_up_s > 1 and (graphs or stats.compiled_at_start):
        done = f"{graphs} CUDA graphs captured" if graphs else f"{stats.compiled_at_start} kernel(s) compiled"
        progress.log(f"{done} in {stats.warm_up_s:.1f} s; nothing is left to compile")
    return llm
