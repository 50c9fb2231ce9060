"""The compile tier at the ends of what dispatch accepts: widest heads, largest groups, float32, GPUs with small blocks.

test_compile.py compiles what is benchmarked, and watches spills; here a kernel has to compile, and to fit in a block's
shared memory. tests/test_config_ranges.py has the rules for all shapes between these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import compiled
from torch import Tensor

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches

pytestmark = pytest.mark.compile

GPUS = {86: "a10", 90: "h200"}
F16, F32, INT8 = torch.float16, torch.float32, torch.int8


def _empty(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _cache(pages: int, page: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(k, v, scales) of one key/value head."""
    k, v = (_empty(pages, page, 2, dim, dtype=dtype) for _ in range(2))
    return k, v, {f"{name}_scale": _empty(pages, page, 2) for name in "kv"} if dtype == INT8 else {}


def decoding(
    dtype: torch.dtype, dim: int, queries: int, group: int, keys: int, page: int, stored: torch.dtype, **options: Any
) -> Callable[[], Any]:
    def call() -> Any:
        pages = keys // page
        k, v, scales = _cache(pages, page, dim, stored)
        q, lengths = _empty(1, queries, 2 * group, dim, dtype=dtype), _empty(1, dtype=torch.int32)
        return fk.decode_attention(q, k, v, lengths, _empty(1, pages, dtype=torch.int32), **scales, **options)

    return call


def prefill(dtype: torch.dtype, dim: int, group: int, stored: torch.dtype) -> Callable[[], Any]:
    def call() -> Any:
        k, v, scales = _cache(512, 16, dim, stored)
        starts, lengths = _empty(2, dtype=torch.int32), _empty(1, dtype=torch.int32)
        table = _empty(1, 512, dtype=torch.int32)
        q = _empty(4096, 2 * group, dim, dtype=dtype)
        return fk.paged_attention(q, k, v, starts, lengths, table, backend="triton", **scales)

    return call


def attention(dtype: torch.dtype, dim: int, with_bias: bool, backward: bool) -> Callable[[], Any]:
    def call() -> Any:
        q, k, v = (_empty(1, 4096, 2, dim, dtype=dtype, grad=backward) for _ in range(3))
        bias = _empty(4096, 4096, dtype=dtype) if with_bias else None
        out = fk.attention(q, k, v, bias, mask=fk.causal(), backend="triton")
        if backward:
            out.backward(torch.empty_like(out))

    return call


MAX_STACK = 2048
EXTREMES = {
    "decoding on Hopper, widest heads": (90, decoding(F16, 256, 16, 4, 131072, 256, F16, backend="hopper")),
    "decoding on Hopper, most pages": (
        90, decoding(F16, 128, 16, 4, 131072, 16, F16, backend="hopper", window=4096, sink_tokens=4, softcap=2.0)
    ),
    "decoding, widest heads in float32": (86, decoding(F32, 512, 4, 64, 131072, 16, INT8, backend="triton")),
    "prefill, a large group in float32": (86, prefill(F32, 64, 256, F32)),
    "prefill, a quantized cache in float32": (86, prefill(F32, 256, 1, INT8)),
    "attention, a bias in float32": (86, attention(F32, 64, with_bias=True, backward=False)),
    "attention, gradients in float32": (86, attention(F32, 128, with_bias=False, backward=True)),
    "attention, gradients in float32 on Hopper": (90, attention(F32, 128, with_bias=False, backward=True)),
    "attention, widest heads": (86, attention(F16, 512, with_bias=False, backward=True)),
}  # fmt: skip


BESIDE = {"attention, gradients in float32 on Hopper"}  # those kernels, on another GPU


@pytest.mark.parametrize(
    "arch, call",
    [
        pytest.param(*extreme, id=name, marks=[pytest.mark.every_config] * (name in BESIDE))
        for name, extreme in EXTREMES.items()
    ],
)
def test_compiles_and_fits(arch: int, call: Callable[[], Any]) -> None:
    gpu = devices.KNOWN[GPUS[arch]]
    with devices.pretend(gpu), collect_launches() as launches:
        call()
    assert launches
    for launch in launches:
        machine = compiled(launch, arch)
        needed = machine.shared
        assert needed <= gpu.shared_per_block, f"{launch.name} {launch.constants} asks for {needed} bytes"
        # Kernels that keep whole tiles on the stack take minutes to compile.
        assert machine.stack <= MAX_STACK, f"{launch.name} {launch.constants} has a stack of {machine.stack} bytes"
