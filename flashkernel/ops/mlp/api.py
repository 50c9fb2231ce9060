"""The public MLP: argument checks and dispatch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import GATES, Activation, Gate, activation_piece, check_activation
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.blocks.weight import Weight, check_main_grads, layouts
from flashkernel.core.arguments import (
    autocast,
    autocast_dtype,
    check_finite,
    check_non_negative,
    check_written,
    is_float,
    needs_gradients,
    without_autocast,
)
from flashkernel.core.device import properties
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.mlp import by_linear, library, spec
from flashkernel.ops.mlp.params import MainGrads, MlpOptions, MlpParams, MlpTensors
from flashkernel.ops.norm import rms_norm


@replayed
def mlp(
    x: Tensor,
    gate_up_weight: Tensor | Weight | Sequence[Tensor | Weight],
    down_weight: Tensor | Weight,
    gate_up_bias: Tensor | Sequence[Tensor] | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    activation: str | Activation | Gate = "swiglu",
    packed: str = "halves",
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    recompute: bool = False,
    main_grads: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns the MLP of a transformer: activation(norm(x) @ up^T + bias) @ down^T + bias + residual.

    Two launches: the activation (with its gate) is part of the first product, bias and residual of the second. The
    backward pass saves x and what goes into the activation, nothing else; the activation's gradient is part of the
    product that computes it. Every tensor is differentiable, except those of a quantized `Weight`. Under autocast x and
    the weights are cast as for torch.nn.functional.linear.

    Args:
        x: (..., in_features), float32, float16 or bfloat16.
        gate_up_weight: (intermediate, in_features) in x's dtype, or a `Weight`. With a gated activation: gate and up
            packed in one (2 * intermediate, in_features), or a pair of them.
        down_weight: (out_features, intermediate) in x's dtype, or a `Weight`.
        gate_up_bias: as many elements as gate_up_weight has rows, a pair of them for a pair, or None.
        down_bias: (out_features,) or None.
        residual: (..., out_features); added last.
        norm_weight: (in_features,); x goes through RMSNorm first: x / rms(x) * (norm_weight + norm_offset).
        activation: gated: "swiglu", "geglu" (tanh), "geglu_exact", "reglu", "gpt_oss_glu"; or "gelu", "gelu_tanh",
            "silu", "relu", "squared_relu"; an `Activation` or `Gate` object.
        packed: how one weight holds gate and up: "halves" or "interleaved", row by row.
        norm_eps: of the RMSNorm.
        norm_offset: added to norm_weight; Gemma's norms take 1.
        recompute: save x alone, and compute what goes into the activation again in the backward pass (activation
            checkpointing): less memory for one more product.
        main_grads: buffers that the backward pass adds the gradients of the weights to, as Megatron's `main_grad`: one
            for each weight, in the order gate_up (or gate, up), down, of its shape, in float32 or its dtype. The
            weights then get no gradient of their own. In eager mode only.
        out: where the output is written and returned; it may be the residual itself, and x. Without gradients only.
        backend: the backend to run on ("hopper", "triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., out_features) in x's dtype; under autocast, in the wider one of that and the residual's.

    Example:
        >>> import torch, flashkernel as fk
        >>> x, gate, up, down = torch.randn(2, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
        >>> y = fk.mlp(x, (gate, up), down)
        >>> torch.allclose(y, (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-4)
        True
        >>> packed = torch.cat((gate, up)).requires_grad_()
        >>> fk.mlp(x, packed, down, residual=x).sum().backward()
        >>> packed.grad.shape
        torch.Size([24, 8])
    """
    separate = not isinstance(gate_up_weight, (Tensor, Weight))
    weights: list[Any] = [*gate_up_weight, down_weight] if separate else [gate_up_weight, down_weight]  # type: ignore[misc]
    weights = [one.data if type(one) is Weight and one.format == "plain" else one for one in weights]
    biases = [] if gate_up_bias is None else [gate_up_bias] if isinstance(gate_up_bias, Tensor) else list(gate_up_bias)
    lower = autocast_dtype(x)
    out_dtype = None if out is None else out.dtype
    if lower is not None:
        x = autocast(x, lower)
        weights = [autocast(one, lower) if isinstance(one, Tensor) else one for one in weights]
        if residual is not None and out_dtype is None:
            out_dtype = torch.promote_types(x.dtype, residual.dtype)  # what mlp(x) + residual has
    _check_options(activation, packed, norm_eps, norm_offset)
    if len(weights) == 3:  # `packed` is of one weight; what goes into the activation is stored as the pair is
        packed = "halves"
    gated = isinstance(activation, Gate) or (isinstance(activation, str) and activation in GATES)
    shape = _check_tensors(x, weights, biases, down_bias, residual, norm_weight, gated)
    plain = [one for one in weights if isinstance(one, Tensor)]
    quantized = len(plain) < len(weights)
    needed = (x, *plain, *biases, down_bias, residual, norm_weight)
    gradients = needs_gradients(*needed)
    if main_grads is not None:
        check_main_grads("mlp", main_grads, weights)
    if out is not None:
        read = [one for weight in weights for one in (weight.tensors if isinstance(weight, Weight) else (weight,))]
        read += [*biases, down_bias, norm_weight]  # x is read before: y = x + mlp(x) may be in place
        check_written("mlp", "out", out, *read, in_place=(residual,))
        _check_out(out, shape, x.device, needs_gradients(*needed))
    chosen = choose(
        spec.MLP, backend, x.device, x.dtype, gradients, rows=spec.row_class(x.shape[:-1].numel()),
        weight=layouts(weights),
    )  # fmt: skip
    up: Any = weights[0] if len(weights) == 2 else weights[:2]
    with without_autocast(x):
        if chosen.composite and main_grads is None:
            y = chosen.run(
                x, up, weights[-1], gate_up_bias=gate_up_bias, down_bias=down_bias, residual=residual,
                norm_weight=norm_weight, activation=activation, packed=packed, norm_eps=norm_eps,
                norm_offset=norm_offset, out_dtype=out_dtype, recompute=recompute and gradients,
            )  # fmt: skip
            return y if out is None else out.copy_(y)
        piece: Any = activation_piece(activation)
        options = MlpOptions(
            gate_up_bias, down_bias, residual, norm_weight, piece, packed, norm_eps, norm_offset, out_dtype
        )
        old = chosen.name == "triton" and spec.unfused(properties(x.device))
        if old and main_grads is None and not quantized:
            return by_linear.unfused(x, up, weights[-1], options, out)
        if not gradients or quantized or (chosen.name == "cuda" and main_grads is None):
            inner = spec.linear_backends(None if quantized else backend, x.shape[:-1].numel())
            return by_linear.fused(x, up, weights[-1], options, out, inner)
        if norm_weight is not None:
            norms = "torch" if x.device.type == "cpu" else "triton"
            x = rms_norm(x, norm_weight, eps=norm_eps, offset=norm_offset, backend=norms)  # type: ignore[assignment]
        up_bias = biases[1] if len(biases) == 2 else None
        tensors = MlpTensors(
            x, weights[0], weights[1] if separate else None, weights[-1], biases[0] if biases else None, up_bias,
            down_bias, residual,
        )  # fmt: skip
        params = MlpParams(piece.text, packed, None if old or chosen.name == "cuda" else chosen.name)
        dtype = x.dtype if out_dtype is None else out_dtype
        return library.mlp(tensors, _main_grads(main_grads), params, dtype, recompute, spec.PRODUCTS)[0]


