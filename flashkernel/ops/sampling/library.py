"""The sampling kernels as a torch operator; it has no gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.sampling.params import SampleParams, States


def _forward(logits: Tensor, params: SampleParams, states: States, kernels: str) -> Tensor:
    return resolve(kernels).forward(unit_stride(logits), SampleParams(*_dense(params)), States(*_dense(states)))


def _dense(tensors: Iterable[Tensor | None]) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


def _fake_forward(logits, *_):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


sample = KernelOp("sample", _forward, _fake_forward)
