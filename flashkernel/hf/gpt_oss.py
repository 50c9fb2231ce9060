"""gpt-oss from its released files, with experts that stay in MXFP4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from flashkernel.blocks.epilogue import Gate
from flashkernel.blocks.weight import Weight
from flashkernel.hf.quantized import OrderedBuffers
from flashkernel.ops.moe import moe_experts, moe_sort

_PACKED = ("_blocks", "_scales")


class FrozenExperts(nn.Module):
    """gpt-oss's experts of a layer, quantized and frozen; it takes the place of `GptOssExperts`.

    Gradients go through it to the hidden states and the routing weights.
    """

    def __init__(self, gate_up: Weight, down: Weight, gate_up_bias: Tensor, down_bias: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = OrderedBuffers(gate_up), OrderedBuffers(down)
        self.register_buffer("gate_up_proj_bias", gate_up_bias)
        self.register_buffer("down_proj_bias", down_bias)
        self.num_experts = len(gate_up)

    def use_kernel_order(self, dtype: torch.dtype) -> None:
        """Puts the experts into the order that the kernels of their device read, for activations in `dtype`."""
        from flashkernel.engine.weight_order import experts_order

        gate_up, down = experts_order(self.gate_up_proj.weight, self.down_proj.weight, dtype)
        self.gate_up_proj.hold(gate_up)
        self.down_proj.hold(down)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """The weighted sums of the experts; as GptOssExperts."""
        routing = moe_sort(router_indices, routing_weights, num_experts=self.num_experts)
        biases: Any = (self.gate_up_proj_bias, self.down_proj_bias)
        return moe_experts(
            hidden_states, routing, self.gate_up_proj.weight, self.down_proj.weight, *biases,
            activation=Gate("gpt_oss"), packed="interleaved",
        )  # fmt: skip


def load_gpt_oss(
    folder: str | Path, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> GptOssForCausalLM:
    """Returns gpt-oss from a folder in its released layout. Its experts stay in MXFP4 and are frozen.

    No expert is ever held in 16 bits: a layer's experts are dequantised for the duration of a product of many tokens,
    and read as they are for few. On a Hopper GPU they are put into tiles (`Weight.tiled`); state dicts have rows.

    Args:
        folder: config.json and *.safetensors with `*_blocks` and `*_scales` for the experts.
        device: Where the model goes.
        dtype: Of all other weights.

    Returns:
        A GptOssForCausalLM in training mode; no parameter requires a gradient.

    Raises:
        FileNotFoundError: The folder has no such files.
        ValueError: Tensors are missing.

    Example:
        >>> import flashkernel.hf
        >>> flashkernel.hf.load_gpt_oss("no/such/folder")
        Traceback (most recent call last):
        FileNotFoundError: no/such/folder has no config.json; give a folder with gpt-oss's files
    """
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise FileNotFoundError(f"{place} has no config.json; give a folder with gpt-oss's files")
    values = json.loads((place / "config.json").read_text())
    values.pop("quantization_config", None)
    config = GptOssConfig.from_dict(values)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    packed: dict[str, Tensor] = {}
    for name, tensor in _tensors(place):
        if name.endswith(_PACKED):
            packed[name] = tensor.to(device)
        else:
            _set(model, name, tensor.to(device, dtype))
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts = _experts(packed, f"model.layers.{index}.mlp.experts", layer.mlp.experts)
        layer.mlp.experts.use_kernel_order(dtype)
    model.model.rotary_emb = GptOssRotaryEmbedding(config).to(device)
    if config.tie_word_embeddings:
        model.tie_weights()
    missing = [name for name, one in model.named_parameters() if one.is_meta]
    if missing:
        raise ValueError(f"load_gpt_oss: {place} has no {', '.join(missing[:3])} and {len(missing)} such in all")
    return model.requires_grad_(False).train()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors; give a folder with gpt-oss's files")
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  a safetensors file is no mapping
                yield name, file.get_tensor(name)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    module = model.get_submodule(parent)
    if attribute not in module._parameters:
        raise ValueError(f"load_gpt_oss: {name} has no place in the model")
    module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


def _experts(packed: dict[str, Tensor], prefix: str, module: Any) -> FrozenExperts:
    """The experts of a layer; where a checkpoint has them in 16 bits, quantized here."""
    weights = []
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (packed.pop(f"{prefix}.{name}{ending}", None) for ending in _PACKED)
        if blocks is not None and scales is not None:
            weights.append(Weight.pack(blocks, scales, format="mxfp4"))
            continue
        dense = getattr(module, name)
        if dense.is_meta:
            raise ValueError(f"load_gpt_oss: there is neither {prefix}.{name}_blocks nor {prefix}.{name}")
        weights.append(Weight.quantize(dense.transpose(1, 2).contiguous(), "mxfp4"))
    biases = [getattr(module, f"{name}_bias").detach() for name in ("gate_up_proj", "down_proj")]
    return FrozenExperts(weights[0], weights[1], biases[0], biases[1])
