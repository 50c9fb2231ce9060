"""Saves a model in a folder as Transformers does: config.json, model.safetensors and the tokenizer.

The folder appears whole or not at all: everything is written beside it and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.engine.architectures import Architecture, StoredWeight, architecture_of
from flashkernel.engine.checkpoint import Checkpoint, SafetensorsCheckpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.quantized_checkpoint import LAYOUTS, quantization_config, write_experts, write_weight
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, Transformer
from flashkernel.engine.weight_order import row_order

_COPIED = (
    "tokenizer*",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab*",
    "merges*",
)


def save_model(model: Transformer, checkpoint: Checkpoint, folder: Path, layout: str = "compressed-tensors") -> None:
    """Writes a model whose projections are quantized.

    Args:
        model: The model.
        checkpoint: Where it came from: its configuration and tokenizer are saved with it.
        folder: The new folder; it must not exist, or be empty.
        layout: How quantized weights are stored: "compressed-tensors", "gptq", "gptq_v2", "awq", or "mxfp4", which is
            that of gpt-oss's released files: experts in MXFP4, everything else plain.

    Raises:
        ModelError: The folder is in use, a weight has no place in the layout, or the disk is full. Nothing is left.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"save_model: layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: it exists and is not empty; choose another folder, or delete it")
    architecture = architecture_of(checkpoint.config)
    try:
        stored = _StoredModel(model, architecture, layout, _stored_dtype(model, checkpoint))
    except ValueError as error:
        raise ModelError(f"{folder}: the model cannot be stored in the layout {layout!r}: {error}") from error
    tensors, config = stored.tensors, _config(model, checkpoint, stored.quantization)
    needed = sum(tensor.nbytes for tensor in tensors.values())
    part: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_space(folder, needed)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        _write(part, tensors, config, checkpoint)
        part.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except OSError as error:
        raise ModelError(
            f"{folder}: the model cannot be written ({error}); nothing was left there; free space, or choose another "
            "folder"
        ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ModelError(
            f"{folder}: the model has {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there; free space, or "
            "choose a folder on another disk"
        )


def check_storable(checkpoint: Checkpoint) -> None:
    """ModelError if the projections of a checkpoint's model are stored (in, out): no layout has quantized ones so."""
    stored = architecture_of(checkpoint.config).layer_weights
    names = [stored[name].names[0] for name in PROJECTIONS if stored[name].transposed]
    if names:
        raise ModelError(
            f"{checkpoint.config.source}: {', '.join(names)} are stored (in, out), which quantized weights are not; "
            "such a model cannot be saved quantized, but for gpt-oss with the method mxfp4"
        )


def _write(part: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), part / "model.safetensors", {"format": "pt"})
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    (part / "model.safetensors").chmod(0o644)
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if isinstance(checkpoint, SafetensorsCheckpoint):
        for pattern in _COPIED:
            for file in checkpoint.path.glob(pattern):
                shutil.copy(file, part / file.name)
        return
    tokenizer = checkpoint.tokenizer()
    if tokenizer is not None:
        _write_tokenizer(part, tokenizer)


