"""How good quantized models are: the perplexity of one model by every method, kept in `results/quality.json`.

The text is one the model was not calibrated on; both come with the library. Perplexity depends on no GPU, so there is
one file for all machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel.engine.transformer import PROJECTIONS, Transformer
from flashkernel.lab.results import QUALITY, describe_run, replace_text
from flashkernel.quantization import KV_CACHES, Method, Scheme, perplexity, quantize_model

CALIBRATION_WINDOWS = 8
# name -> method and scheme; None: weights rounded to bfloat16; a str: that, and keys and values in this format
CONFIGURATIONS: dict[str, tuple[Method, Scheme] | str | None] = {
    "bfloat16": None,
    "int8": (Method("rtn"), Scheme("int8", -1)),
    "int8-activations": (Method("rtn"), Scheme("int8", -1, activation_dtype=torch.int8)),
    "int8-smoothquant": (Method("smoothquant"), Scheme("int8", -1, activation_dtype=torch.int8)),
    "fp8": (Method("rtn"), Scheme("fp8", -1)),
    "mxfp4": (Method("rtn"), Scheme("mxfp4", 32)),
    "int4-rtn": (Method("rtn"), Scheme("int4", 64)),
    "int4-awq": (Method("awq"), Scheme("int4", 64)),
    "int4-gptq": (Method("gptq"), Scheme("int4", 64)),
    "int4-gptq-act-order": (Method("gptq", act_order=True), Scheme("int4", 64)),
    "kv-fp8": "float8_e4m3fn",
    "kv-int8": "int8",
    "kv-int4": "int4",
}


@dataclass(frozen=True)
class QualityRecord:
    """The perplexity of a model by one method."""

    model: str
    configuration: str
    method: str
    format: str
    group_size: int
    bits: float  # of a projection's element, scales and zero points included
    perplexity: float
    tokens: int  # predicted
    length: int  # of a window
    error: float | None = None  # mean relative error of the projections' outputs; None: no calibration
    kv_cache: str = ""  # format of keys and values; "": the model's dtype
    kv_bits: float | None = None  # of an element of keys and values, scales included; None: not quantized


def measure(
    name: str,
    model: Transformer,
    evaluation: Tensor,
    calibration: Tensor,
    configurations: Sequence[str],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[QualityRecord]:
    """Yields the record of each configuration.

    Args:
        name: Of the model.
        model: In float32, with plain weights.
        evaluation: Windows of text that perplexity is measured on.
        calibration: Windows of another text, for methods that calibrate.
        configurations: Names of CONFIGURATIONS.
        progress: Called with a line of text for each step.
    """
    for configuration in configurations:
        chosen = CONFIGURATIONS[configuration]
        progress(f"{configuration}: quantizing")
        error, kv_cache = None, chosen if isinstance(chosen, str) else None
        if chosen is None or isinstance(chosen, str):
            quantized, method, format, size = _in_bfloat16(model), "", "bfloat16", -1
        else:
            rule, scheme = chosen
            tokens = None if rule.name == "rtn" else calibration
            quantized, errors = quantize_model(model, tokens, rule, scheme)
            method, format, size = rule.name, scheme.format, scheme.group_size
            error = sum(one.after for one in errors) / len(errors) if errors else None
        progress(f"{configuration}: measuring perplexity")
        found = perplexity(quantized, evaluation, kv_cache=kv_cache)
        bits = 16.0 if format == "bfloat16" else _bits(quantized)
        cache = ("", None) if kv_cache is None else (kv_cache, KV_CACHES[kv_cache])
        yield QualityRecord(
            name, configuration, method, format, size, bits, found.value, found.tokens, found.length, error, *cache
        )


def _in_bfloat16(model: Transformer) -> Transformer:
    layers = [
        replace(layer, **{name: getattr(layer, name).bfloat16().to(model.dtype) for name in PROJECTIONS})
        for layer in model.layers
    ]
    return Transformer(model.config, model.weights, layers)


def _bits(model: Transformer) -> float:
    weights: list[Any] = [getattr(layer, name) for layer in model.layers for name in PROJECTIONS]
    # Scales are float16 numbers, as checkpoints store them; in memory they are float32.
    saved = sum(
        weight.nbytes - (weight.scales.nbytes // 2 if weight.format.startswith("int") else 0) for weight in weights
    )
    return 8 * saved / sum(weight.shape.numel() for weight in weights)


def save(folder: Path, records: Sequence[QualityRecord], commit: str | None = None) -> Path:
    """Merges records into `<folder>/quality.json`; a record replaces an earlier one of its model and configuration."""
    path = folder / QUALITY
    earlier = [] if not path.exists() else load(path)["records"]
    new = {(record.model, record.configuration) for record in records}
    kept = [record for record in earlier if (record.model, record.configuration) not in new]
    header = describe_run("any", {}, commit)
    del header["device"], header["ceilings"]
    order = list(CONFIGURATIONS)
    merged = sorted([*kept, *records], key=lambda record: (record.model, order.index(record.configuration)))
    replace_text(path, json.dumps({**header, "records": [asdict(record) for record in merged]}, indent=1) + "\n")
    return path


def load(path: Path) -> dict[str, Any]:
    """The contents of a quality file, its records as dataclasses; ValueError if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "records": [QualityRecord(**record) for record in found["records"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a quality file ({type(error).__name__}: {error}); move it away") from error


def markdown(records: Sequence[QualityRecord]) -> str:
    """A markdown table of perplexities; the best of each width in bits stands in bold."""
    lines = [
        "| model | weights | method | bits | keys and values | perplexity | error of outputs |",
        "| --- | --- | --- | ---: | --- | ---: | ---: |",
    ]
    for record in records:
        group = "" if record.group_size == -1 else f", groups of {record.group_size}"
        error = "" if record.error is None else f"{record.error:.1%}"
        cache = f"{record.kv_cache}, {record.kv_bits:.2f} bits" if record.kv_cache else ""
        lines.append(
            f"| {record.model} | {record.format}{group} | {_method(record)} | {record.bits:.2f} | {cache} | "
            f"{record.perplexity:.2f} | {error} |"
        )
    return "\n".join(lines)


def _method(record: QualityRecord) -> str:
    names = {"rtn": "round to nearest", "gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"}
    more = ", act-order" if record.configuration.endswith("act-order") else ""
    more += ", activations in int8" if record.configuration in ("int8-activations", "int8-smoothquant") else ""
    return names.get(record.method, "") + more


def block(results: Path) -> str | None:
    """What `<!-- results:quality -->` holds; None if nothing was measured."""
    path = results / QUALITY
    if not path.exists():
        return None
    found = load(path)
    records = found["records"]
    first = records[0]
    what = f"perplexity of {first.tokens} tokens in windows of {first.length}, of a text that was not calibrated on"
    return f"{what}; bits of an element, scales included; from `results/{QUALITY}`.\n\n{markdown(records)}"
