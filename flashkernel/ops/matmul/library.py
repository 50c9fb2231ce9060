"""The matrix products' kernels as torch operators, with their gradients.

The gradients are products of the same kernels: dA = dZ B^T, dB = A^T dZ, where dZ is the gradient of what goes into the
activation and the transposes are views. A product that ends in an activation stores its input Z for the backward pass.
The dZ of a gated product is packed as its B is, so that its gradients are products of packed tensors as well.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue, Residual
from flashkernel.blocks.fp8 import SCALE_BLOCK
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.arguments import near, unit_stride
from flashkernel.core.launch import mark_written
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.reference import default_dtype

# Of all kernel modules:
_GRADIENTS = "flashkernel.ops.matmul.triton:activation_gradient"
_QUANTIZE = "flashkernel.ops.matmul.triton:quantize_rows"


def matmul(
    kernels: str,
    a: Tensor,
    b: Tensor,
    tensors: MatmulTensors,
    params: MatmulParams,
    quantize: str,
    save: bool,
    return_preactivation: bool,
    added: bool,
) -> Tensor | tuple[Tensor, ...]:
    """C [M, N], or [batch, M, N] if an operand has a batch; differentiable in a, b, up, the biases and the residual.

    Args:
        kernels: The kernel module.
        a: [M, K] or [batch, M, K].
        b: [K, N] or [batch, K, N]; of a gated product the gate's, or both packed.
        tensors: As kernel modules take them, but without a batch where there is none. With `out`, C has no gradient.
        params: What the product computes.
        quantize: "block" or "row": return C in fp8, and its scales; "" for neither.
        save: Store the activation's input for the backward pass.
        return_preactivation: Return it, too.
        added: The residual is `out`, and left out of `tensors`.
    """
    alone = a.ndim == 2 and b.ndim == 2
    a, b, out = _batched(a), _batched(b), tensors.out
    up, bias, up_bias, residual, a_scale, b_scale, *_, seed, out_scale, _ = tensors
    tensors = MatmulTensors(
        _batched(up), bias, up_bias, _batched(residual), _batched(a_scale), _batched(b_scale), out=_batched(out),
        seed=seed, out_scale=_batched(out_scale),
    )  # fmt: skip
    saves = "returned" if return_preactivation else "saved" if save else ""
    if out is not None:
        z = _matmul_into(a, b, tensors, params, added, saves, kernels)
        return (out, z[0] if alone else z) if return_preactivation else out
    c, z, scales = _matmul(a, b, tensors, params, quantize, saves, kernels)
    wanted = [c, *([scales] if quantize else []), *([z] if return_preactivation else [])]
    if alone:
        wanted = [x[0] for x in wanted]
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


def _batched(x):
    return x[None] if x is not None and x.ndim == 2 else x


def _batches(a: Tensor, b: Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _columns(b: Tensor, up: Tensor | None, chain: str) -> tuple[int, int]:
    """Columns of C and of the preactivation."""
    if not Epilogue.parse(chain).gated:
        return b.shape[2], b.shape[2]
    return (b.shape[2], 2 * b.shape[2]) if up is not None else (b.shape[2] // 2, b.shape[2])


def _forward(
    a: Tensor, b: Tensor, tensors: MatmulTensors, params: MatmulParams, quantize: str, saves: str, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """C, the preactivation and the scales of C; those that are not asked for are empty."""
    if quantize == "row":  # in a second kernel
        params = params._replace(out_dtype=default_dtype(a.dtype))
    n = _columns(b, tensors.up, params.chain)[0]
    size = (_batches(a, b), a.shape[1], -(-n // SCALE_BLOCK)) if quantize == "block" else 0
    scales = torch.empty(size, dtype=torch.float32, device=a.device)
    if quantize == "block":
        tensors = tensors._replace(block_scales=scales)
    c, z = _multiply(a, b, params, tensors, saves, kernels)
    if quantize == "row":
        c, scales = resolve(_QUANTIZE)(c)
    return c, z, scales


def _fake_forward(a, b, tensors, params, quantize, saves, kernels):
    n, z_columns = _columns(b, tensors.up, params.chain)
    shape = (_batches(a, b), a.shape[1])
    z = a.new_empty((*shape, z_columns) if saves else 0, dtype=default_dtype(a.dtype))
    groups = 1 if quantize == "row" else -(-n // SCALE_BLOCK)
    scales = a.new_empty((*shape, groups) if quantize else 0, dtype=torch.float32)
    return a.new_empty((*shape, n), dtype=params.out_dtype), z, scales


def _forward_into(
    a: Tensor, b: Tensor, tensors: MatmulTensors, params: MatmulParams, added: bool, saves: str, kernels: str
) -> Tensor:
    """Writes C to `out`, which is the residual where `added`. Returns the preactivation, or an empty tensor."""
    out = tensors.out
    assert out is not None
    target = out if out.stride(2) == 1 or out.shape[2] == 1 else None
    given = tensors._replace(out=target, residual=out if added else tensors.residual)
    c, z = _multiply(a, b, params, given, saves, kernels)
    if target is None:
        out.copy_(c)
    mark_written(out)
    return z


def _fake_forward_into(a, b, tensors, params, added, saves, kernels):
    size = (_batches(a, b), a.shape[1], _columns(b, tensors.up, params.chain)[1])
    return a.new_empty(size if saves else 0, dtype=default_dtype(a.dtype))


def _multiply(
    a: Tensor, b: Tensor, params: MatmulParams, given: MatmulTensors, saves: str, kernels: str
) -> tuple[Tensor, Tensor]:
    """C [batch, M, N], and the preactivation or an empty tensor. A gated B may be packed."""
    n, z_columns = _columns(b, given.up, params.chain)
    shape = (_batches(a, b), a.shape[1], n)
    z = a.new_empty((*shape[:2], z_columns) if saves else 0, dtype=default_dtype(a.dtype))
    vectors = (given.bias, given.up_bias, given.a_scale, given.b_scale)
    bias, up_bias, a_scale, b_scale = [None if one is None else near(one) for one in vectors]
    given = given._replace(bias=bias, up_bias=up_bias, a_scale=a_scale, b_scale=b_scale)
    b, tensors = _unpacked(b, params, given._replace(preactivation=z if saves else None))
    by_batch = params.scaling if tensors.out_scale is None else "row"
    merged = _merged_batch(a, b, by_batch, tensors.residual, tensors.out)
    if merged is not None:  # one product of batch * M rows
        a, residual, out = merged
        rows = shape[0] * shape[1]
        flat = z.view(1, rows, z_columns) if saves else None
        scales = None if tensors.block_scales is None else tensors.block_scales.view(1, rows, -(-n // SCALE_BLOCK))
        tensors = tensors._replace(residual=residual, out=out, preactivation=flat, block_scales=scales)
    c = resolve(kernels).forward(a, b, params, tensors)
    return c if c.shape == shape else c.view(shape), z


def _unpacked(b: Tensor, params: MatmulParams, given: MatmulTensors) -> tuple[Tensor, MatmulTensors]:
    """Gate and up of a packed B, of its bias and of its scales, as views."""
    if not params.epilogue.gated or given.up is not None:
        return b, given
    b, up = split_gate_up(b, params.packed)
    bias, up_bias, b_scale, up_scale = given.bias, None, given.b_scale, given.b_scale
    if bias is not None:
        bias, up_bias = split_gate_up(bias, params.packed)
    if b_scale is not None and b_scale.shape[-1] > 1:
        b_scale, up_scale = split_gate_up(b_scale, params.packed)
    return b, given._replace(up=up, bias=bias, up_bias=up_bias, b_scale=b_scale, up_scale=up_scale)


def _merged_batch(
    a: Tensor, b: Tensor, scaling: str, *outputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """A, the residual and `out` with the batch as more rows, if B is the same for all and the strides allow views."""
    batches, m, _ = a.shape
    if batches == 1 or b.shape[0] != 1 or scaling or not a.numel():
        return None
    if any(x is not None and (x.shape[0] == 1 or x.stride(0) != m * x.stride(1)) for x in (a, *outputs)):
        return None
    views = [
        None if x is None else x.as_strided((1, batches * m, x.shape[2]), (0, x.stride(1), x.stride(2)))
        for x in (a, *outputs)
    ]
    return views[0], views[1], views[2]  # type: ignore[return-value]


class _Saved(NamedTuple):
    """What a product saves for its backward pass."""

    a: Tensor
    b: Tensor
    up: Tensor | None
    preactivation: Tensor
    seed: int | Tensor


class _Inputs(NamedTuple):
    """What the gradients of inputs that are not saved look like."""

    bias_dtype: torch.dtype
    up_bias_dtype: torch.dtype
    residual_dtype: torch.dtype
    residual_batches: int


def _backward(
    dc: Tensor, dz: Tensor | None, saved: _Saved, inputs: _Inputs, params: MatmulParams, wanted: list[bool],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, b, up, their biases and the residual; those not wanted are empty.

    `dz` is the gradient of a returned preactivation.
    """
    a, b, up, preactivation, seed = saved
    module, tf32 = resolve(kernels), params.tf32
    dz = _preactivation_gradient(dc, dz, a.dtype, preactivation, params.epilogue, params.packed, seed)
    parts = (dz,) if up is None else split_gate_up(dz, params.packed)
    results = [a.new_empty(0) for _ in range(6)]  # an output of its own each
    if wanted[0]:
        results[0] = _left_gradient(module, parts, (b,) if up is None else (b, up), a, tf32)
    for index, part in enumerate(parts):
        if wanted[1 + index]:
            results[1 + index] = _right_gradient(module, a, part, b, tf32)
        if wanted[3 + index]:
            total = part.sum((0, 1), dtype=torch.float32)
            results[3 + index] = total.to(inputs.up_bias_dtype if index else inputs.bias_dtype)
    if wanted[5]:
        over = dc.sum(0, keepdim=True, dtype=torch.float32) if inputs.residual_batches < dc.shape[0] else dc
        results[5] = over.to(inputs.residual_dtype, copy=True)
    return results[0], results[1], results[2], results[3], results[4], results[5]


