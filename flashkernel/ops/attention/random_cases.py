"""Random calls of attention: any composition of masks with score functions, biases, sinks, ALiBi and dropout.

The structure of a mask and its numbers are compiled into kernels and come from `rng.kernel`; its tables come from
`rng.call`, because they have the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashkernel.blocks import expression as ex
from flashkernel.blocks import mask as masks
from flashkernel.blocks.expression import Table
from flashkernel.blocks.fp8 import SCALE_BLOCK
from flashkernel.blocks.mask import Mask
from flashkernel.core.op import Case
from flashkernel.core.random_case import Rng

_HEADS = ((1, 1), (2, 1), (2, 2)), ((1, 1), (4, 1), (4, 2), (6, 2), (5, 5), (8, 1))  # small, large
_DIMS = (8, 16, 16, 24, 32, 64), (16, 32, 64, 64, 64, 128, 128, 40, 80, 96, 192, 256)
_FEWEST_KEYS = 4  # a query of one key has no gradient for q and k, against which rounding cannot be measured


def random_case(rng: Rng, case: Case) -> Case:
    """Sizes, options and optional inputs of a call of attention."""
    axes, options = _shared(rng)
    batch, heads = axes["batch"], axes["heads"]
    present = tuple(
        name for name, chance in (("bias", 0.25), ("sinks", 0.3), ("alibi_slopes", 0.2)) if rng.maybe(chance)
    )
    if "bias" in present:
        axes |= {"bias_batch": batch if rng.maybe() else 1, "bias_heads": heads if rng.maybe() else 1}
        axes |= {f"bias_{axis}": 1 for axis in ("queries", "keys") if rng.maybe(0.25)}
        axes |= {"hidden": 6} if rng.maybe(0.3) else {}
    if "alibi_slopes" in present:
        axes["slopes"] = (batch, heads) if rng.maybe() else (heads,)
    if rng.maybe(0.25):
        options["score"] = _score(rng, heads)
    if rng.maybe(0.15):
        seed = rng.call.getrandbits(40)
        options |= {"dropout": 0.25, "seed": rng.tensor(seed, torch.int64) if rng.maybe(0.3) else seed}
    options |= {name: case.options[name] for name in ("causal", "window") if name in case.options}
    if "window" in options:
        options["window"] = rng.kernel.randint(1, 200 if rng.large else 24)
    dtype = case.dtypes[0]
    return replace(case, axes=axes, options=options, present=present, gradients=_has_gradients(axes, options),
                   dtypes=(dtype,))  # fmt: skip


def random_fp8_case(rng: Rng, case: Case) -> Case:
    """The same of FP8 attention, with a scale for each head or for each block of positions."""
    axes, options = _shared(rng, dims=((16, 32, 64), (64, 64, 128, 128, 32, 48, 256)))
    for name, length in (("q", "queries"), ("k", "keys"), ("v", "keys")):
        axes[f"{name}_blocks"] = (-(-axes[length] // SCALE_BLOCK),) if rng.maybe(0.3) else ()
    if rng.maybe():
        options["out_dtype"] = rng.one((torch.bfloat16, torch.float16, torch.float32))
    return replace(case, axes=axes, options=options, present=("sinks",) if rng.maybe(0.3) else ())


def _shared(rng: Rng, dims: tuple[tuple[int, ...], tuple[int, ...]] = _DIMS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes and options that both kinds of attention have."""
    heads, kv_heads = rng.one(_HEADS[rng.large])
    head_dim = rng.one(dims[rng.large])
    value_dim = rng.one(dims[rng.large]) if rng.maybe(0.3) else head_dim
    most = 320 if rng.large else 40
    axes = {
        "batch": 0 if rng.empty() else rng.call.randint(1, 3 if rng.large else 2),
        "queries": 0 if rng.empty() else rng.size(1, most), "keys": 0 if rng.empty() else rng.size(1, most),
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip
    if rng.call.random() < 0.3:  # square, as most calls are
        axes["keys"] = axes["queries"]
    options: dict[str, Any] = {}
    if rng.maybe(0.8):
        options["mask"] = _mask(rng, axes, depth=2)
    if rng.maybe(0.3):
        options["scale"] = rng.call.choice((0.05, 0.3, 0.7))
    if rng.maybe(0.2):
        options["softcap"] = rng.one((1.5, 20.0))
    if rng.maybe(0.4):
        options["return_lse"] = True
    return axes, options


def _mask(rng: Rng, axes: Mapping[str, int], depth: int) -> Mask:
    """A constructor's mask, or two of them combined."""
    number = rng.kernel.random()
    if depth == 0 or number < 0.35:
        return _constructed(rng, axes)
    left = _mask(rng, axes, depth - 1)
    if number < 0.45:
        return ~left
    right = _mask(rng, axes, depth - 1)
    return left & right if number < 0.75 else left | right


def _constructed(rng: Rng, axes: Mapping[str, int]) -> Mask:
    few = rng.kernel.randint(1, 200 if rng.large else 24)
    more = rng.kernel.randint(0, 60 if rng.large else 9)
    builders: tuple[Callable[[], Mask], ...] = (
        masks.causal, masks.causal, masks.causal, masks.causal,
        lambda: masks.window(few), lambda: masks.window(few, more), lambda: masks.window(None, more),
        lambda: masks.sink_tokens(more), lambda: masks.prefix(few),
        lambda: masks.prefix(_integers(rng, axes["batch"], most=axes["keys"])),
        lambda: _documents(rng, axes), lambda: _blocks(rng, axes), lambda: _intervals(rng, axes),
        lambda: _custom(rng, axes), lambda: _custom(rng, axes), lambda: _custom(rng, axes),
    )  # fmt: skip
    return rng.one(builders)()


def _custom(rng: Rng, axes: Mapping[str, int]) -> Mask:
    queries, keys, heads = axes["queries"], axes["keys"], axes["heads"]
    functions: dict[str, Callable[..., Any]] = {
        "(q + k) % 3 > 0": lambda b, h, q, k: (q + k) % 3 > 0,
        "(q - k) % 5 < 3": lambda b, h, q, k: (q - k) % 5 < 3,
        "(q - k) // 4 >= -2": lambda b, h, q, k: (q - k) // 4 >= -2,
        "(k - q) // 3 % 2 == 0": lambda b, h, q, k: (k - q) // 3 % 2 == 0,
        "k <= q + 2 * h": lambda b, h, q, k: k <= q + 2 * h,
        "k < 9 + 7 * b": lambda b, h, q, k: k < 9 + 7 * b,
        "q // 16 == k // 16": lambda b, h, q, k: q // 16 == k // 16,
        "table[q, k]": lambda b, h, q, k: Table(_booleans(rng, queries, keys))[q, k],
        "table[k] & (k <= q)": lambda b, h, q, k: Table(_booleans(rng, keys))[k] & (k <= q),
        "table[h, k]": lambda b, h, q, k: Table(_booleans(rng, heads, keys))[h, k],
        "integers[q] >= k": lambda b, h, q, k: Table(_integers(rng, queries, most=keys))[q] >= k,
    }
    name = rng.one(tuple(functions))
    return masks.custom(functions[name], f"({name})")


def _integers(rng: Rng, *shape: int, most: int) -> torch.Tensor:
    return rng.tensor(_nested(shape, lambda: rng.call.randint(0, most)), torch.int32).view(shape)


def _booleans(rng: Rng, *shape: int) -> torch.Tensor:
    return rng.tensor(_nested(shape, lambda: rng.call.random() < 0.7), torch.bool).view(shape)


def _nested(shape: tuple[int, ...], draw: Callable[[], Any]) -> Any:
    return draw() if not shape else [_nested(shape[1:], draw) for _ in range(shape[0])]


def _documents(rng: Rng, axes: Mapping[str, int]) -> Mask:
    """Documents of random lengths; queries are the last of the keys' positions, or have documents of their own."""

    def ids(length: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            found += [found[-1] + 1 if found else 0] * rng.call.randint(1, max(1, length // 2))
        return found[:length]

    leading = (axes["batch"],) if rng.maybe() else ()
    tables = [
        rng.tensor([ids(axes[axis]) for _ in range(axes["batch"])] if leading else ids(axes[axis]), torch.int32).view(
            *leading, axes[axis]
        )
        for axis in ("queries", "keys")
    ]
    return masks.documents(*tables)


def _blocks(rng: Rng, axes: Mapping[str, int]) -> Mask:
    block = rng.one((16, 64) if rng.large else (8, 16))
    blocks = tuple(-(-axes[axis] // block) for axis in ("queries", "keys"))
    leading = rng.one(((), (axes["heads"],), (axes["batch"], axes["heads"])))
    return masks.block_sparse(_booleans(rng, *leading, *blocks), block)


def _intervals(rng: Rng, axes: Mapping[str, int]) -> Mask:
    shape = (axes["batch"], axes["keys"]) if rng.maybe() else (axes["keys"],)
    start = _integers(rng, *shape, most=axes["queries"])
    return masks.column_intervals(start, start + _integers(rng, *shape, most=max(1, axes["queries"] // 2)))


def _score(rng: Rng, heads: int) -> ex.Traced:
    """A score function; all of them keep -inf."""
    by_head = Table(rng.tensor([rng.call.uniform(-1, 1) for _ in range(heads)], torch.float32))
    functions: dict[str, Callable[..., Any]] = {
        "0.5 s + 0.1 (q - k)": lambda s, b, h, q, k: s * 0.5 + 0.1 * (q - k),
        "s + h tanh(s)": lambda s, b, h, q, k: s + ex.tanh(s) * h,
        "s + 0.01 k": lambda s, b, h, q, k: s + 0.01 * k,
        "s or s / 2": lambda s, b, h, q, k: ex.where((q - k) % 2 == 0, s, s * 0.5),
        "s - (h + 1) |q - k| / 8": lambda s, b, h, q, k: s - 0.125 * ex.absolute(q - k) * (h + 1),
        "min(s, 2)": lambda s, b, h, q, k: ex.minimum(s, 2.0),
        "s + (q - k) // 3 / 10": lambda s, b, h, q, k: s + 0.1 * ((q - k) // 3),
        "s + table[h]": lambda s, b, h, q, k: s + by_head[h],
    }
    name = rng.one(tuple(functions))
    return ex.Traced(ex.trace(functions[name], "score", "b", "h", "q", "k"), name)


def mask_of(options: Mapping[str, Any]) -> Mask | None:
    """What a query sees by a case's `mask`, `causal` and `window` together."""
    return masks.narrowed(options.get("mask"), options.get("causal", False), options.get("window"), "attention")


def _has_gradients(axes: Mapping[str, int], options: Mapping[str, Any]) -> bool:
    """Whether some query sees a few keys: gradients that are all zero leave rounding alone to be compared."""
    batch, heads, queries, keys = (axes[axis] for axis in ("batch", "heads", "queries", "keys"))
    if not batch * queries * keys:
        return True
    mask = mask_of(options)
    if mask is None:
        return keys >= _FEWEST_KEYS
    seen = mask.visible(batch, heads, queries, keys, _device(mask)).sum(-1)
    return bool(seen.max() >= _FEWEST_KEYS or seen.max() == 0)


def _device(mask: Mask) -> torch.device:
    return next((table.device for table in mask.tables), torch.device("cpu"))