def _main_grads(given: Sequence[Tensor] | None) -> MainGrads:
    """Those of gate (or of both), up and down."""
    if given is None:
        return MainGrads()
    return MainGrads(given[0], given[1] if len(given) == 3 else None, given[-1])


def _check_options(activation: Any, packed: str, norm_eps: float, norm_offset: float) -> None:
    check_activation("mlp", activation)
    if activation is None:
        raise ValueError("mlp: activation is None; without one it is two calls of linear")
    if packed not in PACKINGS:
        raise ValueError(f"mlp: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    check_non_negative("mlp", "norm_eps", norm_eps)
    check_finite("mlp", "norm_offset", norm_offset)


def _check_tensors(
    x: Tensor,
    weights: list[Any],
    biases: list[Tensor],
    down_bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    gated: bool,
) -> tuple[int, ...]:
    """The output's shape."""
    if x.ndim == 0 or not is_float(x):
        raise ValueError(f"mlp: x must be a float tensor of at least one dim, not {x.dtype} {tuple(x.shape)}")
    most = 2 if gated else 1
    if not 1 <= len(weights) - 1 <= most:
        takes = "one packed weight or a pair of gate and up" if gated else "one weight"
        raise ValueError(f"mlp: gate_up_weight is a list of {len(weights) - 1}; this activation takes {takes}")
    for weight in weights:
        if weight.ndim != 2 or weight.device != x.device or (weight.dtype != x.dtype and isinstance(weight, Tensor)):
            raise ValueError(
                f"mlp: a weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}; it must be a matrix in "
                f"x's dtype {x.dtype} on {x.device}, or a flashkernel.Weight"
            )
    wide, narrow = weights[:-1], weights[-1]
    rows = wide[0].shape[0]
    if any(weight.shape != (rows, x.shape[-1]) for weight in wide) or (gated and len(wide) == 1 and rows % 2):
        shapes = " and ".join(str(tuple(weight.shape)) for weight in wide)
        raise ValueError(
            f"mlp: gate_up_weight is {shapes}; x has {x.shape[-1]} columns, so it must be (intermediate, "
            f"{x.shape[-1]}), equal for gate and up, or an even number of rows where it holds both"
        )
    inner = rows // 2 if gated and len(wide) == 1 else rows
    if narrow.shape[1] != inner:
        raise ValueError(f"mlp: down_weight is {tuple(narrow.shape)}; it must be (out_features, {inner})")
    if biases and len(biases) != len(wide):
        raise ValueError(f"mlp: {len(biases)} biases were given for {len(wide)} weights; give each one, or none")
    shape = (*x.shape[:-1], narrow.shape[0])
    expected = [("gate_up_bias", bias, (rows,)) for bias in biases]
    expected += [("down_bias", down_bias, (narrow.shape[0],)), ("residual", residual, shape)]  # type: ignore[list-item]
    expected += [("norm_weight", norm_weight, (x.shape[-1],))]  # type: ignore[list-item]
    for name, given, size in expected:
        if given is None:
            continue
        if tuple(given.shape) != tuple(size) or given.device != x.device or not is_float(given):
            raise ValueError(
                f"mlp: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be a float tensor "
                f"{tuple(size)} on {x.device}"
            )
    if norm_weight is not None and x.shape[-1] == 0:
        raise ValueError("mlp: x has no columns to be normalized; leave norm_weight out")
    return shape


def _check_out(out: Tensor, shape: tuple[int, ...], device: torch.device, gradients: bool) -> None:
    if tuple(out.shape) != shape or out.device != device or not is_float(out):
        raise ValueError(
            f"mlp: out is {out.dtype} {tuple(out.shape)} on {out.device}; the output is {shape} on {device}"
        )
    if gradients:
        raise ValueError("mlp: out takes no gradients; call it under torch.no_grad(), or leave out away")
