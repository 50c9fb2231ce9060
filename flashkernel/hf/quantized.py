"""Linear layers of a Transformers model with quantized weights."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from flashkernel.blocks.weight import Weight, WeightBuffers
from flashkernel.ops.gemm import linear

_Model = TypeVar("_Model", bound=nn.Module)


class QuantizedLinear(WeightBuffers):
    """A linear layer whose weight is a `Weight`; the state dict has `data`, `scales` and `bias`."""

    bias: nn.Parameter | None

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """x weight^T + bias."""
        return linear(x, self.weight, self.bias)  # type: ignore[return-value]


def quantize(
    model: _Model, format: str = "fp8", granularity: str | None = None, skip: tuple[str, ...] = ("lm_head",)
) -> _Model:
    """Replaces the linear layers of a model by layers with quantized weights, in place.

    The weights are frozen; gradients go through them, so adapters can be trained. `patch` computes such layers as it
    does plain ones: q, k and v, and gate and up, in one launch for few tokens. Call it before or after `patch`.

    Args:
        model: A Transformers model, or any module with torch.nn.Linear layers inside.
        format: A format of `flashkernel.Weight`.
        granularity: What shares a scale, as in `flashkernel.Weight.quantize`; None: what suits the format.
        skip: Layers whose names end so stay as they are.

    Returns:
        The model.

    Example:
        >>> import torch, flashkernel.hf
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> flashkernel.hf.quantize(model, "fp8")[0].weight
        Weight(fp8 row, 16x8, 192 bytes)
        >>> model(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """
    for name, module in list(model.named_modules()):
        for child, layer in list(module.named_children()):
            full = f"{name}.{child}" if name else child
            if type(layer) is nn.Linear and not full.endswith(skip):
                setattr(module, child, QuantizedLinear(Weight.quantize(layer.weight, format, granularity), layer.bias))
    return model
