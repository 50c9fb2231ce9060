"""What routing is timed against: torch's operators, as models in Transformers call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op
from flashkernel.ops.moe.routing.router import Router, Routing


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """topk, softmax, sort and histogram: seven launches and more."""
    router: Router = case.options["router"]
    if router.kind != "softmax" or router.groups > 1 or not router.normalize or router.limit(1, 1) is not None:
        raise ValueError(f"torch has no one operator for {router}")

    def run(logits: Tensor, router: Router) -> Routing:
        top, experts = torch.topk(logits.float(), router.k, dim=1)
        weights = torch.softmax(top, 1) * router.scale
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        positions = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        counts = torch.histc(flat.float(), logits.shape[1], 0, logits.shape[1] - 1).int()
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        rows = order // router.k
        return Routing(experts.int(), weights, positions.view(experts.shape).int(), rows.int(), offsets, counts)

    return run
