"""The linear layer's kernels as a torch operator, with their gradients.

An operator takes no epilogue, but its text. The weights are separate arguments, at most three, because autograd looks
into no list. Quantized weights have no gradient: they are a list of tensors and the text of their layouts. The backward
pass is made of torch's products: serving has none, and training has rows in plenty.
"""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Operands
from flashkernel.blocks.gate_up import join_gate_up, split_gate_up
from flashkernel.blocks.weight import Layout, Weight
from flashkernel.core.arguments import unit_stride, without_autocast
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve

MOST_WEIGHTS = 3
_AND = " and "  # between the layouts of quantized weights


def linear(
    kernels: str,
    x: Tensor,
    weights: list[Any],
    biases: list[Tensor],
    residual: Tensor | None,
    norm_weight: Tensor | None,
    chain: str,
    packed: str,
    eps: float,
    offset: float,
    dtype: torch.dtype,
) -> Tensor:
    """All outputs side by side, [..., outputs]; differentiable in every tensor but those of quantized weights."""
    padding = [None] * (MOST_WEIGHTS - len(weights))
    vectors = [*biases, *padding] if biases else [None] * MOST_WEIGHTS
    if type(weights[0]) is Weight:  # all are: no kernel takes both kinds
        stored = [tensor for weight in weights for tensor in weight.tensors]
        layouts = _AND.join([weight.layout for weight in weights])
        return _linear_quantized(
            x, stored, *vectors, residual, norm_weight, layouts, chain, packed, eps, offset, dtype, kernels
        )  # fmt: skip
    return _linear(
        x, *weights, *padding, *vectors, residual, norm_weight, chain, packed, eps, offset, dtype, kernels
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """[rows, columns] with unit stride along the row; a view where the layout allows one."""
    flat = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return unit_stride(flat)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _streams(tensors: list[Any], gated: bool, packed: str) -> list[Any]:
    """A gated chain's packed weight or bias as gate and up; anything else as it is."""
    if gated and len(tensors) == 1 and isinstance(tensors[0], Weight):
        weight, half = tensors[0], tensors[0].shape[0] // 2
        parts = (slice(0, half), slice(half, None)) if packed == "halves" else (slice(0, None, 2), slice(1, None, 2))
        return [weight.rows(part) for part in parts]
    return list(split_gate_up(tensors[0], packed, 0)) if gated and len(tensors) == 1 else tensors


def _forward(
    x: Tensor,
    weight: Tensor,
    weight2: Tensor | None,
    weight3: Tensor | None,
    bias: Tensor | None,
    bias2: Tensor | None,
    bias3: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    chain: str,
    packed: str,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    kernels: str,
) -> Tensor:
    gated = Epilogue.parse(chain).gated
    y = resolve(kernels).forward(
        _rows(x), _streams(_given(weight, weight2, weight3), gated, packed),
        _streams(_given(bias, bias2, bias3), gated, packed), None if residual is None else _rows(residual),
        norm_weight, chain, eps, offset, dtype,
    )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[-1])


