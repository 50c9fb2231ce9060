"""Inputs of attention, the backends that run on a CPU, and what their results are held against."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashkernel.core.check import execute
from flashkernel.ops.attention import attention, spec

# Gluon kernels have no interpreter: tests/test_attention_hopper.py has theirs.
BACKENDS = [backend.name for backend in spec.ATTENTION.backends if backend.name not in ("hopper", "cuda")]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
FAST = [name for name in BACKENDS if name != "reference"]
by_fast_backend = pytest.mark.parametrize("backend", FAST)


def make_inputs(
    batch: int = 2, queries: int = 20, keys: int = 20, heads: int = 4, kv_heads: int = 2, dim: int = 16
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (batch, queries, heads, dim), "k": (batch, keys, kv_heads, dim), "v": (batch, keys, kv_heads, dim)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_agrees(inputs: dict[str, Tensor], options: dict[str, Any], backend: str) -> None:
    """Outputs and gradients of a backend against the reference's in float64."""
    wanted = list(inputs)
    exact = execute(attention, {k: v.double() for k, v in inputs.items()}, {**options, "backend": "reference"}, wanted)
    mine = execute(attention, inputs, {**options, "backend": backend}, wanted)
    for name, value in mine.outputs.items():
        torch.testing.assert_close(value.double(), exact.outputs[name], rtol=1e-4, atol=2e-5)
    for name, value in mine.gradients.items():
        torch.testing.assert_close(value.double(), exact.gradients[name], rtol=1e-4, atol=5e-5)
