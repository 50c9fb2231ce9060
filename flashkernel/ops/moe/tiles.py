"""Experts whose weights are in tiles (int4, int8, MXFP4), for few tokens on Hopper: two products in CUDA C++, and the
weighted sum.

A product is one launch of ops/gemm/quantized/few_rows.cu. Its work is a list of (expert, rows of it, 16 weight rows),
made on the device from the routing's offsets: experts without rows are not read, and a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.blocks.weight_formats.tiles import FORMATS, TILE
from flashkernel.core import cuda, tune
from flashkernel.core.cuda import TYPES
from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable
from flashkernel.ops.gemm import few_rows
from flashkernel.ops.moe.configs import FEW_TOKENS
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing
from flashkernel.ops.moe.triton.combine import combine

_TOKENS = (8, 16)  # rows of an expert that a product takes at a time


def _chunked(shape: Mapping[str, int], tokens: int) -> dict[str, int]:
    """The shape of a plain product with as many work items as the experts have at most."""
    return {**shape, "rows": tokens * few_rows.max_chunks(shape["rows"], tokens, shape["experts"])}


def _configs(device: Device, shape: Mapping[str, int], tokens: int) -> list[few_rows.QuantizedConfig]:
    found = few_rows.few_rows_configs(device, shape, tokens, experts=shape["experts"])
    chunked = _chunked(shape, tokens)
    fits = [one for one in found if few_rows.few_rows_error(one, device, chunked, shape["experts"]) is None]
    return sorted(fits, key=lambda one: one.slices > 1)  # blocks that share no sum first


def _heuristic(device: Device, shape: Mapping[str, int]) -> few_rows.QuantizedConfig:
    """16 rows at a time where experts have more than four on average: twice as many are not rare."""
    many = shape["rows"] > 4 * shape["experts"]
    found = [one for tokens in (_TOKENS[::-1] if many else _TOKENS) for one in _configs(device, shape, tokens)]
    if not found:
        raise ValueError(f"moe_experts: no config of few_rows.cu has room for {dict(shape)}")
    return found[0]


def _space(device: Device, shape: Mapping[str, int]) -> Iterator[few_rows.QuantizedConfig]:
    for tokens in _TOKENS:
        yield from _configs(device, shape, tokens)[:3]


def _valid(config: few_rows.QuantizedConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    return few_rows.few_rows_error(config, device, _chunked(shape, config.tokens), shape["experts"])


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (tune.power_of_2(shape["rows"]), *(size for name, size in shape.items() if name != "rows"))


QUANTIZED_EXPERTS = Tunable("moe_quantized", few_rows.QuantizedConfig, _heuristic, _space, _valid, _bucket)


def serves(x: Tensor, routing: Routing, experts: Experts, backend: str | None) -> bool:
    """Whether this kernel computes a call: few tokens, both weights in tiles, of sizes that a config has room for."""
    weights = [one for one in (experts.gate_up, experts.down) if isinstance(one, Weight) and one.format in FORMATS]
    if backend != "hopper" or len(weights) < 2 or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if x.shape[0] > FEW_TOKENS or routing.tokens.shape[0] == 0 or 0 in (*x.shape, experts.inner):
        return False
    if not all(tensor.is_contiguous() for weight in weights for tensor in weight.tensors):
        return False
    if (experts.gate == "halves" and experts.inner % TILE) or cuda.available() is not None:
        return False
    device, rows = cuda.target(x.device), routing.tokens.shape[0]
    parts = (2 if experts.gate == "halves" else 1, 1)
    shapes = [_shape(one, one.shape[-2] // part, experts.count, rows, part) for one, part in zip(weights, parts)]
    return all(_has_config(device, tuple(shape.items())) for shape in shapes)


@lru_cache(maxsize=4096)
def _has_config(device: Device, shape: tuple[tuple[str, int], ...]) -> bool:
    return any(_configs(device, dict(shape), tokens) for tokens in _TOKENS)


def forward(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """[tokens, hidden]; x has unit stride along its columns."""
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Weight)
    assert isinstance(down, Weight)
    rows, x = routing.tokens.shape[0], cuda.vectorized(x)
    chain = experts.piece.text
    hidden = torch.empty((rows, experts.inner), dtype=x.dtype, device=x.device)
    bias = _readable(experts.gate_up_bias)
    weights, biases = (gate_up,), () if bias is None else (bias,)
    if experts.gate == "halves":
        halves = (slice(0, experts.inner), slice(experts.inner, None))
        weights = tuple(gate_up.rows(part) for part in halves)  # type: ignore[assignment]
        biases = () if bias is None else tuple(bias[:, part] for part in halves)  # type: ignore[assignment]
    _product(
        few_rows.FewRows(
            x, weights, hidden, biases, None, f"bias;{chain}" if biases else chain, experts.gate == "interleaved",
            routing.offsets, routing.tokens, gate_up.shape[-2],
        )
    )  # fmt: skip
    y = torch.empty((rows, down.shape[-2]), dtype=torch.float32, device=x.device)
    bias = _readable(experts.down_bias)
    _product(
        few_rows.FewRows(
            hidden, (down,), y, () if bias is None else (bias,), None, "" if bias is None else "bias",
            offsets=routing.offsets,
        )
    )  # fmt: skip
    return combine(y, routing.positions, routing.weights, x.dtype)


def _readable(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else (bias if bias.dtype in TYPES else bias.float()).contiguous()


def _product(call: few_rows.FewRows) -> None:
    assert call.offsets is not None
    weight = call.weights[0]
    shape = _shape(weight, weight.shape[-2], call.offsets.shape[0] - 1, call.y.shape[0], len(call.weights))
    config = tune.pick(QUANTIZED_EXPERTS, cuda.target(call.x.device), shape)
    few_rows.launch(call, config, shape)


def _shape(weight: Weight, columns: int, experts: int, rows: int, parts: int) -> dict[str, int]:
    """What configs are chosen by: `columns` rows of each of `parts` matrices, for `rows` rows of all experts."""
    inner, group = weight.shape[-1], weight.group_shape[1]
    return {
        "experts": experts, "rows": rows, "columns": columns, "inner": inner,
        "bits": 4 if weight.dtype == torch.uint8 else 8, "group": min(inner if group == -1 else group, 2 * TILE),
        "scale_bytes": scales_of(weight).element_size(), "zeros": int(weight.zeros is not None), "parts": parts,
    }  # fmt: skip
