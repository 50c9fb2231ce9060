"""Statistics of how experts are used, gathered on the device and read when they are looked at."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.figure import new_figure
from flashkernel.ops.moe.routing.router import Routing

STATISTICS = ("min_over_max", "entropy", "dropped")


class ExpertUsage:
    """Loads of the experts of all layers over the steps of a training.

    `add` stores a routing's counts on the device and waits for nothing; the properties copy all of them at once.

    Args:
        layers: How many layers there are.

    Example:
        >>> import torch, flashkernel as fk
        >>> usage = fk.ExpertUsage(layers=1)
        >>> usage.add(0, fk.moe_route(torch.eye(4), fk.Router("softmax", 1)))
        >>> usage.add(0, fk.moe_route(torch.eye(4)[[0, 0, 0, 1]], fk.Router("softmax", 1, capacity=2)))
        >>> usage.statistic("min_over_max").tolist(), usage.statistic("dropped").tolist()
        ([[1.0], [0.0]], [[0.0], [0.25]])
        >>> usage.loads.shape
        torch.Size([2, 1, 4])
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"ExpertUsage: layers is {layers}; there must be at least 1")
        self._counts: list[list[Tensor]] = [[] for _ in range(layers)]
        self._kept: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, layer: int, routing: Routing) -> None:
        """Stores what a layer's router chose in a step.

        Args:
            layer: Its number.
            routing: Of the step.
        """
        if not 0 <= layer < len(self._counts):
            raise ValueError(f"ExpertUsage: layer is {layer}; there are layers 0 to {len(self._counts) - 1}")
        experts = routing.counts.shape[0]
        before = {one.shape[0] for steps in self._counts for one in steps[:1]} or {experts}
        if before != {experts}:
            raise ValueError(f"ExpertUsage: the routing is of {experts} experts, and those before of {before.pop()}")
        self._counts[layer].append(routing.counts.detach().clone())
        self._kept[layer].append(routing.offsets[-1].detach().clone())

    @property
    def loads(self) -> Tensor:
        """(steps, layers, experts), float32 on the CPU: tokens that chose each expert."""
        return self._gathered(self._counts)

    def statistic(self, name: str) -> Tensor:
        """Returns a statistic (steps, layers), float32 on the CPU.

        Args:
            name: "min_over_max": the smallest load over the largest, 1 if all are equal. "entropy": of the shares, over
                the largest possible, likewise. "dropped": the share of the chosen slots that found no room. Of a step
                without tokens 1, 1 and 0.
        """
        if name not in STATISTICS:
            raise ValueError(f"ExpertUsage: there is no statistic {name!r}; there are {', '.join(STATISTICS)}")
        loads = self.loads
        total, equal = loads.sum(2), torch.ones(loads.shape[:2], device="cpu")
        if name == "min_over_max":
            return torch.where(total > 0, loads.amin(2) / loads.amax(2).clamp(min=1), equal)
        if name == "entropy":
            most = math.log(loads.shape[2])
            share = loads / total.clamp(min=1)[..., None]
            return torch.where(total > 0, torch.special.entr(share).sum(2) / most, equal) if most else equal
        return (total - self._gathered(self._kept)) / total.clamp(min=1)

    @staticmethod
    def _gathered(counts: list[list[Tensor]]) -> Tensor:
        """[steps, layers, ...] in float32 on the CPU."""
        steps = [len(of_layer) for of_layer in counts]
        if len(set(steps)) > 1 or not steps[0]:
            raise ValueError(f"ExpertUsage: layers have {steps} steps; each must have the same number, at least one")
        return torch.stack([torch.stack(of_layer) for of_layer in counts], 1).float().cpu()

    def plot(self, path: str | Path, statistic: str = "min_over_max") -> None:
        """Draws a heat map of a statistic over layers and steps, and one of the last step's loads over experts.

        Args:
            path: The picture's file.
            statistic: As in `statistic`.
        """
        self._drawn(statistic).savefig(path, dpi=120)

    def _drawn(self, statistic: str) -> Any:
        """The figure that `plot` saves."""
        figure = new_figure("ExpertUsage.plot", figsize=(11, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        values = self.statistic(statistic)
        image = left.imshow(values.T.numpy(), aspect="auto", vmin=0, vmax=1, origin="lower", interpolation="nearest")
        left.set(xlabel="step", ylabel="layer", title=statistic.replace("_", " "))
        figure.colorbar(image, ax=left)
        loads = self.loads[-1]
        image = right.imshow(
            (loads / loads.sum(1, keepdim=True).clamp(min=1)).numpy(), aspect="auto", vmin=0, origin="lower",
            interpolation="nearest",
        )  # fmt: skip
        right.set(xlabel="expert", ylabel="layer", title="share of the slots, last step")
        figure.colorbar(image, ax=right)
        for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
            axis.get_major_locator().set_params(integer=True)  # there is no layer 0.5
        return figure
