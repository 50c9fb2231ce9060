"""The linear layer's kernels as a torch operator, with their gradients.

An operator takes no epilogue, but its text. The weights are separate arguments, at most three, because autograd looks
into no list. Quantized weights have no gradient: they are a list of tensors and the text of their layouts.

The backward pass is dz, the gradient of what goes into the activation, in one launch together with the biases', then
torch's products: dx = dz W and dW = dz^T x. With gradients, the norm in front is an operator of its own (api.py).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks import e2m1
from flashkernel.blocks.epilogue import Activation, Epilogue, Gate
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.blocks.weight import GRANULARITIES, Layout, Weight
from flashkernel.blocks.weight_formats.tiles import SUFFIX
from flashkernel.core.arguments import as_rows, without_autocast
from flashkernel.core.backends import installed
from flashkernel.core.device import properties
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.gemm.configs import DEQUANTIZED, MAX_ROWS
from flashkernel.ops.gemm.params import LinearExtras

MAX_WEIGHTS = 3
TILES = "flashkernel.ops.gemm.quantized.cuda"  # the kernel module for weights in tiles
_ACTIVATION_GRADIENT = "flashkernel.blocks.activation_gradient_triton:activation_gradient"  # of all kernel modules
_DEQUANTIZE = "flashkernel.blocks.dequantize_triton:dequantize"
_IN_FP8 = "flashkernel.blocks.mxfp4_triton:in_fp8"
_AND = " and "  # between the layouts of quantized weights


class Biases(NamedTuple):
    """A bias for each weight, or none."""

    bias: Tensor | None = None
    bias2: Tensor | None = None
    bias3: Tensor | None = None


class PlainWeights(NamedTuple):
    """Matrices [out, in]."""

    weight: Tensor
    weight2: Tensor | None = None
    weight3: Tensor | None = None


class StoredWeights(NamedTuple):
    """Quantized weights: their tensors, one weight after the other, and the text of their layouts."""

    stored: list[Tensor]
    layouts: str

    @property
    def weights(self) -> list[Weight]:
        found, first = [], 0
        for text in self.layouts.split(_AND):
            count = 3 if Layout.parse(text).zeros else 2
            found.append(Weight.from_tensors(self.stored[first : first + count], text))
            first += count
        return found


def linear(kernels: str, x: Tensor, weights: list[Any], biases: list[Tensor], extras: LinearExtras) -> Tensor:
    """All outputs side by side, [..., outputs]; differentiable in every tensor but those of quantized weights."""
    vectors = Biases(*biases)
    if type(weights[0]) is Weight:  # all are: no kernel takes both kinds
        stored = [tensor for weight in weights for tensor in weight.tensors]
        layouts = _AND.join([weight.layout for weight in weights])
        return _linear_quantized(x, StoredWeights(stored, layouts), vectors, extras, kernels)
    return _linear(x, PlainWeights(*weights), vectors, extras, kernels)


def _given(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _streams(tensors: list[Any], gated: bool, packed: str) -> list[Any]:
    """A gated chain's packed weight or bias as gate and up; anything else as it is."""
    if gated and len(tensors) == 1 and isinstance(tensors[0], Weight):
        weight, half = tensors[0], tensors[0].shape[0] // 2
        parts = (slice(0, half), slice(half, None)) if packed == "halves" else (slice(0, None, 2), slice(1, None, 2))
        return [weight.rows(part) for part in parts]
    return list(split_gate_up(tensors[0], packed, 0)) if gated and len(tensors) == 1 else tensors


def _forward(x: Tensor, weights: PlainWeights, biases: Biases, extras: LinearExtras, kernels: str) -> Tensor:
    return _run(x, _given(weights), biases, extras, kernels)


