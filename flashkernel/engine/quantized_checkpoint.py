"""Quantized weights in checkpoints: what config.json says of them, how they are read, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.blocks import checkpoint_layouts as layouts
from flashkernel.engine.checkpoint import Checkpoint
from flashkernel.engine.config import HFConfig, ModelError

SCALE_SUFFIXES = ("_scale", "_scale_inv")  # of an 8-bit weight: vLLM's and DeepSeek's names; both multiply
# What x, keys and values were rounded with elsewhere: x stays as it is here, and the cache has scales of its own.
_INPUT_PARTS = ("input_scale", "input_zero_point")
_CACHE_SCALES = ("self_attn.k_scale", "self_attn.v_scale", "k_proj.output_scale", "v_proj.output_scale")
_FORMATS = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}
LAYOUTS = ("compressed-tensors", "gptq", "gptq_v2", "awq", "mxfp4")
_NOT_MXFP4 = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_BY_DTYPE = ("fp8", "mxfp4")  # methods whose tensors say by their names and dtypes what they are
_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}


@dataclass(frozen=True)
class StoredQuantization:
    """How the weights of a checkpoint are quantized, where one has several tensors in place of `weight`.

    Args:
        method: "gptq", "awq" or "compressed-tensors".
        bits: 4 or 8.
        version: Of GPTQ's zero points: 1 or 2.
        format: Of compressed-tensors.
        group_size: Columns that share a scale, as config.json says it; -1: whole rows. None: it says nothing.
        ordered: Whether columns have an order of their own, which g_idx gives (act-order).
    """

    method: str
    bits: int = 4
    version: int = 1
    format: str = ""
    group_size: int | None = None
    ordered: bool = False

    @staticmethod
    def of(config: HFConfig) -> StoredQuantization | None:
        """What config.json says; None if weights are plain, or say themselves what they are (fp8, MXFP4)."""
        values = config.get("quantization_config", None)
        if values is None:
            return None
        method = values.get("quant_method")
        if method in _BY_DTYPE:
            return None
        if method not in _PARTS:
            raise ModelError(
                f"{config.source}: weights quantized by {method!r} are not known; there are "
                f"{', '.join((*_PARTS, *_BY_DTYPE))}"
            )
        if method == "compressed-tensors":
            return _compressed(values, config.source)
        bits = values.get("bits", 4)
        if bits not in ((4, 8) if method == "gptq" else (4,)):
            raise ModelError(f"{config.source}: {method} weights of {bits} bits are not known; 4 are, and 8 of gptq")
        kind = str(values.get("version", values.get("format", "gemm"))).lower()
        if method == "awq" and kind != "gemm":
            raise ModelError(f"{config.source}: AWQ's version {kind!r} is not known; 'gemm' is")
        version = 2 if values.get("checkpoint_format") == "gptq_v2" else 1
        size = None if values.get("dynamic") or values.get("extra_config") else values.get("group_size")
        ordered = method == "gptq" and bool(values.get("desc_act", False))
        return StoredQuantization(method, bits, version, group_size=size, ordered=ordered)

    def part_names(self, name: str, names: Set[str]) -> dict[str, str]:
        """The tensors in place of a weight `...weight`: their full names, by the last part; {} if there are none."""
        if not name.endswith(".weight"):
            return {}
        base = name.removesuffix("weight")
        found = {part: base + part for part in _PARTS[self.method] if base + part in names}
        return found if _PARTS[self.method][0] in found else {}

    def read(self, parts: Mapping[str, Tensor]) -> Weight:
        """The Weight of such tensors; ValueError if they do not fit together."""
        if self.ordered and not any(name.endswith("g_idx") for name in parts):
            raise ValueError("columns have an order of their own, and g_idx, which has it, is missing")
        found = self._read(parts)
        if found.format != "plain" and self.group_size is not None:
            _check_groups(found, (1, self.group_size))
        return found

    def _read(self, parts: Mapping[str, Tensor]) -> Weight:
        if self.method == "gptq":
            size = None if self.group_size in (None, -1) else self.group_size
            return layouts.read_gptq(parts, self.bits, self.version, size)
        if self.method == "awq":
            return layouts.read_awq(parts)
        if self.format == "mxfp4-pack-quantized":
            return Weight.pack(parts["weight_packed"], parts["weight_scale"], format="mxfp4")
        return layouts.read_pack_quantized(parts, self.bits)


class WeightReader:
    """Reads weights of a checkpoint by their Transformers' names, however they are stored; records what was read.

    Attributes:
        unused: Names of stored tensors that were not read.
        whole: Names of matrices that the checkpoint itself gives as a `Weight` (out, in): a GGUF file's.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.source = checkpoint, checkpoint.config.source
        self.stored = StoredQuantization.of(checkpoint.config)
        self._group_shape = _group_shape(checkpoint.config.get("quantization_config", None) or {})
        self.names = set(checkpoint.names)
        self.unused = {name for name in self.names if not name.endswith(_CACHE_SCALES)}
        self.whole: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the weight is stored, in one tensor or in several."""
        return name in self.names or (self.stored is not None and bool(self.stored.part_names(name, self.names)))

    def read(self, name: str) -> Tensor | Weight:
        """A weight; ModelError if its tensors do not fit together."""
        if name not in self.names:
            if self.stored is None:
                raise ModelError(f"{self.source}: {name} is missing; the model is incomplete, get it again")
            stored, own = self.stored.part_names(name, self.names), self.stored
            self._used(name, stored.values())
            tensors: Any = {part: self.checkpoint.read(full) for part, full in stored.items()}
            return self._checked(name, lambda: own.read(tensors))
        self.unused.discard(name)
        found = self.checkpoint.read(name)
        if isinstance(found, Weight) and found.ndim == 2:
            self.whole.add(name)
        if isinstance(found, Tensor) and found.dtype in _FORMATS:
            return self._packed(name, found)
        if isinstance(found, Tensor) and (not found.is_floating_point() or found.dtype.itemsize < 2):
            kind = str(found.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.source}: {name} is in {kind}, and config.json says nothing of a quantization that is stored so"
            )
        return found

    def _packed(self, name: str, data: Tensor) -> Weight:
        """A weight in 8 bits with its scales. x stays as it is, whatever the checkpoint rounds it to."""
        found = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in self.names]
        if not found:
            kind = str(data.dtype).removeprefix("torch.")
            raise ModelError(f"{self.source}: {name} is in {kind} and has no scales")
        if len(found) > 1:
            raise ModelError(f"{self.source}: {name} has scales twice, {' and '.join(found)}")
        point = name + "_zero_point"
        self._used(name, [*found, point])
        scales: Any = self.checkpoint.read(found[0])
        zeros: Any = self.checkpoint.read(point) if point in self.names else None

        def packed() -> Weight:
            weight = Weight.pack(data, scales, zeros, _FORMATS[data.dtype])
            if self._group_shape is not None:
                _check_groups(weight, self._group_shape)
            return weight

        return self._checked(name, packed)

    def _used(self, name: str, parts: Iterable[str]) -> None:
        """Takes the tensors of a weight, and what x was rounded with before it, from those that were not read."""
        self.unused.difference_update(parts)
        self.unused.difference_update([name.removesuffix("weight") + part for part in _INPUT_PARTS])

    def _checked(self, name: str, make: Callable[[], Weight]) -> Weight:
        """ModelError if the tensors of a weight do not fit together."""
        try:
            return make()
        except (ValueError, KeyError) as error:
            said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{self.source}: {name}: {said}") from error


def _check_groups(weight: Weight, expected: tuple[int, int]) -> None:
    """ValueError if the groups of a weight, which follow from the shapes, are not those that config.json says."""

    def sizes(group: tuple[int, int]) -> list[int]:
        return [each if 0 < each < size else size for each, size in zip(group, weight.shape)]

    if sizes(weight.group_shape) != sizes(expected):
        found, said = ("x".join(map(str, sizes(group))) for group in (weight.group_shape, expected))
        raise ValueError(
            f"its scales are for {found} elements each, and config.json says {said}; the checkpoint is damaged, or has "
            "another model's config.json"
        )


def _group_shape(values: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the groups or blocks that share a scale in weights of 8 bits, as config.json says it; None
    if it says nothing, or several things."""
    blocks = values.get("weight_block_size")
    if values.get("quant_method") == "compressed-tensors":
        arguments = [one or {} for one in _weight_arguments(values)]
        kinds = {(one.get("strategy"), one.get("group_size"), str(one.get("block_structure"))) for one in arguments}
        if len(kinds) != 1:
            return None
        if arguments[0].get("strategy") == "group":
            return 1, int(arguments[0]["group_size"])
        blocks = arguments[0].get("block_structure")
    return (int(blocks[0]), int(blocks[1])) if isinstance(blocks, list) and len(blocks) == 2 else None


