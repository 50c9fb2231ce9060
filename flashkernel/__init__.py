"""FlashKernel: the kernels an LLM is made of, from a laptop's CPU to a Hopper GPU.

Every public function is here; `flashkernel.ops.registry()` lists the operators behind them.
"""

from flashkernel.core.dispatch import BackendError, Explanation, explain, use_backend
from flashkernel.ops.activation import geglu, gelu, gpt_oss_glu, reglu, relu, silu, squared_relu, swiglu
from flashkernel.ops.loss import cross_entropy, linear_cross_entropy
from flashkernel.ops.norm import layer_norm, rms_norm
from flashkernel.ops.reduce import logsumexp, max, mean, softmax, sum, weighted_sum
from flashkernel.ops.rope import Frequencies, rope

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Explanation",
    "Frequencies",
    "cross_entropy",
    "explain",
    "geglu",
    "gelu",
    "gpt_oss_glu",
    "layer_norm",
    "linear_cross_entropy",
    "logsumexp",
    "max",
    "mean",
    "reglu",
    "relu",
    "rms_norm",
    "rope",
    "silu",
    "softmax",
    "squared_relu",
    "sum",
    "swiglu",
    "use_backend",
    "weighted_sum",
]
