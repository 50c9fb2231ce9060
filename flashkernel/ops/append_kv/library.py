"""The append_kv kernel as a torch operator; it has no gradient."""

from torch import Tensor

from flashkernel.core.launch import mark_written
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.append_kv.params import NewTokens, Pages, Rotation


def _forward(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    scaling: float,
    rotary_dim: int,
    interleaved: bool,
    kernels: str,
) -> Tensor:
    """The rotated q; empty without a q."""
    rotated = resolve(kernels).forward(
        NewTokens(k, v, q), Pages(k_pages, v_pages, k_scale, v_scale), slots,
        Rotation(cos, sin, rates, positions, scaling, rotary_dim, interleaved),
    )  # fmt: skip
    for x in (k_pages, v_pages, k_scale, v_scale):
        if x is not None:
            mark_written(x)
    return rotated


def _fake_forward(k, v, k_pages, v_pages, slots, k_scale, v_scale, q, *_):
    return k.new_empty(0 if q is None else q.shape)


append_kv = KernelOp("append_kv", _forward, _fake_forward, mutates=("k_pages", "v_pages", "k_scale", "v_scale"))
