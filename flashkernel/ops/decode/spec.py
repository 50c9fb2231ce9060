"""The declarations of decoding and of prefill through pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.decode_cpp import CACHE_DTYPES
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Baseline, Call, Case, Cost, Input, Tolerance
from flashkernel.core.shapes import MODELS
from flashkernel.ops.decode.configs import SHORT, too_large
from flashkernel.ops.decode.random_cases import random_decode, random_prefill

_PACKAGE = "flashkernel.ops.decode"
_HALF = (torch.bfloat16,)
_TENSOR_CORE_DTYPES = (torch.float16, torch.bfloat16)
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_QUANTIZED = ("k_scale", "v_scale")
_PAGED = ("page_table",)
_UNALIGNED = "the cache's address, and the strides of its heads, keys and pages, must be multiples of 16 bytes"
MAX_SEQUENCES = 4096  # every program holds all their lengths


def _kernels(call: Call) -> str | None:
    widest = max(call.facts["head_dim"], call.facts["value_dim"])
    if widest > 512:
        return f"heads must be at most 512 wide, not {widest}"
    if call.facts["batch"] > MAX_SEQUENCES:
        return f"at most {MAX_SEQUENCES} sequences fit a launch, not {call.facts['batch']}"
    if call.facts["cache_dtype"] == _FP8 and call.device.kind == "cuda" and call.device.arch < 89:
        return f"float8_e4m3fn needs sm_89 or newer; {call.device.name} is sm_{call.device.arch}"
    return None


def _prefill(call: Call) -> str | None:
    shape = {
        **{name: call.facts[name] for name in ("group_size", "head_dim", "value_dim")},
        "cache_bytes": call.facts["cache_dtype"].itemsize, "q_bytes": call.dtype.itemsize,
    }  # fmt: skip
    reason = too_large(call.device, shape)
    if reason is not None:
        return f"{call.facts['group_size']} query heads per KV head are too many for heads this wide: {reason}"
    return _kernels(call)


def _hopper(call: Call) -> str | None:
    head_dim, value_dim, rows = call.facts["head_dim"], call.facts["value_dim"], call.facts["rows"]
    if head_dim != value_dim or head_dim > 256 or head_dim % 8:
        return f"keys and values must be equally wide, a multiple of 8 and at most 256, not {head_dim} and {value_dim}"
    if call.facts["cache_dtype"] != call.dtype:
        return f"its cache has the queries' dtype, not {str(call.facts['cache_dtype']).removeprefix('torch.')}"
    if rows > 64:
        return f"the queries and heads that share a key must be at most 64, not {rows}"
    if call.facts["has_prefix"]:
        return "it has no shared prefix"
    if not call.facts["tma_aligned"]:
        return _UNALIGNED
    return _kernels(call)


def _cuda(call: Call) -> str | None:
    head_dim, value_dim, stored = call.facts["head_dim"], call.facts["value_dim"], call.facts["cache_dtype"].itemsize
    if max(head_dim, value_dim) > 256 or head_dim % (16 // stored) or value_dim % (16 // stored):
        return f"heads must be a multiple of 16 bytes and at most 256 wide, not {head_dim} and {value_dim}"
    if not call.facts["tma_aligned"]:
        return _UNALIGNED
    return None


def _cpp(call: Call) -> str | None:
    stored = call.facts["cache_dtype"]
    return None if stored in CACHE_DTYPES else f"it reads no cache in {stored}"


def _blas_is_faster(call: Call) -> str | None:
    most = 64
    return f"torch multiplies matrices of more than {most} rows faster" if call.facts["rows"] > most else None


def _not_faster(call: Call) -> str | None:
    """Short contexts end before the pipeline is full, and need no combine step. TMA gains where addresses are many: in
    pages, of heads wide enough not to waste most of a 64-row MMA."""
    if call.facts["short"]:
        return f"at most {SHORT} keys are seen"
    if not call.facts["paged"]:
        return "a contiguous cache is read as fast by the Triton kernel"
    return f"heads of {call.facts['head_dim']} are too narrow to gain by it" if call.facts["head_dim"] <= 64 else None


def _capacity(axes: Axes) -> int:
    return axes["max_pages"] * axes["cache"][1] if "max_pages" in axes else axes["cache"][1]


def _cached(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Keys or values; whole numbers for a quantized cache; the first ones equal where sequences share a prefix."""
    device = generator.device
    if axes.get("levels"):
        return torch.randint(-axes["levels"], axes["levels"] + 1, shape, generator=generator, device=device).float()
    values = torch.randn(shape, generator=generator, device=device)
    if "max_pages" not in axes and axes.get("shared") and shape[0]:
        values[:, : axes["shared"]] = values[:1, : axes["shared"]].clone()
    return values


