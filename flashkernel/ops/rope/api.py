"""The public rotary embedding: argument checks, dispatch, autograd."""

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import half_width, rotary_width
from flashkernel.core.arguments import promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.launch import mark_written
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.core.replay import replayed
from flashkernel.ops.rope import spec


@replayed
def rope(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    frequencies: Frequencies | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    in_place: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary position embedding of q, or of q and k in one launch: returns q' or (q', k').

    q and k are (batch, seq, heads, head_dim) with any strides, k with its own number of heads. A pair of dims (a, b)
    becomes (a cos - b sin, b cos + a sin); pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) with interleaved=True.
    Dims after the first `rotary_dim` are kept.

    The angles come from one of:
    - `frequencies`, with `positions` (seq,) or (batch, seq), any integers, by default 0 to seq - 1;
    - `cos` and `sin` tables (max_positions, rotary_dim / 2), with the same positions. One outside the table gives NaN
      in that token's rotated dims: it cannot raise without waiting for the device;
    - `cos` and `sin` of each token, (batch or 1, seq, rotary_dim) as Transformers makes them, each value twice, or
      (batch or 1, seq, rotary_dim / 2) with `rotary_dim` given.

    With in_place=True, q and k are overwritten and returned; only where no gradient is recorded. Tables and positions
    have no gradient.
    """
    if not in_place:
        q, k = promoted(q, k)
    _check_heads(q, k)
    _check_angles(q, cos, sin, positions, frequencies)
    width = rotary_width("rope", q.shape[-1], cos, rotary_dim, frequencies)
    if in_place:
        _check_in_place(q, k)
    chosen = choose(spec.ROPE, backend, q.device, q.dtype)
    if chosen.composite:
        result = chosen.run(
            q, k, cos, sin, positions, frequencies=frequencies, rotary_dim=width, interleaved=interleaved
        )
        return _overwrite(q, k, result) if in_place else result
    rates, scaling = None, 1.0
    if frequencies is not None:
        rates, scaling = frequencies.rates(q.device), frequencies.scaling
    if in_place:
        _rope_in_place(q, k, cos, sin, rates, positions, scaling, width, interleaved, chosen.target)
        return q if k is None else (q, k)
    turned_q, turned_k = _rope(q, k, cos, sin, rates, positions, scaling, width, interleaved, False, chosen.target)
    return turned_q if k is None else (turned_q, turned_k)


def _overwrite(q: Tensor, k: Tensor | None, result) -> Tensor | tuple[Tensor, Tensor]:
    return q.copy_(result) if k is None else (q.copy_(result[0]), k.copy_(result[1]))


def _check_heads(q: Tensor, k: Tensor | None) -> None:
    if q.ndim != 4 or not q.is_floating_point():
        raise ValueError(
            f"rope: q must be a float tensor (batch, seq, heads, head_dim), not {q.dtype} of shape {tuple(q.shape)}"
        )
    if k is None:
        return
    if k.ndim != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"rope: k has shape {tuple(k.shape)}; beside q of {tuple(q.shape)} it must be "
            f"({q.shape[0]}, {q.shape[1]}, its heads, {q.shape[3]})"
        )
    if k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"rope: k is {k.dtype} on {k.device}; it must match q: {q.dtype} on {q.device}")


def _check_angles(
    q: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, frequencies: Frequencies | None
) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"rope: {'cos' if cos is None else 'sin'} is missing; a table is both cos and sin")
    if (cos is None) == (frequencies is None):
        raise ValueError("rope: give the angles either as cos and sin or as frequencies, not both and not neither")
    if cos is not None and sin is not None:
        _check_table(q, cos, sin, positions)
    if positions is None:
        return
    batch, seq = q.shape[:2]
    if positions.dtype not in (torch.int64, torch.int32) or positions.device != q.device:
        raise ValueError(
            f"rope: positions are {positions.dtype} on {positions.device}; they must be int64 or int32 on {q.device}"
        )
    if positions.shape not in ((seq,), (batch, seq), (1, seq)):
        raise ValueError(
            f"rope: positions have shape {tuple(positions.shape)}; q has {batch} x {seq} tokens, "
            f"so it must be ({seq},) or ({batch}, {seq})"
        )


def _check_table(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    batch, seq = q.shape[:2]
    if cos.ndim not in (2, 3) or cos.shape != sin.shape or cos.dtype != sin.dtype or not cos.is_floating_point():
        raise ValueError(
            f"rope: cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}; both must be "
            "float and (max_positions, pairs), or (batch or 1, seq, columns) for the tokens themselves"
        )
    if cos.device != q.device or sin.device != q.device:
        raise ValueError(f"rope: cos is on {cos.device} and sin on {sin.device}; move them to q's {q.device}")
    if cos.ndim == 2:
        if cos.shape[0] < (seq if positions is None else min(1, batch * seq)):
            raise ValueError(f"rope: the table has {cos.shape[0]} positions but q has {seq}; make it longer")
        return
    if cos.shape[0] not in (1, batch) or cos.shape[1] != seq:
        raise ValueError(
            f"rope: cos of each token has shape {tuple(cos.shape)}; q has {batch} x {seq} tokens, so it must be "
            f"({batch} or 1, {seq}, columns)"
        )
    if positions is not None:
        raise ValueError("rope: cos and sin of each token leave no use for positions; drop them or pass a table")


def _check_in_place(q: Tensor, k: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"rope: {name} needs a gradient, so it cannot be overwritten; use in_place=False")
        if x.stride(-1) != 1 or any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride())):
            raise ValueError(
                f"rope: in_place needs heads with unit stride and no element seen twice; {name} has shape "
                f"{tuple(x.shape)} and strides {x.stride()}; use in_place=False"
            )


def _forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
    inverse: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """(q', k'); k' is empty without a k."""
    cos, sin = _halves(cos, sin, rotary, interleaved)
    return resolve(kernels).forward(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, inverse)


def _fake_forward(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, inverse, kernels):
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def _forward_in_place(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
    kernels: str,
) -> None:
    cos, sin = _halves(cos, sin, rotary, interleaved)
    resolve(kernels).forward_in_place(q, k, cos, sin, rates, positions, scaling, rotary, interleaved)
    for x in (q, k):
        if x is not None:
            mark_written(x)


def _halves(
    cos: Tensor | None, sin: Tensor | None, rotary: int, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Tables with one column for each pair."""
    if cos is None or sin is None:
        return cos, sin
    return half_width(cos, rotary, interleaved), half_width(sin, rotary, interleaved)


def _fake_forward_in_place(q, k, cos, sin, rates, positions, scaling, rotary, interleaved, kernels):
    return None


def _setup_context(ctx, inputs, output):
    _, _, *tables, scaling, rotary, interleaved, inverse, kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tables)
    ctx.settings = (scaling, rotary, interleaved, not inverse, kernels)
    ctx.has_k = inputs[1] is not None


def _pull_back(ctx, dq, dk):
    gradients = [gradient for gradient in (dq, dk if ctx.has_k else None) if gradient is not None]
    turned = [None, None]
    if gradients:
        pair = (gradients[0], gradients[1] if len(gradients) == 2 else None)
        turned = list(_rope(*pair, *ctx.saved_tensors, *ctx.settings))
    if dq is None:
        turned = [None, turned[0]]
    elif len(gradients) < 2:
        turned = [turned[0], None]
    return (*turned, *(None,) * 9)


_rope = KernelOp("rope", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
_rope_in_place = KernelOp("rope_in_place", _forward_in_place, _fake_forward_in_place, mutates=("q", "k"))
