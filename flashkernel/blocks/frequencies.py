"""The frequencies of a rotary embedding: plain, or stretched to longer contexts by one of the published rules."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.arguments import static
from flashkernel.core.replay import CONSTANT
from flashkernel.core.tables import for_any_call
from flashkernel.core.tracing import assume_constant_result

_cache_keys: dict[tuple[tuple[float, ...], float], object] = {}  # one short key for equal frequencies (core/replay.py)


@dataclass(frozen=True)
class Frequencies:
    """Angular frequencies of a rotary embedding, one per rotated pair of dims, and a factor on cos and sin.

    Pair i of n = dim / 2 rotates by theta^(-i / n) radians per position in the plain form; other constructors change
    that for contexts longer than the model was trained on. Values are rounded to float32, as in the models' code.

    Args:
        values: radians per position of each pair.
        scaling: multiplies cos and sin (YaRN's attention factor).

    Example:
        >>> import flashkernel as fk
        >>> fk.Frequencies.plain(8, theta=10000.0).rotary_dim
        8
        >>> fk.Frequencies.linear(8, 10000.0, factor=2.0).values[0]
        0.5
    """

    values: tuple[float, ...]
    scaling: float = 1.0

    def __post_init__(self) -> None:
        values, scaling = [static(value) for value in self.values], static(self.scaling)
        if not values or not all(math.isfinite(value) for value in (*values, scaling)):
            raise ValueError(f"Frequencies: need at least one finite value and a finite scaling, not {self}")
        object.__setattr__(self, "values", tuple([_float32(value) for value in values]))
        object.__setattr__(self, "scaling", scaling)

    @property
    def cache_key(self) -> object:
        """Tells calls apart (core/replay.py)."""
        found = self.__dict__.get("_key")
        if found is None:
            found = self.__dict__["_key"] = _cache_keys.setdefault((self.values, self.scaling), object())
        return found

    @property
    def rotary_dim(self) -> int:
        """How many dims of a head are rotated."""
        return 2 * len(self.values)

    @classmethod
    def plain(cls, dim: int, theta: float = 10000.0) -> Frequencies:
        """Returns the original frequencies, theta^(-2i / dim).

        Args:
            dim: rotated dims of a head; even.
            theta: the base.
        """
        if dim < 2 or dim % 2:
            raise ValueError(f"Frequencies: {dim} dims cannot be rotated in pairs; dim must be even and at least 2")
        if not 0 < theta < math.inf:
            raise ValueError(f"Frequencies: theta is {theta}; it must be above 0, and finite")
        dim, theta = static(dim), static(theta)
        return cls(tuple(theta ** (-index / dim) for index in range(0, dim, 2)))

    @classmethod
    def linear(cls, dim: int, theta: float, factor: float) -> Frequencies:
        """Returns frequencies divided by `factor` (position interpolation).

        Args:
            dim: rotated dims of a head; even.
            theta: the base.
            factor: how much longer the context becomes.
        """
        _check_factor("linear", factor)
        return cls(tuple(value / factor for value in _exact(dim, theta)))

    @classmethod
    def llama3(
        cls,
        dim: int,
        theta: float,
        factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        original_max_positions: int,
    ) -> Frequencies:
        """Returns Llama 3.1's frequencies: low ones divided by `factor`, high ones kept, those between blended.

        Args:
            dim: rotated dims of a head; even.
            theta: the base.
            factor: how much longer the context becomes.
            low_freq_factor: pairs with fewer rotations in the original context are divided.
            high_freq_factor: pairs with more rotations are kept.
            original_max_positions: context length of the original training.
        """
        if high_freq_factor <= low_freq_factor:
            raise ValueError(
                f"Frequencies.llama3: high_freq_factor is {high_freq_factor}; "
                f"it must be above low_freq_factor, {low_freq_factor}"
            )

        _check_factor("llama3", factor)

        def stretched(value: float) -> float:
            rotations = original_max_positions * value / (2 * math.pi)  # in the original context
            kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)
            kept = min(1.0, max(0.0, kept))
            return value * (kept + (1 - kept) / factor)

        return cls(tuple(stretched(value) for value in _exact(dim, theta)))

    @classmethod
    def yarn(
        cls,
        dim: int,
        theta: float,
        factor: float,
        original_max_positions: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> Frequencies:
        """Returns YaRN's frequencies: a linear ramp over the pairs blends kept and interpolated ones.

        Args:
            dim: rotated dims of a head; even.
            theta: the base.
            factor: how much longer the context becomes.
            original_max_positions: context length of the original training.
            beta_fast: pairs with more rotations than this in the original context are kept.
            beta_slow: pairs with fewer rotations than this are divided by `factor`.
            attention_factor: the scaling of cos and sin; follows from `factor` (and the mscales) unless given.
            mscale: DeepSeek's numerator of the scaling.
            mscale_all_dim: DeepSeek's denominator of the scaling.
            truncate: rounds the ramp's ends to whole pairs.
        """

        _check_factor("yarn", factor)

        def correction_dim(rotations: float) -> float:
            return dim * math.log(original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = correction_dim(beta_fast), correction_dim(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001  # no ramp: a step

        def blended(index: int, value: float) -> float:
            kept = 1 - min(1.0, max(0.0, (index - low) / width))
            return value * (kept + (1 - kept) / factor)

        if attention_factor is None:
            attention_factor = _yarn_scale(factor, 1.0)
            if mscale and mscale_all_dim:
                attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
        values = tuple(blended(index, value) for index, value in enumerate(_exact(dim, theta)))
        return cls(values, attention_factor)

    @classmethod
    def from_hf(cls, config: Any, layer_type: str | None = None) -> Frequencies:
        """Returns the frequencies of a Transformers config, as version 5 (`rope_parameters`) or 4 writes it.

        Args:
            config: a config object or dict.
            layer_type: names the entry where a model has several ("full_attention", "sliding_attention").
        """
        return _from_hf(config, layer_type)

    def inverse(self, device: torch.device | str = "cpu") -> Tensor:
        """The values as a float32 tensor [dim / 2], kept per device.

        Args:
            device: The device of the result.
        """
        return self._kept("inverse", device)

    def rates(self, device: torch.device | str = "cpu") -> Tensor:
        """Rotations per position in units of 2^-64, modulo one rotation: int64 [dim / 2], kept per device.

        A position times a rate, in wrapping int64 arithmetic, is the phase without the rounding of large angles.

        Args:
            device: The device of the result.
        """
        return self._kept("rates", device)

    def table(self, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions 0, 1, ..., each float32 [positions, dim / 2] on `device`.

        Args:
            positions: How many, counted from 0.
            device: The device of the result.
        """
        cos, sin = self.cos_sin(torch.arange(positions, device=device))
        return cos.float(), sin.float()

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of integer positions [...], each float64 [..., dim / 2], times the scaling.

        Args:
            positions: Integers of any shape [...].
        """
        angles = positions.double()[..., None] * self.inverse(positions.device).double()
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def _kept(self, name: str, device: torch.device | str) -> Tensor:
        if torch.compiler.is_compiling():
            return _graph_constant(tuple([static(value) for value in self.values]), name, device)
        known = self.__dict__.setdefault("_tensors", {})  # not a field: a graph may make these objects, without it
        found = known.get((name, device))
        if found is None:
            with for_any_call():
                found = _tensor_of(self.values, name, device)
            if type(found) is Tensor:  # a tracer's stand-in must not outlive its trace
                known[name, device] = found
                setattr(found, CONSTANT, True)
        return found


@assume_constant_result
def _graph_constant(values: tuple[float, ...], name: str, device: torch.device | str) -> Tensor:
    """A compiled graph holds the tensor itself: one made inside could live in memory that a replay reuses."""
    key = (values, name, device)
    if key not in _graph_constants:
        with for_any_call():
            found = _tensor_of(*key)
        if type(found) is not Tensor:
            return found
        _graph_constants[key] = found
    return _graph_constants[key]


_graph_constants: dict[Any, Tensor] = {}  # the layers of a model share them


def _tensor_of(values: tuple[float, ...], name: str, device: torch.device | str) -> Tensor:
    """`Frequencies.inverse` or `Frequencies.rates`."""
    if name == "inverse":
        return torch.tensor(values, dtype=torch.float32, device=device)
    units = (round(value / (2 * math.pi) * 2**64) % 2**64 for value in values)
    return torch.tensor([unit - 2**64 if unit >= 2**63 else unit for unit in units], dtype=torch.int64, device=device)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _exact(dim: int, theta: float) -> tuple[float, ...]:
    """The plain frequencies before rounding to float32; checks dim and theta as `plain` does."""
    Frequencies.plain(dim, theta)
    return tuple(theta ** (-index / dim) for index in range(0, dim, 2))


def _check_factor(rule: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ValueError(f"Frequencies.{rule}: factor is {factor}; it must be above 0, and finite")


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _from_hf(config: Any, layer_type: str | None) -> Frequencies:
    def read(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    rule = dict(read("rope_parameters") or read("rope_scaling") or {})
    nested = [name for name, value in rule.items() if isinstance(value, Mapping)]
    if nested:
        if layer_type not in nested:
            raise ValueError(f"Frequencies.from_hf: this model has {', '.join(nested)}; say layer_type=one of them")
        rule = dict(rule[layer_type])
    heads, hidden = read("num_attention_heads"), read("hidden_size")
    head_dim = read("head_dim") or (hidden // heads if heads and hidden else None)
    if head_dim is None:
        raise ValueError("Frequencies.from_hf: the config has no head_dim, nor hidden_size and num_attention_heads")
    most = read("max_position_embeddings")
    original = rule.get("original_max_position_embeddings") or read("original_max_position_embeddings", most)
    if rule.get("factor") is None and most and original:
        rule["factor"] = most / original
    dim = int(head_dim * (rule.get("partial_rotary_factor") or read("partial_rotary_factor", 1.0)))
    theta = rule.get("rope_theta") or read("rope_theta", 10000.0)
    kind = rule.get("rope_type") or rule.get("type") or "default"
    return _build(kind, dim, theta, original, rule)


def _build(kind: str, dim: int, theta: float, original: Any, rule: Mapping[str, Any]) -> Frequencies:
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
    }
    if kind not in needed:
        raise ValueError(
            f"Frequencies.from_hf: rope type {kind!r} is not known; there are {', '.join(needed)}. "
            "For another, compute the frequencies and pass Frequencies(values, scaling)"
        )
    missing = [name for name in needed[kind] if rule.get(name) is None]
    if kind in ("llama3", "yarn") and original is None:
        missing.append("original_max_position_embeddings")
    if missing:
        raise ValueError(f"Frequencies.from_hf: rope type {kind!r} needs {', '.join(missing)}, which the config lacks")
    if kind == "default":
        return Frequencies.plain(dim, theta)
    if kind == "linear":
        return Frequencies.linear(dim, theta, rule["factor"])
    if kind == "llama3":
        low, high = rule["low_freq_factor"], rule["high_freq_factor"]
        return Frequencies.llama3(dim, theta, rule["factor"], low, high, original)
    optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    given = {name: rule[name] for name in optional if rule.get(name) is not None}
    return Frequencies.yarn(dim, theta, rule["factor"], original, **given)
