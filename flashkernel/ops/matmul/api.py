"""The public matrix products: argument checks and dispatch."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernel.blocks.dropout import check_dropout, draw_seed
from flashkernel.blocks.epilogue import Activation, Gate, activation_piece, standard
from flashkernel.blocks.fp8 import FP8
from flashkernel.core.arguments import autocast, autocast_dtype, check_finite, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.matmul import checks, library, spec
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.reference import default_dtype


@replayed
def matmul(
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    residual: Tensor | None = None,
    activation: str | Activation | Gate | None = None,
    packed: str = "halves",
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_quantize: str | None = None,
    return_preactivation: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns dropout(scale * activation(a @ b + bias)) + residual.

    Sums are in float32. Transposed operands are views: `matmul(x, weight.T)` copies nothing. float32 operands are
    rounded to tf32 where torch.backends.cuda.matmul.allow_tf32 is set. a, b, bias and residual are differentiable;
    products of 8-bit operands are forward only. Under autocast a and b are cast as for torch.matmul.

    Args:
        a: (M, K) or (batch, M, K), float32, float16, bfloat16, float8_e4m3fn or int8.
        b: (K, N) or (batch, K, N) in a's dtype. A batch of 1, or no batch, is used for every entry of the other's.
            With a gated activation: gate and up packed in one tensor (..., K, 2 N), or a pair of (..., K, N).
        bias: (N,) or None. With a gated activation as b: packed (2 N,), or a pair.
        residual: (M, N) or (batch, M, N); added last.
        activation: "gelu", "gelu_tanh", "silu", "relu", "squared_relu", or gated: "swiglu", "geglu" (tanh),
            "geglu_exact", "reglu", "gpt_oss_glu"; an `Activation` or `Gate` object; None.
        packed: how b holds gate and up: "halves" or "interleaved" columns. A returned preactivation is packed alike.
        scale: a factor on the activation's output.
        dropout: the share of the elements that are dropped, ahead of the residual; others at each call.
        seed: a number, or int64 of one element on a's device, that fixes which are dropped. None draws one from torch's
            generator of the device, on the device, so torch.manual_seed and activation checkpointing repeat it, and a
            CUDA graph draws another at each replay.
        out_dtype: the output's dtype; a's unless given, and bfloat16 of 8-bit operands.
        a_scale: scales of 8-bit operands, float32: one for all, () or (1,); one for each row, (M,) or (..., M, 1); one
            for each row and 128 columns, (..., M, K / 128). Given with b_scale.
        b_scale: one for all; one for each column, (N,) or (..., 1, N); one for every 128 x 128 block,
            (..., K / 128, N / 128), with an a_scale of blocks. Sizes are rounded up.
        out_scale: float32 scales of a float8_e4m3fn output: one for all, () or (1,), or one for each row, (M, 1) or
            (batch, M, 1). The output is divided by it and saturated at 448.
        out_quantize: quantizes the output to float8_e4m3fn. "block": with a scale for each 1 x 128 elements, computed
            in the epilogue, as block-scaled products read them. "row": with a scale for each row, which needs the whole
            row: the output is written in a's dtype first, and a second kernel quantizes it.
        return_preactivation: also return Z = a @ b + bias, what goes into the activation, in a's dtype (bfloat16 of
            8-bit operands). `matmul_dact` takes it.
        out: where the output is written and returned, instead of a new tensor; it may be the residual itself, so that
            a product is added to an existing buffer. The output then has its dtype. Without gradients only. It may lie
            in no operand's memory.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (M, N), or (batch, M, N) if an operand has a batch. A tuple of that and, in this order: with `out_quantize` the
        scales, float32 (..., M, N / 128) rounded up or (..., M, 1); with `return_preactivation` Z, which has 2 N
        columns for a gated activation. Outputs in float8_e4m3fn have no gradient.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)
        >>> y = fk.matmul(x, weight.T, bias=bias, activation="relu")
        >>> torch.allclose(y, torch.relu(x @ weight.T + bias), atol=1e-5)
        True
        >>> y, z = fk.matmul(x, weight.T, activation="swiglu", return_preactivation=True)  # (4, 8): two rows are up's
        >>> y.shape, z.shape
        (torch.Size([3, 2]), torch.Size([3, 4]))
        >>> y, scales = fk.matmul(x, weight.T, activation="swiglu", out_quantize="block")
        >>> y.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([3, 1]))
        >>> q = (x / x.abs().amax(1, keepdim=True) * 127).to(torch.int8)
        >>> fk.matmul(q, q.T, a_scale=torch.ones(3), b_scale=torch.ones(()), out_dtype=torch.float32).shape
        torch.Size([3, 3])
    """
    matrices = (b,) if isinstance(b, Tensor) else tuple(b)
    biases = () if bias is None else (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if out is not None and out_dtype is None:
        out_dtype = out.dtype
    lower = autocast_dtype(a)
    if lower is not None and a.dtype.itemsize > 1:
        a, matrices = autocast(a, lower), tuple([autocast(one, lower) for one in matrices])
        if residual is not None and out_dtype is None:
            out_dtype = torch.promote_types(a.dtype, residual.dtype)  # what a @ b + residual has
    batch = checks.operands("matmul", a, *matrices)
    n = checks.columns("matmul", matrices, activation, packed)
    check_finite("matmul", "scale", scale)
    check_dropout("matmul", dropout, seed, a.device)
    checks.extras(a, batch, n, matrices, biases, residual, out_dtype)
    a_scale, b_scale, scaling = checks.scales(a, matrices[0], a_scale, b_scale)
    if scaling and len(matrices) == 2:
        raise ValueError("matmul: b is a pair of 8-bit matrices; pack gate and up and their scales in one tensor")
    if out_dtype is None:
        out_dtype = default_dtype(a.dtype) if out_quantize is None else FP8
    out_scale = checks.quantization(a, batch, out_dtype, out_scale, out_quantize, out)
    if out is not None:
        shape = (a.shape[-2], n) if batch is None else (batch, a.shape[-2], n)
        checks.output(
            "matmul", "out", out, out_dtype, shape, a, *matrices, *biases, a_scale, b_scale, out_scale,
            in_place=residual,
        )  # fmt: skip
    gradients = needs_gradients(a, *matrices, *biases, residual)
    if gradients and out_dtype == FP8:
        raise ValueError("matmul: an output in float8_e4m3fn has no gradient; call it under torch.no_grad()")
    # In 16 bits torch would store the float32 product ahead of a factor or a residual.
    stored_wide = a.dtype.itemsize == 2 and (residual is not None or scale != 1.0)
    fused = activation is not None or return_preactivation or out is not None or dropout > 0 or out_dtype == FP8
    chosen = choose(
        spec.MATMUL, backend, a.device, a.dtype, gradients, scaling=scaling,
        gated=spec.gate_fact(activation, packed if len(matrices) == 1 else "pair", scaling, n),
        fused=fused or stored_wide,
    )  # fmt: skip
    if seed is None:
        seed = draw_seed(a.device) if dropout > 0 else 0
    if chosen.composite:
        with without_autocast(a):
            results = chosen.run(
                a, _alone(matrices), bias=_alone(biases), residual=residual, activation=activation, packed=packed,
                scale=scale, dropout=dropout, seed=seed, out_dtype=out_dtype, out_quantize=out_quantize,
                return_preactivation=return_preactivation, a_scale=a_scale, b_scale=b_scale, out_scale=out_scale,
            )  # fmt: skip
        if out is None:
            return results
        return (out.copy_(results[0]), results[1]) if return_preactivation else out.copy_(results)
    pieces = standard(len(biases) > 0, activation, scale, residual is not None, dropout)
    chain = ";".join([piece.text for piece in pieces])
    added = out is not None and out is residual
    tensors = MatmulTensors(
        matrices[1] if len(matrices) == 2 else None, biases[0] if biases else None,
        biases[1] if len(biases) == 2 else None, None if added else residual, a_scale, b_scale, out=out,
        seed=seed if isinstance(seed, Tensor) or type(seed) is int else operator.index(seed), out_scale=out_scale,
    )  # fmt: skip
    params = MatmulParams(out_dtype, chain, scaling, torch.backends.cuda.matmul.allow_tf32, packed)
    save = gradients and activation is not None
    return library.matmul(
        chosen.target, a, matrices[0], tensors, params, out_quantize or "", save, return_preactivation, added
    )


def _alone(tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """None, a tensor or a pair."""
    return tensors[0] if len(tensors) == 1 else tensors or None


@replayed
def matmul_dact(
    a: Tensor,
    b: Tensor,
    preactivation: Tensor,
    *,
    activation: str | Activation | Gate,
    packed: str = "halves",
    dz_out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (dz, activated): a product with the gradient of an activation in its epilogue.

    With G = a @ b, the gradient of activation(Z), dz = G * activation'(Z) and activated = activation(Z), which the
    gradient of the next weight needs. It is the middle of an MLP's backward pass, in one kernel. Forward only.

    Args:
        a: (M, K) or (batch, M, K), float32, float16 or bfloat16: the gradient of the layer's output.
        b: (K, N) or (batch, K, N) in a's dtype: the weight of the layer that follows the activation.
        preactivation: Z, (..., M, N) in any float dtype; with a gated activation (..., M, 2 N), packed.
            `matmul(..., return_preactivation=True)` gives it.
        activation: as in `matmul`; not None.
        packed: how Z and dz hold gate and up: "halves" or "interleaved" columns.
        dz_out: where dz is written and returned, of Z's shape and dtype; it may be Z itself. None: a new tensor.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        dz of Z's shape, and activated (..., M, N), both in Z's dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, up, down = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16)
        >>> h, z = fk.matmul(x, up.T, activation="gelu", return_preactivation=True)
        >>> dy = torch.randn(3, 8)  # the gradient of y = h @ down.T
        >>> dz, again = fk.matmul_dact(dy, down, z, activation="gelu")
        >>> dz.shape, torch.allclose(again, h, atol=1e-6)
        (torch.Size([3, 16]), True)
    """
    lower = autocast_dtype(a)
    if lower is not None:
        a, b = autocast(a, lower), autocast(b, lower)
    batch = checks.operands("matmul_dact", a, b)
    checks.columns("matmul_dact", (b,), None, packed)
    width = checks.preactivation(a, b, batch, preactivation, activation)
    if dz_out is not None:
        shape = tuple(preactivation.shape)
        checks.output("matmul_dact", "dz_out", dz_out, preactivation.dtype, shape, a, b, in_place=preactivation)
    if needs_gradients(a, b, preactivation, dz_out):
        raise ValueError("matmul_dact: it has no gradient; call it under torch.no_grad()")
    chosen = choose(spec.MATMUL_DACT, backend, a.device, a.dtype, gated=packed if width == 2 else "")
    if chosen.composite:
        with without_autocast(a):
            return chosen.run(a, b, preactivation, activation=activation, packed=packed, dz_out=dz_out)
    text = activation_piece(activation).text  # type: ignore[union-attr]
    params = MatmulParams(preactivation.dtype, text, "", torch.backends.cuda.matmul.allow_tf32, packed)
    return library.matmul_dact(chosen.target, a, b, preactivation, dz_out, params)
