"""What experts are timed against: vLLM's fused_moe, and two of Transformers' experts functions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.op import Case, Op


def vllm(op: Op, case: Case) -> Callable[..., Tensor]:
    """fused_experts; its gate "swigluoai" is gpt-oss's, with interleaved columns."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    names = {"swiglu": ("silu", "halves"), "gpt_oss_glu": ("swigluoai", "interleaved")}
    name, packed = names.get(case.options.get("activation", "swiglu"), ("", ""))
    if packed != case.options.get("packed", "halves") or _special(case):
        raise ValueError("vLLM has SwiGLU in halves and gpt-oss's gate interleaved, and no capacity")

    def run(
        x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        config = None if gate_up_bias is None else biased_moe_quant_config(gate_up_bias, down_bias)
        return fused_experts(
            x, gate_up, down, weights, experts, activation=MoEActivation(name), quant_config=config
        )  # fmt: skip

    return run


def hf_grouped(op: Op, case: Case) -> Callable[..., Tensor]:
    """Transformers' experts_implementation="grouped_mm"."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return _transformers(case, grouped_mm_experts_forward)


def hf_eager(op: Op, case: Case) -> Callable[..., Tensor]:
    """A loop over the experts that have tokens, whose number the host waits for, as Transformers' modules have it."""

    def forward(module: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        mask = torch.nn.functional.one_hot(index.long(), module.num_experts).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero().flatten().tolist():
            slot, token = torch.where(mask[expert])
            z = torch.nn.functional.linear(
                hidden_states[token], module.gate_up_proj[expert],
                module.gate_up_proj_bias[expert] if module.has_bias else None,
            )  # fmt: skip
            y = torch.nn.functional.linear(
                module._apply_gate(z), module.down_proj[expert],
                module.down_proj_bias[expert] if module.has_bias else None,
            )  # fmt: skip
            out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
        return out

    return _transformers(case, forward)


def _special(case: Case) -> bool:
    return case.options.get("capacity") is not None or "format" in case.options or case.axes["unused"] > 0


def _transformers(case: Case, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the operator's signature that calls `forward` with a module of experts."""
    kind = GATES.get(case.options.get("activation", "swiglu"))
    if kind is None or _special(case):
        raise ValueError("written for gated experts without capacity")
    packed = case.options.get("packed", "halves")

    def gate(z: Tensor) -> Tensor:
        return apply_gate(NATIVE, kind, *split_gate_up(z, packed))

    def run(
        x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        module = SimpleNamespace(
            num_experts=gate_up.shape[0], has_gate=True, has_bias=gate_up_bias is not None, is_transposed=False,
            is_concatenated=packed == "halves", gate_up_proj=gate_up, down_proj=down, gate_up_proj_bias=gate_up_bias,
            down_proj_bias=down_bias, _apply_gate=gate,
        )  # fmt: skip
        return forward(module, x, experts, weights)

    return run