def _scales(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    spread = torch.rand(shape, generator=generator, device=generator.device)
    return (0.5 + spread) * 2 / max(1, axes.get("levels", 1))


def _lengths(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """As the case says, or anything from `least` to the capacity; by default all of it."""
    if "lengths" in axes:
        return torch.tensor(axes["lengths"], device=generator.device).view(shape)
    most = _capacity(axes)
    least = min(axes.get("least", most), most)
    return torch.randint(least, most + 1, shape, generator=generator, device=generator.device)


def _pages(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Pages in no order, each at one place of the table, but for those that hold a shared prefix."""
    pages = max(1, axes["cache"][0])
    order = torch.randperm(pages, generator=generator, device=generator.device)
    index = torch.arange(shape[0] * shape[1], device=generator.device) % pages
    table = order[index].view(shape)
    if axes.get("shared") and shape[0]:
        first = axes["shared"] // axes["cache"][1]
        table[:, :first] = table[:1, :first].clone()
    return table


def _cumulative(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    if "starts" in axes:
        return torch.tensor(axes["starts"], device=generator.device).view(shape)
    share = torch.arange(shape[0], device=generator.device) * axes["tokens"] // max(1, shape[0] - 1)
    return share


_SHARED_INPUTS = {
    "lengths": Input(("batch",), torch.int32, _lengths, grad=False),
    "page_table": Input(("batch", "max_pages"), torch.int32, _pages, grad=False, optional=True),
    "sinks": Input(("heads",), optional=True),
    "k_scale": Input(("*cache", "kv_heads"), torch.float32, _scales, optional=True),
    "v_scale": Input(("*cache", "kv_heads"), torch.float32, _scales, optional=True),
}
_CACHE_INPUTS = {
    "k": Input(("*cache", "kv_heads", "head_dim"), draw=_cached),
    "v": Input(("*cache", "kv_heads", "value_dim"), draw=_cached),
}
_DECODE_INPUTS = {"q": Input(("batch", "new", "heads", "head_dim")), **_CACHE_INPUTS, **_SHARED_INPUTS}
_PREFILL_INPUTS = {
    "q": Input(("tokens", "heads", "head_dim")),
    **_CACHE_INPUTS,
    "cu_seqlens_q": Input(("bounds",), torch.int32, _cumulative, grad=False),
    **_SHARED_INPUTS,
    "page_table": Input(("batch", "max_pages"), torch.int32, _pages, grad=False),
}


def _axes(
    batch: int, new: int, heads: tuple[int, int], dims: int | tuple[int, int], capacity: int, page: int = 0, **more: Any
) -> dict[str, Any]:
    """Sizes of a case; heads are (query, key and value) heads, dims (head_dim, value_dim)."""
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    axes = {
        "batch": batch, "new": new, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim,
        "value_dim": value_dim, "cache": (batch, capacity), **more,
    }  # fmt: skip
    if page:
        axes |= {"max_pages": -(-capacity // page), "cache": (batch * -(-capacity // page) + 3, page)}
    return axes


_SHAPES = (
    Case("one", _axes(3, 1, (4, 2), 32, 29, least=1)),
    Case("full", _axes(2, 1, (8, 1), 64, 48)),
    Case("heads-alone", _axes(2, 1, (4, 4), 16, 21, least=5)),
    Case("groups-of-seven", _axes(2, 1, (14, 2), 16, 33, least=1)),
    Case("groups-of-twenty", _axes(1, 2, (40, 2), 16, 33)),
    Case("three-heads", _axes(2, 1, (9, 3), 64, 19, least=1)),
    Case("verify", _axes(2, 4, (8, 2), 32, 40, least=4), {"return_lse": True}),
    Case("verify-first", _axes(3, 5, (4, 2), 16, 20, lengths=(5, 2, 20)), {"return_lse": True}),  # some see nothing
    Case("wide-heads", _axes(2, 1, (4, 2), 80, 27, least=1)),
    Case("narrow-values", _axes(2, 2, (4, 2), (48, 24), 27, least=2)),
    Case("lengths", _axes(4, 1, (4, 2), 16, 37, lengths=(0, 1, 37, 16)), {"return_lse": True}),
    Case("split", _axes(3, 1, (4, 2), 16, 777, lengths=(700, 31, 777)), {"return_lse": True}),
    Case("split-verify", _axes(2, 3, (6, 2), 32, 600, least=3)),
    Case("padded", _axes(2, 1, (4, 2), 24, 30, least=1), layout="padded"),
    Case("transposed", _axes(2, 2, (4, 2), 16, 30, least=2), layout="transposed"),
    Case("no-batch", _axes(0, 1, (4, 2), 16, 30)),
    Case("no-queries", _axes(2, 0, (4, 2), 16, 30), {"return_lse": True}),
    Case("no-keys", _axes(2, 1, (4, 2), 16, 0), {"return_lse": True}),
)
_SCORES = (
    Case("lse", _axes(2, 1, (4, 2), 16, 26, least=1), {"return_lse": True}),
    Case("scale", _axes(2, 1, (4, 2), 16, 26, least=1), {"scale": 0.5}),
    Case("softcap", _axes(2, 2, (4, 2), 16, 26, least=2), {"softcap": 1.5}),
    Case("sinks", _axes(3, 1, (4, 2), 16, 26, lengths=(0, 9, 26)), {"return_lse": True}, present=("sinks",)),
    Case("window", _axes(3, 1, (4, 2), 16, 150, lengths=(3, 90, 150)), {"window": 20}),
    Case("window-verify", _axes(2, 3, (4, 2), 16, 150, least=3), {"window": 70, "return_lse": True}),
    Case("window-sink-tokens", _axes(3, 2, (4, 2), 16, 200, lengths=(4, 77, 200)), {"window": 30, "sink_tokens": 5}),
    Case("gpt-oss", _axes(3, 1, (16, 2), 64, 300, lengths=(2, 130, 300)), {"window": 128}, present=("sinks",)),
    Case("split-window", _axes(1, 1, (4, 2), 16, 1500, lengths=(1400,)), {"window": 600, "sink_tokens": 70},
         present=("sinks",)),
)  # fmt: skip
_PAGES = (
    Case("paged-16", _axes(3, 1, (4, 2), 32, 100, 16, lengths=(0, 37, 100)), {"return_lse": True}, present=_PAGED),
    Case("paged-64", _axes(2, 2, (4, 2), 16, 200, 64, least=2), present=_PAGED),
    Case("paged-256", _axes(2, 1, (8, 2), 16, 256, 256, least=1), present=_PAGED),
    Case("paged-split", _axes(2, 1, (4, 2), 16, 640, 32, lengths=(640, 90)), {"softcap": 2.0}, present=_PAGED),
    Case("paged-window", _axes(3, 2, (4, 2), 16, 200, 16, lengths=(2, 77, 200)), {"window": 30, "sink_tokens": 5},
         present=("page_table", "sinks")),
    Case("paged-padded", _axes(2, 1, (4, 2), 24, 70, 16, least=1), present=_PAGED, layout="padded"),
    Case("paged-transposed", _axes(2, 1, (4, 2), 16, 70, 16, least=1), present=_PAGED, layout="transposed"),
    Case("prefix", _axes(3, 1, (4, 2), 16, 90, shared=40, lengths=(90, 41, 66)), {"prefix_length": 40}),
    Case("prefix-paged", _axes(3, 2, (4, 2), 16, 112, 16, shared=48, lengths=(50, 0, 112)),
         {"prefix_length": 48, "return_lse": True}, present=("page_table", "sinks")),
    Case("prefix-split", _axes(2, 1, (4, 2), 16, 1300, shared=600, lengths=(1300, 620)),
         {"prefix_length": 600, "return_lse": True}),
    Case("prefix-window", _axes(2, 1, (4, 2), 16, 90, shared=40, lengths=(90, 41)),
         {"prefix_length": 40, "window": 30}),
)  # fmt: skip


def _quantized(
    name: str, axes: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, levels: int, *more: str
) -> Case:
    present = (*_QUANTIZED, *more, *(_PAGED if "max_pages" in axes else ()))
    return Case(name, {**axes, "levels": levels}, options, present=present, dtype_of={"k": dtype, "v": dtype})


_STORED = (
    _quantized("fp8", _axes(2, 1, (4, 2), 32, 40, least=1), {"return_lse": True}, _FP8, 15),
    _quantized("fp8-paged", _axes(2, 2, (4, 2), 16, 100, 16, least=2), {"window": 40}, _FP8, 15),
    _quantized("int8", _axes(2, 1, (8, 2), 16, 40, least=1), {}, _INT8, 127),
    _quantized("int8-paged-split", _axes(2, 1, (4, 2), 16, 640, 64, lengths=(600, 7)), {}, _INT8, 127),
    _quantized(
        "everything",
        _axes(2, 3, (4, 2), 16, 90, 16, least=3),
        {"window": 40, "sink_tokens": 3, "softcap": 3.0, "scale": 0.2, "return_lse": True},
        _INT8,
        127,
        "sinks",
    ),
)


def _packed(tokens: int, starts: tuple[int, ...], heads: tuple[int, int], dims: Any, capacity: int, page: int,
            **more: Any) -> dict[str, Any]:  # fmt: skip
    batch = len(starts) - 1
    axes = _axes(batch, 0, heads, dims, capacity, page, starts=starts, bounds=batch + 1, tokens=tokens, **more)
    del axes["new"]
    return axes


_PREFILL_CASES = (
    Case("one", _packed(19, (0, 19), (4, 2), 32, 19, 16)),
    Case("several", _packed(40, (0, 7, 8, 40), (4, 2), 16, 70, 16, lengths=(30, 1, 70)), {"return_lse": True}),
    Case("whole-tiles", _packed(150, (0, 150), (2, 1), 16, 300, 64, lengths=(300,))),
    Case("empty-ones", _packed(20, (0, 0, 12, 12, 20), (4, 2), 16, 48, 16, lengths=(9, 12, 0, 40)),
         {"return_lse": True}),
    Case("longer-than-keys", _packed(20, (0, 20), (4, 2), 16, 16, 16, lengths=(9,)), {"return_lse": True}),
    Case("behind-the-last", _packed(20, (0, 5, 13), (4, 2), 16, 32, 16, lengths=(20, 30)), {"return_lse": True}),
    Case("groups-of-seven", _packed(25, (0, 11, 25), (14, 2), 16, 40, 32, lengths=(11, 40))),
    Case("window", _packed(60, (0, 10, 60), (4, 2), 16, 150, 16, lengths=(120, 150)), {"window": 33}),
    Case("window-sink-tokens", _packed(60, (0, 10, 60), (2, 1), 16, 350, 16, lengths=(120, 350)),
         {"window": 170, "sink_tokens": 20, "return_lse": True}, present=("sinks",)),
    Case("softcap", _packed(21, (0, 10, 21), (4, 2), 16, 40, 16, lengths=(40, 21)), {"softcap": 2.0, "scale": 0.3}),
    Case("wide-heads", _packed(9, (0, 9), (2, 1), (80, 40), 20, 16, lengths=(20,))),
    Case("padded", _packed(21, (0, 10, 21), (4, 2), 24, 40, 16, lengths=(40, 21)), layout="padded"),
    Case("transposed", _packed(21, (0, 10, 21), (4, 2), 16, 40, 16, lengths=(40, 21)), layout="transposed"),
    Case("no-tokens", _packed(0, (0, 0), (4, 2), 16, 40, 16), {"return_lse": True}),
    Case("no-batch", _packed(5, (0,), (4, 2), 16, 16, 16), {"return_lse": True}, present=("sinks",)),
    Case("fp8", _packed(21, (0, 10, 21), (4, 2), 16, 40, 16, lengths=(40, 21), levels=15), present=_QUANTIZED,
         dtype_of={"k": _FP8, "v": _FP8}),
    Case("everything", _packed(21, (0, 10, 21), (4, 2), 16, 40, 16, lengths=(40, 21), levels=127),
         {"window": 9, "sink_tokens": 3, "softcap": 3.0, "scale": 0.2, "return_lse": True},
         present=(*_QUANTIZED, "sinks"), dtype_of={"k": _INT8, "v": _INT8}),
)  # fmt: skip


def _bench(name: str, heads: tuple[int, int], dim: int, batch: int, capacity: int, page: int = 0, new: int = 1,
           options: dict[str, Any] | None = None, present: tuple[str, ...] = (), **more: Any) -> Case:  # fmt: skip
    few, short = min(batch, 4), min(capacity, 1024)
    small = _axes(few, new, heads, dim, short, page)
    checked = {axis: small[axis] for axis in ("batch", "cache", *(("max_pages",) if page else ()))}
    return Case(
        f"{name}{f'-page{page}' if page else ''}", _axes(batch, new, heads, dim, capacity, page, **more), options or {},
        _HALF, (*present, *(_PAGED if page else ())), gradients=False, check_axes=checked,
    )  # fmt: skip


def _decode_benches() -> tuple[Case, ...]:
    """The shapes that decoding is compared on, contiguous and paged, and what serving adds to them."""
    llama, oss = MODELS["llama-3.1-8b"], MODELS["gpt-oss-20b"]
    wide, narrow = ((llama.heads, llama.kv_heads), llama.head_dim), ((oss.heads, oss.kv_heads), oss.head_dim)
    found = []
    for page in (0, 16, 64):
        found += [
            _bench("b1-32/8x128-n8192", *wide, 1, 8192, page),
            _bench("b1-32/8x128-n131072", *wide, 1, 131072, page),
            _bench("b16-32/8x128-n8192", *wide, 16, 8192, page),
            _bench("b64-64/8x64-n4096", *narrow, 64, 4096, page),
            _bench("uneven-b64-32/8x128-n8192", *wide, 64, 8192, page, least=128),
        ]
    return (
        *found,
        _bench("b16-32/8x128-n8192", *wide, 16, 8192, 256),
        _bench("b16-64/8x64-n8192", *narrow, 16, 8192, 16),
        _bench("b16-64/8x64-n8192", *narrow, 16, 8192, 256),
        _bench("gpt-oss-window-b64-n4096", *narrow, 64, 4096, 0, options={"window": 128}, present=("sinks",)),
        _bench("gpt-oss-window-b64-n4096", *narrow, 64, 4096, 16, options={"window": 128}, present=("sinks",)),
        _bench("verify4-b1-32/8x128-n8192", *wide, 1, 8192, 0, 4),
        _bench("verify4-b16-32/8x128-n8192", *wide, 16, 8192, 16, 4),
        _bench("prefix-b64-32/8x128-n2048", *wide, 64, 2048, 16, options={"prefix_length": 1024}, shared=1024),
    )


def _prefill_benches() -> tuple[Case, ...]:
    llama = MODELS["llama-3.1-8b"]
    cases = []
    for name, batch, tokens, keys in (("4x2048", 4, 8192, 2048), ("1x4096-n16384", 1, 4096, 16384)):
        axes = _axes(batch, 0, (llama.heads, llama.kv_heads), llama.head_dim, keys, 16, tokens=tokens, bounds=batch + 1)
        del axes["new"]
        small = _axes(1, 0, (1, 1), 16, 1024, 16)
        checked = {"batch": 1, "bounds": 2, "tokens": 256, "cache": small["cache"], "max_pages": small["max_pages"]}
        cases.append(Case(name, axes, {}, _HALF, gradients=False, check_axes=checked))
    return tuple(cases)


def _keys(case: Case) -> float:
    """Keys that a sequence has on average, and of those, how many its queries see."""
    most = _capacity(case.axes)
    lengths = case.axes.get("lengths")
    return sum(lengths) / len(lengths) if lengths else (min(case.axes.get("least", most), most) + most) / 2


def _decode_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every visible key and value is read once, a shared prefix once for all."""
    axes = case.axes
    batch, new = axes["batch"], axes["new"]
    keys = _keys(case)
    seen = min(keys, case.options.get("window", keys) + new - 1 + case.options.get("sink_tokens", 0))
    read = batch * seen - (batch - 1) * case.options.get("prefix_length", 0)
    widths = axes["head_dim"] + axes["value_dim"]
    stored = case.dtype_of.get("k", dtype).itemsize
    moved = read * axes["kv_heads"] * widths * stored + batch * new * axes["heads"] * widths * dtype.itemsize
    return {"fwd": Cost(2.0 * batch * new * seen * axes["heads"] * widths, moved)}


def _prefill_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Two matrix products over the visible pairs; every key is read once."""
    axes = case.axes
    batch, tokens, keys = axes["batch"], axes["tokens"], _keys(case)
    each = tokens / max(1, batch)
    pairs = tokens * (keys - each) + tokens * (each + 1) / 2
    widths = axes["head_dim"] + axes["value_dim"]
    moved = (batch * keys * axes["kv_heads"] + tokens * axes["heads"]) * widths * dtype.itemsize
    return {"fwd": Cost(2.0 * pairs * axes["heads"] * widths, moved)}


DECODE_ATTENTION = declare(
    _PACKAGE,
    "decode_attention",
    "attention of a few new queries to a cache, contiguous or paged",
    inputs=_DECODE_INPUTS,
    kernels=(
        backends.hopper(f"{_PACKAGE}.hopper", _hopper, deprioritized=_not_faster),
        backends.triton(f"{_PACKAGE}.triton", _kernels, min_arch=80),
        backends.cuda(f"{_PACKAGE}.cuda", _cuda, _TENSOR_CORE_DTYPES, auto_devices=("cuda",)),
        backends.cpp(f"{_PACKAGE}.cpp", _cpp, deprioritized=_blas_is_faster),
    ),
    cases=(*_SHAPES, *_SCORES, *_PAGES, *_STORED),
    benches=_decode_benches(),
    cost=_decode_cost,
    tolerance=Tolerance(floor32=8.0),
    baselines=("eager", "sdpa", "cudnn", "fa2", "fa3"),
    differentiable=False,
    random_case=random_decode,
    random_share=4,
)
PAGED_ATTENTION = declare(
    _PACKAGE,
    "paged_attention",
    "attention of many new queries to a paged cache: prefill, whole or in chunks",
    inputs=_PREFILL_INPUTS,
    kernels=(
        backends.triton(f"{_PACKAGE}.triton", _prefill, min_arch=80),
        backends.cuda(f"{_PACKAGE}.cuda", _cuda, _TENSOR_CORE_DTYPES, auto_devices=("cuda",)),
    ),
    workload=Workload(_PREFILL_CASES, _prefill_benches(), _prefill_cost),
    tolerance=Tolerance(floor32=8.0),
    baselines=(
        Baseline("eager", f"{_PACKAGE}.baselines:eager_packed"),
        Baseline("fa3", f"{_PACKAGE}.baselines:fa3_packed"),
    ),
    differentiable=False,
    random_case=random_prefill,
    random_share=3,
)
OPS = (DECODE_ATTENTION, PAGED_ATTENTION)
