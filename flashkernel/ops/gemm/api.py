"""The public linear layer: argument checks and dispatch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES, Activation, Gate, check_activation, standard
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.blocks.weight import Layout, Weight, check_main_grads
from flashkernel.blocks.weight_formats.tiles import TILE
from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import (
    autocast,
    autocast_dtype,
    check_finite,
    check_non_negative,
    check_written,
    is_float,
    needs_gradients,
)
from flashkernel.core.dispatch import choose, requested_backend
from flashkernel.core.replay import replayed
from flashkernel.ops.gemm import dense, library, spec, support
from flashkernel.ops.gemm.configs import MAX_ROWS, TILE_ROWS
from flashkernel.ops.gemm.params import LinearExtras
from flashkernel.ops.norm import rms_norm


@replayed
def linear(
    x: Tensor,
    weight: Tensor | Weight | Sequence[Tensor | Weight],
    bias: Tensor | Sequence[Tensor] | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    activation: str | Activation | Gate | None = None,
    packed: str = "halves",
    splits: Sequence[int] | None = None,
    scale: float = 1.0,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    main_grads: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns scale * activation(norm(x) @ weight^T + bias) + residual, in one launch.

    Up to 64 rows have kernels of their own; on Hopper 33 to 64 rows by one weight, without a norm, are cuBLAS's. More
    rows are products of `matmul`, the norm a launch before; products without an activation are cuBLAS's.

    Sums are in float32 and every tensor is differentiable, except those of a quantized `Weight`. Under autocast x and
    the weights are cast as for torch.nn.functional.linear; the output then has the wider dtype of that and the
    residual's.

    Args:
        x: (..., in_features), float32, float16 or bfloat16.
        weight: (out_features, in_features) in x's dtype, as in torch.nn.Linear, or a `Weight`, whose format may differ
            from x's dtype. A list of up to three (q, k and v) gives a tuple of outputs. With a gated activation: a list
            of gate and up, or both packed in one weight (2 * out_features, in_features).
        bias: (out_features,), a list of them for a list of weights, or None.
        residual: the output's shape; added last.
        norm_weight: (in_features,); x goes through RMSNorm first: x / rms(x) * (norm_weight + norm_offset).
        activation: "gelu", "gelu_tanh", "silu", "relu", "squared_relu", or gated: "swiglu", "geglu" (tanh),
            "geglu_exact", "reglu", "gpt_oss_glu"; an `Activation` or `Gate` object; None.
        packed: how one weight holds gate and up: "halves" or "interleaved", row by row.
        splits: sizes of several outputs stored one after the other in one weight; gives a tuple.
        scale: a factor on the activation's output.
        norm_eps: of the RMSNorm.
        norm_offset: added to norm_weight; Gemma's norms take 1.
        out_dtype: the output's dtype; x's unless given.
        main_grads: buffers that the backward pass adds the gradients of the weights to, as Megatron's `main_grad`: one
            for each weight, of its shape, in float32 or its dtype. The weights then get no gradient of their own. The
            products are torch's, in eager mode.
        out: where the output is written and returned, instead of a new tensor; it may be the residual itself, which
            saves a pass over it, and lies in the memory of no other operand. Only for a single output, and without
            gradients.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., out_features), or a tuple of them for several outputs.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
        >>> y = fk.linear(x, weight, bias, activation="silu")
        >>> torch.allclose(y, torch.nn.functional.silu(x @ weight.T + bias), atol=1e-5)
        True
        >>> q, k, v = fk.linear(x, [weight, weight, weight])
    """
    single = isinstance(weight, (Tensor, Weight))
    weights: list[Any] = [weight] if single else list(weight)  # type: ignore[arg-type]
    quantized = False
    for index, one in enumerate(weights):
        if type(one) is Weight:
            if one.format == "plain":
                weights[index] = one.data
            else:
                quantized = True
    if out is not None and out_dtype is None:
        out_dtype = out.dtype
    lower = autocast_dtype(x)
    if lower is not None:
        x = autocast(x, lower)
        weights = [autocast(one, lower) if isinstance(one, Tensor) else one for one in weights]
        if residual is not None and out_dtype is None:
            out_dtype = torch.promote_types(x.dtype, residual.dtype)  # what linear(x) + residual has
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    _check_names(activation, packed, out_dtype)
    check_finite("linear", "scale", scale)
    check_non_negative("linear", "norm_eps", norm_eps)
    check_finite("linear", "norm_offset", norm_offset)
    gated = isinstance(activation, Gate) or (isinstance(activation, str) and activation in GATES)
    sizes = _check_weights(x, weights, biases, gated)
    several = len(weights) > 1 and not gated
    _check_extras(x, sizes, residual, norm_weight, splits, several)
    plain = [one for one in weights if isinstance(one, Tensor)]
    if out is not None:
        read = [norm_weight, *biases, *[one for weight in weights for one in _tensors(weight)]]
        _check_out(out, out_dtype, (*x.shape[:-1], sizes[0]), several or splits is not None, x, read, residual)
    first = weights[0].data if type(weights[0]) is Weight else weights[0]
    formats: dict[str, Any] = {}
    if quantized:
        formats = {"weight": spec.layouts(weights), "weights": len(weights), "blocks": support.in_blocks(x.shape[-1])}
        if support.in_tiles(formats["weight"]):
            no_tiles = packed == "interleaved" or sizes[0] % TILE != 0
            formats["interleaved"] = gated and len(weights) == 1 and no_tiles
            formats["many_tokens"] = x.shape[:-1].numel() > TILE_ROWS
    if main_grads is not None:
        check_main_grads("linear", main_grads, weights)
        formats["main_grads"] = True
    gradients = needs_gradients(x, norm_weight, residual, *biases, *plain)
    rows = x.shape[:-1].numel()
    alone = norm_weight is None and scale == 1.0 and (out_dtype is None or out_dtype == x.dtype)
    chosen = choose(
        spec.LINEAR, backend, x.device, x.dtype, gradients, rows=support.row_class(rows),
        product=support.product_class([weight.shape[0] for weight in weights], alone),
        transposed=first.shape[1] > 1 and first.stride(1) != 1,
        fused="gate" if gated else "" if activation is None else "activation", **formats,
    )  # fmt: skip
    in_8_bits = quantized and support.multiplies_in_8_bits(formats["weight"], support.row_class(rows))
    in_tiles = chosen.name == "hopper" and quantized and support.in_tiles(formats["weight"])
    dense_rows = rows > MAX_ROWS and not quantized
    by_matmul = (chosen.name == "hopper" and not in_tiles) or (chosen.name == "triton" and (dense_rows or in_8_bits))
    if norm_weight is not None and chosen.name == "torch" and backend is None and x.device.type != "cpu":
        x, norm_weight = rms_norm(x, norm_weight, eps=norm_eps, offset=norm_offset), None  # type: ignore[assignment]
    if (chosen.composite and not in_tiles) or by_matmul:
        if main_grads is not None and chosen.name == "reference":
            raise ValueError("linear: the reference adds no gradients to main_grads; use backend='torch'")
        products = {"backend": "triton" if in_8_bits and chosen.name == "triton" else backend}
        run, more = (dense.linear, products) if by_matmul else (chosen.run, {"main_grads": main_grads})
        y: Any = run(
            x, weights[0] if single else weights, bias, residual=residual, norm_weight=norm_weight,
            activation=activation, packed=packed, splits=splits, scale=scale, norm_eps=norm_eps,
            norm_offset=norm_offset, out_dtype=out_dtype, out=out, **more,
        )  # fmt: skip
        return y if out is None or y is out else out.copy_(y)
    rounds = type(weights[0]) is Weight and weights[0].activation_dtype == FP8
    if norm_weight is not None and (gradients or in_tiles or rounds):
        x = dense.normalized(x, norm_weight, norm_eps, norm_offset)
        norm_weight = None
    if rounds:
        x = dense.rounded_to_fp8(x, weights[0], gradients)
        weights = [replace(one, activation_dtype=None) for one in weights]
    chain = ";".join([piece.text for piece in standard(len(biases) > 0, activation, scale, residual is not None)])
    dtype = x.dtype if out_dtype is None else out_dtype
    extras = LinearExtras(residual, norm_weight, chain, packed, float(norm_eps), float(norm_offset), dtype)
    y = library.linear(library.TILES if in_tiles else chosen.target, x, weights, biases, extras)
    if out is not None:
        return out.copy_(y)
    if splits is not None:
        return y.split(list(splits), -1)
    return y if gated or single else y.split(sizes, -1)


