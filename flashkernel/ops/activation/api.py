"""The public activations: argument checks and dispatch."""

from torch import Tensor

from flashkernel.core.arguments import check_finite, is_float, needs_gradients, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.op import Op
from flashkernel.core.replay import replayed
from flashkernel.ops.activation import library, spec


@replayed
def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """Returns x * Phi(x), where Phi is the cumulative distribution function of the normal distribution.

    Args:
        x: any shape, float32, float16 or bfloat16.
        approximate: "none" for the exact form, "tanh" for GPT-2's and Gemma's approximation.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A tensor with x's shape and dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4)
        >>> torch.allclose(fk.gelu(x), torch.nn.functional.gelu(x), atol=1e-6)
        True
    """
    _check_approximate("gelu", approximate)
    chosen = _choose(spec.GELU, x, backend)
    if chosen.composite:
        return chosen.run(x, approximate=approximate)
    return library.activation(x, None, _GELU[approximate], "plain", 0.0, 0.0, chosen.target)


@replayed
def silu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Returns x * sigmoid(x), also called swish.

    Args:
        x: any shape, float32, float16 or bfloat16.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A tensor with x's shape and dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4)
        >>> torch.allclose(fk.silu(x), torch.nn.functional.silu(x), atol=1e-6)
        True
    """
    chosen = _choose(spec.SILU, x, backend)
    return chosen.run(x) if chosen.composite else library.activation(x, None, "silu", "plain", 0.0, 0.0, chosen.target)


@replayed
def relu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Returns max(x, 0).

    Args:
        x: any shape, float32, float16 or bfloat16.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A tensor with x's shape and dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4)
        >>> torch.allclose(fk.relu(x), torch.relu(x), atol=1e-6)
        True
    """
    chosen = _choose(spec.RELU, x, backend)
    return chosen.run(x) if chosen.composite else library.activation(x, None, "relu", "plain", 0.0, 0.0, chosen.target)


