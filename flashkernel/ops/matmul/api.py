"""The public matrix products: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS, standard
from flashkernel.blocks.fp8 import SCALE_BLOCK
from flashkernel.core.arguments import autocast, autocast_dtype, check_finite, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.matmul import library, spec
from flashkernel.ops.matmul.reference import as_matrices, default_dtype


@replayed
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns scale * activation(a @ b + bias) + residual.

    Sums are in float32. Transposed operands are views: `matmul(x, weight.T)` copies nothing. float32 operands are
    rounded to tf32 where torch.backends.cuda.matmul.allow_tf32 is set. a, b, bias and residual are differentiable;
    products of 8-bit operands are forward only. Under autocast a and b are cast as for torch.matmul.

    Args:
        a: (M, K) or (batch, M, K), float32, float16, bfloat16, float8_e4m3fn or int8.
        b: (K, N) or (batch, K, N) in a's dtype. A batch of 1, or no batch, is used for every entry of the other's.
        bias: (N,) or None.
        residual: (M, N) or (batch, M, N); added last.
        activation: "gelu", "gelu_tanh", "silu", "relu", "squared_relu" or None.
        scale: a factor on the activation's output.
        out_dtype: the output's dtype; a's unless given, and bfloat16 of 8-bit operands.
        a_scale: scales of 8-bit operands, float32: one for all, () or (1,); one for each row, (M,) or (..., M, 1); one
            for each row and 128 columns, (..., M, K / 128). Given with b_scale.
        b_scale: one for all; one for each column, (N,) or (..., 1, N); one for every 128 x 128 block,
            (..., K / 128, N / 128), with an a_scale of blocks. Sizes are rounded up.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (M, N), or (batch, M, N) if an operand has a batch.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)
        >>> y = fk.matmul(x, weight.T, bias=bias, activation="relu")
        >>> torch.allclose(y, torch.relu(x @ weight.T + bias), atol=1e-5)
        True
        >>> q = (x / x.abs().amax(1, keepdim=True) * 127).to(torch.int8)
        >>> fk.matmul(q, q.T, a_scale=torch.ones(3), b_scale=torch.ones(()), out_dtype=torch.float32).shape
        torch.Size([3, 3])
    """
    lower = autocast_dtype(a)
    if lower is not None and a.dtype.itemsize > 1:
        a, b = autocast(a, lower), autocast(b, lower)
        if residual is not None and out_dtype is None:
            out_dtype = torch.promote_types(a.dtype, residual.dtype)  # what a @ b + residual has
    batch = _check_operands(a, b)
    check_finite("matmul", "scale", scale)
    _check_extras(a, b, bias, residual, activation, out_dtype, batch)
    a_scale, b_scale, scaling = _scales(a, b, a_scale, b_scale)
    gradients = needs_gradients(a, b, bias, residual)
    save = gradients and activation is not None
    chosen = choose(
        spec.MATMUL, backend, a.device, a.dtype, gradients,
        scaling=scaling, fused=activation is not None, saves=save,
    )  # fmt: skip
    if chosen.composite:
        with without_autocast(a):
            return chosen.run(
                a, b, bias=bias, residual=residual, activation=activation, scale=scale, out_dtype=out_dtype,
                a_scale=a_scale, b_scale=b_scale,
            )  # fmt: skip
    chain = ";".join([piece.text for piece in standard(bias is not None, activation, scale, residual is not None)])
    return library.matmul(
        chosen.target, a, b, bias, residual, a_scale, b_scale, chain, scaling,
        default_dtype(a.dtype) if out_dtype is None else out_dtype, torch.backends.cuda.matmul.allow_tf32, save,
    )  # fmt: skip


def _check_operands(a: Tensor, b: Tensor) -> int | None:
    """The batch of the output; None for a matrix."""
    if a.ndim not in (2, 3) or b.ndim not in (2, 3):
        raise ValueError(f"matmul: a is {tuple(a.shape)} and b {tuple(b.shape)}; they must have 2 or 3 dims")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: a is {tuple(a.shape)} and b {tuple(b.shape)}; the last size of a must be b's last but one"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"matmul: a is {a.dtype} on {a.device}, b is {b.dtype} on {b.device}; convert one of them")
    if a.ndim == 2 and b.ndim == 2:
        return None
    left, right = a.shape[0] if a.ndim == 3 else 1, b.shape[0] if b.ndim == 3 else 1
    if left != right and 1 not in (left, right):
        raise ValueError(f"matmul: a has a batch of {left} and b of {right}; they must be equal, or one of them 1")
    return right if left == 1 else left


def _check_extras(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    batch: int | None,
) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"matmul: activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"matmul: out_dtype is {out_dtype}; it must be a float dtype")
    m, n = a.shape[-2], b.shape[-1]
    if bias is not None and (
        bias.ndim != 1 or bias.shape[0] != n or not bias.is_floating_point() or bias.device != a.device
    ):
        raise ValueError(
            f"matmul: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; it must be float ({n},) on {a.device}"
        )
    if residual is not None:
        shapes = [(m, n)] if batch is None else [(m, n), (1, m, n), (batch, m, n)]
        if (
            tuple(residual.shape) not in shapes
            or not residual.is_floating_point()
            or residual.device != a.device
        ):  # fmt: skip
            raise ValueError(
                f"matmul: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}; it must be float "
                f"{' or '.join(map(str, shapes))} on {a.device}"
            )


def _scales(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str]:
    """Scales of 2 or 3 dims, and how they multiply: "", "row" or "block" (`MatmulParams.scaling`)."""
    if (a_scale is None) != (b_scale is None):
        raise ValueError("matmul: give both a_scale and b_scale, or neither; a scale of 1 is torch.ones(())")
    if a_scale is None or b_scale is None:
        if a.dtype == torch.int8:
            raise ValueError("matmul: int8 operands need a_scale and b_scale")
        return None, None, ""
    if a.dtype.itemsize > 1:
        raise ValueError(f"matmul: scales are for 8-bit operands; a is {a.dtype}: multiply it, or use `scale`")
    for name, given in (("a_scale", a_scale), ("b_scale", b_scale)):
        if given.dtype != torch.float32 or given.device != a.device or given.ndim > 3:
            raise ValueError(
                f"matmul: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be float32 of up "
                f"to 3 dims on {a.device}"
            )
    a_scale, b_scale = as_matrices(a_scale, b_scale)
    (m, k), n = a.shape[-2:], b.shape[-1]
    blocks_k, blocks_n = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    batches = [(1,), (a.shape[0] if a.ndim == 3 else 1,), (b.shape[0] if b.ndim == 3 else 1,)]
    fits = tuple(a_scale.shape[:-2]) in [(), *batches[:2]] and tuple(b_scale.shape[:-2]) in [(), (1,), batches[2]]
    left, right = tuple(a_scale.shape[-2:]), tuple(b_scale.shape[-2:])
    if fits and left in ((1, 1), (m, 1)) and right in ((1, 1), (1, n)):
        return a_scale, b_scale, "row"
    if fits and left == (m, blocks_k) and right == (blocks_k, blocks_n):
        return a_scale, b_scale, "block"
    raise ValueError(
        f"matmul: a_scale is {tuple(a_scale.shape)} and b_scale {tuple(b_scale.shape)} for a {tuple(a.shape)} and b "
        f"{tuple(b.shape)}; they must be (1, 1) or ({m}, 1) with (1, 1) or (1, {n}), or blocks: ({m}, {blocks_k}) with "
        f"({blocks_k}, {blocks_n})"
    )