def _write_tokenizer(part: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer that was made of a GGUF file, as `Tokenizer.from_folder` reads it."""
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    if tokenizer.bos_token_id is not None:
        from tokenizers.processors import TemplateProcessing

        token = backend.id_to_token(tokenizer.bos_token_id)
        backend.post_processor = TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, tokenizer.bos_token_id)]
        )
    backend.save(str(part / "tokenizer.json"))
    settings = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    kept = {name: value for name, value in settings.items() if value is not None}
    (part / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _stored_dtype(model: Transformer, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of matrices that are not quantized: the source's, if the model was only computed in a wider one."""
    name = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype", "float32"))
    found = getattr(torch, str(name), model.dtype)
    narrower = isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize < model.dtype.itemsize
    return found if narrower else model.dtype


def _config(model: Transformer, checkpoint: Checkpoint, quantization: dict[str, Any] | None) -> dict[str, Any]:
    values = {name: value for name, value in checkpoint.config.values.items() if value is not None}
    values.pop("quantization_config", None)
    values["dtype"] = str(_stored_dtype(model, checkpoint)).removeprefix("torch.")
    values.pop("torch_dtype", None)
    return values if quantization is None else {**values, "quantization_config": quantization}


class _StoredModel:
    """Every tensor of a model under its stored name, and what config.json says of the quantized ones.

    Attributes:
        tensors: The tensors; matrices that are not quantized are in `dtype`.
        quantization: What config.json says; None if nothing is quantized.
    """

    def __init__(self, model: Transformer, architecture: Architecture, layout: str, dtype: torch.dtype) -> None:
        self.config, self.layout, self.dtype = model.config, layout, dtype
        self.tensors: dict[str, Tensor] = {}
        self._plain = ["lm_head"]  # linear layers that are not quantized
        self._first: tuple[str, Weight] | None = None
        for name, stored in architecture.model_weights.items():
            value = row_order(getattr(model.weights, name))
            if value is not None and not (name == "lm_head" and model.config.tie_word_embeddings):
                self._add(value, stored, "")
        for index, layer in enumerate(model.layers):
            prefix = architecture.layer_prefix.format(index)
            for name, stored in architecture.layer_weights.items():
                value = row_order(getattr(layer, name))
                if isinstance(value, Weight) and value.ndim == 3:
                    value = _like_projections(value, layer)
                if value is not None:
                    self._add(value, stored, prefix)
        found = None if self._first is None else self._first[1]
        self.quantization = None if found is None else quantization_config(found, layout, self._plain)

    def _add(self, value: Any, stored: StoredWeight, prefix: str) -> None:
        stack = isinstance(value, Weight) and value.ndim == 3 and "{expert}" not in stored.names[0]
        if self.layout == "mxfp4" and stack:
            self._first = self._first or (stored.names[0], value)
            for ending, tensor in write_experts(value).items():
                self.tensors[prefix + stored.names[0] + ending] = tensor.cpu()
            return
        if stored.transposed and isinstance(value, Weight):
            raise ValueError(f"{prefix}{stored.names[0]} is stored (in, out), which quantized layers are not")
        if "{expert}" in stored.names[0]:
            for expert in range(len(value)):
                names = tuple(name.format(expert=expert) for name in stored.names)
                self._add(value[expert], StoredWeight(names), prefix)
            return
        sizes = _sizes(value.shape[0], len(stored.names), self.config)
        start = 0
        for name, size in zip(stored.names, sizes):
            rows = slice(start, start + size)
            start += size
            if isinstance(value, Weight):
                self._add_weight(prefix + name, value.rows(rows))
            else:
                self._add_plain(prefix + name, value[rows] if len(sizes) > 1 else value, stored.transposed)

    def _add_weight(self, name: str, weight: Weight) -> None:
        for part, tensor in write_weight(weight, self.layout).items():
            self.tensors[name.removesuffix("weight") + part] = tensor.cpu()
        if name == "lm_head.weight":
            self._plain.remove("lm_head")
        if self._first is None:
            self._first = (name, weight)
        other, first = self._first
        if quantization_config(weight, self.layout) != quantization_config(first, self.layout):
            raise ValueError(
                f"{name} is {weight!r} and {other} is {first!r}: config.json has one format and group size for all; "
                "quantize all projections alike"
            )

    def _add_plain(self, name: str, tensor: Tensor, transposed: bool) -> None:
        tensor = tensor.to(self.dtype) if tensor.ndim > 1 else tensor
        tensor = tensor.transpose(-1, -2) if transposed else tensor
        self.tensors[name] = tensor.detach().cpu().clone().contiguous()
        layer = name.removesuffix(".weight")
        if tensor.ndim == 2 and "layers." in name and layer != name:  # a router, or a projection that stays plain
            self._plain.append(layer)


def _like_projections(stack: Weight, layer: LayerWeights) -> Weight:
    """A stack of experts as a layer's projections are: it takes x as it is, and a checkpoint has one format."""
    other = layer.o_proj
    if not isinstance(other, Weight) or other.format != stack.format or other.activation_dtype is None:
        return stack
    return replace(stack, activation_dtype=other.activation_dtype)


def _sizes(rows: int, parts: int, config: ModelConfig) -> list[int]:
    """Rows of each stored tensor: q, k and v, gate and up, or all."""
    if parts == 3:
        return [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    return [rows // parts] * parts
