"""Routing by torch's own operators, in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.ops.moe.routing import reference
from flashkernel.ops.moe.routing.reference import moe_sort
from flashkernel.ops.moe.routing.router import Router, Routing

__all__ = ["moe_route", "moe_sort"]


def moe_route(logits: Tensor, router: Router, **given: Tensor | None) -> Routing:
    """As the reference, of logits and noise widened to float32."""
    wide, noise = torch.promote_types(logits.dtype, torch.float32), given.pop("noise", None)
    return reference.moe_route(logits.to(wide), router, noise=None if noise is None else noise.to(wide), **given)
