"""Configuration of a model: the same facts whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashkernel import Frequencies, Router


class ModelError(ValueError):
    """A model that cannot be found, read or run; the message says what to do.

    Example:
        >>> from flashkernel.engine import LLM, ModelError
        >>> try:
        ...     LLM("no/such/folder")
        ... except ModelError as error:
        ...     print("not found")
        not found
    """


_LAYERS, _MAX_LAYERS = ("num_hidden_layers", "n_layer"), 10_000


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only transformer.

    Args:
        architecture: Transformers' `model_type`, such as "llama".
        vocab_size: Number of tokens.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key/value heads; divides `heads`.
        head_dim: Width of a head.
        max_position_embeddings: Longest sequence that the model was made for.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        eps: Epsilon of the norms.
        activation: Activation of the MLP, as `flashkernel.linear` names it.
        packed: How gate and up lie in one weight: "halves" or "interleaved".
        frequencies: Of the rotary embedding; None: learned positions.
        sliding_windows: For each layer, how many tokens a token sees; None: all.
        tie_word_embeddings: The LM head is the embedding.
        num_experts: Experts of a layer; 0: a dense MLP.
        num_experts_per_token: Experts that the router chooses for a token.
        normalize_router: The weights of a token's experts sum to 1.
        eos_token_ids: Tokens that end a text.
        dtype: Dtype of the stored weights.
        norm_offset: Added to the weights of norms; 1 for Gemma.
        embedding_scale: Embeddings are multiplied by it.
        attention_scale: Factor on scores; None: head_dim ** -0.5.
        local_frequencies: Of the rotary embedding in layers with a sliding window, where it differs.

    Example:
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> config = tiny_transformer().config
        >>> config.hidden_size, config.num_layers, config.heads, config.kv_heads
        (32, 2, 4, 2)
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: str
    eps: float
    activation: str
    packed: str
    frequencies: Frequencies | None
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    num_experts: int = 0
    num_experts_per_token: int = 0
    normalize_router: bool = True
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    local_frequencies: Frequencies | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "heads", "kv_heads", "head_dim", "max_position_embeddings")
        wrong = {name: getattr(self, name) for name in sizes if getattr(self, name) < 1}
        if wrong:
            raise ModelError(f"{self.architecture}: sizes must be at least 1, and the configuration has {wrong}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.heads} query heads cannot share {self.kv_heads} key/value heads; the "
                "configuration is damaged"
            )

    @cached_property
    def router(self) -> Router:
        """How tokens choose their experts."""
        return Router("softmax", self.num_experts_per_token, self.normalize_router)


class HFConfig:
    """A config.json of Transformers, read with errors that name what is missing."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def need(self, name: str) -> Any:
        """The value of a field; ModelError if it is missing."""
        value = self.values.get(name)
        if value is None:
            raise ModelError(f"{self.source}: the configuration has no {name!r}, which this architecture needs")
        return value

    def size(self, name: str) -> int:
        """A field that must be a whole number."""
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} is {value!r}; it must be a whole number")
        if name in _LAYERS and value > _MAX_LAYERS:  # lists of so many entries are made before a tensor is missed
            raise ModelError(f"{self.source}: {name} is {value}; no model has so many layers, and the file is damaged")
        return value

    def get(self, name: str, default: Any) -> Any:
        """The value of a field; `default` if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text; the configuration names none, one or several."""
        value = self.values.get("eos_token_id")
        return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)

    def sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The window of each layer: `layer_types` decides if there are any, else a window holds for all layers."""
        window = self.values.get("sliding_window")
        if window is None or self.values.get("use_sliding_window") is False:
            return (None,) * num_layers
        kinds = self.get("layer_types", ["sliding_attention"] * num_layers)
        if len(kinds) != num_layers:
            raise ModelError(f"{self.source}: layer_types names {len(kinds)} layers, and the model has {num_layers}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
