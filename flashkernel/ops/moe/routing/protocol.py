"""What a kernel module of routing offers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.moe.routing.router import Router


class RouteKernels(Protocol):
    """A module such as `triton`."""

    def route(
        self, logits: Tensor, bias: Tensor | None, noise: Tensor | None, token_ids: Tensor | None, router: Router
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the fields of a `Routing`. Rows are in a fixed order; nothing is read on the host.

        Args:
            logits: [tokens, experts], any strides. A NaN is taken as -inf in the choice, and makes the weights NaN.
            bias: [experts] in any float dtype, any stride, or None; added to the scores for the choice alone.
            noise: As logits, added to them; or None.
            token_ids: int32 or int64 [tokens], contiguous, or None: the token's index.
            router: How to choose.
        """

    def route_backward(
        self, dweights: Tensor, logits: Tensor, noise: Tensor | None, chosen: Tensor, router: Router
    ) -> Tensor:
        """Returns dlogits [tokens, experts] in the logits' dtype, of dweights [tokens, slots] with any strides."""


class SortKernels(Protocol):
    """A module such as `triton`."""

    def sort(self, given: Tensor, experts: int, capacity: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns experts, positions, tokens, offsets and counts of a `Routing`.

        Args:
            given: int32 or int64 [tokens, slots], any strides: experts, all different for a token. Any index outside
                of [0, experts) is a slot that is not used.
            experts: The number of experts.
            capacity: Rows that an expert takes at most, or None.
        """


PROTOCOLS = {"moe_route": RouteKernels, "moe_sort": SortKernels}
