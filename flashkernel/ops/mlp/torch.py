"""The MLP by torch's own operators: cuBLAS (or the CPU's BLAS) for the products, an operator for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashkernel.blocks.weight import Weight
from flashkernel.ops.gemm import linear
from flashkernel.ops.mlp.params import MlpOptions

_linear: Any = linear  # returns one tensor or several, depending on its arguments


def mlp(
    x: Tensor, gate_up_weight: Tensor | Weight | Sequence[Tensor | Weight], down_weight: Tensor | Weight, **options: Any
) -> Tensor:
    params = MlpOptions(**options)

    def run(x: Tensor) -> Tensor:
        hidden = _linear(
            x, gate_up_weight, params.gate_up_bias, None, params.norm_weight, activation=params.activation,
            packed=params.packed, norm_eps=params.norm_eps, norm_offset=params.norm_offset, backend="torch",
        )  # fmt: skip
        return _linear(
            hidden, down_weight, params.down_bias, params.residual, out_dtype=params.out_dtype, backend="torch"
        )

    if params.recompute:
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    return run(x)