def _preactivation_gradient(
    dc: Tensor, dz: Tensor | None, dtype: torch.dtype, preactivation: Tensor, epilogue: Epilogue, packed: str,
    seed: int | Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of what goes into the activation, in `dtype`; `dz` is added to it."""
    if not epilogue.linear:
        return resolve(_GRADIENTS)(dc, dz, preactivation, epilogue, packed, seed)
    found = dc if epilogue.factor == 1.0 else dc * epilogue.factor
    found = (found if dz is None else found + dz).to(dtype)
    return found if found.stride(2) == 1 or found.stride(1) == 1 else found.contiguous()


def _left_gradient(module, parts: tuple[Tensor, ...], matrices: tuple[Tensor, ...], a: Tensor, tf32: bool) -> Tensor:
    """dA = dZ B^T; of gate and up the sum of two products, added in float32."""
    summed = a.shape[0] < parts[0].shape[0]  # one A for all: dA is the sum over the batch
    last = torch.float32 if summed else a.dtype
    if len(parts) == 1:
        da = module.forward(
            parts[0], matrices[0].transpose(1, 2), MatmulParams(last, "", "", tf32), MatmulTensors()
        )  # fmt: skip
    else:
        first = MatmulParams(torch.float32, "", "", tf32)
        da = module.forward(parts[0], matrices[0].transpose(1, 2), first, MatmulTensors())
        second = MatmulParams(last, Residual().text, "", tf32)
        da = module.forward(parts[1], matrices[1].transpose(1, 2), second, MatmulTensors(residual=da))
    return da.sum(0, keepdim=True).to(a.dtype) if summed else da


def _right_gradient(module, a: Tensor, dz: Tensor, b: Tensor, tf32: bool) -> Tensor:
    """dB = A^T dZ."""
    if b.shape[0] < dz.shape[0]:  # one B for all: the sum over M goes on over the batch
        rows = dz.shape[0] * dz.shape[1]
        a, dz = a.reshape(1, rows, a.shape[2]), dz.reshape(1, rows, dz.shape[2])
    return module.forward(a.transpose(1, 2), dz, MatmulParams(a.dtype, "", "", tf32), MatmulTensors())


def _fake_backward(dc, dz, saved, inputs, params, wanted, kernels):
    a, b = saved.a, saved.b
    shapes = [
        (a.shape, a.dtype), (b.shape, a.dtype), (b.shape, a.dtype), (b.shape[2:], inputs.bias_dtype),
        (b.shape[2:], inputs.up_bias_dtype), ((inputs.residual_batches, *dc.shape[1:]), inputs.residual_dtype),
    ]  # fmt: skip
    return tuple(
        a.new_empty(shape, dtype=dtype) if want else a.new_empty(0) for (shape, dtype), want in zip(shapes, wanted)
    )


def _setup_context(ctx, inputs, output):
    a, b, tensors, ctx.params, _, saves, ctx.kernels = inputs
    seed, residual = tensors.seed, tensors.residual
    on_device = isinstance(seed, Tensor)
    ctx.save_for_backward(a, b, tensors.up, output[1], seed if on_device else None)
    ctx.mark_non_differentiable(*(output[2:] if saves == "returned" else output[1:]))
    ctx.output = (output[0].shape, output[0].dtype)
    ctx.seed = 0 if on_device else seed
    dtypes = [a.dtype if x is None else x.dtype for x in (tensors.bias, tensors.up_bias, residual)]
    ctx.inputs = _Inputs._make((*dtypes, 1 if residual is None else residual.shape[0]))


def _pull_back(ctx, wanted, dc, dz, _):
    *saved, device_seed = ctx.saved_tensors
    if dc is None:
        dc = saved[0].new_zeros(ctx.output[0], dtype=ctx.output[1])
    given = _Saved._make((*saved, ctx.seed if device_seed is None else device_seed))
    return _matmul_backward(dc, dz, given, ctx.inputs, ctx.params, wanted, ctx.kernels)


_matmul_backward = KernelOp("matmul_backward", _backward, _fake_backward)
_matmul = KernelOp(
    "matmul",
    _forward,
    _fake_forward,
    Gradient(_setup_context, _pull_back, ("a", "b", "up", "bias", "up_bias", "residual")),
)
_matmul_into = KernelOp("matmul_into", _forward_into, _fake_forward_into, mutates=("out",))


def matmul_dact(
    kernels: str, a: Tensor, b: Tensor, preactivation: Tensor, dz_out: Tensor | None, params: MatmulParams
) -> tuple[Tensor, Tensor]:
    """(dz, activated); dz is `dz_out` where that is given."""
    alone = a.ndim == 2 and b.ndim == 2
    operands = (_batched(a), _batched(b))
    if dz_out is None:
        dz, activated = _dact(*operands, _batched(preactivation), params, kernels)
        return (dz[0], activated[0]) if alone else (dz, activated)
    z = None if dz_out is preactivation else _batched(preactivation)
    activated = _dact_into(*operands, z, _batched(dz_out), params, kernels)
    return dz_out, activated[0] if alone else activated


def _dact_forward(
    a: Tensor, b: Tensor, preactivation: Tensor, params: MatmulParams, kernels: str
) -> tuple[Tensor, Tensor]:
    dz = preactivation.new_empty(preactivation.shape)
    return dz, _dact_run(a, b, preactivation, dz, params, kernels)


def _fake_dact(a, b, preactivation, params, kernels):
    shape = (*preactivation.shape[:2], b.shape[2])
    return preactivation.new_empty(preactivation.shape), preactivation.new_empty(shape)


def _dact_forward_into(
    a: Tensor, b: Tensor, preactivation: Tensor | None, dz: Tensor, params: MatmulParams, kernels: str
) -> Tensor:
    """Writes dz and returns the activated values. Without a preactivation it is what dz holds."""
    activated = _dact_run(a, b, dz if preactivation is None else preactivation, dz, params, kernels)
    mark_written(dz)
    return activated


def _fake_dact_into(a, b, preactivation, dz, params, kernels):
    return dz.new_empty((*dz.shape[:2], b.shape[2]))


def _dact_run(a: Tensor, b: Tensor, z: Tensor, dz: Tensor, params: MatmulParams, kernels: str) -> Tensor:
    batches, m, n = z.shape[0], a.shape[1], b.shape[2]
    activated = z.new_empty((batches, m, n))
    plain, target = unit_stride(z), dz if dz.stride(2) == 1 or dz.shape[2] == 1 else dz.new_empty(dz.shape)
    merged = _merged_batch(a, b, "", plain, target)
    if merged is None:
        resolve(kernels).dact(a, b, plain, target, activated, params)
    else:  # one product of batch * M rows
        resolve(kernels).dact(merged[0], b, *merged[1:], activated.view(1, batches * m, n), params)
    if target is not dz:
        dz.copy_(target)
    return activated


_dact = KernelOp("matmul_dact", _dact_forward, _fake_dact)
_dact_into = KernelOp("matmul_dact_into", _dact_forward_into, _fake_dact_into, mutates=("dz",))
