"""Loads the weights of a checkpoint onto a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.weight_formats.int8 import with_zeros
from flashkernel.core.huge_pages import HugePages
from flashkernel.engine.architectures import StoredWeight, architecture_of
from flashkernel.engine.checkpoint import Checkpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.forward_pass import Projection
from flashkernel.engine.quantized_checkpoint import WeightReader
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, ModelWeights, Transformer
from flashkernel.engine.weight_order import kernel_order, layer_order

_linear: Any = fk.linear


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    quantization: str | None = None,
) -> Transformer:
    """Loads a model; calls `progress(layers loaded, layers)` after each layer.

    With `quantization`, the name of a `Weight` format, projections are quantized with that format's default groups;
    "plain" dequantizes a GGUF file's weights and experts in MXFP4. Without it, they stay quantized if kernels read them
    on the device.
    """
    architecture = architecture_of(checkpoint.config)
    config = architecture.configure(checkpoint.config)
    loader = _WeightLoader(checkpoint, config, device, dtype, quantization)
    found = loader.load(architecture.model_weights, "")
    if config.tie_word_embeddings:
        embedding = found["embedding"]
        looked_up = isinstance(embedding, Weight) and embedding.group_shape[0] == 1
        found["lm_head"] = found["embedding"] = embedding if looked_up else _laid_out(_dense(embedding, dtype))
    elif found.get("lm_head") is None:
        raise ModelError(f"{checkpoint.config.source}: the output layer's weight is missing, and it is not tied")
    else:
        found["lm_head"] = kernel_order(_laid_out(found["lm_head"]), dtype)
    weights = ModelWeights(**found)
    layers = []
    for index in range(config.num_layers):
        tensors = loader.load(architecture.layer_weights, architecture.layer_prefix.format(index))
        projections = layer_order({name: _laid_out(tensors[name], quantization) for name in PROJECTIONS}, dtype)
        layers.append(LayerWeights(**tensors | projections))
        if progress is not None:
            progress(index + 1, config.num_layers)
    loader.check_all_used(architecture.ignored)
    _check_shapes(config, weights, layers, checkpoint.config.source)
    return Transformer(config, weights, layers)


def _laid_out(weight: Any, quantization: str | None = None) -> Any:
    """The weight in the format that is asked for, else in the memory order that its device reads fastest.

    CPU libraries read a weight with more outputs than inputs faster by columns: 1.1 to 1.25 times as fast with one row,
    and more with several.
    """
    if not isinstance(weight, Tensor):  # as the checkpoint has it
        return weight
    if quantization is not None and quantization != "plain":
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
        self.keep_stored, self.dequantizes = quantization is None, quantization == "plain"
        self.reader, self.pages = WeightReader(checkpoint), HugePages()

    def load(self, table: Mapping[str, StoredWeight], prefix: str) -> dict[str, Any]:
        return {name: self._weight(stored, prefix) for name, stored in table.items()}

    def _weight(self, stored: StoredWeight, prefix: str) -> Projection | None:
        names = [prefix + name for name in stored.names]
        if stored.optional and not any(self.reader.has(name) for name in names):
            return None
        if any("{expert}" in name for name in names):
            experts = range(self.config.num_experts)
            each = [self._concatenated([name.format(expert=e) for name in names]) for e in experts]
            found: Any = self._stacked(each, names[0])
        else:
            found = self._concatenated(names)
        transposed = stored.transposed
        if set(names) <= self.reader.whole:  # (out, in) always
            return self._kept(found)
        if isinstance(found, Weight) and found.format == "mxfp4" and transposed:  # stored (out, in) all the same
            if self.dequantizes:
                return torch.stack([found[one].dequantize(self.dtype).to(self.device) for one in range(len(found))])
            return found.to(self.device)
        if isinstance(found, Weight) and found.format == "plain":
            found = found.data
        if isinstance(found, Weight):
            if transposed:
                raise ModelError(f"{self.checkpoint.config.source}: {names[0]} is quantized and stored (in, out)")
            return found.to(self.device)
        if transposed:
            found = found.transpose(-1, -2)
        return found.to(self.device, self.dtype).contiguous()

    def _stacked(self, experts: list[Any], name: str) -> Tensor | Weight:
        """The experts in one; ModelError if they are stored in different ways."""
        if not any(isinstance(one, Weight) for one in experts):
            return torch.stack(experts)
        try:
            weights = [one if isinstance(one, Weight) else Weight(one) for one in experts]
            return Weight.stack(with_zeros(weights) if len({one.format for one in weights}) == 1 else weights)
        except ValueError as error:
            raise ModelError(f"{self.checkpoint.config.source}: {name}: {error}") from error

    def _kept(self, weight: Weight | tuple[Weight, ...]) -> Projection:
        """The weight as a GGUF file has it where kernels of the device read it, else dequantized.

        On a CPU x is rounded to int8 in blocks of 32 columns, as llama.cpp does, and weights lie in huge pages.
        """
        if isinstance(weight, tuple):
            found: Any = tuple([self._kept(part) for part in weight])
            whole = all(isinstance(part, Weight) for part in found)
            return found if whole else torch.cat([_dense(part, self.dtype) for part in found])
        rounds = self.device.type == "cpu"
        kept = replace(weight, activation_dtype=torch.int8 if rounds else None).to(self.device)
        x = torch.empty((1, weight.shape[1]), dtype=self.dtype, device=self.device)
        if self.keep_stored and fk.explain(_linear, x, kept).chosen not in ("torch", "reference"):
            return Weight.from_tensors(list(map(self.pages.place, kept.tensors)), kept.layout) if rounds else kept
        return weight.dequantize(self.dtype).to(self.device)

    def _concatenated(self, names: list[str]) -> Any:
        """The tensors' rows in one: a tensor, or a `Weight` if they are stored quantized."""
        missing = [name for name in names if not self.reader.has(name)]
        if missing:
            source = self.checkpoint.config.source
            raise ModelError(f"{source}: {', '.join(missing)} are missing; the model is incomplete, get it again")
        parts: list[Any] = [self.reader.read(name) for name in names]
        self._check_rows(names, parts)
        if any(isinstance(part, Weight) for part in parts):
            parts = [part if isinstance(part, Weight) else Weight(part) for part in parts]
            if len({part.format for part in parts}) > 1 and set(names) <= self.reader.whole:
                return tuple(parts)
            try:
                return Weight.concatenate(parts)
            except ValueError as error:
                raise ModelError(f"{self.checkpoint.config.source}: {', '.join(names)}: {error}") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check_rows(self, names: list[str], parts: list[Any]) -> None:
        """ModelError if q, k and v, or gate and up, have rows of another: in one matrix nobody could tell."""
        config, found = self.config, [part.shape[0] for part in parts]
        expected = [found[0]] * len(parts)
        if len(parts) == 3:
            expected = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
        if found != expected:
            raise ModelError(f"{self.checkpoint.config.source}: {', '.join(names)} have {found} rows, not {expected}")

    def check_all_used(self, ignored: tuple[str, ...]) -> None:
        """ModelError if a stored tensor was not used: the model would run without a part of it."""
        left = sorted(name for name in self.reader.unused if not name.endswith(ignored))
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise ModelError(
                f"{self.checkpoint.config.source}: {shown} have no place in a {self.config.architecture} model"
            )