def _weight_arguments(values: Mapping[str, Any]) -> list[Any]:
    """How the weights of each group of layers are quantized, as compressed-tensors says it."""
    groups = (values.get("config_groups") or {}).values()
    return [group.get("weights") if isinstance(group, Mapping) else None for group in groups]


def _compressed(values: Mapping[str, Any], source: str) -> StoredQuantization | None:
    """compressed-tensors: formats of one tensor of 8 bits say themselves what they are."""
    format = values.get("format", "")
    if format in ("int-quantized", "float-quantized", "naive-quantized"):
        return None
    arguments = [one or {} for one in _weight_arguments(values)]
    bits: set[Any] = {one.get("num_bits") for one in arguments}
    if format not in ("pack-quantized", "mxfp4-pack-quantized") or not bits <= {4, 8} or len(bits) != 1:
        raise ModelError(
            f"{source}: compressed-tensors in format {format!r} with {sorted(map(str, bits))} bits are not known; "
            "there are pack-quantized (4 or 8 bits), mxfp4-pack-quantized, int-quantized and float-quantized"
        )
    sizes = {one.get("group_size") if one.get("strategy") == "group" else -1 for one in arguments}
    ordered = any(one.get("actorder") == "group" for one in arguments)
    size = sizes.pop() if len(sizes) == 1 else None
    return StoredQuantization("compressed-tensors", bits.pop(), format=format, group_size=size, ordered=ordered)


