"""The transformer: one forward pass for every architecture, over keys and values in pages.

Tokens of all sequences lie one behind the other, [tokens, hidden]: first one of each decoding sequence, then the
chunks of prompts. Norms, biases, activations and residuals ride on the matrix products where tokens are few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.engine import operators
from flashkernel.engine.architectures import Piece, architecture_of
from flashkernel.engine.checkpoint import Checkpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.kvcache import LayerPages, Step


@dataclass(frozen=True)
class Layer:
    """The tensors of one layer; weights are (out, in), those of experts [experts, out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    up: Tensor  # gate and up in one, where there is a gate
    down: Tensor
    attention_norm_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None


@dataclass(frozen=True)
class Outer:
    """The tensors around the layers."""

    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    final_norm_bias: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """What one forward pass computes: `step` says where; the first `decoding` sequences have one token each."""

    ids: Tensor  # int64 [tokens]
    step: Step
    decoding: int
    wanted: Tensor | None  # int64: tokens whose logits are wanted; None: all


class Transformer:
    """Weights on a device, and the forward pass."""

    def __init__(self, config: ModelConfig, outer: Outer, layers: list[Layer]) -> None:
        self.config, self.outer, self.layers = config, outer, layers

    @property
    def device(self) -> torch.device:
        return self.outer.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.embedding.dtype

    @property
    def nbytes(self) -> int:
        """Memory of the weights; a tied output layer counts once."""
        held = {
            x.data_ptr(): x.nbytes for part in (self.outer, *self.layers) for x in vars(part).values() if x is not None
        }
        return sum(held.values())

    def forward(self, tokens: Tokens, pages: list[LayerPages]) -> Tensor:
        """Logits in float32, [wanted, vocab]; writes the tokens' keys and values into pages."""
        outer, config = self.outer, self.config
        x = F.embedding(tokens.ids, outer.embedding)
        if outer.positions is not None:
            x = x + F.embedding(tokens.step.positions, outer.positions)
        run = operators.begin(self, tokens, pages)
        for layer, window, stored in zip(self.layers, config.windows, pages):
            packed = run.normed_linear(x, layer.attention_norm, layer.attention_norm_bias, layer.qkv, layer.qkv_bias)
            q = run.remember(packed.view(x.shape[0], -1, config.head_dim), layer, stored)
            seen = run.attend(q, stored, window, layer.sinks)
            x = run.linear(seen, layer.out, layer.out_bias, x)
            x = run.mlp(x, layer)
        if tokens.wanted is not None:
            x = x[tokens.wanted]
        return run.normed_linear(x, outer.final_norm, outer.final_norm_bias, outer.head, None, out_dtype=torch.float32)


def load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Read a model's weights onto a device; `progress(layers read, layers)` is told after each."""
    architecture = architecture_of(checkpoint.settings)
    config = architecture.configure(checkpoint.settings)
    reader = _Reader(checkpoint, config, device, dtype)
    found = reader.pieces(architecture.outer, "")
    if config.tied:
        found["head"] = found["embedding"] = _laid_out(found["embedding"])
    elif found.get("head") is None:
        raise ModelError(f"{checkpoint.settings.place}: the output layer's weight is missing, and it is not tied")
    else:
        found["head"] = _laid_out(found["head"])
    outer = Outer(**found)
    layers = []
    for index in range(config.layers):
        pieces = reader.pieces(architecture.layer, architecture.layer_prefix.format(index))
        products = {name: _laid_out(pieces[name]) for name in ("qkv", "out", "up", "down")}
        layers.append(Layer(**pieces | products))
        if progress is not None:
            progress(index + 1, config.layers)
    reader.check_leftovers(architecture.ignored)
    _check_shapes(config, outer, layers, checkpoint.settings.place)
    return Transformer(config, outer, layers)


def _laid_out(weight: Tensor) -> Tensor:
    """A weight as its device reads it fastest. CPU libraries take one with more outputs than inputs by columns: 1.1 to
    1.25 times as fast with one row, and more with several."""
    turned = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.ndim == 2
    return weight.T.contiguous().T if turned and weight.shape[0] > weight.shape[1] else weight


class _Reader:
    """Makes pieces of stored tensors, and remembers which were used."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.config, self.device, self.dtype = checkpoint, config, device, dtype
        self.names = set(checkpoint.names)
        self.unused = set(self.names)

    def pieces(self, table: Mapping[str, Piece], prefix: str) -> dict[str, Any]:
        return {name: self._piece(piece, prefix) for name, piece in table.items()}

    def _piece(self, piece: Piece, prefix: str) -> Tensor | None:
        names = [prefix + name for name in piece.stored]
        if piece.optional and not any(name in self.names for name in names):
            return None
        if any("{expert}" in name for name in names):
            experts = range(self.config.experts)
            found = torch.stack([self._joined([name.format(expert=e) for name in names]) for e in experts])
        else:
            found = self._joined(names)
        if piece.turned:
            found = found.transpose(-1, -2)
        return found.to(self.device, self.dtype).contiguous()

    def _joined(self, names: list[str]) -> Tensor:
        missing = [name for name in names if name not in self.names]
        if missing:
            place = self.checkpoint.settings.place
            raise ModelError(f"{place}: {', '.join(missing)} are missing; the model is incomplete, get it again")
        self.unused.difference_update(names)
        parts = [self.checkpoint.read(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def check_leftovers(self, ignored: tuple[str, ...]) -> None:
        """A tensor that nobody asked for is a part of the model that would be left out without a word."""
        left = sorted(name for name in self.unused if not name.endswith(ignored))
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise ModelError(
                f"{self.checkpoint.settings.place}: {shown} have no place in a {self.config.architecture} model"
            )


def _check_shapes(config: ModelConfig, outer: Outer, layers: list[Layer], place: str) -> None:
    """The weights must be as the configuration says; what follows from these shapes is checked by the operators."""
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    expected = {"qkv": (rows, config.hidden), "out": (config.hidden, config.heads * config.head_dim)}
    for index, layer in enumerate(layers):
        for name, shape in expected.items():
            found = tuple(getattr(layer, name).shape)
            if found != shape:
                raise ModelError(f"{place}: {name} of layer {index} has shape {found}; the configuration says {shape}")
    for field in fields(Outer):
        x = getattr(outer, field.name)
        if field.name in ("embedding", "head") and tuple(x.shape) != (config.vocab, config.hidden):
            raise ModelError(
                f"{place}: the {field.name} has shape {tuple(x.shape)}; the configuration says "
                f"{(config.vocab, config.hidden)}"
            )
