"""FlashKernel: the kernels an LLM is made of, from a laptop's CPU to a Hopper GPU.

Every public function is here; `flashkernel.ops.registry()` lists the operators behind them.
"""

from flashkernel.blocks.expression import score_function, where
from flashkernel.core.dispatch import BackendError, Explanation, explain, use_backend
from flashkernel.ops.activation import geglu, gelu, gpt_oss_glu, reglu, relu, silu, squared_relu, swiglu
from flashkernel.ops.append_kv import append_kv
from flashkernel.ops.attention import (
    Mask,
    Table,
    attention,
    attention_fp8,
    attention_varlen,
    block_sparse,
    causal,
    column_intervals,
    custom,
    documents,
    prefix,
    quantize_fp8,
    sink_tokens,
    tensor_mask,
    window,
)
from flashkernel.ops.decode import decode_attention, paged_attention
from flashkernel.ops.gemm import linear
from flashkernel.ops.loss import cross_entropy, linear_cross_entropy
from flashkernel.ops.norm import layer_norm, rms_norm
from flashkernel.ops.reduce import argmax, logsumexp, max, mean, softmax, sum, weighted_sum
from flashkernel.ops.rope import Frequencies, rope

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Explanation",
    "Frequencies",
    "Mask",
    "Table",
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
    "documents",
    "explain",
    "geglu",
    "gelu",
    "gpt_oss_glu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "logsumexp",
    "max",
    "mean",
    "paged_attention",
    "prefix",
    "quantize_fp8",
    "reglu",
    "relu",
    "rms_norm",
    "rope",
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