def write_weight(weight: Weight, layout: str) -> dict[str, Tensor]:
    """The tensors of a Weight in a layout of LAYOUTS, by the part of the name after the layer's; ValueError if the
    layout has no place for its format."""
    if layout == "mxfp4":
        raise ValueError(f"it has experts in MXFP4 alone, not {weight!r}; use the layout 'compressed-tensors'")
    if layout == "awq":
        return layouts.write_awq(weight)
    if layout in ("gptq", "gptq_v2"):
        return layouts.write_gptq(weight, 2 if layout == "gptq_v2" else 1)
    if weight.format == "int4" or (weight.format == "int8" and weight.activation_dtype is None):
        return layouts.write_pack_quantized(weight)
    _strategy(weight)
    assert weight.scales is not None
    # Copies: q, k and v may share one scale, and no two tensors of a safetensors file may share memory.
    if weight.format == "mxfp4":
        return {"weight_packed": weight.data.contiguous(), "weight_scale": weight.scales.clone()}
    found = {"weight": weight.data.contiguous(), "weight_scale": weight.scales.clone()}
    if weight.zeros is not None:
        found["weight_zero_point"] = weight.zeros.clone()
    return found


def write_experts(weight: Weight) -> dict[str, Tensor]:
    """A stack of experts in MXFP4 as gpt-oss's released files have it, by the end of its name.

    `_blocks` are uint8 (experts, out, in / 32, 16), two elements in a byte; `_scales` uint8 (experts, out, in / 32).
    """
    if weight.format != "mxfp4" or weight.scales is None:
        raise ValueError(f"gpt-oss's experts are stored in MXFP4, not in {weight.layout}; quantize them so")
    scales = weight.scales.contiguous()
    return {"_blocks": weight.data.reshape(*scales.shape, 16).contiguous(), "_scales": scales}


def quantization_config(weight: Weight, layout: str, plain: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """What config.json says of a model whose projections are stored like `weight`, all but the linear layers `plain`.

    `weight` is some rows of a projection, as they are stored.
    """
    if layout == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_MXFP4)}
    columns, symmetric = weight.group_shape[1], weight.zeros is None
    bits = 4 if weight.format in ("int4", "mxfp4") else 8
    if layout in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq", "bits": bits, "group_size": columns, "sym": symmetric, "desc_act": False,
            "checkpoint_format": layout,
        }  # fmt: skip
    if layout == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": columns, "zero_point": not symmetric, "version": "gemm",
            "modules_to_not_convert": list(plain),
        }  # fmt: skip
    format = _format_name(weight)
    kind = "float" if weight.format in ("fp8", "mxfp4") else "int"
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "dynamic": False, **_strategy(weight)}
    activations = None
    if weight.activation_dtype is not None:
        floating, group_size = weight.activation_dtype.is_floating_point, weight.activation_group[1]
        activations = {
            "num_bits": 8, "type": "float" if floating else "int", "symmetric": True, "dynamic": True,
            **({"strategy": "token"} if group_size == -1 else {"strategy": "group", "group_size": group_size}),
        }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(plain), "kv_cache_scheme": None,
    }  # fmt: skip


def _strategy(weight: Weight) -> dict[str, Any]:
    """What shares a scale, as compressed-tensors says it; ValueError if it has no such format or groups."""
    rows, columns = weight.group_shape
    if weight.format not in ("int4", "int8", "fp8", "mxfp4"):
        raise ValueError(f"compressed-tensors has no format for {weight!r}; quantize to int4, int8, fp8 or mxfp4")
    if rows not in (1, -1) or (rows == -1 and columns != -1):
        raise ValueError(f"{weight!r} has scales for {rows}x{columns} elements, which are not stored; take rows")
    if columns == -1:
        return {"strategy": "tensor" if rows == -1 else "channel"}
    if weight.shape[-1] % columns:
        raise ValueError(
            f"{weight!r} ends with a group of {weight.shape[-1] % columns} columns, and all groups are stored with "
            f"{columns}; quantize with a scale for each row"
        )
    return {"strategy": "group", "group_size": columns}


def _format_name(weight: Weight) -> str:
    if weight.format == "mxfp4":
        return "mxfp4-pack-quantized"
    if weight.format == "fp8":
        return "float-quantized"
    return "int-quantized" if weight.activation_dtype is not None else "pack-quantized"
