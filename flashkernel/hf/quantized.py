"""Linear layers of a Transformers model with quantized weights: made from plain ones, or loaded from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.tiles import SUFFIX
from flashkernel.blocks.weight_module import WeightBuffers
from flashkernel.ops.gemm import linear

_Model = TypeVar("_Model", bound=nn.Module)
_PARTS = ("data", "scales", "zeros")


class OrderedBuffers(WeightBuffers):
    """A module that holds a `Weight` in the order that the kernels of its device read.

    State dicts have rows whatever that order is, so they fit modules on any device.
    """

    def hold(self, weight: Weight) -> None:
        """Takes a Weight of the same values in another order."""
        self._context = (weight.format, weight.group_shape, weight.activation_dtype)
        for name in _PARTS:
            setattr(self, name, getattr(weight, name))

    def get_extra_state(self) -> str:
        """The layout in rows, so that tensors of another one are not loaded."""
        return row_layout(self.weight)

    def set_extra_state(self, state: str) -> None:
        """ValueError if a state dict has another layout than the module."""
        if state != row_layout(self.weight):
            raise ValueError(
                f"the state dict has a weight in {state!r}; the module's is in {row_layout(self.weight)!r}"
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _in_tiles(self.weight):
            from flashkernel.engine.weight_order import row_order

            rows = row_order(self.weight)
            kept = {name: getattr(rows, name) for name in _PARTS}
            destination.update({prefix + name: value for name, value in kept.items() if value is not None})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = [state_dict.get(prefix + name) for name in _PARTS]
        if _in_tiles(self.weight) and given[0] is not None:
            rows = Weight.from_tensors([one for one in given if one is not None], row_layout(self.weight))
            tiled = rows.to(self.data.device).tiled()
            state_dict = dict(state_dict)
            state_dict.update({prefix + "data": tiled.data, prefix + "scales": tiled.scales})
            if tiled.zeros is not None:
                state_dict[prefix + "zeros"] = tiled.zeros
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantizedLinear(OrderedBuffers, nn.Linear):  # type: ignore[misc]
    """A linear layer whose weight is a `Weight`; the state dict has `data`, `scales` and `bias`.

    It is a torch.nn.Linear to PEFT, which puts adapters around it. On a Hopper GPU `use_kernel_order` puts the weight
    into tiles.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """x weight^T + bias."""
        return linear(x, self.weight, self.bias)  # type: ignore[return-value]

    def use_kernel_order(self, dtype: torch.dtype) -> None:
        """Puts the weight into the order that the kernels of its device read, for activations in `dtype`."""
        from flashkernel.engine.weight_order import kernel_order

        self.hold(kernel_order(self.weight, dtype))


def _in_tiles(weight: Weight) -> bool:
    return weight.format.endswith(SUFFIX)


def row_layout(weight: Weight) -> str:
    """The layout of a weight when it is in rows."""
    return weight.layout.replace(SUFFIX, "", 1)


def quantize(
    model: _Model, format: str = "fp8", granularity: str | None = None, skip: str | Sequence[str] = ("lm_head",)
) -> _Model:
    """Replaces the linear layers of a model by layers with quantized weights, in place.

    The weights are frozen; gradients go through them, so adapters can be trained. `patch` computes such layers as it
    does plain ones: q, k and v, and gate and up, in one launch for few tokens. Call it before or after `patch`.

    A state dict fits a model that was quantized in the same way. `from_pretrained` cannot read such layers:
    `flashkernel quantize` makes a checkpoint to keep, and `load_quantized` reads it.

    Args:
        model: A Transformers model, or any module with torch.nn.Linear layers inside.
        format: A format of `flashkernel.Weight`.
        granularity: What shares a scale, as in `flashkernel.Weight.quantize`; None: what suits the format.
        skip: Layers whose names end so stay as they are.

    Returns:
        The model.

    Raises:
        ValueError: The format does not take a layer, which the message names, or there is no layer to quantize. The
            model is then as it was.

    Example:
        >>> import torch, flashkernel.hf
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> flashkernel.hf.quantize(model, "fp8")[0].weight
        Weight(fp8 row, 16x8, 192 bytes)
        >>> model(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hf.quantize: the model is a {type(model).__name__}; it must be a torch.nn.Module")
    places = {
        f"{name}.{child}" if name else child: (module, child)
        for name, module in model.named_modules()
        for child, layer in module.named_children()
        if type(layer) is nn.Linear
    }
    endings = skip if isinstance(skip, str) else tuple(skip)
    places = {full: place for full, place in places.items() if not full.endswith(endings)}
    if not places:
        done = sum(isinstance(module, QuantizedLinear) for module in model.modules())
        raise ValueError(
            f"hf.quantize: the model has no torch.nn.Linear to quantize; {done} layers are quantized already"
        )
    for full, (module, child) in places.items():
        _check_quantizes(full, getattr(module, child).weight, format, granularity)
    for module, child in places.values():
        layer = getattr(module, child)
        made = QuantizedLinear(Weight.quantize(layer.weight, format, granularity), layer.bias)
        made.use_kernel_order(layer.weight.dtype)
        setattr(module, child, made)
    return model


def _check_quantizes(name: str, weight: Tensor, format: str, granularity: str | None) -> None:
    """ValueError for a layer that the format does not take, before anything is replaced."""
    try:
        Weight.quantize(torch.empty_like(weight, device="meta"), format, granularity)
    except ValueError as error:
        raise ValueError(f"hf.quantize: {name}: {error}") from error
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise ValueError(f"hf.quantize: {name} has infinite or NaN elements; the checkpoint is damaged")


def load_quantized(
    folder: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu", **options: Any
) -> Any:
    """Loads a quantized checkpoint into a Transformers model whose linear layers keep the weights as they are stored.

    GPTQ, AWQ, compressed-tensors (pack-quantized, int-quantized, float-quantized, mxfp4-pack-quantized), fp8 and GGUF
    files' formats become a `flashkernel.Weight`, and `flashkernel.linear` multiplies by it. gpt-oss's experts in MXFP4
    stay so, and are multiplied by `flashkernel.moe_experts`; embeddings are dequantized. The weights are frozen;
    gradients go through them, so adapters can be trained.

    Args:
        folder: A folder as Transformers saves it, with `quantization_config` in its config.json; or "owner/name", of a
            repository in the local Hugging Face cache.
        dtype: Of everything that is not quantized, or its name; None, or "auto": what the configuration says.
        device: Where the model is put.
        options: Passed to AutoModelForCausalLM.from_config, such as attn_implementation.

    Returns:
        The model, in evaluation mode.

    Example:
        >>> import flashkernel.hf
        >>> model = flashkernel.hf.load_quantized("Llama-3.1-8B-Instruct-AWQ")  # doctest: +SKIP
        >>> print(flashkernel.hf.patch(model))  # doctest: +SKIP
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from flashkernel.engine import hub
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.quantized_checkpoint import WeightReader

    dtype = None if dtype is None or dtype == "auto" else dtype_of(dtype, "load_quantized")
    folder = hub.resolve(folder) if hub.is_repository(folder) else Path(folder)
    reader = WeightReader(open_checkpoint(folder))
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else Transformers looks for its own kernels
    kind = dtype or config.dtype or torch.float32
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=kind, **options)
    _load_linears(model, reader, kind)
    if config.model_type == "gpt_oss":
        from flashkernel.hf.gpt_oss import freeze_experts

        freeze_experts(model, reader, device, kind)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and not reader.has(name) and name not in tied:
            raise _error(
                f"{reader.source}: there is no tensor {name}; load_quantized reads models of linear layers, and "
                "gpt-oss; flashkernel.engine.LLM reads mixtures of experts stored one by one"
            )
        if parameter.is_meta and reader.has(name):
            set_parameter(model, name, plain_tensor(reader.read(name), kind, tuple(parameter.shape)), reader.source)
    _check_all_used(model, reader, tied)
    model.tie_weights()
    model = model.to(device)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.use_kernel_order(kind)
    return model.eval()


