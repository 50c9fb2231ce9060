"""Whole models timed: `flashkernel step` trains, `flashkernel e2e` generates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from flashkernel.commands.options import Commit, Formatted, ModelDtype, OnDevice, Save
from flashkernel.lab import output, progress
from flashkernel.lab.output import Format

if TYPE_CHECKING:
    import torch

    from flashkernel.core.roofline import Ceilings
    from flashkernel.lab.generation import BenchModel, Workload
    from flashkernel.lab.results import GenerationRecord, Record


def step(
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per step; repeatable, by default 2048, 4096 and 8192.")
    ] = None,
    model: Annotated[str, typer.Option(help="gpt-oss or llama-3.2-1b.")] = "gpt-oss",
    impl: Annotated[
        list[str] | None, typer.Option(help="A Transformers attention implementation, or hf_patch; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; by default 4 of gpt-oss, all of Llama.")] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts per layer of gpt-oss.")] = 8,
    vocab: Annotated[int | None, typer.Option(min=2, help="Vocabulary size; by default the model's own.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences packed into the tokens.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 8,
    device: OnDevice = None,
    save: Save = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Time training steps of a Transformers model with each implementation, and measure their peak memory.

    Example: flashkernel step --model llama-3.2-1b --tokens 8192 --sequences 8
    """
    with progress.report_errors():
        from flashkernel.core import roofline
        from flashkernel.lab import selection, tables, training
        from flashkernel.lab.results import ResultsFile

        target = selection.device(device)
        training.build(model, layers, experts, vocab)  # reports an unknown model before anything is measured
        lengths = tokens or [2048, 4096, 8192]
        training.packed_lengths(min(lengths), sequences)  # and too many sequences
        names = list(dict.fromkeys(impl or training.implementations(model, sequences)))
    each = steps + training.WARM_UP_STEPS
    total = len(names) * len(lengths) * each
    if target.type == "cpu" and (layers is None or max(lengths) > 256):
        progress.log(
            f"on a CPU {total} training steps of up to {max(lengths)} tokens may take hours; "
            "shorten them with --tokens 128 --layers 1 --experts 2 --vocab 1024 --steps 2"
        )
    records: list[Record] = []
    with progress.progress_bar(total) as bar, progress.keep_results() as stopped:

        def on_step(text: str, done: int) -> None:
            bar.describe(text)
            bar.set_completed(len(records) * each + done, total)
            if target.type == "cpu":  # where a step takes minutes
                bar.log_line(text)

        file = None
        if save is not None:
            bar.describe("measuring memory bandwidth and matmul rate")
            with progress.report_errors():
                found = roofline.ceilings(target, [training.dtype_of(target)])
                file = ResultsFile.in_folder(save, training.OP, found, commit)
        for length in lengths:
            first = len(records)
            for record in training.measure(
                length, names, target, model, layers, experts, vocab, steps, on_step, sequences
            ):  # fmt: skip
                records.append(record)
                bar.log_line(tables.line([record]))
            if file is not None:
                file.add(records[first:])
    output.show_records(format, records, selection.hardware(str(target)).name)
    nothing = not stopped.code and not any(record.comparable for record in records)
    if nothing:
        progress.log("step: nothing was timed; the messages above say why")
    ours = [record for record in records if record.kind == "backend"]
    progress.exit_with(stopped, failed=nothing or any(not record.comparable for record in ours))


