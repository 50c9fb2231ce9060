"""Which experts the kernels serve, and why they decline others."""

from __future__ import annotations

import torch

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import GRANULARITIES, Layout
from flashkernel.core.op import Call

_FP8_GROUPS = (GRANULARITIES["tensor"], GRANULARITIES["row"])


def rounded_activations(call: Call) -> str | None:
    """Experts that take x as it is, or whose weights are multiplied in fp8, forward only."""
    parsed = [Layout.parse(text) for text in call.facts["weight"].split(" and ")]
    dtypes = {layout.activation_dtype for layout in parsed}
    if dtypes == {None}:
        return None
    if dtypes != {FP8} or any(not _multiplied_in_fp8(layout) for layout in parsed):
        return "its kernels round x to 8 bits for weights in MXFP4 alone, or in fp8 with scales for rows or the tensor"
    if call.gradients:
        return "products of 8-bit operands are forward only"
    if call.dtype == torch.float64 or (call.device.kind == "cuda" and call.device.arch < 89):
        return f"it multiplies 8-bit floats from sm_89 on; {call.device.name} is older"
    return None


def _multiplied_in_fp8(layout: Layout) -> bool:
    return layout.format == "mxfp4" or (layout.format == "fp8" and layout.group_shape in _FP8_GROUPS)
