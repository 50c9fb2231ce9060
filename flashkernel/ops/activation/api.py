"""The public activations: argument checks, dispatch, autograd."""

from torch import Tensor

from flashkernel.core.arguments import check_finite, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.library import KernelOp
from flashkernel.core.op import Op, resolve
from flashkernel.core.replay import replayed
from flashkernel.ops.activation import spec


@replayed
def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """x times the normal distribution's cumulative function at x; approximate="tanh" for GPT-2's and Gemma's form."""
    _check_approximate("gelu", approximate)
    chosen = _choose(spec.GELU, x, backend)
    if chosen.composite:
        return chosen.run(x, approximate=approximate)
    return _activation(x, None, _GELU[approximate], "plain", 0.0, 0.0, chosen.target)


@replayed
def silu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """x sigmoid(x), also called swish."""
    chosen = _choose(spec.SILU, x, backend)
    return chosen.run(x) if chosen.composite else _activation(x, None, "silu", "plain", 0.0, 0.0, chosen.target)


@replayed
def relu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x, 0)."""
    chosen = _choose(spec.RELU, x, backend)
    return chosen.run(x) if chosen.composite else _activation(x, None, "relu", "plain", 0.0, 0.0, chosen.target)


@replayed
def squared_relu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x, 0)^2."""
    chosen = _choose(spec.SQUARED_RELU, x, backend)
    return chosen.run(x) if chosen.composite else _activation(x, None, "squared_relu", "plain", 0.0, 0.0, chosen.target)


@replayed
def swiglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves", backend: str | None = None) -> Tensor:
    """silu(gate) * up.

    Without `up`, `gate` holds both, [..., 2 width]: packed="halves" has the gate in the first half of the columns,
    "interleaved" in the even ones. The gradient of a packed tensor is packed the same way.
    """
    gate, up = promoted(gate, up)
    _check_gated("swiglu", gate, up, packed)
    chosen = _choose(spec.SWIGLU, gate, backend)
    if chosen.composite:
        return chosen.run(gate, up, packed=packed)
    return _activation(gate, up, "silu", packed if up is None else "separate", 0.0, 0.0, chosen.target)


@replayed
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "tanh",
    packed: str = "halves",
    backend: str | None = None,
) -> Tensor:
    """gelu(gate) * up, by default with Gemma's tanh form; packed inputs as in `swiglu`."""
    _check_approximate("geglu", approximate)
    gate, up = promoted(gate, up)
    _check_gated("geglu", gate, up, packed)
    chosen = _choose(spec.GEGLU, gate, backend)
    if chosen.composite:
        return chosen.run(gate, up, approximate=approximate, packed=packed)
    return _activation(gate, up, _GELU[approximate], packed if up is None else "separate", 0.0, 0.0, chosen.target)


@replayed
def reglu(gate: Tensor, up: Tensor | None = None, *, packed: str = "halves", backend: str | None = None) -> Tensor:
    """relu(gate) * up; packed inputs as in `swiglu`."""
    gate, up = promoted(gate, up)
    _check_gated("reglu", gate, up, packed)
    chosen = _choose(spec.REGLU, gate, backend)
    if chosen.composite:
        return chosen.run(gate, up, packed=packed)
    return _activation(gate, up, "relu", packed if up is None else "separate", 0.0, 0.0, chosen.target)


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
    """gpt-oss's clamped gate: (up + 1) * gate * sigmoid(alpha * gate), of min(gate, limit) and up in [-limit, limit].

    Packed inputs as in `swiglu`, interleaved by default as the model's weights are.
    """
    gate, up = promoted(gate, up)
    _check_gated("gpt_oss_glu", gate, up, packed)
    check_finite("gpt_oss_glu", "alpha", alpha)
    if not limit >= 0:
        raise ValueError(f"gpt_oss_glu: limit is {limit}; the clamp needs a limit of at least 0")
    chosen = _choose(spec.GPT_OSS_GLU, gate, backend)
    if chosen.composite:
        return chosen.run(gate, up, alpha=alpha, limit=limit, packed=packed)
    return _activation(gate, up, "gpt_oss", packed if up is None else "separate", alpha, limit, chosen.target)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # torch's names of the forms, and the kernels'


def _choose(op: Op, x: Tensor, backend: str | None):
    if not x.is_floating_point():
        raise ValueError(f"{op.name}: {x.dtype} cannot be activated; pass a float tensor")
    return choose(op, backend, x.device, x.dtype)


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


def _forward(
    gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float, kernels: str
) -> Tensor:
    """layout: "plain" (no up), "separate", "halves" or "interleaved"."""
    return resolve(kernels).forward(gate, up, kind, layout, alpha, limit)


def _fake_forward(gate, up, kind, layout, alpha, limit, kernels):
    if layout in ("plain", "separate"):
        return gate.new_empty(gate.shape)
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, layout: str, alpha: float, limit: float, kernels: str
) -> tuple[Tensor, Tensor]:
    """(dgate, dup); dup is empty without an up."""
    return resolve(kernels).backward(dy, gate, up, kind, layout, alpha, limit)


def _fake_backward(dy, gate, up, kind, layout, alpha, limit, kernels):
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _setup_context(ctx, inputs, output):
    gate, up, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up)
    ctx.settings = settings


def _pull_back(ctx, dy):
    gate, up = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    dgate, dup = _activation_backward(dy, gate, up, *ctx.settings)
    return dgate, None if up is None else dup, None, None, None, None, None


_activation_backward = KernelOp("activation_backward", _backward, _fake_backward)
_activation = KernelOp("activation", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
