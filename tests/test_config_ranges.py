"""Wherever dispatch accepts a call, the launch config is one its kernel can use, and the grid one a GPU can launch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.device import Device
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Call
from flashkernel.core.tune import Tunable
from flashkernel.ops.attention import configs as attention_configs
from flashkernel.ops.attention import support as attention_support
from flashkernel.ops.decode import configs as decode_configs
from flashkernel.ops.decode import spec as decode_spec
from flashkernel.ops.reduce.triton.argmax import argmax

GPUS = [device for device in devices.KNOWN.values() if device.arch >= 80]
DIMS = (1, 8, 16, 40, 64, 72, 128, 192, 256, 300, 512)
LENGTHS = (1, 40, 1024, 131072)
FLOATS = (torch.float32, torch.float16)
MAX_ON_OTHER_AXES = 65535  # programs along the second and third axis of a grid


def choice(tunable: Tunable, device: Device, shape: dict[str, int]) -> object:
    """What the heuristic says, checked by the rule that tuned configs obey."""
    config = tunable.heuristic(device, shape)
    reason = tunable.valid(config, device, shape)
    assert reason is None, f"{tunable.name} on {device.name} for {shape}: {reason}"
    return config


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_attention(device: Device) -> None:
    accepted = 0
    for head_dim, value_dim, dtype in product(DIMS, DIMS, FLOATS):
        facts = {"head_dim": head_dim, "value_dim": value_dim, "deterministic": False, "has_bias": False}
        if attention_support.triton(Call(device, dtype, facts)) is not None:
            continue
        accepted += 1
        for queries, keys, gathers in product(LENGTHS, LENGTHS, (0, 1)):
            shape = {
                "seqlen_q": queries, "seqlen_k": keys, "max_visible_keys": min(keys, 4096), "head_dim": head_dim,
                "value_dim": value_dim, "bytes": dtype.itemsize, "gathers": gathers,
            }  # fmt: skip
            for tunable in ("FORWARD", "BACKWARD_QUERIES", "BACKWARD_KEYS"):
                choice(getattr(attention_configs, tunable), device, shape)
    assert accepted == len(DIMS) ** 2 + len([dim for dim in DIMS if dim <= 128]) ** 2  # float16, float32


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_decoding_and_prefill(device: Device) -> None:
    stored = (None, torch.int8, torch.float8_e4m3fn)
    for head_dim, dtype, kept, group in product(DIMS, FLOATS, stored, (1, 7, 64, 256)):
        facts = {
            "head_dim": head_dim, "value_dim": head_dim, "cache_dtype": kept or dtype, "batch": 1, "group_size": group,
        }  # fmt: skip
        call = Call(device, dtype, facts)
        shape = {
            "head_dim": head_dim, "value_dim": head_dim, "group_size": group, "cache_bytes": (kept or dtype).itemsize,
            "q_bytes": dtype.itemsize,
        }  # fmt: skip
        for page, span in product((16, 256), LENGTHS):
            if decode_spec._prefill(call) is None:
                more = {"tokens": span, "visible_keys": span, "page_size": page}
                choice(decode_configs.PREFILL, device, {**shape, **more})
            if decode_spec._kernels(call) is None:
                for batch, queries, kv_heads in product((1, 4096), (1, 16), (1, 8)):
                    more = {"batch": batch, "queries": queries, "kv_heads": kv_heads}
                    more |= {"page_size": page, "visible_keys": span}
                    choice(decode_configs.SPLIT_KV, device, {**shape, **more})


def test_decoding_on_hopper() -> None:
    device = devices.KNOWN["h200"]
    for head_dim, page, span, batch, kv_heads, rows in product(
        (8, 64, 72, 128, 136, 256), (0, 16, 256), (513, 4096, 131072), (1, 64, 4096), (1, 2, 8), (1, 64)
    ):
        shape = {
            "batch": batch, "rows": rows, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page,
            "visible_keys": span,
        }  # fmt: skip
        choice(decode_configs.HOPPER, device, shape)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_attention_of_many_sequences_fits_a_grid(backend: str) -> None:
    """Two axes of a grid end at 65535: a batch beyond that must not lie on them."""
    batch, heads, length = 70000, 2, 192
    q, k, v = (
        torch.empty((batch, length, heads, 64), dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        out = fk.attention(q, k, v, backend=backend)
        out.backward(torch.empty_like(out))
    assert len(launches) >= 3
    for launch in launches:
        assert max(launch.grid[1:], default=1) <= MAX_ON_OTHER_AXES, f"{launch.name} has a grid of {launch.grid}"


def _sample(rows: int) -> torch.Tensor:
    seeds = torch.empty(rows, dtype=torch.int64, device="meta")
    return fk.sample(torch.empty((rows, 64), device="meta"), seeds, seeds, backend="triton")


@pytest.mark.parametrize("function", [_sample, lambda rows: argmax(torch.empty((rows, 64), device="meta"))])
def test_many_rows_fit_a_grid(function: Callable[[int], torch.Tensor]) -> None:
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        function(70000)
    assert len(launches) == 2
    for launch in launches:
        assert max(launch.grid[1:], default=1) <= MAX_ON_OTHER_AXES, f"{launch.name} has a grid of {launch.grid}"
