"""The compile tier: the mask language through Triton's compiler, in the Triton and in the Gluon kernels."""

from __future__ import annotations

import pytest
import torch
from compiled import compile_for
from in_turn import in_turn

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.tile_status import make_block_ranges, make_tile_ranges
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches

pytestmark = pytest.mark.compile


def _table(dtype: torch.dtype, *shape: int) -> fk.Table:
    return fk.Table(torch.empty(shape, dtype=dtype, device="meta"))


def _everything(b: ex.Expression, h: ex.Expression, q: ex.Expression, k: ex.Expression) -> ex.Expression:
    """Every operation and every dtype of a table."""
    apart = q - k
    seen = (apart // 3 <= 4) & (apart % 5 != 1) & (apart // 8 < 9) & (apart % 4 != 3) & (q // 3 == k % 7)
    seen = seen & ((q & 1) == (k | 2)) & ((q < 5) == (k < 5)) & ((q < 3) + (k < 3) < 2) & ~(h == 1)
    seen = seen & (ex.minimum(q / 2, 3.5) < ex.maximum(k, 4)) & (ex.absolute(apart) < 90) & (q < float("inf"))
    seen = seen & (ex.tanh(apart) < 0.5) & (ex.exp(apart * 0.5) < 9) & fk.where(h == 0, k <= q, True)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        seen = seen | (_table(dtype, 512)[k] - _table(dtype, 512)[q] < -1) | (_table(dtype, 512)[k] == 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        seen = seen | (_table(dtype, 512)[k] < ex.minimum(_table(dtype, 2, 512)[b, q], 1.5))
    return seen | _table(torch.bool, 512, 512)[q, k] | (_table(torch.bool, 512)[q] == _table(torch.bool, 512)[k])


MASKS = {
    "everything": _everything,
    "a constant": lambda b, h, q, k: True,
    "a head": lambda b, h, q, k: h == 1,
    "a query": lambda b, h, q, k: q % 3 == 0,
    "relative": lambda b, h, q, k: (q - k) // 48 == 0,
    "a large tensor": lambda b, h, q, k: _table(torch.bool, 2**12, 2**12, 2**12)[h, q, k],
    "single entries": lambda b, h, q, k: _table(torch.bool, 1)[0] | (_table(torch.float16, 2)[b] < q),
}


@pytest.mark.parametrize("name, backend", in_turn(MASKS, ["triton", "hopper"], pytest.mark.every_config))
def test_masks_compile(name: str, backend: str) -> None:
    q, k, v = (torch.empty((2, 512, 2, 64), dtype=torch.bfloat16, device="meta").requires_grad_() for _ in range(3))
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        out = fk.attention(q, k, v, mask=fk.custom(MASKS[name]), backend=backend)
        if name != "everything":
            out.sum().backward()
    masked = [launch for launch in launches if launch.constants.get("MASK") is not None]
    assert masked
    for launch in masked:
        compile_for(launch, 90)


@pytest.mark.parametrize(
    "name, arch", in_turn(["a large tensor", "everything", "single entries"], [75, 90, 100], pytest.mark.every_config)
)
def test_the_kernels_that_make_block_ranges_compile(name: str, arch: int) -> None:
    """Of one sequence and of several; the lengths are no constants, so that others need no other kernel."""
    mask = fk.custom(MASKS[name])
    for sizes in ((2, 2, 512, 512, 64, 64), (1, 1, 1, 1, 16, 128)):
        with collect_launches() as launches:
            make_tile_ranges(mask, sizes, transposed=False)
            make_block_ranges(mask, sizes, 3, transposed=True, pad_front=True)
        assert [launch.name for launch in launches] == [
            "mask_tile_status", "mask_tile_ranges", "mask_tile_status", "mask_block_ranges",
        ]  # fmt: skip
        for launch in launches:
            code = compile_for(launch, arch)
            assert code.stack == 0, f"{launch.name}: {code.stack} bytes of stack"


SCORES = {
    "a constant": lambda s, b, h, q, k: 0.0,
    "a key": lambda s, b, h, q, k: 0.5 * k,
    "relative": lambda s, b, h, q, k: q - k,
    "everything": lambda s, b, h, q, k: ex.minimum(s, 3.0) * fk.where(s < 0, 2, h) + ex.absolute(q - k) / 3,
}
BESIDE = {"a key", "relative"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_config] * (name in BESIDE)) for name in SCORES]
)
def test_score_functions_compile(name: str) -> None:
    """Of one query, whose number the compiler takes for a constant; a constant, and what has no shape of its own."""
    q, k = (torch.empty((1, size, 2, 64), dtype=torch.float16, device="meta") for size in (1, 64))
    with devices.pretend(devices.KNOWN["a100"]), collect_launches() as launches:
        fk.attention(q.requires_grad_(), k, k, score=SCORES[name], backend="triton").sum().backward()
    assert launches
    for launch in launches:
        compile_for(launch, 80)