@type_checked
def quantized_linear(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str,
    backend: str | None = None,
) -> Tensor:
    """Returns x @ weight^T + bias for a quantized weight given by its tensors, as `linear` does with a `Weight`.

    For callers that keep the tensors of a weight themselves. x and the bias are differentiable.

    Args:
        x: (..., in_features), float32, float16 or bfloat16.
        data: The stored elements, as `Weight.data`.
        scales: As `Weight.scales`.
        zeros: As `Weight.zeros`, where the layout has them.
        bias: (out_features,), or None.
        layout: As `Weight.layout`: format, what shares a scale, "zeros"; for example "int4 1x128 zeros".
        backend: The backend to run on; None picks the best one that serves the call.

    Returns:
        (..., out_features).

    Example:
        >>> import torch, flashkernel as fk
        >>> weight = fk.Weight.quantize(torch.randn(8, 64), "int4", "1x32")
        >>> y = fk.quantized_linear(torch.randn(3, 64), weight.data, weight.scales, layout=weight.layout)
        >>> y.shape
        torch.Size([3, 8])
    """
    if Layout.parse(layout).zeros != (zeros is not None):
        raise ValueError(
            f"quantized_linear: the layout is {layout!r}; zeros are {'not ' if zeros is None else ''}given"
        )
    tensors = [data, scales] if zeros is None else [data, scales, zeros]
    weight, backend = Weight.from_tensors(tensors, layout), requested_backend("quantized_linear", backend)
    return linear(x, weight, bias, backend=backend)  # type: ignore[return-value]


