"""Routers of a mixture of experts: which experts a token goes to, with what weights, and the rows sorted by expert."""

from flashkernel.ops.moe.routing.api import moe_route, moe_sort
from flashkernel.ops.moe.routing.router import Router, Routing

__all__ = ["Router", "Routing", "moe_route", "moe_sort"]
