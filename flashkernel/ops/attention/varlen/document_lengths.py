"""The cumulative lengths of the documents that a mask keeps apart, read from the device once for each version."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core import device as devices
from flashkernel.core.derived import derived
from flashkernel.core.library import traced
from flashkernel.core.tables import capturing


def packed_lengths(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """The cumulative lengths of the documents that a mask keeps apart, of all batch entries one behind the other.

    None if the mask has another form, its ids are not sorted, or nothing can be read from the device here: under
    torch.compile and while a CUDA graph is captured. Ids are read from the device once for each tensor and version,
    which waits for it; `attention_varlen` takes lengths and waits for nothing.
    """
    ids = _readable_ids(mask, q, k)
    if ids is None:
        return None
    batch, seqlen = q.shape[:2]
    found = derived(("document_lengths", batch, seqlen), [ids], lambda ids: _cumulative(ids, batch, seqlen))
    return found[0] if found else None


def joined_lengths(mask: Mask, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """The cumulative lengths of one batch entry whose documents a mask keeps apart, and whose sequences are packed by
    these lengths: it is cut where either says so. None where `packed_lengths` is, and if queries and keys are packed
    differently. All three are read from the device once for each version of them."""
    ids = _readable_ids(mask, q, k)
    if ids is None or q.shape[0] != 1 or traced(cu_seqlens_q) or traced(cu_seqlens_k):
        return None
    seqlen = q.shape[1]

    def make(ids: Tensor, of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, ...]:
        lengths, found = of_queries.cpu(), _cumulative(ids, 1, seqlen)
        if not found or not torch.equal(lengths, of_keys.cpu()) or int(lengths[-1]) != seqlen:
            return ()
        return (torch.cat([found[0], of_queries.to(torch.int32)]).unique(),)

    found = derived(("joined_lengths", seqlen), [ids, cu_seqlens_q, cu_seqlens_k], make)
    return found[0] if found else None


def _readable_ids(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """The ids of the documents of a mask, if the Hopper kernels could serve them and they can be read here and now."""
    if torch.compiler.is_compiling() or traced(q) or capturing():
        return None
    form = mask.packed_form
    if form is None or form.ids is None or q.shape[1] != k.shape[1] or q.shape[0] == 0:
        return None
    ids = form.ids
    if devices.properties(q.device).arch != 90 or ids.is_meta or ids.is_inference() or traced(ids):
        return None
    return ids


def _cumulative(ids: Tensor, batch: int, seqlen: int) -> tuple[Tensor, ...]:
    """Where documents start, and the end of the last; nothing unless ids never decrease."""
    host = _read(ids.detach().cpu(), batch, seqlen)
    if bool((host[:, 1:] < host[:, :-1]).any()):
        return ()
    changes = host[:, 1:] != host[:, :-1]
    starts = torch.cat([torch.ones(batch, 1, dtype=torch.bool, device="cpu"), changes], 1).flatten().nonzero().flatten()
    return (torch.cat([starts, torch.tensor([batch * seqlen], device="cpu")]).to(device=ids.device, dtype=torch.int32),)


def _read(ids: Tensor, batch: int, seqlen: int) -> Tensor:
    """The ids that a mask reads, (batch, seqlen): those of (positions,) hold for the whole batch, and reads outside of
    the table give 0."""
    rows = ids[..., :seqlen] if ids.ndim == 1 else ids[:batch, :seqlen]
    missing = (0, seqlen - rows.shape[-1]) if ids.ndim == 1 else (0, seqlen - rows.shape[1], 0, batch - rows.shape[0])
    return torch.nn.functional.pad(rows, missing).expand(batch, seqlen)
