"""The transformer: weights and one forward pass for every architecture, over a paged KV cache.

Tokens of all sequences are concatenated, [tokens, hidden]: first one token of each decoding sequence, then the prefill
chunks. For few tokens, norms, biases, activations and residuals are fused into the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel import Weight
from flashkernel.engine import forward_pass
from flashkernel.engine.config import ModelConfig
from flashkernel.engine.weight_order import experts_order, layer_order
from flashkernel.kvcache import LayerPages, Step

PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer. Projections are (out, in), those of experts [experts, out, in]."""

    attention_norm: Tensor
    qkv_proj: forward_pass.Projection
    o_proj: Tensor | Weight
    mlp_norm: Tensor
    gate_up_proj: Tensor | Weight  # gate and up in one; up alone if the activation has no gate
    down_proj: Tensor | Weight
    attention_norm_bias: Tensor | None = None
    qkv_proj_bias: Tensor | None = None
    o_proj_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    gate_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None  # of the attention's output, before it is added
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """Weights of the model beside those of its decoder layers."""

    embedding: Tensor | Weight  # [vocab, hidden]
    final_norm: Tensor
    lm_head: Tensor | Weight  # [vocab, hidden]; the embedding itself if tied
    final_norm_bias: Tensor | None = None
    position_embedding: Tensor | None = None  # [positions, hidden]; None: rotary


@dataclass(frozen=True)
class ModelInput:
    """Input of a forward pass: the first `num_decodes` sequences have one token each, the others prefill chunks."""

    input_ids: Tensor  # int64 [tokens]
    step: Step  # positions, slots, page table and lengths
    num_decodes: int
    logits_indices: Tensor | None  # int64: tokens whose logits are wanted; None: all
    eager: bool = False  # layer by layer, and each operator through dispatch


class Transformer:
    """A decoder-only transformer: its weights on a device, and the forward pass.

    Args:
        config: What the weights are.
        weights: Embedding, final norm and LM head.
        layers: Weights of each decoder layer.

    Example:
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> model = tiny_transformer()
        >>> model.device.type, len(model.layers), model.nbytes
        ('cpu', 2, 74880)
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights]) -> None:
        self.config, self.weights, self.layers = config, weights, layers
        self.linear_calls: dict[Any, Any] = {}  # of forward_pass.TorchForwardPass, by weight
        self.cpu_backends: dict[torch.dtype, dict[str, str]] = {}  # of forward_pass.select, by the dtype of KV pages

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.weights.final_norm.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; a tied LM head counts once."""
        found = {
            tensor.data_ptr(): tensor.nbytes
            for part in (self.weights, *self.layers)
            for x in vars(part).values()
            if x is not None
            for part_or_whole in (x if isinstance(x, tuple) else (x,))
            for tensor in (part_or_whole.tensors if isinstance(part_or_whole, Weight) else (part_or_whole,))
        }
        return sum(found.values())

    def quantized(self, format: str) -> Transformer:
        """The model with its layers' projections in another `Weight` format, with that format's default groups.

        Args:
            format: A name of `flashkernel.Weight` formats, such as "int4".
        """
        layers = []
        for layer in self.layers:
            found: dict[str, Any] = {name: getattr(layer, name) for name in PROJECTIONS}
            for name, projection in found.items():
                if isinstance(projection, Tensor) and format != "plain":
                    found[name] = Weight.quantize(projection, format)
            layers.append(replace(layer, **layer_order(found, self.dtype)))
        return Transformer(self.config, self.weights, layers)

    def with_mxfp4_experts(self) -> Transformer:
        """The model with its experts in MXFP4, rounded to nearest, as gpt-oss is released; those in MXFP4 stay."""
        layers = []
        for layer in self.layers:
            stacks = [getattr(layer, name) for name in ("gate_up_proj", "down_proj")]
            found = [Weight.quantize(x, "mxfp4") if isinstance(x, Tensor) else x for x in stacks]
            gate_up, down = experts_order(found[0], found[1], self.dtype)
            layers.append(replace(layer, gate_up_proj=gate_up, down_proj=down))
        return Transformer(self.config, self.weights, layers)

    def forward(self, model_input: ModelInput, pages: list[LayerPages]) -> Tensor:
        """Computes logits; writes the keys and values of the tokens into `pages`.

        Args:
            model_input: Tokens and where they belong.
            pages: KV pages of each layer.

        Returns:
            Logits in float32, [logits_indices, vocab].
        """
        run = forward_pass.select(self, model_input, pages)
        program = run.decode_program(self, pages)
        if program is not None:
            return program(run)
        weights = self.weights
        x = self.embed(model_input.input_ids)
        if weights.position_embedding is not None:
            x = x + F.embedding(model_input.step.positions, weights.position_embedding)
        for index, (layer, layer_pages) in enumerate(zip(self.layers, pages)):
            x = self.forward_layer(run, x, layer, index, layer_pages)
        if model_input.logits_indices is not None:
            x = x[model_input.logits_indices]
        return self.logits(run, x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The embeddings of tokens `input_ids`, [..., hidden]; of a quantized table only their rows are dequantized.

        Args:
            input_ids: Integers [...].
        """
        table = self.weights.embedding
        if isinstance(table, Weight):
            x = table.take(input_ids).dequantize(self.dtype).view(*input_ids.shape, -1)
        else:
            x = F.embedding(input_ids, table)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype, device="cpu")

    def forward_layer(
        self, run: forward_pass.ForwardPass, x: Tensor, layer: LayerWeights, index: int, pages: LayerPages
    ) -> Tensor:
        """Hidden states [tokens, hidden] after a decoder layer.

        Args:
            run: The operators of the pass.
            x: Hidden states before the layer.
            layer: Its weights, which need not be the model's own.
            index: Its number, which says what its window is.
            pages: KV pages of the layer; keys and values of the tokens are written there.
        """
        config = self.config
        qkv = run.norm_linear(x, layer.attention_norm, layer.attention_norm_bias, layer.qkv_proj, layer.qkv_proj_bias)
        window = config.sliding_windows[index]
        q = run.write_kv(qkv.view(x.shape[0], -1, config.head_dim), layer, pages, window)
        o = run.attention(q, pages, window, layer.sinks)
        if layer.attention_post_norm is None:
            x = run.linear_residual(o, layer.o_proj, layer.o_proj_bias, x)
        else:
            x = x + run.norm(run.linear(o, layer.o_proj, layer.o_proj_bias), layer.attention_post_norm)
        return run.mlp(x, layer)

    def logits(self, run: forward_pass.ForwardPass, x: Tensor) -> Tensor:
        """Logits in float32 of hidden states x [tokens, hidden], by the operators of the pass `run`.

        Args:
            run: A forward pass: whose operators compute them.
            x: Hidden states [tokens, hidden].
        """
        weights = self.weights
        return run.norm_linear(
            x, weights.final_norm, weights.final_norm_bias, weights.lm_head, None, out_dtype=torch.float32
        )
