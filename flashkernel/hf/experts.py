"""Experts of Transformers models on these kernels: Transformers' ExpertsInterface, and what `patch` sets.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fkernel")

Transformers stores the experts of a layer as stacks, and says by attributes of the module how: `is_transposed` (in,
out), `has_bias`, `is_concatenated` (gate and up in halves, else interleaved), `has_gate`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from flashkernel.blocks.activation_modules import activation_of
from flashkernel.blocks.epilogue import Gate
from flashkernel.hf.attention import NAME
from flashkernel.ops.moe import moe_experts, moe_sort


def register_experts() -> None:
    """Makes the experts known to Transformers as "fkernel"."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def activation_name(module: Any) -> str | None:
    """The activation of a module of experts, by the name that operators know; None if there is no kernel for it."""
    kind = type(module)
    if any(one.__name__ == "GptOssExperts" for one in kind.__mro__):  # fully_shard makes a subclass
        return "gpt_oss_glu"
    if module.has_gate and getattr(kind, "_apply_gate", None) is not _default_apply_gate:
        return None  # a gate of its own
    return activation_of(getattr(module, "act_fn", None), gated=module.has_gate)


def uses_interface(module: Any) -> bool:
    """Whether a module of experts is of Transformers' ExpertsInterface: stacks of weights, and attributes that say how
    they are stored."""
    said = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "down_proj")
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, name) for name in said)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sums of the tokens' experts; a function of Transformers' ExpertsInterface.

    Args:
        module: The module of experts.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k) experts; an index that is no expert is a slot that is not used.
        top_k_weights: (tokens, k).
    """
    name = activation_name(module)
    if name is None:
        raise ValueError(
            f'experts_implementation="{NAME}": {type(module).__name__} has an activation that no kernel computes; '
            'choose "grouped_mm"'
        )
    return run_experts(module, name, hidden_states, top_k_index, top_k_weights)


def run_experts(module: Any, name: str, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts_forward` with the activation named."""
    gate_up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    biases = (None, None)
    if module.has_bias:
        biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias, module.down_proj_bias)
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    activation = Gate("gpt_oss", module.alpha, module.limit) if name == "gpt_oss_glu" else name
    routing = moe_sort(top_k_index, top_k_weights, num_experts=module.num_experts)
    x = hidden_states if hidden_states.dtype == gate_up.dtype else hidden_states.to(gate_up.dtype)
    y = moe_experts(
        x, routing, gate_up, down, *biases, activation=activation,
        packed="halves" if module.is_concatenated else "interleaved",
    )  # fmt: skip
    return y.to(hidden_states.dtype)
