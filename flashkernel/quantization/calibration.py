"""Quantization of a model, layer by layer: each one is calibrated on what the quantized layers before it compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight
from flashkernel.engine.config import ModelConfig
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, Transformer
from flashkernel.quantization.awq import awq_factors, smoothquant_factors
from flashkernel.quantization.folding import fold, folds, shared_channels
from flashkernel.quantization.gptq import gptq
from flashkernel.quantization.layer_pass import InputStatistics, SequenceRunner
from flashkernel.quantization.scheme import Scheme, round_to_nearest
from flashkernel.quantization.state import CalibrationState

METHODS = ("rtn", "gptq", "awq", "smoothquant")
# What a method puts factors on. A projection is folded into one that comes before it in the layer, and so must come
# first. SmoothQuant leaves what follows no norm: a single large input of down_proj would coarsen its whole rows.
_FOLDED = {
    "awq": ("down_proj", "gate_up_proj", "o_proj", "qkv_proj"),
    "smoothquant": ("gate_up_proj", "qkv_proj"),
}
_linear: Any = fk.linear


@dataclass(frozen=True)
class LayerError:
    """How far the outputs of a quantized projection are from those of the plain one, relative to their size.

    Args:
        layer: Number of the decoder layer.
        projection: "qkv_proj", "o_proj", "gate_up_proj" or "down_proj".
        before: The error of rounding to nearest.
        after: The error of the method.

    Example:
        >>> from flashkernel.quantization import LayerError
        >>> LayerError(0, "o_proj", before=0.08, after=0.05).after
        0.05
    """

    layer: int
    projection: str
    before: float
    after: float


@dataclass(frozen=True)
class Method:
    """A method with its settings.

    Args:
        name: "rtn" (rounding to nearest), "gptq", "awq" or "smoothquant".
        damping: Of GPTQ.
        act_order: Of GPTQ: columns with the largest inputs first.
        strength: Of SmoothQuant: how much of the outliers moves into the weights, from 0 to 1.

    Example:
        >>> from flashkernel.quantization import Method
        >>> Method("gptq", act_order=True).damping
        0.01
    """

    name: str = "gptq"
    damping: float = 0.01
    act_order: bool = False
    strength: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"Method: name is {self.name!r}; it must be one of {', '.join(METHODS)}")
        if not self.damping > 0 or not 0 <= self.strength <= 1:
            raise ValueError(
                f"Method: damping is {self.damping} and strength {self.strength}; they must be above 0, and from 0 to 1"
            )


@torch.no_grad()
def quantize_model(
    model: Transformer,
    token_ids: Tensor | None,
    method: Method | str = "gptq",
    scheme: Scheme | None = None,
    *,
    state: Path | None = None,
    progress: Callable[[int, int, list[LayerError]], None] | None = None,
) -> tuple[Transformer, list[LayerError]]:
    """Returns the model with quantized projections, and the error of each projection.

    Norms, embedding, LM head and routers stay as they are; AWQ and SmoothQuant change norms and rows of weights by
    factors that cancel. Experts of a mixture are rounded to nearest.

    Args:
        model: A model of the engine in float32, float16 or bfloat16, with plain weights.
        token_ids: Calibration text, int64 (sequences, length). None is enough for "rtn", and gives no errors.
        method: A `Method`, or its name.
        scheme: What the projections become; by default int4 in groups of 128, and for "smoothquant" int8 with
            activations in int8.
        state: A folder where the work is saved after each layer. A call that was interrupted goes on from there.
        progress: Called after each layer with (layers done, layers, errors of that layer).

    Returns:
        (the quantized model, errors).

    Example:
        >>> import torch
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> from flashkernel.quantization import Scheme, quantize_model
        >>> tokens = torch.randint(0, 100, (4, 64))
        >>> model, errors = quantize_model(tiny_transformer(), tokens, "gptq", Scheme("int4", 16))
        >>> model.layers[0].qkv_proj
        Weight(int4 1x16, 64x32, 1536 bytes)
        >>> all(error.after < error.before for error in errors)
        True
    """
    method = Method(method) if isinstance(method, str) else method
    if scheme is None:
        scheme = Scheme("int8", -1, activation_dtype=torch.int8) if method.name == "smoothquant" else Scheme()
    _check(model, method, scheme)
    if token_ids is None:
        if method.name != "rtn":
            raise ValueError(f"quantize_model: {method.name} calibrates; give token_ids of a text")
        return _rounded(model, scheme), []
    runner = SequenceRunner(model, token_ids)
    saved = None if state is None else CalibrationState(state, _fingerprint(model, token_ids, method, scheme))
    layers: list[LayerWeights] = [] if saved is None else saved.layers()
    errors = [] if saved is None else [LayerError(**one) for one in saved.errors]
    layers = [_to(layer, model.device) for layer in layers]
    hidden = runner.embeddings() if not layers or saved is None else saved.hidden().to(model.device)
    for index in range(len(layers), len(model.layers)):
        statistics: dict[str, InputStatistics] = {}
        runner.layer(hidden, model.layers[index], index, statistics)
        _check_inputs(statistics, index)
        layer, found = quantize_layer(model.layers[index], model.config, statistics, method, scheme, index)
        hidden = runner.layer(hidden, layer, index)
        layers.append(layer)
        errors += found
        if saved is not None:
            saved.save(layer, hidden, [asdict(error) for error in found])
        if progress is not None:
            progress(index + 1, len(model.layers), found)
    return Transformer(model.config, model.weights, layers), errors


def quantize_layer(
    layer: LayerWeights,
    config: ModelConfig,
    statistics: dict[str, InputStatistics],
    method: Method,
    scheme: Scheme,
    index: int,
) -> tuple[LayerWeights, list[LayerError]]:
    """Returns a decoder layer with quantized projections, and their errors; `statistics` are of their inputs."""
    folded, factors = layer, {name: torch.ones((), device=layer.attention_norm.device) for name in PROJECTIONS}
    for name in _FOLDED.get(method.name, ()):
        if name in statistics and folds(layer, config, name):
            factors[name] = _factors(getattr(folded, name), config, name, statistics[name], method, scheme)
            folded = fold(folded, config, name, factors[name])
    found: dict[str, Any] = {}
    errors = []
    for name in PROJECTIONS:
        matrix = getattr(folded, name)
        if name not in statistics:  # experts
            found[name] = _round(matrix, scheme)
            continue
        found[name] = _quantized(matrix, statistics[name], factors[name], method, scheme)
        original = getattr(layer, name)
        sample, rows = statistics[name].sample, _row_ratio(original, matrix, factors[name])
        before = _error(original, _linear(sample, round_to_nearest(original, scheme)), sample)
        after = _error(original, _linear(sample / factors[name], found[name]) / rows, sample)
        errors.append(LayerError(index, name, before, after))
    return replace(folded, **found), errors


def _rounded(model: Transformer, scheme: Scheme) -> Transformer:
    """The model with all projections rounded to nearest."""
    layers = []
    for layer in model.layers:
        found: dict[str, Any] = {name: _round(getattr(layer, name), scheme) for name in PROJECTIONS}
        layers.append(replace(layer, **found))
    return Transformer(model.config, model.weights, layers)


def _round(matrix: Tensor, scheme: Scheme) -> Weight:
    """A matrix, or a stack of experts, rounded to nearest; experts take x as it is."""
    if matrix.ndim == 2:
        return round_to_nearest(matrix, scheme)
    return Weight.stack([round_to_nearest(one, replace(scheme, activation_dtype=None)) for one in matrix])


def _factors(
    matrix: Tensor, config: ModelConfig, name: str, inputs: InputStatistics, method: Method, scheme: Scheme
) -> Tensor:
    assert inputs.hessian is not None
    assert inputs.largest is not None
    if method.name == "awq":
        means = shared_channels(inputs.mean_magnitudes, config, name, largest=False)
        return awq_factors(matrix, inputs.sample, means, scheme)
    factors = smoothquant_factors(matrix, shared_channels(inputs.largest, config, name, largest=True), method.strength)
    plain, sample = torch.ones_like(factors), inputs.sample

    def error(factors: Tensor) -> float:
        outputs = _linear(sample / factors, round_to_nearest(matrix.float() * factors, scheme))
        return _error(matrix, outputs, sample)

    return factors if error(factors) < error(plain) else plain


def _quantized(matrix: Tensor, inputs: InputStatistics, factors: Tensor, method: Method, scheme: Scheme) -> Weight:
    assert inputs.hessian is not None
    if method.name == "gptq":
        return gptq(matrix, inputs.hessian, scheme, damping=method.damping, act_order=method.act_order)
    if method.name == "awq":
        importance = (inputs.hessian.diagonal() / factors.square()).clamp_min(1e-12)
        sample = inputs.sample / factors
        found = [round_to_nearest(matrix, scheme), round_to_nearest(matrix, scheme, importance)]
        return min(found, key=lambda weight: _error(matrix, _linear(sample, weight), sample))  # importance is a guess
    return round_to_nearest(matrix, scheme)


def _error(matrix: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """Error of a projection's outputs, relative to their size."""
    exact = inputs @ matrix.float().T
    return float((outputs - exact).norm() / exact.norm().clamp_min(1e-30))


