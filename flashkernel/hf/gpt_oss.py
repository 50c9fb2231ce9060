"""gpt-oss from its released files, with experts that stay in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRotaryEmbedding

from flashkernel.blocks.epilogue import Gate
from flashkernel.blocks.weight import Weight
from flashkernel.hf.quantized import OrderedBuffers, dtype_of, plain_tensor, set_parameter
from flashkernel.ops.moe import moe_experts, moe_sort


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
    folder: str | Path, device: torch.device | str = "cuda", dtype: torch.dtype | str = torch.bfloat16
) -> GptOssForCausalLM:
    """Returns gpt-oss from a folder in its released layout. Its experts stay in MXFP4 and are frozen.

    No expert is ever held in 16 bits: a layer's experts are dequantized for the duration of a product of many tokens,
    and read as they are for few. On a Hopper GPU they are put into tiles (`Weight.tiled`); state dicts have rows.

    Args:
        folder: config.json and *.safetensors with `*_blocks` and `*_scales` for the experts; or "owner/name", of a
            repository in the local Hugging Face cache.
        device: Where the model goes.
        dtype: Of all other weights, or its name.

    Returns:
        A GptOssForCausalLM in training mode; no parameter requires a gradient.

    Raises:
        FileNotFoundError: The folder has no such files.
        ModelError: The repository is not here; or tensors are missing, damaged, of other shapes than config.json says,
            or have no place in the model.

    Example:
        >>> import flashkernel.hf
        >>> flashkernel.hf.load_gpt_oss("no/such/folder")
        Traceback (most recent call last):
        FileNotFoundError: no/such/folder has no config.json; give a folder with gpt-oss's files
    """
    from flashkernel.engine import ModelError, hub

    dtype = dtype_of(dtype, "load_gpt_oss")
    place = hub.resolve(folder) if hub.is_repository(folder) else Path(folder)
    if not (place / "config.json").is_file():
        raise FileNotFoundError(f"{place} has no config.json; give a folder with gpt-oss's files")
    if not any(place.glob("*.safetensors")):
        raise FileNotFoundError(f"{place} has no *.safetensors; give a folder with gpt-oss's files")
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.quantized_checkpoint import WeightReader

    reader = WeightReader(open_checkpoint(place))
    values = {name: value for name, value in reader.checkpoint.config.values.items() if name != "quantization_config"}
    config = GptOssConfig.from_dict(values)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    freeze_experts(model, reader, device, dtype, quantize=True)
    for name, parameter in list(model.named_parameters()):
        if reader.has(name) or not (config.tie_word_embeddings and name == "lm_head.weight"):
            value = plain_tensor(reader.read(name), dtype, tuple(parameter.shape)).to(device)
            set_parameter(model, name, value, reader.source)
    model.model.rotary_emb = GptOssRotaryEmbedding(config).to(device)
    if config.tie_word_embeddings:
        model.tie_weights()
    if reader.unused:
        raise ModelError(f"{reader.source}: {', '.join(sorted(reader.unused)[:3])} have no place in the model")
    return model.requires_grad_(False).train()


def freeze_experts(
    model: nn.Module, reader: Any, device: torch.device | str, dtype: torch.dtype, quantize: bool = False
) -> None:
    """Replaces the experts of a gpt-oss that a checkpoint has in MXFP4 by `FrozenExperts`, one layer after the other.

    Args:
        model: Any model; its parameters may be on the meta device.
        reader: A `WeightReader` of the checkpoint.
        device: Where the experts go.
        dtype: Of their biases and of the activations.
        quantize: Quantizes experts that the checkpoint has in 16 bits.
    """
    from flashkernel.engine import ModelError

    for name, module in list(model.named_modules()):
        if not isinstance(module, GptOssExperts):
            continue
        gate_up, down = (_stack(reader, f"{name}.{one}", device, quantize) for one in ("gate_up_proj", "down_proj"))
        if gate_up is None or down is None:
            continue
        for one, stack in ((module.gate_up_proj, gate_up), (module.down_proj, down)):
            experts, inner, outer = one.shape
            if tuple(stack.shape) != (experts, outer, inner):
                raise ModelError(
                    f"{reader.source}: a stack of {name} has shape {tuple(stack.shape)}; the configuration says "
                    f"{(experts, outer, inner)}"
                )
        biases = [reader.read(f"{name}.{one}_bias").to(device, dtype) for one in ("gate_up_proj", "down_proj")]
        made = FrozenExperts(gate_up, down, biases[0], biases[1])
        made.use_kernel_order(dtype)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made)


def _stack(reader: Any, name: str, device: torch.device | str, quantize: bool) -> Weight | None:
    """A stack of experts in MXFP4, (experts, out, in); None for one in 16 bits that is to stay so."""
    found = reader.read(name)
    if isinstance(found, Weight):
        return found.to(device)
    return Weight.quantize(found.to(device).transpose(1, 2).contiguous(), "mxfp4") if quantize else None
