"""Random calls of attention over a cache: sequences of any lengths, pages, windows, sinks, prefixes and dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashkernel.core.op import Case
from flashkernel.core.random_case import Rng

_HEADS = ((1, 1), (2, 1), (4, 2), (3, 3)), ((1, 1), (4, 2), (8, 1), (14, 2), (16, 2), (32, 8))  # small, large
_DIMS = (8, 16, 16, 24, 32, 64), (16, 64, 64, 128, 128, 40, 80, 256)
_STORED = (None, None, None, (torch.float8_e4m3fn, 15), (torch.int8, 127))  # the dtype of the cache and its levels


def random_decode(rng: Rng, case: Case) -> Case:
    """A few new queries of each sequence, a cache that is contiguous or paged, and perhaps a shared prefix."""
    axes = _axes(rng)
    page = rng.one((0, 0, 16, 16, 64)) if rng.large else rng.one((0, 0, 16))
    new = 0 if rng.empty() else rng.one((1, 1, 1, 2, 5))
    capacity = _cache(rng, axes, page)
    case = _with(rng, case, {**axes, "new": new}, ("page_table",) if page else ())
    if not rng.maybe(0.2) or (case.dtype_of and not page):  # sequences share pages, but not the scales of a whole cache
        return case
    shared = rng.call.randint(0, capacity) // max(1, page) * max(1, page)
    return replace(case.at(shared=shared), options={**case.options, "prefix_length": shared})


def random_prefill(rng: Rng, case: Case) -> Case:
    """New queries of several sequences, packed; some sequences have none, and some queries belong to none."""
    axes = _axes(rng)
    _cache(rng, axes, rng.one((16, 16, 64)) if rng.large else 16, most=400)
    most = 70 if rng.large else 20  # the reference gathers all keys for each query
    starts = [0]
    for _ in range(axes["batch"]):
        starts.append(starts[-1] + (0 if rng.call.random() < 0.1 else rng.size(1, most)))
    beyond = rng.call.randrange(1, 6) if rng.call.random() < 0.2 else 0
    axes |= {"starts": tuple(starts), "bounds": len(starts), "tokens": starts[-1] + beyond}
    return _with(rng, case, axes, ())


def _axes(rng: Rng) -> dict[str, Any]:
    heads, kv_heads = rng.one(_HEADS[rng.large])
    head_dim = rng.one(_DIMS[rng.large])
    value_dim = rng.one(_DIMS[rng.large]) if rng.maybe(0.25) else head_dim
    batch = 0 if rng.empty() else rng.call.randint(1, 6 if rng.large else 3)
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}


def _cache(rng: Rng, axes: dict[str, Any], page: int, most: int = 1100) -> int:
    """Adds the axes of a cache and the lengths in it; returns its capacity."""
    capacity = rng.size(1, most if rng.large else 70)
    if page:
        pages = -(-capacity // page)
        axes |= {"max_pages": pages, "cache": (axes["batch"] * pages + 3, page)}
        capacity = pages * page
    else:
        axes["cache"] = (axes["batch"], capacity)
    axes["lengths"] = tuple(rng.call.choice((0, capacity, rng.call.randint(0, capacity), rng.call.randint(0, capacity)))
                            for _ in range(axes["batch"]))  # fmt: skip
    return capacity


def _with(rng: Rng, case: Case, axes: dict[str, Any], present: tuple[str, ...]) -> Case:
    """The case with these axes and random options."""
    options: dict[str, Any] = {}
    if rng.maybe(0.4):
        options["window"] = rng.call.randint(1, 300 if rng.large else 40)
        if rng.maybe():
            options["sink_tokens"] = rng.call.randint(0, 20)
    if rng.maybe(0.2):
        options["softcap"] = rng.one((1.5, 20.0))
    if rng.maybe(0.3):
        options["scale"] = rng.call.choice((0.05, 0.3))
    if rng.maybe(0.4):
        options["return_lse"] = True
    if rng.maybe(0.3):
        present = (*present, "sinks")
    stored, dtype_of = rng.one(_STORED), {}
    if stored is not None:
        dtype, axes["levels"] = stored
        dtype_of = {"k": dtype, "v": dtype}
        present = (*present, "k_scale", "v_scale")
    return replace(case, axes=axes, options=options, present=present, dtype_of=dtype_of)
