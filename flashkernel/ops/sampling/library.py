"""The sampling kernels as a torch operator; it has no gradient."""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.sampling.params import Settings, States


def _forward(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    penalties: Tensor | None,
    state_rows: Tensor | None,
    token_counts: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    bias_until: Tensor | None,
    allowed: Tensor | None,
    restricted: Tensor | None,
    kernels: str,
) -> Tensor:
    given = _dense(temperature, top_k, top_p, min_p, penalties)
    settings = Settings(seeds.contiguous(), positions.contiguous(), *given)
    states = States(*_dense(state_rows, token_counts, bias_ids, bias_values, bias_until, allowed, restricted))
    return resolve(kernels).forward(unit_stride(logits), settings, states)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _fake_forward(logits, *_):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


sample = KernelOp("sample", _forward, _fake_forward)
