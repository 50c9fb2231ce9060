"""What a kernel module of `sample` offers: `SampleKernels`. It is forward-only."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flashkernel.ops.sampling.params import SampleParams, States


class SampleKernels(Protocol):
    """A module such as `triton`."""

    def forward(self, logits: Tensor, params: SampleParams, states: States) -> Tensor:
        """Returns int64 [rows] of logits [rows, vocab] with unit stride along the row."""


PROTOCOLS = {"sample": SampleKernels}
