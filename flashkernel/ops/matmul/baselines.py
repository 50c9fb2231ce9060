"""What matrix products are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op
from flashkernel.ops.matmul.torch import matmul, matmul_dact


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS and torch's operators, as model code writes them."""
    return _of_tensors(case, matmul)


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return _of_tensors(case, torch.compile(matmul, dynamic=False))


def max_autotune(op: Op, case: Case) -> Callable[..., Any]:
    """Inductor's choice among cuBLAS and its own Triton templates, with the epilogue fused."""
    if case.options.get("activation") is None:
        raise ValueError("written for products with an activation")
    return _of_tensors(case, torch.compile(matmul, dynamic=False, mode="max-autotune-no-cudagraphs"))


def addmm_activation(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLASLt's epilogue: bias and GeLU in one launch."""
    if case.options != {"activation": "gelu_tanh"} or case.present != ("bias",):
        raise ValueError("torch._addmm_activation is GeLU (tanh) with a bias")

    def run(a: Tensor, b: Tensor, bias: Tensor, activation: str) -> Tensor:
        return torch._addmm_activation(bias, a, b, use_gelu=True)

    return run


def _of_tensors(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    if {"up", "out"} & set(case.present):
        raise ValueError("written for one b and a new output")
    return function


def eager_dact(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS, and torch's operators for the activation and its gradient."""
    if case.present or "in_place" in case.options:
        raise ValueError("written for a new dz")
    return matmul_dact
