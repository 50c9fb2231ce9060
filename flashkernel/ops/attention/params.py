"""One attention call as the kernels see it, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Expression
from flashkernel.blocks.mask import Mask
from flashkernel.core.generate import jit_function

_INDICES = "b, h, q, k, sq, sk, tables"


class AttentionInputs(NamedTuple):
    """The tensors of a call that have gradients; the last dim of q, k and v has stride 1."""

    q: Tensor  # (batch, seqlen_q, heads, head_dim)
    k: Tensor  # (batch, seqlen_k, kv_heads, head_dim)
    v: Tensor  # (batch, seqlen_k, kv_heads, value_dim)
    bias: Tensor | None  # four dims, of which some may have size 1
    sinks: Tensor | None  # (heads,)
    alibi_slopes: Tensor | None  # float32 (heads,) or (batch, heads)


class OutputGradients(NamedTuple):
    """What the forward pass returned, and the gradients of it."""

    o: Tensor  # (batch, seqlen_q, heads, value_dim)
    lse: Tensor  # float32 (batch, heads, seqlen_q)
    do: Tensor  # as o, the last dim with stride 1
    dlse: Tensor | None  # as lse


# dq, dk, dv, dbias, dsinks, dslopes
InputGradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class KernelFunctions(NamedTuple):
    """The mask and the score function as Triton functions, and the tensors they read as kernel arguments."""

    mask: Any  # of (b, h, q, k, sq, sk, tables): bool
    score: Any  # of (score, b, h, q, k, sq, sk, tables)
    score_grad: Any  # the derivative of the score function in its score
    score_tables: tuple[Any, ...]
    mask_tables: tuple[Any, ...]


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a call as composite backends take them, with `causal` and `window` in the mask."""

    mask: Mask | None = None
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0
    score: Callable[..., Any] | ex.Traced | None = None
    dropout: float = 0.0
    seed: int | Tensor = 0
    return_lse: bool = False
    deterministic: bool = False  # composite backends are

    @property
    def extended(self) -> bool:
        """Whether an option is set that scaled_dot_product_attention does not have."""
        return self.score is not None or bool(self.softcap or self.dropout or self.return_lse)


class AttentionParams(NamedTuple):
    """One attention call: everything but the tensors that have gradients."""

    mask: Mask | None
    scale: float
    softcap: float
    score: Expression | None
    dropout: float
    seed: int | Tensor
    deterministic: bool = False  # gradients are summed in a fixed order

    def functions(self) -> KernelFunctions:
        mask = score = score_grad = None
        score_tables: list[Tensor] = []
        mask_tables: list[Tensor] = []
        if self.mask is not None:
            mask_tables = list(self.mask.tables)
            mask = jit_function("visible", _INDICES, self.mask.text)
        if self.score is not None:
            derivative = ex.derivative(self.score, "score")
            score_tables = ex.tables(self.score)
            score_tables += [table for table in ex.tables(derivative) if not any(table is t for t in score_tables)]
            score = jit_function("score_of", f"score, {_INDICES}", ex.score_source(self.score, score_tables))
            score_grad = jit_function("score_grad_of", f"score, {_INDICES}", ex.triton_source(derivative, score_tables))
        return KernelFunctions(
            mask, score, score_grad, ex.table_arguments(score_tables), ex.table_arguments(mask_tables)
        )