def e2e(
    more: Annotated[
        list[int] | None, typer.Argument(metavar="[BATCH]...", help="Further batches, as in --batch 1 16 64.", min=1)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="gpt2-124m, smollm2-135m, smollm2 (4 bits, as shipped), llama-3.2-1b or llama-3.1-8b; repeatable.",
        ),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option(
            help="engine, hf_sdpa, hf_eager, hf_patch, hf_compile or llama_cpp (GGUF files, on a CPU); repeatable, by "
            "default all but llama_cpp."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences; repeatable, by default 1, 16, 64.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate for each sequence.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measure all runners this often, alternately: a busy host slows them alike.")
    ] = 1,
    prompt_period: Annotated[
        int | None, typer.Option(min=1, help="Prompts repeat themselves after so many tokens; by default they do not.")
    ] = None,
    quantization: Annotated[
        list[str] | None,
        typer.Option(help="The engine's weights: plain, int4, int8, fp8 or mxfp4; repeatable, measured in turns."),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="The engine's keys and values: int8, float8_e4m3fn, ...; repeatable.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens that prompt look-up drafts in the engine; 0: none; repeatable.")
    ] = None,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="The engine also without CUDA graphs; on a CPU, by single operators."),
    ] = False,
    dtype: ModelDtype = None,
    device: OnDevice = None,
    save: Save = None,
    commit: Commit = None,
    format: Formatted = Format.table,
) -> None:
    """Generate with whole models, in the engine, Transformers and llama.cpp: first token, tokens/s, memory, energy.

    Example: flashkernel e2e --model llama-3.1-8b --runner engine --quantization plain --quantization int4 --rounds 2
    """
    with progress.report_errors():
        import torch

        from flashkernel.core import device as devices
        from flashkernel.core import roofline
        from flashkernel.lab import engine_options, generation, generation_tables, runners, selection
        from flashkernel.lab.bench import frozen_objects
        from flashkernel.lab.results import ResultsFile

        target = selection.device(device)
        names = selection.known_names("runner", runner or runners.DEFAULTS, generation.RUNNERS)
        models = selection.known_names("model", model, generation.NAMES) if model else generation.DEFAULTS
        kind = (selection.dtypes([dtype] if dtype else None) or [devices.model_dtype(devices.properties(target))])[0]
        work = generation.Workload([*(batch or []), *(more or [])] or [1, 16, 64], prompt, new, rounds, prompt_period)
        engines = engine_options.combinations(
            quantization or [], kv_cache_dtype or [], num_speculative_tokens or [], str(kind).removeprefix("torch."),
            enforce_eager,
        )  # fmt: skip
        if engines != [runners.DEFAULT_OPTIONS] and "engine" not in names:
            raise ValueError("e2e: these options are of the engine, and --runner leaves it out")
    if target.type == "cpu":
        _warn_of_cpu(work)
    records: list[GenerationRecord] = []
    unavailable: list[str] = []
    ceilings: Ceilings | None = None
    total = len(models) * len(generation.runner_setups(names, engines)) * len(work.batches) * rounds
    with progress.progress_bar(total) as bar, progress.keep_results() as stopped:
        bar.describe("measuring memory bandwidth")
        ceilings = roofline.ceilings(target, [])
        if target.type == "cpu":  # whose speed is that of its threads
            ceilings = replace(ceilings, device=f"{ceilings.device}, {torch.get_num_threads()} threads")
        with progress.report_errors():
            file = ResultsFile.in_folder(save, "e2e", ceilings, commit)

        def on_progress(text: str) -> None:
            bar.describe(text)
            if target.type == "cpu":
                bar.log_line(text)

        for name in models:
            bar.describe(f"building {name}")
            found = _bench_model(name, target, kind)
            if found is None:
                unavailable.append(name)
                bar.advance(total // len(models))
                continue
            with frozen_objects():
                for record in generation.measure(found, names, work, ceilings.copy_tbs, on_progress, engines):
                    records = [one for one in records if one.key != record.key] + [record]
                    bar.advance()
                    if file is not None:
                        file.add([record])
                    bar.log_line(generation_tables.line(record))
            del found
    output.show_records(format, records, selection.hardware(str(target)).name, ceilings)
    wrong = any(record.failed for record in records if record.implementation == "engine")
    progress.exit_with(stopped, failed=wrong or bool(unavailable))


def _bench_model(name: str, device: torch.device, dtype: torch.dtype) -> BenchModel | None:
    """The model, or None with a message where it cannot be downloaded or does not fit."""
    import torch

    from flashkernel.lab import generation

    try:
        return generation.BenchModel(name, device, dtype)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        progress.log(f"{name}: {error}")
        return None


def _warn_of_cpu(work: Workload) -> None:
    tokens = sum(work.batches) * (work.prompt + work.new)
    if tokens > 4096:
        progress.log(
            f"on a CPU every runner generates batches of {', '.join(map(str, work.batches))} sequences with "
            f"{work.prompt} + {work.new} tokens at least three times, which may take hours; "
            "shorten it with --model gpt2-124m --batch 1 --prompt 64 --new 16"
        )