def _check_shapes(config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights], source: str) -> None:
    """ModelError if weights differ from the configuration, or from each other."""
    table = (config.vocab_size, config.hidden_size)
    _check_shape(f"{source}: the embedding", weights.embedding, table)
    _check_shape(f"{source}: the lm_head", weights.lm_head, table)
    for name in ("final_norm", "final_norm_bias"):
        _check_shape(f"{source}: {name}", getattr(weights, name), table[1:])
    for index, layer in enumerate(layers):
        for name, shape in _expected_shapes(config, layer).items():
            _check_shape(f"{source}: {name} of layer {index}", getattr(layer, name), shape)


def _expected_shapes(config: ModelConfig, layer: LayerWeights) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights; how wide the MLP is follows from its own weights."""
    hidden, rows = config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_dim
    norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
    vectors = (*norms, "attention_norm_bias", "mlp_norm_bias", "o_proj_bias")
    experts = () if layer.router is None else (config.num_experts,)
    parts: Any = layer.gate_up_proj if isinstance(layer.gate_up_proj, tuple) else (layer.gate_up_proj,)
    wide = sum(part.shape[-2] for part in parts)
    inner = wide // 2 if config.activation in GATES else wide
    return {
        **dict.fromkeys(vectors, (hidden,)),
        **dict.fromkeys(("q_norm", "k_norm"), (config.head_dim,)),
        "qkv_proj": (rows, hidden),
        "qkv_proj_bias": (rows,),
        "o_proj": (hidden, config.heads * config.head_dim),
        "sinks": (config.heads,),
        "router": (*experts, hidden),
        "router_bias": experts,
        "gate_up_proj": (*experts, wide, hidden),
        "gate_up_proj_bias": (*experts, wide),
        "down_proj": (*experts, hidden, inner),
        "down_proj_bias": (*experts, hidden),
    }


def _dense(weight: Tensor | Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor, which a lookup of tokens needs."""
    return weight.dequantize(dtype) if isinstance(weight, Weight) else weight


def _check_shape(what: str, weight: Projection | None, expected: tuple[int, ...]) -> None:
    if isinstance(weight, tuple):
        expected = (expected[0] - sum(part.shape[0] for part in weight[1:]), expected[1])
        weight = weight[0]
    if weight is not None and tuple(weight.shape) != expected:
        raise ModelError(f"{what} has shape {tuple(weight.shape)}; the configuration says {expected}")
