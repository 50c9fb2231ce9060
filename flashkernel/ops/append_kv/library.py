"""The append_kv kernel as a torch operator; it has no gradient."""

from torch import Tensor

from flashkernel.blocks.rope import Rotation
from flashkernel.core.launch import mark_written
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.append_kv.params import NewTokens, Pages


def _forward(new: NewTokens, pages: Pages, slots: Tensor, rotation: Rotation, kernels: str) -> Tensor:
    """The rotated q; empty without a q."""
    rotated = resolve(kernels).forward(new, pages, slots, rotation.by_pairs)
    for x in pages:
        if x is not None:
            mark_written(x)
    return rotated


def _fake_forward(new, pages, slots, rotation, kernels):
    return new.k.new_empty(0 if new.q is None else new.q.shape)


append_kv = KernelOp("append_kv", _forward, _fake_forward, mutates=("pages_k", "pages_v", "k_scale", "v_scale"))
