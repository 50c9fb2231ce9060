"""Quantization of models: `flashkernel quantize` and `flashkernel perplexity`."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashkernel.commands.options import Commit, ModelDtype, OnDevice
from flashkernel.lab import output, progress

if TYPE_CHECKING:
    from torch import Tensor

    from flashkernel.engine.checkpoint import Checkpoint
    from flashkernel.engine.transformer import Transformer
    from flashkernel.quantization import LayerError, Scheme


class MethodName(str, Enum):
    rtn = "rtn"
    gptq = "gptq"
    awq = "awq"
    smoothquant = "smoothquant"
    mxfp4 = "mxfp4"


class Layout(str, Enum):
    compressed_tensors = "compressed-tensors"
    gptq = "gptq"
    gptq_v2 = "gptq_v2"
    awq = "awq"
    mxfp4 = "mxfp4"


TextFile = Annotated[Path | None, typer.Option("--text", help="A text file; by default a text that comes along.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a window.")]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, a cached owner/name, or smollm2 (downloaded).")
]


def quantize(
    model: ModelName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new model's folder.")],
    method: Annotated[MethodName, typer.Option(help="How weights are rounded.")] = MethodName.gptq,
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale; -1: whole rows.")] = 128,
    symmetric: Annotated[bool, typer.Option(help="--no-symmetric gives zero points.")] = True,
    act_order: Annotated[bool, typer.Option("--act-order", help="GPTQ: columns with large inputs first.")] = False,
    damping: Annotated[float, typer.Option(help="GPTQ: share of the Hessian's diagonal added to it.")] = 0.01,
    strength: Annotated[float, typer.Option(help="SmoothQuant: how much moves into the weights, 0 to 1.")] = 0.5,
    layout: Annotated[Layout, typer.Option(help="How the checkpoint stores weights.")] = Layout.compressed_tensors,
    text: TextFile = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of calibration text, at most.")] = 64,
    length: Length = 512,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Quantize a model and save it; a run that was interrupted goes on where it was, with the same command.

    The state of a run is in DIR.calibration until it is done. The method mxfp4 needs no text: experts become MXFP4 in
    the layout of gpt-oss's released files, and the projections of a model without experts in that of
    compressed-tensors.
    """
    with progress.report_errors():
        from flashkernel.engine.save_model import check_storable, save_model
        from flashkernel.quantization import CALIBRATION_TEXT, Method, quantize_model
        from flashkernel.quantization.state import STATE_SUFFIX

        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out}: it exists and is not empty; choose another folder, or delete it")
        _check_options(method, bits, layout, act_order)
        if method is MethodName.mxfp4:
            _quantize_mxfp4(model, out, device, dtype)
            return
        scheme = _scheme(method, bits, group_size, symmetric)
        rule = Method(method.value, damping, act_order, strength)
        loaded, checkpoint = _load(model, device, dtype)
        check_storable(checkpoint)  # before the calibration, which takes hours
        if method is MethodName.rtn and text is None and checkpoint.tokenizer() is None:
            progress.log(f"{model}: it has no tokenizer; the errors shown are those of random tokens")
            tokens = _random_windows(loaded.config.vocab_size, length, samples)
        else:
            tokens = _windows(checkpoint, text, CALIBRATION_TEXT, length, samples)
        state = out.with_name(out.name + STATE_SUFFIX)
        began, errors = time.perf_counter(), list["LayerError"]()
        with progress.progress_bar(len(loaded.layers), f"{method.value}: layer 0") as bar:

            def on_layer(done: int, total: int, found: list[LayerError]) -> None:
                bar.set_completed(done, total)
                bar.describe(f"{method.value}: layer {done}")
                bar.log_line(_line(done, total, found))

            try:
                quantized, errors = quantize_model(loaded, tokens, rule, scheme, state=state, progress=on_layer)
            except KeyboardInterrupt:
                progress.log(f"interrupted; the same command goes on from {state}")
                raise typer.Exit(progress.INTERRUPTED) from None
        save_model(quantized, checkpoint, out, layout.value)
        _remove(state)
    _show(errors)
    progress.log(
        f"{out}: {quantized.nbytes / 1e6:.0f} MB, was {loaded.nbytes / 1e6:.0f} MB; {time.perf_counter() - began:.0f} s"
    )


def _quantize_mxfp4(model: str, out: Path, device: str | None, dtype: str | None) -> None:
    """Rounds a model's experts, or its projections, to MXFP4; experts that are in MXFP4 keep their bytes."""
    from flashkernel.engine import hub
    from flashkernel.engine.save_model import save_model

    # A folder's experts may be in MXFP4 already; a GGUF file's weights are in other formats.
    loaded, checkpoint = _load(model, device, dtype, None if hub.resolve(model).is_dir() else "plain")
    experts = loaded.config.num_experts > 0
    quantized = loaded.with_mxfp4_experts() if experts else loaded.quantized("mxfp4")
    save_model(quantized, checkpoint, out, "mxfp4" if experts else "compressed-tensors")
    progress.log(f"{out}: {quantized.nbytes / 1e6:.0f} MB, was {loaded.nbytes / 1e6:.0f} MB")


