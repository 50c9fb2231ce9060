"""The declaration of the write into pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Call, Case, Cost, Draw, Input
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.append_kv"
_HALF = (torch.bfloat16,)
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8


def _slots(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Slots of the pages in random order, none twice; one token in `skips`, and those with none left, are skipped."""
    order = torch.randperm(axes["pages"] * axes["page_size"], generator=generator, device=generator.device)
    values = torch.full(shape, -1, dtype=torch.int64, device=generator.device)
    given = min(shape[0], order.shape[0])
    values[:given] = order[:given]
    if "skips" in axes:
        values[:: axes["skips"]] = -1
    return values


def _table(function: Callable[[Tensor], Tensor]) -> Draw:
    """cos or sin of each row's index, at one frequency for each column."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
        *leading, rows, columns = shape
        frequency = 10000.0 ** (-torch.arange(columns, device=generator.device) / max(1, columns))
        angles = torch.arange(rows, device=generator.device)[:, None] * frequency
        return function(angles).expand(*leading, -1, -1).clone()

    return draw


def _position(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    most = axes["table"][0] if "table" in axes else 100_000
    return torch.randint(0, max(1, most), shape, generator=generator, device=generator.device)


_INPUTS = {
    "k": Input(("tokens", "kv_heads", "dim")),
    "v": Input(("tokens", "kv_heads", "value_dim")),
    "k_pages": Input(("pages", "page_size", "kv_heads", "dim")),
    "v_pages": Input(("pages", "page_size", "kv_heads", "value_dim")),
    "slots": Input(("tokens",), draw=_slots),
    "k_scale": Input(("pages", "page_size", "kv_heads"), torch.float32, optional=True),
    "v_scale": Input(("pages", "page_size", "kv_heads"), torch.float32, optional=True),
    "q": Input(("tokens", "heads", "dim"), optional=True),
    "cos": Input(("*table",), torch.float32, _table(torch.cos), optional=True),
    "sin": Input(("*table",), torch.float32, _table(torch.sin), optional=True),
    "positions": Input(("tokens",), draw=_position, optional=True),
}
_SCALES, _TABLE, _ANGLES = ("k_scale", "v_scale"), ("q", "cos", "sin"), ("q", "cos", "sin", "positions")


def _axes(tokens: int, heads: int, kv_heads: int, dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"tokens": tokens, "pages": 4, "page_size": 16, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    return {**sizes, "value_dim": dim, **more}


def _pages(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"k_pages": dtype, "v_pages": dtype}


_LLAMA3 = Frequencies.llama3(32, 500000.0, 8.0, 1.0, 4.0, 8192)
_YARN = Frequencies.yarn(16, 150000.0, 32.0, 4096, truncate=False)
_CASES = (
    Case("rotated", _axes(5, 4, 2, 32, table=(50, 16), skips=4), present=_ANGLES),
    Case("plain", _axes(7, 0, 3, 20, skips=3)),
    Case("no-q", _axes(5, 0, 2, 16, table=(50, 8)), present=("cos", "sin", "positions")),
    Case("interleaved", _axes(3, 4, 2, 32, table=(50, 16)), {"interleaved": True}, present=_ANGLES),
    Case("partial", _axes(3, 3, 1, 24, table=(50, 4)), present=_ANGLES),
    Case("partial-interleaved", _axes(3, 5, 3, 20, table=(50, 6)), {"interleaved": True}, present=_ANGLES),
    Case("odd", _axes(3, 3, 3, 10, value_dim=7, table=(9, 3), pages=3), present=_ANGLES),
    Case("one", _axes(1, 1, 1, 2, table=(1, 1), pages=1, page_size=1), present=_ANGLES),
    Case("by-token", _axes(3, 4, 2, 16, table=(1, 3, 16)), present=_TABLE),
    Case("computed", _axes(5, 4, 2, 32), {"frequencies": _LLAMA3}, present=("q", "positions"),
         dtype_of={"positions": torch.int32, "slots": torch.int32}),
    Case("computed-partial", _axes(5, 4, 2, 24), {"frequencies": _YARN, "interleaved": True},
         present=("q", "positions")),
    Case("half-pages", _axes(5, 4, 2, 16, table=(50, 8)), present=_ANGLES, dtypes=(torch.float32,),
         dtype_of=_pages(torch.float16)),
    Case("int8", _axes(5, 4, 2, 32, table=(50, 16), skips=4), present=(*_ANGLES, *_SCALES), dtype_of=_pages(_INT8)),
    Case("int8-plain", _axes(5, 0, 3, 24), present=_SCALES, dtype_of=_pages(_INT8)),
    Case("int8-partial", _axes(3, 5, 3, 20), {"frequencies": _YARN}, present=("q", "positions", *_SCALES),
         dtype_of=_pages(_INT8)),
    Case("fp8", _axes(5, 4, 2, 32, table=(50, 16), skips=4), present=(*_ANGLES, *_SCALES), dtype_of=_pages(_FP8)),
    Case("fp8-plain", _axes(5, 0, 3, 24), present=_SCALES, dtype_of=_pages(_FP8)),
    Case("fp8-partial-interleaved", _axes(3, 5, 3, 20, value_dim=12, table=(50, 6)), {"interleaved": True},
         present=(*_ANGLES, *_SCALES), dtype_of=_pages(_FP8)),
    Case("padded", _axes(3, 4, 2, 16, table=(50, 8)), present=_ANGLES, layout="padded"),
    Case("transposed", _axes(3, 4, 2, 16, table=(50, 8)), present=_ANGLES, layout="transposed"),
    Case("int8-padded", _axes(3, 4, 2, 16, table=(50, 8)), present=(*_ANGLES, *_SCALES), layout="padded",
         dtype_of=_pages(_INT8)),
    Case("fp8-transposed", _axes(3, 4, 2, 16, table=(50, 8)), present=(*_ANGLES, *_SCALES), layout="transposed",
         dtype_of=_pages(_FP8)),
    Case("all-skipped", _axes(3, 4, 2, 16, table=(50, 8), skips=1), present=_ANGLES),
    Case("no-tokens", _axes(0, 4, 2, 16, table=(50, 8)), present=_ANGLES),
    Case("no-pages", _axes(3, 4, 2, 16, table=(50, 8), pages=0), present=_ANGLES),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Any pages, with or without q, and angles from a table, of each token, from frequencies, or none at all."""
    dim = rng.one((2, 10, 16, 32) if not rng.large else (16, 64, 64, 128, 80, 10))
    value_dim = rng.one((7, 16, 32)) if rng.maybe(0.3) else dim
    tokens = 0 if rng.empty() else rng.size(1, 130 if rng.large else 12)
    axes = _axes(tokens, rng.one((1, 3, 4, 8)), rng.one((1, 2, 3)), dim, value_dim=value_dim)
    axes |= {"pages": rng.call.randint(1, 9), "page_size": rng.one((1, 16, 16, 64 if rng.large else 8))}
    if rng.call.random() < 0.3:
        axes["skips"] = rng.call.randint(2, 5)
    rotary = 2 * rng.kernel.randint(1, dim // 2) if rng.maybe(0.3) else dim
    options: dict[str, Any] = {"interleaved": True} if rng.maybe() else {}
    kind = rng.one(("none", "table", "table", "tokens", "frequencies"))
    present = ["q"] if kind != "none" and rng.maybe(0.7) else []
    if kind in ("table", "frequencies"):
        present.append("positions")
    if kind == "frequencies":
        options["frequencies"] = Frequencies.plain(rotary)
    elif kind != "none":
        present += ["cos", "sin"]
        axes["table"] = (1, tokens, rotary) if kind == "tokens" else (rng.call.randint(1, 60), rotary // 2)
        if kind == "tokens":
            options["rotary_dim"] = rotary
    stored = rng.one((None, None, _INT8, _FP8))
    dtype_of = {} if stored is None else _pages(stored)
    present += [] if stored is None else _SCALES
    if rng.maybe(0.3):
        dtype_of |= {name: torch.int32 for name in ("positions", "slots") if name == "slots" or name in present}
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of)


def _bench(name: str, model: str, tokens: int, pages: torch.dtype | None = None, **options: object) -> Case:
    sizes = MODELS[model]
    axes = _axes(tokens, sizes.heads, sizes.kv_heads, sizes.head_dim, pages=max(tokens // 8, 1024))
    present = ("q", "positions") if options else _ANGLES
    if not options:
        axes["table"] = (4096, sizes.head_dim // 2)
    if pages is not None:
        present = (*present, *_SCALES)
    dtype_of = {} if pages is None else _pages(pages)
    return Case(name, axes, options, _HALF, present, dtype_of=dtype_of, check_axes={"tokens": min(tokens, 1024)})


_BENCHES = (
    _bench("16384-32/8x128", "llama-3.1-8b", 16384),
    _bench("16384-32/8x64", "llama-3.2-1b", 16384),
    _bench("fp8-16384-32/8x128", "llama-3.1-8b", 16384, _FP8),
    _bench("int8-16384-32/8x128", "llama-3.1-8b", 16384, _INT8),
    _bench("computed-16384-32/8x128", "llama-3.1-8b", 16384, frequencies=Frequencies.plain(128, 500000.0)),
    *(_bench(f"decode-{tokens}-32/8x128", "llama-3.1-8b", tokens) for tokens in (1, 16, 64, 256)),
    *(_bench(f"decode-{tokens}-32/8x64", "llama-3.2-1b", tokens) for tokens in (1, 64)),
    _bench("fp8-decode-64-32/8x128", "llama-3.1-8b", 64, _FP8),
)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """q is read and written, k and v read and written into pages, with their scales; every token's cos and sin read."""
    axes = case.axes
    keys, values = (axes["tokens"] * axes["kv_heads"] * axes[dim] for dim in ("dim", "value_dim"))
    queries = axes["tokens"] * axes["heads"] * axes["dim"] if "q" in case.present else 0
    stored = case.dtype_of.get("k_pages", dtype).itemsize
    moved = (2 * queries + keys + values) * dtype.itemsize + (keys + values) * stored
    if "k_scale" in case.present:
        moved += 2 * 4 * axes["tokens"] * axes["kv_heads"]
    if "cos" in case.present:
        moved += 2 * 4 * min(axes["tokens"], axes["table"][-2]) * axes["table"][-1]
    return {"fwd": Cost(3.0 * (queries + keys) + values, moved + 8 * axes["tokens"])}


def _written(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The pages, as values: what codes and scales mean together is what counts."""
    scales = [given.get(name) for name in _SCALES]
    pages = [given["k_pages"], given["v_pages"]]
    return (
        *(held if scale is None else held.to(scale.dtype) * scale[..., None] for held, scale in zip(pages, scales)),
        *(scale for scale in scales if scale is not None),
    )


def _triton_supports(call: Call) -> str | None:
    stored = call.facts["pages"]
    if stored in (torch.float32, torch.float16, torch.bfloat16, _FP8, _INT8):
        if stored == torch.bfloat16 and 0 < call.device.arch < 80:
            return f"pages in bfloat16 need sm_80 or newer; {call.device.name} is sm_{call.device.arch}"
        return None
    return f"it writes pages in float32, float16, bfloat16, float8_e4m3fn and int8, not in {stored}"


def _cpp_supports(call: Call) -> str | None:
    if call.facts["pages"] not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it writes pages in float32, float16 and bfloat16, not in {call.facts['pages']}"
    return "it rotates by tables of cos and sin, not by frequencies" if call.facts["frequencies"] else None


APPEND_KV = declare(
    _PACKAGE,
    "append_kv",
    "new keys and values into pages, rotated and quantized on the way",
    inputs=_INPUTS,
    kernels=(backends.triton(f"{_PACKAGE}.triton", _triton_supports), backends.cpp(f"{_PACKAGE}.cpp", _cpp_supports)),
    workload=Workload(_CASES, _BENCHES, _cost),
    baselines=("eager", "compile"),
    differentiable=False,
    random_case=_random_case,
    random_share=3,
    written=_written,
)
OPS = (APPEND_KV,)