def _check_names(activation: str | Activation | Gate | None, packed: str, out_dtype: torch.dtype | None) -> None:
    check_activation("linear", activation)
    if packed not in PACKINGS:
        raise ValueError(f"linear: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"linear: out_dtype is {out_dtype}; it must be a float dtype")


def _check_weights(x: Tensor, weights: list[Any], biases: list[Tensor], gated: bool) -> list[int]:
    """The sizes of the outputs."""
    if x.ndim == 0 or not is_float(x):
        raise ValueError(f"linear: x must be a float tensor of at least one dim, not {x.dtype} {tuple(x.shape)}")
    most = 2 if gated else library.MAX_WEIGHTS
    if not 1 <= len(weights) <= most:
        raise ValueError(
            f"linear: {len(weights)} weights were given; {'gate and up' if gated else 'outputs'} take one packed "
            f"weight or up to {most} separate ones"
        )
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"linear: a weight has shape {tuple(weight.shape)}; x has {x.shape[-1]} columns, so it must be "
                f"(outputs, {x.shape[-1]})"
            )
        if weight.device != x.device or (weight.dtype != x.dtype and isinstance(weight, Tensor)):
            raise ValueError(
                f"linear: a weight is {weight.dtype} on {weight.device} but x is {x.dtype} on {x.device}; "
                "convert one of them, or give a flashkernel.Weight"
            )
    sizes = [weight.shape[0] for weight in weights]
    if biases and len(biases) != len(weights):
        raise ValueError(f"linear: {len(biases)} biases were given for {len(weights)} weights; give each one, or none")
    for bias, size in zip(biases, sizes):
        if bias is None or bias.ndim != 1 or bias.shape[0] != size or not is_float(bias):
            given = "None" if bias is None else f"{bias.dtype} {tuple(bias.shape)}"
            raise ValueError(f"linear: a bias is {given}; its weight has {size} outputs, so it must be float ({size},)")
        if bias.device != x.device:
            raise ValueError(f"linear: a bias is on {bias.device} but x is on {x.device}; move one of them")
    if not gated:
        return sizes
    if len(sizes) == 1 and sizes[0] % 2:
        raise ValueError(f"linear: the weight holds gate and up and needs an even number of rows, not {sizes[0]}")
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ValueError(f"linear: the gate has {sizes[0]} outputs and up has {sizes[1]}; they must have as many")
    return [sizes[0] if len(sizes) == 2 else sizes[0] // 2]


def _tensors(weight: Any) -> Sequence[Tensor]:
    """A weight's tensors: itself, or those of a quantized one."""
    return weight.tensors if isinstance(weight, Weight) else (weight,)


def _check_out(
    out: Tensor, dtype: torch.dtype | None, shape: tuple[int, ...], several: bool, x: Tensor,
    read: list[Tensor | None], residual: Tensor | None,
) -> None:  # fmt: skip
    if several:
        raise ValueError("linear: out needs one output; leave splits out, or give one weight")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != x.device:
        raise ValueError(
            f"linear: out is {out.dtype} {tuple(out.shape)} on {out.device}; the output is {dtype} {shape} on "
            f"{x.device}"
        )
    check_written("linear", "out", out, x, *read, in_place=(residual,))
    if needs_gradients(x, *read, residual):
        raise ValueError("linear: out takes no gradients; call it under torch.no_grad(), or leave out away")


def _check_extras(
    x: Tensor,
    sizes: list[int],
    residual: Tensor | None,
    norm_weight: Tensor | None,
    splits: Sequence[int] | None,
    several: bool,
) -> None:
    if splits is not None and (several or sum(splits) != sizes[0] or min(splits) < 0):
        raise ValueError(
            f"linear: splits {list(splits)} cannot divide outputs of {sizes}; they split the outputs of one weight and "
            f"must add up to {sizes[0]}"
        )
    if residual is not None:
        if several or splits is not None:
            raise ValueError("linear: a residual needs one output; leave splits out, or give one weight")
        shape = (*x.shape[:-1], sizes[0])
        if tuple(residual.shape) != tuple(shape) or residual.device != x.device or not is_float(residual):
            raise ValueError(
                f"linear: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}; it must be a "
                f"float tensor of the output's shape {tuple(shape)} on {x.device}"
            )
    if norm_weight is not None:
        if norm_weight.ndim != 1 or norm_weight.shape[0] != x.shape[-1] or x.shape[-1] == 0:
            raise ValueError(
                f"linear: norm_weight has shape {tuple(norm_weight.shape)}; x has {x.shape[-1]} columns, as many as it "
                "must have, and at least one"
            )
        if norm_weight.device != x.device or not is_float(norm_weight):
            raise ValueError(
                f"linear: norm_weight is {norm_weight.dtype} on {norm_weight.device}; it must be a float tensor on "
                f"{x.device}"
            )
