"""Mixtures of experts: routers, experts, and what balances them."""

from flashkernel.ops.moe.api import moe_experts
from flashkernel.ops.moe.balance import BALANCE_LOSSES, moe_balance_bias, moe_balance_loss
from flashkernel.ops.moe.routing import Router, Routing, moe_route, moe_sort
from flashkernel.ops.moe.usage import ExpertUsage

__all__ = [
    "BALANCE_LOSSES",
    "ExpertUsage",
    "Router",
    "Routing",
    "moe_balance_bias",
    "moe_balance_loss",
    "moe_experts",
    "moe_route",
    "moe_sort",
]