def _fake_forward(
    x, weight, weight2, weight3, bias, bias2, bias3, residual, norm_weight, chain, packed, eps, offset, dtype, kernels
):
    outputs = sum([matrix.shape[0] for matrix in _given(weight, weight2, weight3)])
    if Epilogue.parse(chain).gated:
        outputs = outputs // 2
    return x.new_empty((*x.shape[:-1], outputs), dtype=dtype)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    weight2: Tensor | None,
    weight3: Tensor | None,
    bias: Tensor | None,
    bias2: Tensor | None,
    bias3: Tensor | None,
    norm_weight: Tensor | None,
    residual_dtype: torch.dtype,
    chain: str,
    packed: str,
    eps: float,
    offset: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the weights, the biases, the residual and the norm's weight; those not wanted are empty."""
    weights, vectors = _given(weight, weight2, weight3), _given(bias, bias2, bias3)
    flat, width = _rows(x), x.shape[-1]
    normal, spread = (flat, flat) if norm_weight is None else _normalised(flat, norm_weight, eps, offset)
    chain_of = Epilogue.parse(chain)
    gradients, at_bias, at_residual = _through_chain(chain_of, normal, weights, vectors, packed, _rows(dy))
    results: list[Tensor | None] = [None] * len(wanted)
    lowered = [gradient.to(x.dtype) for gradient in gradients]
    if wanted[0] or wanted[8]:
        dx = lowered[0] @ weights[0]
        for gradient, matrix in zip(lowered[1:], weights[1:]):
            dx = torch.addmm(dx, gradient, matrix)
        if norm_weight is not None:
            dx, dnorm = _pull_back_norm(dx, flat, norm_weight, spread, offset)
            results[8] = dnorm if wanted[8] else None
        results[0] = dx.to(x.dtype).view(*x.shape[:-1], width) if wanted[0] else None
    for index, (matrix, gradient) in enumerate(zip(weights, lowered)):
        if wanted[1 + index]:
            results[1 + index] = (gradient.t() @ normal).to(matrix.dtype)
    for index, (vector, gradient) in enumerate(zip(vectors, at_bias)):
        if wanted[4 + index]:
            results[4 + index] = gradient.sum(0, dtype=torch.float32).to(vector.dtype)
    if wanted[7]:
        results[7] = at_residual.to(residual_dtype, copy=True).view(dy.shape)
    return tuple([x.new_empty(0) if result is None else result for result in results])  # type: ignore[return-value]


def _through_chain(
    chain: Epilogue, normal: Tensor, weights: list[Tensor], biases: list[Tensor], packed: str, dy: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients of the products of each weight, of the values at their biases, and of the residual; in float32 where
    there is an activation."""
    if chain.linear:  # nothing depends on the products
        scaled = dy if chain.factor == 1.0 else dy.float() * chain.factor
        parts = list(scaled.split([matrix.shape[0] for matrix in weights], -1)) if len(weights) > 1 else [scaled]
        return parts, parts, dy
    products = [normal @ matrix.t() for matrix in weights]
    nothing = dy.new_zeros(1, 1)  # stands for a residual, whose value no gradient depends on
    if not chain.gated:
        found = []
        for index, (product, part) in enumerate(zip(products, dy.split([matrix.shape[0] for matrix in weights], -1))):
            found.append(chain.pull_back((product,), Operands(tuple(biases[index : index + 1]), nothing), part))
        return [one[0][0] for one in found], [one[1][0] for one in found], found[0][2]
    alone = len(weights) == 1
    pair = tuple(split_gate_up(products[0], packed, -1)) if alone else tuple(products)
    vectors = tuple(split_gate_up(biases[0], packed, 0)) if alone and biases else tuple(biases)
    gradients, at_bias, at_residual = chain.pull_back(pair, Operands(vectors, nothing), dy)
    if not alone:
        return list(gradients), list(at_bias), at_residual
    together = join_gate_up(gradients[0], gradients[1], packed)
    return [together], [join_gate_up(at_bias[0], at_bias[-1], packed)] if biases else [], at_residual


def _normalised(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x in x's dtype, 1 / rms [rows, 1])."""
    wide = x.float()
    spread = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * spread * (norm_weight.float() + offset)).to(x.dtype), spread