@replayed
def squared_relu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Returns max(x, 0)^2.

    Args:
        x: any shape, float32, float16 or bfloat16.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        A tensor with x's shape and dtype.

    Example:
        >>> import torch, flashkernel as fk
        >>> x = torch.randn(4)
        >>> torch.allclose(fk.squared_relu(x), torch.relu(x) ** 2, atol=1e-6)
        True
    """
    chosen = _choose(spec.SQUARED_RELU, x, backend)
    return (
        chosen.run(x)
        if chosen.composite
        else library.activation(x, None, "squared_relu", "plain", 0.0, 0.0, chosen.target)
    )


@replayed
def swiglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves", backend: str | None = None) -> Tensor:
    """Returns silu(gate) * up, the gated activation of Llama, Qwen and Mixtral.

    Args:
        gate: (..., width); or, without `up`, gate and up in one tensor (..., 2 * width).
        up: shape and dtype of gate; None where `gate` holds both.
        packed: how a tensor holds both: "halves" (gate in the first half of the columns, as in Llama) or "interleaved"
            (gate in the even columns, gpt-oss's order). The gradient is packed the same way.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., width) in gate's dtype; computed in float32 and rounded once.

    Example:
        >>> import torch, flashkernel as fk
        >>> gate, up = torch.randn(2, 4), torch.randn(2, 4)
        >>> torch.allclose(fk.swiglu(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
        True
    """
    gate, up = promoted(gate, up)
    _check_gated("swiglu", gate, up, packed)
    chosen = _choose(spec.SWIGLU, gate, backend, up)
    if chosen.composite:
        return chosen.run(gate, up, packed=packed)
    return library.activation(gate, up, "silu", packed if up is None else "separate", 0.0, 0.0, chosen.target)


@replayed
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "tanh",
    packed: str = "halves",
    backend: str | None = None,
) -> Tensor:
    """Returns gelu(gate) * up, the gated activation of Gemma.

    Args:
        gate: (..., width); or, without `up`, gate and up in one tensor (..., 2 * width).
        up: shape and dtype of gate; None where `gate` holds both.
        approximate: "tanh" for Gemma's approximation, "none" for the exact form.
        packed: how a tensor holds both: "halves" (gate in the first half of the columns, as in Llama) or "interleaved"
            (gate in the even columns, gpt-oss's order). The gradient is packed the same way.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., width) in gate's dtype; computed in float32 and rounded once.

    Example:
        >>> import torch, flashkernel as fk
        >>> gate, up = torch.randn(2, 4), torch.randn(2, 4)
        >>> torch.allclose(fk.geglu(gate, up), torch.nn.functional.gelu(gate, approximate="tanh") * up, atol=1e-6)
        True
    """
    _check_approximate("geglu", approximate)
    gate, up = promoted(gate, up)
    _check_gated("geglu", gate, up, packed)
    chosen = _choose(spec.GEGLU, gate, backend, up)
    if chosen.composite:
        return chosen.run(gate, up, approximate=approximate, packed=packed)
    return library.activation(
        gate, up, _GELU[approximate], packed if up is None else "separate", 0.0, 0.0, chosen.target
    )


@replayed
def reglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves", backend: str | None = None) -> Tensor:
    """Returns relu(gate) * up.

    Args:
        gate: (..., width); or, without `up`, gate and up in one tensor (..., 2 * width).
        up: shape and dtype of gate; None where `gate` holds both.
        packed: how a tensor holds both: "halves" (gate in the first half of the columns, as in Llama) or "interleaved"
            (gate in the even columns, gpt-oss's order). The gradient is packed the same way.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., width) in gate's dtype; computed in float32 and rounded once.

    Example:
        >>> import torch, flashkernel as fk
        >>> gate, up = torch.randn(2, 4), torch.randn(2, 4)
        >>> torch.allclose(fk.reglu(gate, up), torch.relu(gate) * up, atol=1e-6)
        True
    """
    gate, up = promoted(gate, up)
    _check_gated("reglu", gate, up, packed)
    chosen = _choose(spec.REGLU, gate, backend, up)
    if chosen.composite:
        return chosen.run(gate, up, packed=packed)
    return library.activation(gate, up, "relu", packed if up is None else "separate", 0.0, 0.0, chosen.target)


@replayed
def gpt_oss_glu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    packed: str = "interleaved",
    backend: str | None = None,
) -> Tensor:
    """Returns gpt-oss's clamped gated activation: (up + 1) * gate * sigmoid(alpha * gate).

    gate is clamped from above and up from both sides, by `limit`, before that.

    Args:
        gate: (..., width); or, without `up`, gate and up in one tensor (..., 2 * width).
        up: shape and dtype of gate; None where `gate` holds both.
        alpha: the factor inside the sigmoid.
        limit: of the clamp; at least 0.
        packed: how a tensor holds both: "halves" (gate in the first half of the columns, as in Llama) or "interleaved"
            (gate in the even columns, gpt-oss's order). The gradient is packed the same way.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        (..., width) in gate's dtype; computed in float32 and rounded once.

    Example:
        >>> import torch, flashkernel as fk
        >>> gate, up = torch.randn(2, 4), torch.randn(2, 4)
        >>> torch.allclose(fk.gpt_oss_glu(gate, up), (up + 1) * gate * torch.sigmoid(1.702 * gate), atol=1e-6)
        True
    """
    gate, up = promoted(gate, up)
    _check_gated("gpt_oss_glu", gate, up, packed)
    check_finite("gpt_oss_glu", "alpha", alpha)
    if not limit >= 0:
        raise ValueError(f"gpt_oss_glu: limit is {limit}; the clamp needs a limit of at least 0")
    chosen = _choose(spec.GPT_OSS_GLU, gate, backend, up)
    if chosen.composite:
        return chosen.run(gate, up, alpha=alpha, limit=limit, packed=packed)
    return library.activation(gate, up, "gpt_oss", packed if up is None else "separate", alpha, limit, chosen.target)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # torch's names of the forms, and the kernels'


def _choose(op: Op, x: Tensor, backend: str | None, up: Tensor | None = None):
    if not is_float(x):
        raise ValueError(f"{op.name}: {x.dtype} cannot be activated; pass a float tensor")
    return choose(op, backend, x.device, x.dtype, needs_gradients(x, up))


def _check_approximate(name: str, approximate: str) -> None:
    if approximate not in _GELU:
        raise ValueError(f"{name}: approximate is {approximate!r}; it must be 'none' or 'tanh'")


def _check_gated(name: str, gate: Tensor, up: Tensor | None, packed: str) -> None:
    if packed not in ("halves", "interleaved"):
        raise ValueError(f"{name}: packed is {packed!r}; it must be 'halves' or 'interleaved'")
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"{name}: without up, gate holds both and needs an even number of columns; "
                f"its shape is {tuple(gate.shape)}"
            )
    elif up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        raise ValueError(
            f"{name}: up is {up.dtype} {tuple(up.shape)} on {up.device}; "
            f"it must match gate: {gate.dtype} {tuple(gate.shape)} on {gate.device}"
        )