def _row_ratio(before: Tensor, after: Tensor, factors: Tensor) -> Tensor:
    """By what the rows of a matrix were multiplied when another projection was folded into them."""
    largest, argmax = before.float().abs().max(1)
    scaled = (after.float() / factors).abs().gather(1, argmax[:, None])[:, 0]
    return torch.where(largest > 0, scaled / largest.clamp_min(1e-30), 1.0)


def _check(model: Transformer, method: Method, scheme: Scheme) -> None:
    for index, layer in enumerate(model.layers):
        for name in PROJECTIONS:
            value = getattr(layer, name)
            if isinstance(value, Weight):
                raise ValueError(f"quantize_model: {name} is quantized already, as {value!r}; load the plain model")
            if value.is_meta:
                raise ValueError(f"quantize_model: {name} in layer {index} is on the meta device; load its values")
            if not bool(value.isfinite().all()):
                count = int((~value.isfinite()).sum())
                raise ValueError(
                    f"quantize_model: {count} of {value.numel()} elements of {name} in layer {index} are infinite or "
                    "NaN; the model is damaged, get it again"
                )
            scheme.check(name, value.shape[-1])
    if method.name == "smoothquant" and scheme.activation_dtype is None:
        raise ValueError(
            "quantize_model: SmoothQuant rounds activations too; give a scheme with activation_dtype=torch.int8"
        )
    if method.name in ("gptq", "awq"):
        scheme.numbers  # noqa: B018  ValueError if the format has no integers


def _check_inputs(statistics: dict[str, InputStatistics], index: int) -> None:
    """ValueError if a layer's inputs are infinite or NaN: every method would take them for a reason to do nothing."""
    for name, found in statistics.items():
        if found.largest is not None and not bool(found.largest.isfinite().all()):
            raise ValueError(
                f"quantize_model: inputs of {name} in layer {index} are infinite or NaN; the norms or biases before it "
                "are damaged, or the model overflows in float16: run it in bfloat16 or float32"
            )


def _fingerprint(model: Transformer, token_ids: Tensor, method: Method, scheme: Scheme) -> str:
    """What a saved state belongs to: the weights that calibration reads, the text, and all settings."""
    settings = [repr(model.config), repr(method), repr(scheme), str(tuple(token_ids.shape))]
    digest = hashlib.sha256("\n".join(settings).encode())
    weights = [model.weights.embedding, model.weights.position_embedding]
    for value in (token_ids, *weights, *[one for layer in model.layers for one in vars(layer).values()]):
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            digest.update(f"{data.dtype} {tuple(data.shape)}".encode())
            digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _to(layer: LayerWeights, device: torch.device) -> LayerWeights:
    found: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in vars(layer).items()}
    return LayerWeights(**found)