def _pull_back_norm(
    dnormal: Tensor, x: Tensor, norm_weight: Tensor, spread: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx in float32, gradient of the norm's weight)."""
    even = x.float() * spread
    dnormal = dnormal.float()
    along = dnormal * (norm_weight.float() + offset)
    dx = spread * (along - even * (along * even).mean(-1, keepdim=True))
    return dx, (dnormal * even).sum(0).to(norm_weight.dtype)


def _fake_backward(
    dy, x, weight, weight2, weight3, bias, bias2, bias3, norm_weight, residual_dtype, chain, packed, eps, offset, wanted
):
    given = (x, weight, weight2, weight3, bias, bias2, bias3, None, norm_weight)
    results = [
        x.new_empty(0) if tensor is None or not want else tensor.new_empty(tensor.shape)
        for tensor, want in zip(given, wanted)
    ]
    if wanted[7]:
        results[7] = dy.new_empty(dy.shape, dtype=residual_dtype)
    return tuple(results)


def _setup_context(ctx, inputs, output):
    x, *weights_and_biases, residual, norm_weight, chain, packed, eps, offset, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *weights_and_biases, norm_weight)
    ctx.settings = (x.dtype if residual is None else residual.dtype, chain, packed, eps, offset)


def _pull_back(ctx, dy):
    if dy is None:
        return (None,) * 15
    wanted = list(ctx.needs_input_grad[:9])
    with without_autocast(dy):  # of a backward() that is called inside it: products here have the dtypes they want
        results = _linear_backward(dy, *ctx.saved_tensors, *ctx.settings, wanted)
    return *[result if want else None for result, want in zip(results, wanted)], *[None] * 6


_linear_backward = KernelOp("linear_backward", _backward, _fake_backward)
_linear = KernelOp("linear", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)


def _rebuilt(stored: list[Tensor], layouts: str) -> list[Weight]:
    """Weights from their tensors, one after the other, and the text of their layouts."""
    weights, first = [], 0
    for text in layouts.split(_AND):
        count = 3 if Layout.parse(text).zeros else 2
        weights.append(Weight.from_tensors(stored[first : first + count], text))
        first += count
    return weights


def _forward_quantized(
    x: Tensor,
    stored: list[Tensor],
    bias: Tensor | None,
    bias2: Tensor | None,
    bias3: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    layouts: str,
    chain: str,
    packed: str,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    kernels: str,
) -> Tensor:
    gated = Epilogue.parse(chain).gated
    y = resolve(kernels).forward(
        _rows(x), _streams(_rebuilt(stored, layouts), gated, packed),
        _streams(_given(bias, bias2, bias3), gated, packed), None if residual is None else _rows(residual),
        norm_weight, chain, eps, offset, dtype,
    )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[-1])


def _fake_forward_quantized(
    x, stored, bias, bias2, bias3, residual, norm_weight, layouts, chain, packed, eps, offset, dtype, kernels
):
    outputs = sum([weight.shape[0] for weight in _rebuilt(stored, layouts)])
    return x.new_empty((*x.shape[:-1], outputs // 2 if Epilogue.parse(chain).gated else outputs), dtype=dtype)


def _setup_context_quantized(ctx, inputs, output):
    x, stored, *biases, residual, norm_weight, layouts, chain, packed, eps, offset, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *biases, norm_weight, *stored)
    ctx.settings = (x.dtype if residual is None else residual.dtype, chain, packed, eps, offset)
    ctx.layouts = layouts


def _pull_back_quantized(ctx, dy):
    x, bias, bias2, bias3, norm_weight, *stored = ctx.saved_tensors
    none = [None] * len(stored)
    if dy is None:
        return None, none, *[None] * 12
    needs = list(ctx.needs_input_grad)
    wanted = [needs[0], False, False, False, *needs[2:7]]
    with without_autocast(dy):
        weights: list[Any] = [weight.dequantize(x.dtype) for weight in _rebuilt(stored, ctx.layouts)]
        weights += [None] * (MOST_WEIGHTS - len(weights))
        results = _linear_backward(dy, x, *weights, bias, bias2, bias3, norm_weight, *ctx.settings, wanted)
    dx, _, _, _, *others = [result if want else None for result, want in zip(results, wanted)]
    return dx, none, *others, *[None] * 7


_linear_quantized = KernelOp(
    "linear_quantized", _forward_quantized, _fake_forward_quantized,
    setup_context=_setup_context_quantized, backward=_pull_back_quantized,
)  # fmt: skip
