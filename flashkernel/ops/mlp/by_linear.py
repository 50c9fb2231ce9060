"""An MLP as calls of `linear`: two of them, or three operators where the activation is a kernel of its own.

Two serve few rows and quantized weights. Three serve GPUs whose tensor cores Triton does not use: `linear` has cuBLAS
and CUDA C++ there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.ops.activation import geglu, gelu, gpt_oss_glu, reglu, relu, silu, squared_relu, swiglu
from flashkernel.ops.gemm import linear

_linear: Any = linear  # returns one tensor or several, depending on its arguments
_ALONE: dict[str, Any] = {
    "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "silu": silu, "relu": relu,
    "squared_relu": squared_relu,
}  # fmt: skip
_GATED: dict[str, Any] = {
    "silu": swiglu, "gelu_tanh": geglu, "gelu": partial(geglu, approximate="none"), "relu": reglu,
    "gpt_oss": gpt_oss_glu,
}  # fmt: skip


def fused(
    x: Tensor,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation | Gate,
    packed: str,
    norm: dict[str, Any],
    backends: tuple[str | None, str | None],
    **output: Any,
) -> Tensor:
    """Two calls on these backends; `norm` and `output` as in `unfused`."""
    hidden = _linear(x, gate_up, gate_up_bias, activation=activation, packed=packed, **norm, backend=backends[0])
    return _linear(hidden, down, down_bias, residual, **output, backend=backends[1])


def unfused(
    x: Tensor,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation | Gate,
    packed: str,
    norm: dict[str, Any],
    **output: Any,
) -> Tensor:
    """Three operators; `norm` has linear's norm_weight, norm_eps and norm_offset, `output` its out and out_dtype."""
    products = _linear(x, gate_up, gate_up_bias, **norm)
    if isinstance(activation, Gate):
        options: dict[str, Any] = {"packed": packed} if isinstance(products, Tensor) else {}
        if activation.kind == "gpt_oss":
            options |= {"alpha": activation.alpha, "limit": activation.limit}
        pair = (products,) if isinstance(products, Tensor) else products
        hidden = _GATED[activation.kind](*pair, **options)
    else:
        hidden = _ALONE[activation.kind](products)
    return _linear(hidden, down, down_bias, residual, **output)
