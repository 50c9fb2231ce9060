"""The declaration of the rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import Axes, Case, Cost, Draw, Input, count
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS

_PACKAGE = "flashkernel.ops.rope"
_HALF = (torch.bfloat16,)


def _table(function: Callable[[Tensor], Tensor]) -> Draw:
    """cos or sin of each row's index, at one frequency for each column."""

    def draw(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
        *leading, rows, columns = shape
        frequency = 10000.0 ** (-torch.arange(columns, device=generator.device) / max(1, columns))
        return (
            function(torch.arange(rows, device=generator.device)[:, None] * frequency).expand(*leading, -1, -1).clone()
        )

    return draw


def _position(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return torch.randint(0, axes.get("most", 50), shape, generator=generator, device=generator.device)


_INPUTS = {
    "q": Input(("batch", "seq", "heads", "dim")),
    "k": Input(("batch", "seq", "kv_heads", "dim"), optional=True),
    "cos": Input(("*table",), torch.float32, _table(torch.cos), grad=False, optional=True),
    "sin": Input(("*table",), torch.float32, _table(torch.sin), grad=False, optional=True),
    "positions": Input(("*tokens",), draw=_position, optional=True),
}
_TABLE, _KEYS = ("cos", "sin"), ("k", "cos", "sin")


def _axes(batch: int, seq: int, heads: int, kv_heads: int, dim: int, **more: object) -> dict[str, object]:
    return {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "dim": dim, **more}


_LLAMA3 = Frequencies.llama3(32, 500000.0, 8.0, 1.0, 4.0, 8192)
_YARN = Frequencies.yarn(16, 150000.0, 32.0, 4096, truncate=False)
_CASES = (
    Case("q", _axes(2, 5, 4, 2, 16, table=(9, 8)), present=_TABLE),
    Case("q-k", _axes(2, 5, 4, 2, 32, table=(5, 16)), present=_KEYS),
    Case("interleaved", _axes(2, 3, 4, 4, 32, table=(6, 16)), {"interleaved": True}, present=_KEYS),
    Case("partial", _axes(2, 3, 3, 1, 24, table=(6, 4)), present=_KEYS),
    Case("partial-interleaved", _axes(1, 3, 5, 3, 20, table=(6, 6)), {"interleaved": True}, present=_KEYS),
    Case("odd-pairs", _axes(1, 4, 3, 2, 10, table=(6, 3)), present=_KEYS),
    Case("one-pair", _axes(1, 1, 1, 1, 2, table=(1, 1)), present=_KEYS),
    Case("positions", _axes(2, 4, 4, 2, 16, table=(50, 8), tokens=(4,)), present=(*_KEYS, "positions")),
    Case("positions-by-batch", _axes(3, 2, 4, 2, 16, table=(50, 8), tokens=(3, 2)), present=(*_KEYS, "positions"),
         dtype_of={"positions": torch.int32}),
    Case("decode", _axes(5, 1, 12, 3, 16, table=(50, 8), tokens=(5, 1)), present=(*_KEYS, "positions")),
    Case("half-tables", _axes(2, 3, 4, 2, 16, table=(6, 8)), present=_KEYS, dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"cos": torch.float16, "sin": torch.float16}),
    Case("by-token", _axes(2, 3, 4, 2, 16, table=(2, 3, 16)), present=_KEYS),
    Case("by-token-shared", _axes(2, 3, 4, 2, 16, table=(1, 3, 16)), {"interleaved": True}, present=_KEYS),
    Case("by-token-pairs", _axes(2, 3, 4, 2, 24, table=(2, 3, 6)), {"rotary_dim": 12}, present=_KEYS),
    Case("padded", _axes(2, 3, 4, 2, 16, table=(9, 8)), present=_KEYS, layout="padded"),
    Case("transposed", _axes(2, 3, 4, 2, 16, table=(9, 8)), present=_KEYS, layout="transposed"),
    Case("no-tokens", _axes(2, 0, 4, 2, 16, table=(9, 8)), present=_KEYS),
    Case("no-batch", _axes(0, 3, 4, 2, 16, table=(9, 8)), present=_KEYS),
    Case("no-heads", _axes(2, 3, 0, 2, 16, table=(9, 8)), present=_KEYS),
    Case("computed", _axes(2, 5, 4, 2, 16), {"frequencies": Frequencies.plain(16)}, present=("k",)),
    Case("computed-far", _axes(2, 5, 4, 2, 32, tokens=(2, 5), most=1_000_000), {"frequencies": _LLAMA3},
         present=("k", "positions")),
    Case("computed-partial", _axes(2, 5, 4, 2, 24, tokens=(5,)), {"frequencies": _YARN, "interleaved": True},
         present=("k", "positions")),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Angles from a table by position, of each token, or from frequencies; all of a head is rotated, or part of it."""
    dim = rng.one((2, 10, 16, 32) if not rng.large else (16, 64, 64, 128, 80, 10))
    rotary = 2 * rng.kernel.randint(1, dim // 2) if rng.maybe(0.3) else dim
    batch, seq = rng.call.randint(1, 3), 0 if rng.empty() else rng.size(1, 130 if rng.large else 12)
    axes = _axes(batch, seq, rng.one((1, 3, 4, 8)), rng.one((1, 2, 3)), dim)
    options: dict[str, object] = {"interleaved": True} if rng.maybe() else {}
    present = ["k"] if rng.maybe(0.7) else []
    kind = rng.one(("table", "tokens", "frequencies"))
    if kind == "frequencies":
        options["frequencies"] = Frequencies.plain(rotary)
    else:
        present += _TABLE
        axes["table"] = (seq + rng.call.randrange(9), rotary // 2)
    if kind == "tokens":
        axes["table"] = (batch if rng.maybe() else 1, seq, rotary // 2 if rng.maybe() else rotary)
        options["rotary_dim"] = rotary
    elif rng.maybe():
        present.append("positions")
        axes["tokens"] = (batch, seq) if rng.maybe() else (seq,)
        axes["most"] = max(1, axes["table"][0]) if kind == "table" else rng.call.choice((50, 100_000))  # type: ignore
    dtype_of = {"positions": torch.int32} if rng.maybe(0.3) and "positions" in present else {}
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of)


def _bench(name: str, model: str, batch: int, seq: int, **options: object) -> Case:
    sizes = MODELS[model]
    axes = _axes(batch, seq, sizes.heads, sizes.kv_heads, sizes.head_dim)
    if "frequencies" not in options:
        axes["table"] = (max(seq, 4096), sizes.head_dim // 2)
    decode = seq == 1
    if decode:
        axes.update(tokens=(batch, 1), most=4096)
    present = ("k", *(() if "frequencies" in options else _TABLE), *(("positions",) if decode else ()))
    return Case(name, axes, options, _HALF, present, gradients=not decode, check_axes={"seq": min(seq, 1024)})


_BENCHES = (
    _bench("16384-32/8x128", "llama-3.1-8b", 1, 16384),
    _bench("16384-64/8x64", "gpt-oss-20b", 1, 16384),
    _bench("16384-32/8x64", "llama-3.2-1b", 1, 16384),
    _bench("4x4096-32/8x128", "llama-3.1-8b", 4, 4096),
    _bench("interleaved-16384-32/8x128", "llama-3.1-8b", 1, 16384, interleaved=True),
    _bench("computed-16384-32/8x128", "llama-3.1-8b", 1, 16384, frequencies=Frequencies.plain(128, 500000.0)),
    *(_bench(f"decode-{batch}-32/8x128", "llama-3.1-8b", batch, 1) for batch in (1, 16, 64)),
    *(_bench(f"decode-{batch}-64/8x64", "gpt-oss-20b", batch, 1) for batch in (1, 16, 64)),
)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every head is read once and written once, every token's cos and sin read once."""
    axes = case.axes
    tokens = axes["batch"] * axes["seq"]
    elements = tokens * axes["dim"] * (axes["heads"] + (axes["kv_heads"] if "k" in case.present else 0))
    table = 0
    if "cos" in case.present:
        rows = count(axes["table"][:-1]) if len(axes["table"]) == 3 else min(tokens, axes["table"][0])
        table = 2 * rows * axes["table"][-1] * 4
    cost = Cost(3.0 * elements, 2 * elements * dtype.itemsize + table)
    return {"fwd": cost, "bwd": cost}


ROPE = declare(
    _PACKAGE,
    "rope",
    "rotary position embedding of q and k",
    backward=None,  # the gradient of a rotation is the inverse rotation
    inputs=_INPUTS,
    kernels=(backends.triton(f"{_PACKAGE}.triton"), backends.cuda(f"{_PACKAGE}.cuda")),
    workload=Workload(_CASES, _BENCHES, _cost),
    random_case=_random_case,
    random_share=2,
    baselines=("eager", "compile", "liger"),
)
OPS = (ROPE,)