def perplexity(
    model: ModelName,
    text: TextFile = None,
    length: Length = 512,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows at most; by default all of the text.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Quantize the model by every method and compare; takes minutes.")
    ] = False,
    configuration: Annotated[
        list[str] | None, typer.Option(help="Compare this configuration alone, such as int4-gptq; repeatable.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Merge the comparison into DIR/quality.json.")
    ] = None,
    commit: Commit = None,
    device: OnDevice = None,
    dtype: ModelDtype = None,
) -> None:
    """Measure a model's perplexity on a text, and with --compare that of the model quantized by every method."""
    with progress.report_errors():
        from flashkernel.lab import quality, selection
        from flashkernel.quantization import CALIBRATION_TEXT, EVALUATION_TEXT
        from flashkernel.quantization import perplexity as measure

        if save is not None and not compare:
            raise ValueError("perplexity: --save keeps a comparison; add --compare")
        names = selection.known_names("configuration", configuration, list(quality.CONFIGURATIONS))
        loaded, checkpoint = _load(model, device, dtype)
        tokens = _windows(checkpoint, text, EVALUATION_TEXT, length, windows)
        console = output.stdout_console()
        if not compare:
            with progress.progress_bar(len(loaded.layers), "measuring perplexity") as bar:
                found = measure(loaded, tokens, bar.set_completed)
            console.print(f"perplexity {found.value:.3f} of {found.tokens} tokens in windows of {found.length}")
            return
        calibration = _windows(checkpoint, None, CALIBRATION_TEXT, length, quality.CALIBRATION_WINDOWS)
        records = []
        with progress.progress_bar(len(names)) as bar:

            def on_progress(line: str) -> None:
                bar.describe(line)
                bar.log_line(line)

            name = Path(model).name
            for record in quality.measure(name, loaded, tokens, calibration, names, on_progress):
                records.append(record)
                bar.advance()
                bar.log_line(f"{record.configuration}: perplexity {record.perplexity:.3f}, {record.bits:.2f} bits")
                if save is not None:
                    quality.save(save, [record], commit)
    console.print(quality.markdown(records), markup=False, soft_wrap=True)


def _check_options(method: MethodName, bits: int, layout: Layout, act_order: bool) -> None:
    """ValueError if options contradict each other; saving would find it after the calibration, or leave one out."""
    others = (Layout.gptq, Layout.gptq_v2, Layout.awq)
    if method is MethodName.mxfp4 and layout in others:
        raise ValueError(f"quantize: MXFP4 is not stored in the layout {layout.value}; leave --layout out")
    if method is not MethodName.mxfp4 and layout is Layout.mxfp4:
        raise ValueError(f"quantize: the layout mxfp4 is that of --method mxfp4, not of {method.value}")
    if method is MethodName.smoothquant and layout in others:
        raise ValueError(
            f"quantize: the layout {layout.value} has no place for activations in 8 bits, which SmoothQuant makes; use "
            "compressed-tensors"
        )
    if layout is Layout.awq and bits != 4:
        raise ValueError(f"quantize: the layout awq has 4 bits, not {bits}; use gptq or compressed-tensors")
    if act_order and method is not MethodName.gptq:
        raise ValueError(f"quantize: --act-order is an order of GPTQ, and the method is {method.value}; leave it out")


def _scheme(method: MethodName, bits: int, group_size: int, symmetric: bool) -> Scheme:
    import torch

    from flashkernel.quantization import Scheme

    if bits not in (4, 8):
        raise ValueError(f"quantize: bits is {bits}; it must be 4 or 8")
    if method is MethodName.smoothquant:
        if bits != 8:
            raise ValueError("quantize: SmoothQuant makes weights and activations of 8 bits; give --bits 8")
        return Scheme("int8", -1, symmetric, torch.int8)
    return Scheme(f"int{bits}", group_size, symmetric)


def _load(
    model: str, device: str | None, dtype: str | None, quantization: str | None = "plain"
) -> tuple[Transformer, Checkpoint]:
    from flashkernel.engine import build, hub
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.model_loader import load_model

    path = hub.resolve(model)
    checkpoint = open_checkpoint(path)
    target, kind = build.device_and_dtype(checkpoint, device, dtype)
    with progress.progress_bar(description=f"loading {model}") as bar:
        return load_model(checkpoint, target, kind, bar.set_completed, quantization), checkpoint


def _windows(checkpoint: Checkpoint, text: Path | None, shipped: str, length: int, most: int | None) -> Tensor:
    from flashkernel.quantization import shipped_text, windows

    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{checkpoint.config.source}: the model has no tokenizer, which text needs")
    try:
        content = shipped_text(shipped) if text is None else text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: it is no text in UTF-8 ({error}); convert it") from error
    return windows(tokenizer.encode(content), length, most)


def _random_windows(vocab_size: int, length: int, count: int) -> Tensor:
    """Tokens for rounding, which needs no text: only the errors that are shown depend on them."""
    import torch

    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=generator, device="cpu")


def _remove(state: Path) -> None:
    from flashkernel.quantization.state import remove_state

    remove_state(state)


def _line(done: int, total: int, found: list[LayerError]) -> str:
    parts = ", ".join(f"{one.projection} {one.before:.2%} -> {one.after:.2%}" for one in found)
    return f"layer {done} of {total}: error of outputs {parts}"


def _show(errors: list[Any]) -> None:
    from rich.table import Table

    table = Table(title="Relative error of the outputs: rounded to nearest -> by the method", title_justify="left")
    names = list(dict.fromkeys(error.projection for error in errors))
    for heading in ("layer", *names):
        table.add_column(heading, justify="right")
    for layer in sorted({error.layer for error in errors}):
        cells = {e.projection: f"{e.before:.2%} -> {e.after:.2%}" for e in errors if e.layer == layer}
        table.add_row(str(layer), *[cells.get(name, "") for name in names])
    output.stdout_console().print(table)
