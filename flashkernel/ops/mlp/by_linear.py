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
from flashkernel.ops.mlp.params import MlpOptions

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
    x: Tensor, gate_up: Any, down: Any, params: MlpOptions, out: Tensor | None, backends: tuple[str | None, str | None]
) -> Tensor:
    """Two calls on these backends."""
    activation = {"activation": params.activation, "packed": params.packed}
    hidden = _linear(x, gate_up, params.gate_up_bias, **activation, **_norm(params), backend=backends[0])
    return _down(hidden, down, params, out, backends[1])


def unfused(x: Tensor, gate_up: Any, down: Any, params: MlpOptions, out: Tensor | None) -> Tensor:
    """Three operators."""
    products, activation = _linear(x, gate_up, params.gate_up_bias, **_norm(params)), params.activation
    if isinstance(activation, Gate):
        options: dict[str, Any] = {"packed": params.packed} if isinstance(products, Tensor) else {}
        if activation.kind == "gpt_oss":
            options |= {"alpha": activation.alpha, "limit": activation.limit}
        pair = (products,) if isinstance(products, Tensor) else products
        hidden = _GATED[activation.kind](*pair, **options)
    else:
        assert isinstance(activation, Activation)
        hidden = _ALONE[activation.kind](products)
    return _down(hidden, down, params, out)


def _norm(params: MlpOptions) -> dict[str, Any]:
    return {"norm_weight": params.norm_weight, "norm_eps": params.norm_eps, "norm_offset": params.norm_offset}


def _down(hidden: Tensor, down: Any, params: MlpOptions, out: Tensor | None, backend: str | None = None) -> Tensor:
    output = {"out_dtype": params.out_dtype, "out": out, "backend": backend}
    return _linear(hidden, down, params.down_bias, params.residual, **output)  # type: ignore[no-any-return]
