"""LLM kernels in Triton, Gluon and CUDA C++, from a CPU to a Hopper GPU: `import flashkernel as fk`.

Every operator is a function of this module. All of them take `backend=`, and `explain` says which one a call runs on.

    attention                attention, attention_varlen, rotary_attention, attention_fp8, quantize_fp8
    masks                    causal, window, sink_tokens, prefix, documents, block_sparse, column_intervals, custom,
                             tensor_mask; Mask, Table; score_function, where
    decoding                 decode_attention, paged_attention, append_kv
    linear layers            linear, Weight, quantized_linear
    MLPs                     mlp
    mixtures of experts      moe_route, moe_sort, moe_experts, moe_balance_loss, moe_balance_bias; Router, Routing,
                             ExpertUsage
    modules                  FusedLinear, FusedMLP, MoE
    matrix products          matmul, matmul_dact, grouped_matmul, grouped_weight_gradient
    norms                    rms_norm, layer_norm
    position embedding       rope, Frequencies
    activations              gelu, silu, relu, squared_relu, swiglu, geglu, reglu, gpt_oss_glu
    quantization             quantize, dequantize, rms_norm_quantize, glu_quantize
    losses                   cross_entropy, linear_cross_entropy
    sampling                 sample
    reductions               sum, mean, max, argmax, logsumexp, softmax, weighted_sum
    backends                 explain, Explanation, use_backend, BackendError

Packages beside it: `flashkernel.hf` (Transformers models on these kernels), `flashkernel.engine` (generation and
serving), `flashkernel.kvcache` (the paged KV cache), `flashkernel.compat.flash_attn` (flash-attn's functions).

Example:
    >>> import torch, flashkernel as fk
    >>> q, k, v = torch.randn(3, 1, 16, 4, 32)
    >>> fk.attention(q, k, v, mask=fk.causal()).shape
    torch.Size([1, 16, 4, 32])
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashkernel.blocks.expression import Table, score_function, where
    from flashkernel.blocks.mask import (
        Mask,
        block_sparse,
        causal,
        column_intervals,
        custom,
        documents,
        prefix,
        sink_tokens,
        tensor_mask,
        window,
    )
    from flashkernel.core.dispatch import BackendError, Explanation, explain, use_backend
    from flashkernel.moe import MoE
    from flashkernel.nn import FusedLinear, FusedMLP
    from flashkernel.ops.activation import geglu, gelu, gpt_oss_glu, reglu, relu, silu, squared_relu, swiglu
    from flashkernel.ops.append_kv import append_kv
    from flashkernel.ops.attention import attention, attention_fp8, attention_varlen, quantize_fp8, rotary_attention
    from flashkernel.ops.decode import decode_attention, paged_attention
    from flashkernel.ops.gemm import Weight, linear, quantized_linear
    from flashkernel.ops.loss import cross_entropy, linear_cross_entropy
    from flashkernel.ops.matmul import grouped_matmul, grouped_weight_gradient, matmul, matmul_dact
    from flashkernel.ops.mlp import mlp
    from flashkernel.ops.moe import (
        ExpertUsage,
        Router,
        Routing,
        moe_balance_bias,
        moe_balance_loss,
        moe_experts,
        moe_route,
        moe_sort,
    )
    from flashkernel.ops.norm import layer_norm, rms_norm
    from flashkernel.ops.quant import dequantize, glu_quantize, quantize, rms_norm_quantize
    from flashkernel.ops.reduce import argmax, logsumexp, max, mean, softmax, sum, weighted_sum
    from flashkernel.ops.rope import Frequencies, rope
    from flashkernel.ops.sampling import sample
else:
    from flashkernel.lazy_loading import attach

    __getattr__, __dir__ = attach(
        __name__,
        {
            "blocks.expression": ["Table", "score_function", "where"],
            "blocks.mask": [
                "Mask",
                "block_sparse",
                "causal",
                "column_intervals",
                "custom",
                "documents",
                "prefix",
                "sink_tokens",
                "tensor_mask",
                "window",
            ],
            "core.dispatch": ["BackendError", "Explanation", "explain", "use_backend"],
            "moe": ["MoE"],
            "nn": ["FusedLinear", "FusedMLP"],
            "ops.activation": ["geglu", "gelu", "gpt_oss_glu", "reglu", "relu", "silu", "squared_relu", "swiglu"],
            "ops.append_kv": ["append_kv"],
            "ops.attention": ["attention", "attention_fp8", "attention_varlen", "quantize_fp8", "rotary_attention"],
            "ops.decode": ["decode_attention", "paged_attention"],
            "ops.gemm": ["Weight", "linear", "quantized_linear"],
            "ops.loss": ["cross_entropy", "linear_cross_entropy"],
            "ops.matmul": ["grouped_matmul", "grouped_weight_gradient", "matmul", "matmul_dact"],
            "ops.mlp": ["mlp"],
            "ops.moe": [
                "ExpertUsage",
                "Router",
                "Routing",
                "moe_balance_bias",
                "moe_balance_loss",
                "moe_experts",
                "moe_route",
                "moe_sort",
            ],
            "ops.norm": ["layer_norm", "rms_norm"],
            "ops.quant": ["dequantize", "glu_quantize", "quantize", "rms_norm_quantize"],
            "ops.reduce": ["argmax", "logsumexp", "max", "mean", "softmax", "sum", "weighted_sum"],
            "ops.rope": ["Frequencies", "rope"],
            "ops.sampling": ["sample"],
        },
        submodules=("blocks", "core", "moe", "nn", "ops"),
    )

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "ExpertUsage",
    "Explanation",
    "Frequencies",
    "FusedLinear",
    "FusedMLP",
    "Mask",
    "MoE",
    "Router",
    "Routing",
    "Table",
    "Weight",
    "append_kv",
    "argmax",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "block_sparse",
    "causal",
    "column_intervals",
    "cross_entropy",
    "custom",
    "decode_attention",
    "dequantize",
    "documents",
    "explain",
    "geglu",
    "gelu",
    "glu_quantize",
    "gpt_oss_glu",
    "grouped_matmul",
    "grouped_weight_gradient",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "logsumexp",
    "matmul",
    "matmul_dact",
    "max",
    "mean",
    "mlp",
    "moe_balance_bias",
    "moe_balance_loss",
    "moe_experts",
    "moe_route",
    "moe_sort",
    "paged_attention",
    "prefix",
    "quantize",
    "quantize_fp8",
    "quantized_linear",
    "reglu",
    "relu",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rotary_attention",
    "sample",
    "score_function",
    "silu",
    "sink_tokens",
    "softmax",
    "squared_relu",
    "sum",
    "swiglu",
    "tensor_mask",
    "use_backend",
    "weighted_sum",
    "where",
    "window",
]
