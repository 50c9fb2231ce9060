"""What the MLP is timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.op import Case, Op
from flashkernel.ops.mlp.named import gathered


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS and torch's operators, as model code writes them; recomputed by torch's checkpointing."""
    if set(case.options) - {"activation", "packed", "recompute"}:
        raise ValueError("written for the benchmark cases, whose options are activation, packed and recompute")

    def mlp(
        x: Tensor,
        gate_up: Tensor | tuple[Tensor, Tensor],
        down: Tensor,
        gate_up_bias: Any = None,
        down_bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        activation: str = "swiglu",
        packed: str = "halves",
        recompute: bool = False,
    ) -> Tensor:
        if recompute:
            given = (x, gate_up, down, gate_up_bias, down_bias, residual, norm_weight, activation, packed)
            return checkpoint(mlp, *given, use_reentrant=False)  # type: ignore[no-any-return]
        if norm_weight is not None:
            x = F.rms_norm(x, x.shape[-1:], norm_weight, 1e-6)
        if isinstance(gate_up, tuple):
            biases = (None, None) if gate_up_bias is None else gate_up_bias
            gate, up = (F.linear(x, weight, bias) for weight, bias in zip(gate_up, biases))
            hidden = apply_gate(NATIVE, GATES[activation], gate, up)
        elif activation in GATES:
            pair = split_gate_up(F.linear(x, gate_up, gate_up_bias), packed)
            hidden = apply_gate(NATIVE, GATES[activation], *pair)
        else:
            hidden = NATIVE[activation](F.linear(x, gate_up, gate_up_bias))
        y = F.linear(hidden, down, down_bias)
        return y if residual is None else y + residual

    return _named(mlp)


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS's products around Liger's SwiGLU, as its LigerSwiGLUMLP has it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if case.options.get("activation", "swiglu") != "swiglu" or "up" not in case.present:
        raise ValueError("its MLP has SwiGLU, with separate weights of gate and up")

    def mlp(x: Tensor, gate_up: tuple[Tensor, Tensor], down: Tensor, activation: str = "swiglu") -> Tensor:
        return F.linear(LigerSiLUMulFunction.apply(F.linear(x, gate_up[0]), F.linear(x, gate_up[1])), down)

    return _named(mlp)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, gate_up: Tensor, down: Tensor, **given: Any) -> Any:
        return gathered(function, x, {"gate_up": gate_up, "down": down, **given})

    return run
