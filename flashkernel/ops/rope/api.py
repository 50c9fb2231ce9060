"""The public rotary embedding: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import make_rotation, rotary_width
from flashkernel.core.arguments import is_float, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.rope import library, spec


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
    """Returns q, or q and k, with rotary position embedding applied, in one launch.

    A pair of dims (a, b) becomes (a cos - b sin, b cos + a sin). The angles come from one of:

    - `frequencies` and `positions`;
    - `cos` and `sin` tables (max_positions, rotary_dim / 2), indexed by `positions`. A position outside the table gives
      NaN in that token's rotated dims: the kernel cannot raise without waiting for the device;
    - `cos` and `sin` of each token, (batch or 1, seq, rotary_dim) as Transformers makes them (each value twice), or
      (batch or 1, seq, rotary_dim / 2) with `rotary_dim` given.

    Args:
        q: (batch, seq, heads, head_dim), float32, float16 or bfloat16; any strides.
        k: (batch, seq, kv_heads, head_dim) in q's dtype, or None.
        cos: a table as above; no gradient flows to it.
        sin: a table like `cos`.
        positions: (seq,) or (batch, seq), int32 or int64; 0 to seq - 1 unless given.
        frequencies: a `Frequencies`, instead of `cos` and `sin`.
        rotary_dim: leading dims of a head that are rotated; the others are copied.
        interleaved: pairs are (2i, 2i + 1) (GPT-J) instead of (i, i + rotary_dim / 2) (GPT-NeoX, Llama).
        in_place: overwrites q and k and returns them; only where no gradient is recorded.
        backend: the backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        The rotated q, or (q, k) where k is given; shapes and dtypes as given.

    Example:
        >>> import torch, flashkernel as fk
        >>> q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16)
        >>> q, k = fk.rope(q, k, frequencies=fk.Frequencies.plain(16, theta=10000.0))
        >>> q.shape, k.shape
        (torch.Size([1, 5, 4, 16]), torch.Size([1, 5, 2, 16]))
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
    rotation = make_rotation(cos, sin, positions, frequencies, width, interleaved, q.device)
    if in_place:
        library.rope_in_place(q, k, rotation, chosen.target)
        return q if k is None else (q, k)
    rotated_q, rotated_k = library.rope(q, k, rotation, False, chosen.target)
    return rotated_q if k is None else (rotated_q, rotated_k)


def _overwrite(q: Tensor, k: Tensor | None, result) -> Tensor | tuple[Tensor, Tensor]:
    return q.copy_(result) if k is None else (q.copy_(result[0]), k.copy_(result[1]))


def _check_heads(q: Tensor, k: Tensor | None) -> None:
    if q.ndim != 4 or not is_float(q):
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
    if cos.ndim not in (2, 3) or cos.shape != sin.shape or cos.dtype != sin.dtype or not is_float(cos):
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