def dtype_of(dtype: torch.dtype | str, function: str) -> torch.dtype:
    """A dtype that was given as such or by its name, as Transformers takes both."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{function}: dtype is {dtype!r}; it must be a torch dtype or its name, such as 'bfloat16'")
    return found


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered inside take no memory; buffers, such as rotary frequencies, are as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _load_linears(model: nn.Module, reader: Any, dtype: torch.dtype) -> None:
    """Replaces linear layers whose weights are stored quantized."""
    for name, module in list(model.named_modules()):
        for child, layer in list(module.named_children()):
            full = f"{name}.{child}" if name else child
            if type(layer) is not nn.Linear or not reader.has(f"{full}.weight"):
                continue
            weight = reader.read(f"{full}.weight")
            if isinstance(weight, Weight) and weight.format == "plain":  # columns in an order of their own
                weight = weight.data
            if not isinstance(weight, Weight):
                set_parameter(layer, "weight", weight.to(dtype), reader.source)
                continue
            if tuple(weight.shape) != (layer.out_features, layer.in_features):
                expected = (layer.out_features, layer.in_features)
                raise _error(f"{reader.source}: {full} has shape {tuple(weight.shape)}; the model has {expected}")
            bias = (
                None if layer.bias is None else plain_tensor(reader.read(f"{full}.bias"), dtype, (layer.out_features,))
            )
            setattr(module, child, QuantizedLinear(weight, bias))


def _check_all_used(model: Any, reader: Any, tied: set[str]) -> None:
    """ModelError if a stored tensor was not read: the model would compute without a part of it."""
    from flashkernel.engine.architectures import ARCHITECTURES

    known = ARCHITECTURES.get(model.config.model_type)
    ignored = ("rotary_emb.inv_freq",) if known is None else known.ignored
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left = [name for name in sorted(reader.unused) if name not in tied and not name.endswith(ignored)]
    left = [name for name in left if not any(re.search(pattern, name) for pattern in patterns)]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise _error(f"{reader.source}: {shown} have no place in the model that config.json describes")


def plain_tensor(found: Tensor | Weight, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A parameter; experts in MXFP4 are stored (experts, out, in), and Transformers has them (experts, in, out)."""
    if isinstance(found, Weight):
        dense = found.dequantize(dtype)
        return dense.transpose(-1, -2).contiguous() if found.ndim == 3 and tuple(dense.shape) != shape else dense
    return found.to(dtype)


def set_parameter(model: nn.Module, name: str, value: Tensor, source: str) -> None:
    """Puts `value` in the place of a parameter; ModelError if that has another shape. `source` is the checkpoint."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    expected = tuple(getattr(module, last).shape)
    if tuple(value.shape) != expected:
        raise _error(f"{source}: {name} has shape {tuple(value.shape)}; the model has {expected}")
    setattr(module, last, nn.Parameter(value, value.is_floating_point()))


def _error(text: str) -> Exception:
    from flashkernel.engine import ModelError

    return ModelError(text)
