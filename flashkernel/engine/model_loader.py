"""Loads the weights of a checkpoint onto a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.engine.architectures import StoredWeight, architecture_of
from flashkernel.engine.checkpoint import Checkpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.quantized_checkpoint import StoredQuantization
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, ModelWeights, Transformer

SCALE_SUFFIXES = ("_scale", "_scale_inv")  # of an 8-bit weight: vLLM's and DeepSeek's names; both multiply
_FORMATS = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    quantization: str | None = None,
) -> Transformer:
    """Loads a model; calls `progress(layers loaded, layers)` after each layer.

    With `quantization`, the name of a `Weight` format, projections are quantized with that format's default groups.
    """
    architecture = architecture_of(checkpoint.config)
    config = architecture.configure(checkpoint.config)
    loader = _WeightLoader(checkpoint, config, device, dtype, quantization)
    found = loader.load(architecture.model_weights, "")
    if config.tie_word_embeddings:
        found["lm_head"] = found["embedding"] = _laid_out(_dense(found["embedding"], dtype))
    elif found.get("lm_head") is None:
        raise ModelError(f"{checkpoint.config.source}: the output layer's weight is missing, and it is not tied")
    else:
        found["lm_head"] = _laid_out(found["lm_head"])
    weights = ModelWeights(**found)
    layers = []
    for index in range(config.num_layers):
        tensors = loader.load(architecture.layer_weights, architecture.layer_prefix.format(index))
        projections = {name: _laid_out(tensors[name], quantization) for name in PROJECTIONS}
        layers.append(LayerWeights(**tensors | projections))
        if progress is not None:
            progress(index + 1, config.num_layers)
    loader.check_all_used(architecture.ignored)
    _check_shapes(config, weights, layers, checkpoint.config.source)
    return Transformer(config, weights, layers)


def _laid_out(weight: Tensor | Weight, quantization: str | None = None) -> Tensor | Weight:
    """The weight in the format that is asked for, else in the memory order that its device reads fastest.

    CPU libraries read a weight with more outputs than inputs faster by columns: 1.1 to 1.25 times as fast with one row,
    and more with several.
    """
    if isinstance(weight, Weight):  # as the checkpoint has it
        return weight
    if quantization is not None:
        return Weight.quantize(weight, quantization)
    transposed = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.ndim == 2
    return weight.T.contiguous().T if transposed and weight.shape[0] > weight.shape[1] else weight


class _WeightLoader:
    """Builds weights from stored tensors and records which tensors were used."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str | None,
    ) -> None:
        self.checkpoint, self.config, self.device, self.dtype = checkpoint, config, device, dtype
        self.keep_mxfp4 = quantization == "mxfp4"
        self.stored = StoredQuantization.of(checkpoint.config)
        self.names = set(checkpoint.names)
        self.unused = set(self.names)

    def load(self, table: Mapping[str, StoredWeight], prefix: str) -> dict[str, Any]:
        return {name: self._weight(stored, prefix) for name, stored in table.items()}

    def _weight(self, stored: StoredWeight, prefix: str) -> Tensor | Weight | None:
        names = [prefix + name for name in stored.names]
        if stored.optional and not any(self._is_there(name) for name in names):
            return None
        if any("{expert}" in name for name in names):
            experts = range(self.config.num_experts)
            each = [self._concatenated([name.format(expert=e) for name in names]) for e in experts]
            found = Weight.stack(each) if isinstance(each[0], Weight) else torch.stack(each)
        else:
            found = self._concatenated(names)
        transposed = stored.transposed
        if isinstance(found, Weight) and found.format == "mxfp4" and transposed:  # stored (out, in) all the same
            if self.keep_mxfp4:
                return found.to(self.device)
            return torch.stack([found[expert].dequantize(self.dtype).to(self.device) for expert in range(len(found))])
        if isinstance(found, Weight) and found.format == "plain":
            found = found.data
        if isinstance(found, Weight):
            if transposed:
                raise ModelError(f"{self.checkpoint.config.source}: {names[0]} is quantized and stored (in, out)")
            return found.to(self.device)
        if transposed:
            found = found.transpose(-1, -2)
        return found.to(self.device, self.dtype).contiguous()

    def _is_there(self, name: str) -> bool:
        return name in self.names or (self.stored is not None and bool(self.stored.part_names(name, self.names)))

    def _concatenated(self, names: list[str]) -> Any:
        """The tensors' rows in one: a tensor, or a `Weight` if they are stored quantized."""
        missing = [name for name in names if not self._is_there(name)]
        if missing:
            source = self.checkpoint.config.source
            raise ModelError(f"{source}: {', '.join(missing)} are missing; the model is incomplete, get it again")
        parts: list[Any] = [self._part(name) for name in names]
        if any(isinstance(part, Weight) for part in parts):
            parts = [part if isinstance(part, Weight) else Weight(part) for part in parts]
            try:
                return Weight.concatenate(parts)
            except ValueError as error:
                raise ModelError(f"{self.checkpoint.config.source}: {', '.join(names)}: {error}") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, name: str) -> Tensor | Weight:
        """One stored weight."""
        if name not in self.names:
            assert self.stored is not None
            stored = self.stored.part_names(name, self.names)
            self.unused.difference_update(stored.values())
            tensors: Any = {part: self.checkpoint.read(full) for part, full in stored.items()}
            return self._checked(name, lambda: self.stored.read(tensors))  # type: ignore[union-attr]
        self.unused.discard(name)
        found = self.checkpoint.read(name)
        if isinstance(found, Tensor) and found.dtype in _FORMATS:
            return self._packed(name, found)
        return found

    def _packed(self, name: str, data: Tensor) -> Weight:
        """A weight in 8 bits with its scales. x stays as it is, whatever the checkpoint rounds it to."""
        found = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in self.names]
        if not found:
            kind = str(data.dtype).removeprefix("torch.")
            raise ModelError(f"{self.checkpoint.config.source}: {name} is in {kind} and has no scales")
        point = name + "_zero_point"
        self.unused.difference_update([*found, point])
        self.unused.discard(name.removesuffix("weight") + "input_scale")
        scales: Any = self.checkpoint.read(found[0])
        zeros: Any = self.checkpoint.read(point) if point in self.names else None
        return self._checked(name, lambda: Weight.pack(data, scales, zeros, _FORMATS[data.dtype]))

    def _checked(self, name: str, make: Callable[[], Weight]) -> Weight:
        """ModelError if the tensors of a weight do not fit together."""
        try:
            return make()
        except ValueError as error:
            raise ModelError(f"{self.checkpoint.config.source}: {name}: {error}") from error

    def check_all_used(self, ignored: tuple[str, ...]) -> None:
        """ModelError if a stored tensor was not used: the model would run without a part of it."""
        left = sorted(name for name in self.unused if not name.endswith(ignored))
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise ModelError(
                f"{self.checkpoint.config.source}: {shown} have no place in a {self.config.architecture} model"
            )


def _check_shapes(config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights], source: str) -> None:
    """ModelError if weights differ from the configuration; the operators check what follows from these shapes."""
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    table = (config.vocab_size, config.hidden_size)
    expected = {"qkv_proj": (rows, config.hidden_size), "o_proj": (config.hidden_size, config.heads * config.head_dim)}
    for index, layer in enumerate(layers):
        for name, shape in expected.items():
            _check_shape(f"{source}: {name} of layer {index}", getattr(layer, name), shape)
    _check_shape(f"{source}: the embedding", weights.embedding, table)
    _check_shape(f"{source}: the lm_head", weights.lm_head, table)


def _dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor, which a lookup of tokens needs."""
    return weight.dequantize(dtype) if isinstance(weight, Weight) else weight


def _check_shape(what: str, weight: Tensor | Weight, expected: tuple[int, ...]) -> None:
    if tuple(weight.shape) != expected:
        raise ModelError(f"{what} has shape {tuple(weight.shape)}; the configuration says {expected}")
