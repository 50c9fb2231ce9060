"""The public write into pages: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import RotaryOptions, make_rotation
from flashkernel.core.arguments import check_written, is_float, needs_gradients, promoted
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.append_kv import library, spec
from flashkernel.ops.append_kv.params import NewTokens, Pages

QUANTIZED = (torch.float8_e4m3fn, torch.int8)


@replayed
def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    frequencies: Frequencies | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor | None:
    """Writes the keys and values of new tokens into pages, in place; with rotary angles, k and q are rotated first.

    Token i goes to k_pages[slots[i] // page_size, slots[i] % page_size]. Pages in float8_e4m3fn or int8 hold
    value / scale with one scale for each head of each token, its largest magnitude / 448 (or / 127). There is no
    gradient.

    Args:
        k: (tokens, kv_heads, head_dim), the new keys of all sequences, packed.
        v: (tokens, kv_heads, value_dim), the new values.
        k_pages: (pages, page_size, kv_heads, head_dim), written in place. Any page_size: a contiguous cache
            (batch, capacity, kv_heads, head_dim) is pages of one sequence each.
        v_pages: (pages, page_size, kv_heads, value_dim), written in place.
        slots: int64 or int32 (tokens,), page * page_size + offset (vLLM's `slot_mapping`); no two tokens share one.
            A slot outside the pages, such as -1 for padding, is not written.
        k_scale: float32 (pages, page_size, kv_heads), written in place, for quantized pages.
        v_scale: the same for values.
        q: (tokens, heads, head_dim), rotated and returned where there are angles; q itself is kept.
        cos: (max_positions, rotary_dim / 2), a table that `positions` index, or (1, tokens, columns), the cos of each
            token.
        sin: as cos.
        positions: int64 or int32 (tokens,), with a table or with `frequencies`.
        frequencies: the rotary embedding's `Frequencies`, instead of cos and sin.
        rotary_dim: leading dims that are rotated, where cos and sin do not say.
        interleaved: pairs are adjacent dims instead of the two halves of the rotated dims.
        backend: a backend's name; None chooses.

    Returns:
        The rotated q (tokens, heads, head_dim); None without a q.

    Example:
        >>> import torch, flashkernel as fk
        >>> k_pages, v_pages = torch.zeros(8, 16, 2, 64), torch.zeros(8, 16, 2, 64)  # 8 pages of 16 tokens
        >>> q, k, v = torch.randn(3, 8, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> slots = torch.tensor([16, 17, -1])  # the first two slots of page 1; one token is padding
        >>> positions, frequencies = torch.tensor([0, 1, 0]), fk.Frequencies.plain(64)
        >>> q = fk.append_kv(k, v, k_pages, v_pages, slots, q=q, positions=positions, frequencies=frequencies)
        >>> torch.equal(v_pages[1, :2], v[:2])
        True
    """
    k, v = promoted(k, v)
    if q is not None and q.dtype != k.dtype:
        q, k = promoted(q, k)
        v, k = promoted(v, k)
    _check_tokens(k, v, q, slots)
    _check_pages(k, v, k_pages, v_pages)
    _check_scales(k_pages, v_pages, k_scale, v_scale)
    rotary = RotaryOptions(cos, sin, positions, frequencies, rotary_dim, interleaved)
    _check_angles(k, q, rotary)
    width = rotary.width("append_kv", k.shape[-1]) if rotary.rotates else 0
    chosen = choose(
        spec.APPEND_KV, backend, k.device, k.dtype, pages=k_pages.dtype, frequencies=frequencies is not None
    )
    if chosen.composite:
        return chosen.run(
            k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, q=q, cos=cos, sin=sin, positions=positions,
            frequencies=frequencies, rotary_dim=width if rotary.rotates else None, interleaved=interleaved,
        )  # fmt: skip
    rotation = make_rotation(cos, sin, positions, frequencies, width, interleaved, k.device)
    pages = Pages(k_pages, v_pages, k_scale, v_scale)
    rotated = library.append_kv(NewTokens(k, v, q), pages, slots, rotation, chosen.target)
    return None if q is None else rotated


def _check_tokens(k: Tensor, v: Tensor, q: Tensor | None, slots: Tensor) -> None:
    if k.ndim != 3 or not is_float(k) or k.shape[2] == 0:
        raise ValueError(
            f"append_kv: k must be a float tensor (tokens, kv_heads, head_dim), not {k.dtype} of {tuple(k.shape)}"
        )
    if v.ndim != 3 or v.shape[:2] != k.shape[:2] or v.shape[2] == 0:
        raise ValueError(
            f"append_kv: v has shape {tuple(v.shape)}; beside k of {tuple(k.shape)} it must be "
            f"({k.shape[0]}, {k.shape[1]}, head_dim)"
        )
    if q is not None and (q.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]):
        raise ValueError(
            f"append_kv: q has shape {tuple(q.shape)}; beside k of {tuple(k.shape)} it must be "
            f"({k.shape[0]}, heads, {k.shape[2]})"
        )
    for name, x in (("v", v), ("q", q)):
        if x is not None and (x.dtype != k.dtype or x.device != k.device):
            raise ValueError(f"append_kv: {name} is {x.dtype} on {x.device}; it must match k: {k.dtype} on {k.device}")
    if slots.shape != k.shape[:1] or slots.dtype not in (torch.int64, torch.int32) or slots.device != k.device:
        raise ValueError(
            f"append_kv: slots are {slots.dtype} {tuple(slots.shape)} on {slots.device}; for {k.shape[0]} tokens they "
            f"must be int64 or int32 ({k.shape[0]},) on {k.device}"
        )
    if needs_gradients(k, v, q):
        raise ValueError("append_kv: it has no gradient; call it under torch.no_grad(), or detach q, k and v")


def _check_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    for name, pages, new in (("k_pages", k_pages, k), ("v_pages", v_pages, v)):
        if pages.ndim != 4 or pages.shape[1] == 0 or pages.shape[2:] != new.shape[1:]:
            raise ValueError(
                f"append_kv: {name} have shape {tuple(pages.shape)}; for new tokens of {tuple(new.shape)} they must be "
                f"(pages, page_size, {new.shape[1]}, {new.shape[2]})"
            )
        if pages.stride(3) != 1 and pages.shape[3] > 1:
            raise ValueError(f"append_kv: {name} have strides {pages.stride()}; a head's values must lie side by side")
        check_written("append_kv", name, pages)
        if pages.device != k.device:
            raise ValueError(f"append_kv: {name} are on {pages.device}; they must be where k is, on {k.device}")
        if not pages.is_floating_point() and pages.dtype != torch.int8:
            raise ValueError(f"append_kv: {name} are {pages.dtype}; they must be a float dtype or int8")
    if k_pages.shape[:2] != v_pages.shape[:2] or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"append_kv: k_pages are {k_pages.dtype} {tuple(k_pages.shape)} and v_pages {v_pages.dtype} "
            f"{tuple(v_pages.shape)}; a slot must be the same place in both, in one dtype"
        )


def _check_scales(k_pages: Tensor, v_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    wanted = k_pages.dtype in QUANTIZED
    for name, pages, scale in (("k_scale", k_pages, k_scale), ("v_scale", v_pages, v_scale)):
        if (scale is not None) != wanted:
            raise ValueError(
                f"append_kv: pages in {pages.dtype} {'need' if wanted else 'have no use for'} {name}; "
                f"{'give it' if wanted else 'leave it out'}"
            )
        if scale is None:
            continue
        check_written("append_kv", name, scale)
        if scale.shape != pages.shape[:3] or scale.dtype != torch.float32 or scale.device != pages.device:
            raise ValueError(
                f"append_kv: {name} is {scale.dtype} {tuple(scale.shape)} on {scale.device}; beside pages of "
                f"{tuple(pages.shape)} it must be float32 {tuple(pages.shape[:3])} on {pages.device}"
            )


def _check_angles(k: Tensor, q: Tensor | None, rotary: RotaryOptions) -> None:
    """The angles, where there are any, must fit the tokens."""
    cos, sin, positions = rotary.cos, rotary.sin, rotary.positions
    if (cos is None) != (sin is None):
        raise ValueError(f"append_kv: {'cos' if cos is None else 'sin'} is missing; a table is both cos and sin")
    if cos is not None and rotary.frequencies is not None:
        raise ValueError("append_kv: give the angles either as cos and sin or as frequencies, not both")
    if not rotary.rotates:
        if q is not None or positions is not None:
            raise ValueError(
                "append_kv: q and positions are there to rotate; give cos and sin or frequencies, or leave them out"
            )
        return
    by_token = cos is not None and cos.ndim == 3
    if cos is not None and sin is not None:
        _check_table(k, cos, sin)
    if by_token != (positions is None):
        raise ValueError(
            "append_kv: cos and sin of each token leave no use for positions; drop them or pass a table"
            if by_token
            else "append_kv: positions are missing; tokens of many sequences say their own"
        )
    if positions is not None and (
        positions.shape != k.shape[:1]
        or positions.dtype not in (torch.int64, torch.int32)
        or positions.device != k.device
    ):
        raise ValueError(
            f"append_kv: positions are {positions.dtype} {tuple(positions.shape)} on {positions.device}; for "
            f"{k.shape[0]} tokens they must be int64 or int32 ({k.shape[0]},) on {k.device}"
        )


def _check_table(k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if cos.shape != sin.shape or cos.dtype != sin.dtype or not is_float(cos) or cos.ndim not in (2, 3):
        raise ValueError(
            f"append_kv: cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}; both must be "
            f"float and (max_positions, pairs), or (1, {k.shape[0]}, columns) for the tokens themselves"
        )
    if cos.ndim == 3 and cos.shape[:2] != (1, k.shape[0]):
        raise ValueError(
            f"append_kv: cos of each token has shape {tuple(cos.shape)}; for {k.shape[0]} tokens it must be "
            f"(1, {k.shape[0]}, columns)"
        )
    if cos.ndim == 2 and cos.shape[0] == 0 and k.shape[0] > 0:
        raise ValueError("append_kv: the table of cos and sin has no positions")
    if cos.device != k.device or sin.device != k.device:
        raise ValueError(f"append_kv: cos is on {cos.device} and sin on {sin.device}; move them to k's {k.device}")