def _run(x: Tensor, weights: list[Any], biases: Biases, extras: LinearExtras, kernels: str) -> Tensor:
    gated, packed = Epilogue.parse(extras.chain).gated, extras.packed
    if extras.residual is not None:
        extras = extras._replace(residual=as_rows(extras.residual))
    y = resolve(kernels).forward(
        as_rows(x), _streams(weights, gated, packed), _streams(_given(biases), gated, packed), extras
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def _fake_forward(x, weights, biases, extras, kernels):
    return _empty_output(x, _given(weights), extras)


def _empty_output(x, weights, extras):
    outputs = sum([weight.shape[0] for weight in weights])
    return x.new_empty(
        (*x.shape[:-1], outputs // 2 if Epilogue.parse(extras.chain).gated else outputs), dtype=extras.dtype
    )


def _backward(
    dy: Tensor, x: Tensor, matrices: PlainWeights, biases: Biases, residual_dtype: torch.dtype, chain: str, packed: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the weights, the biases and the residual; those not wanted are empty."""
    weights, vectors = _given(matrices), _given(biases)
    flat, results = as_rows(x), [x.new_empty(0) for _ in wanted]
    dz, sums = _preactivation_gradient(
        Epilogue.parse(chain), flat, weights, vectors, packed, as_rows(dy), any(wanted[4:7])
    )  # fmt: skip
    parts = list(dz.split([matrix.shape[0] for matrix in weights], -1)) if len(weights) > 1 else [dz]
    if wanted[0]:
        dx = torch.mm(parts[0], weights[0])
        for part, matrix in zip(parts[1:], weights[1:]):
            dx = torch.addmm(dx, part, matrix)
        results[0] = dx.view(x.shape)
    for index, part in enumerate(parts):
        if wanted[1 + index]:
            results[1 + index] = torch.mm(part.t(), flat)
        if wanted[4 + index]:
            results[4 + index] = sums[index] if sums else part.sum(0, dtype=torch.float32).to(vectors[index].dtype)
    if wanted[7]:
        results[7] = dy.to(residual_dtype, copy=True)
    return tuple(results)  # type: ignore[return-value]


def _preactivation_gradient(
    epilogue: Epilogue,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    packed: str,
    dy: Tensor,
    summed: bool,
) -> tuple[Tensor, list[Tensor]]:
    """(dz [rows, outputs of all weights] in x's dtype, the biases' gradients), where z = x W^T + b is computed again.

    The second is empty where `summed` does not ask for it, and where there are too many rows or several weights that
    are not gate and up: the caller then sums dz.
    """
    activation = next((piece for piece in epilogue.pieces if isinstance(piece, (Activation, Gate))), None)
    gated, alone = isinstance(activation, Gate), len(weights) == 1
    summed = summed and (alone or gated) and x.shape[0] <= MAX_ROWS
    stored = activation is not None or epilogue.factor != 1.0
    dz = dy.to(x.dtype)
    z: tuple[Tensor, ...] = ()
    if stored:
        dz = x.new_empty((x.shape[0], sum([matrix.shape[0] for matrix in weights])))
    if activation is not None:
        products, first = torch.empty_like(dz), 0
        for matrix in weights:
            torch.mm(x, matrix.t(), out=products.narrow(1, first, matrix.shape[0]))
            first += matrix.shape[0]
        z = _pair(products, gated, packed if alone else "halves", -1)
    sums = [torch.empty(bias.shape, dtype=bias.dtype, device=x.device) for bias in biases] if summed else []
    if stored or sums:
        resolve(_ACTIVATION_GRADIENT)(
            dy, z, activation, epilogue.factor, _pair(dz, gated, packed if alone else "halves", -1) if stored else (),
            _vectors(biases, gated, packed), _vectors(sums, gated, packed),
        )  # fmt: skip
    return dz, sums


def _pair(tensor: Tensor, gated: bool, packed: str, dim: int) -> tuple[Tensor, ...]:
    return split_gate_up(tensor, packed, dim) if gated else (tensor,)


def _vectors(biases: list[Tensor], gated: bool, packed: str) -> tuple[Tensor, ...]:
    """Biases as the columns of z have them: one vector, or one for gate and one for up."""
    if not biases:
        return ()
    if gated:
        return tuple([bias.contiguous() for bias in biases]) if len(biases) > 1 else _pair(biases[0], True, packed, 0)
    return (biases[0] if len(biases) == 1 else torch.cat([bias.float() for bias in biases]),)


def _fake_backward(dy, x, matrices, biases, residual_dtype, chain, packed, wanted):
    residual = dy.new_empty(dy.shape if wanted[7] else 0, dtype=residual_dtype)
    return *empty_gradients((x, *matrices, *biases), wanted), residual


def _setup_context(ctx, inputs, output):
    x, weights, biases, extras, _ = inputs
    ctx.save_for_backward(x, *weights, *biases)
    ctx.settings = _settings(x, extras)


def _settings(x, extras):
    """What the backward pass needs beside tensors."""
    return x.dtype if extras.residual is None else extras.residual.dtype, extras.chain, extras.packed


def _pull_back(ctx, wanted, dy):
    x, *saved = ctx.saved_tensors
    with without_autocast(dy):  # of a backward() that is called inside it: products here have the dtypes they want
        return _linear_backward(dy, x, PlainWeights(*saved[:3]), Biases(*saved[3:]), *ctx.settings, wanted)


_linear_backward = KernelOp("linear_backward", _backward, _fake_backward, torch_alone=True)
_linear = KernelOp(
    "linear",
    _forward,
    _fake_forward,
    Gradient(_setup_context, _pull_back, ("x", *PlainWeights._fields, *Biases._fields, "residual")),
)


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix of a quantized weight in `dtype`: on a GPU by one kernel, for the formats that it reads."""
    if properties(weight.device).kind == "cpu" or not _has_kernel(weight):
        return weight.dequantize(dtype)
    return _dequantize(weight.data, list(weight.tensors[1:]), weight.layout, dtype)


def _has_kernel(weight: Weight) -> bool:
    known = weight.format.removesuffix(SUFFIX) in DEQUANTIZED
    return known and weight.ndim == 2 and weight.group_shape[0] in (1, -1) and installed("triton")


def _dequantized(data: Tensor, others: list[Tensor], layout: str, dtype: torch.dtype) -> Tensor:
    return resolve(_DEQUANTIZE)(Weight.from_tensors([data, *others], layout), dtype)


def _fake_dequantized(data, others, layout, dtype):
    return data.new_empty(Weight.from_tensors([data, *others], layout).shape, dtype=dtype)


_dequantize = KernelOp("linear_dequantize", _dequantized, _fake_dequantized)


def in_fp8(weight: Weight) -> Weight:
    """An MXFP4 matrix or stack as fp8 with a scale for each row, for products with x in fp8: one kernel."""
    data, scales = _in_fp8(weight.data, *weight.tensors[1:])
    return Weight(data, scales, None, "fp8", GRANULARITIES["row"], FP8)


def _run_in_fp8(data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    found = resolve(_IN_FP8)(Weight(data, scales, None, "mxfp4", (1, e2m1.GROUP)))
    return found.data, found.scales


def _fake_in_fp8(data, scales):
    return (
        data.new_empty((*data.shape[:-1], 2 * data.shape[-1]), dtype=FP8),
        data.new_empty((*data.shape[:-1], 1), dtype=torch.float32),
    )


_in_fp8 = KernelOp("linear_in_fp8", _run_in_fp8, _fake_in_fp8)


def _forward_quantized(x: Tensor, weights: StoredWeights, biases: Biases, extras: LinearExtras, kernels: str) -> Tensor:
    return _run(x, weights.weights, biases, extras, kernels)


def _fake_forward_quantized(x, weights, biases, extras, kernels):
    return _empty_output(x, weights.weights, extras)


def _setup_context_quantized(ctx, inputs, output):
    x, weights, biases, extras, _ = inputs
    ctx.save_for_backward(x, *biases, *weights.stored)
    ctx.layouts, ctx.settings = weights.layouts, _settings(x, extras)


def _pull_back_quantized(ctx, wanted, dy):
    x, bias, bias2, bias3, *stored = ctx.saved_tensors
    needed = [wanted[0], False, False, False, *wanted[1:]]
    with without_autocast(dy):
        weights = [dequantized(weight, x.dtype) for weight in StoredWeights(stored, ctx.layouts).weights]
        biases = Biases(bias, bias2, bias3)
        dx, _, _, _, *others = _linear_backward(dy, x, PlainWeights(*weights), biases, *ctx.settings, needed)
    return dx, *others


_linear_quantized = KernelOp(
    "linear_quantized",
    _forward_quantized,
    _fake_forward_quantized,
    Gradient(_setup_context_quantized, _pull_back_quantized, ("x", *Biases._fields, "residual")),
)
