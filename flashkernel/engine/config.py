"""What a transformer is made of, in numbers: the same facts whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashkernel import Frequencies


class ModelError(ValueError):
    """A model that cannot be found, read or run; the message says what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. What an architecture does not have is None, zero or empty."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # the most positions it was made for
    norm: str  # "rms" or "layer"
    eps: float
    activation: str  # as `flashkernel.linear` names it
    packed: str  # how gate and up lie in one weight: "halves" or "interleaved"
    frequencies: Frequencies | None  # None: learned positions
    windows: tuple[int | None, ...]  # for each layer, how many tokens a token sees; None: all
    tied: bool  # the output layer is the embedding
    experts: int = 0
    experts_per_token: int = 0
    stop_tokens: tuple[int, ...] = ()
    dtype: str = "float32"  # what the weights are stored in

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "context")
        wrong = {name: getattr(self, name) for name in sizes if getattr(self, name) < 1}
        if wrong:
            raise ModelError(f"{self.architecture}: sizes must be at least 1, and the configuration has {wrong}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.heads} query heads cannot share {self.kv_heads} key/value heads; the "
                "configuration is damaged"
            )


class Settings:
    """A configuration as Transformers writes it (config.json), read with errors that name what is missing."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def need(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            raise ModelError(f"{self.place}: the configuration has no {name!r}, which this architecture needs")
        return value

    def size(self, name: str) -> int:
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.place}: {name} is {value!r}; it must be a whole number")
        return value

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text, however many the configuration names."""
        value = self.values.get("eos_token_id")
        return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """What each layer sees. `layer_types` decides where there are any, else a window holds for all layers."""
        window = self.values.get("sliding_window")
        if window is None or self.values.get("use_sliding_window") is False:
            return (None,) * layers
        kinds = self.get("layer_types", ["sliding_attention"] * layers)
        if len(kinds) != layers:
            raise ModelError(f"{self.place}: layer_types names {len(kinds)} layers, and the model has {layers}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
