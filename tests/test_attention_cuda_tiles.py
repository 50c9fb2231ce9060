"""Forward tiles of the CUDA C++ attention whose row sums are in shared memory: 128 x 64 at d 128, 128 x 128 at d 64."""

from __future__ import annotations

import pytest
import torch
from cuda_emulator import emulated, unavailable
from in_turn import in_turn

from flashkernel.core import cuda, tune
from flashkernel.core.check import verify
from flashkernel.core.device import KNOWN
from flashkernel.core.op import Case
from flashkernel.lab.cuda_resources import by_module, compile_nvrtc, instances
from flashkernel.ops import registry
from flashkernel.ops.attention.cuda.configs import FORWARD, ForwardConfig

TILES = {128: ForwardConfig(128, 64, 4), 64: ForwardConfig(128, 128, 4)}


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", TILES)
def test_results_are_right(dim: int, causal: bool) -> None:
    """Lengths that no tile divides, and a width below the padded one."""
    op = registry()["attention"]
    axes = {"batch": 1, "queries": 150, "keys": 203, "heads": 2, "kv_heads": 1, "head_dim": dim, "value_dim": dim - 8}
    with emulated(80), tune.override(FORWARD, TILES[dim]):
        reports = verify(op, Case("tiles", axes, {"causal": causal}), torch.float16, "cuda", gradients=False)
    assert not [report.message for report in reports if not report.ok]


@pytest.mark.compile
@pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))
@pytest.mark.parametrize("dim, arch", in_turn(TILES, [80, 90], pytest.mark.every_config))
def test_no_register_is_spilled(dim: int, arch: int) -> None:
    op = registry()["attention"]
    names = (f"d{dim}-n1024", f"d{dim}-n1024-causal", *(("gpt-oss-4x4096",) if dim == 64 else ()))
    with tune.override(FORWARD, TILES[dim]):
        found = instances(arch, [op], lambda op: [case for case in op.benches if case.name in names])
    forward = [one for one in found if one.kernel.name.startswith("attention_forward")]
    assert forward
    taken = [one for group in by_module(forward) for one in compile_nvrtc(group, arch)]
    assert not [(one.kernel, one.spilled) for one in taken if one.spilled]
    assert 2 * max(one.shared for one in taken) <= KNOWN["a100"].shared_per_block  # two blocks on an SM


def test_shared_memory_has_room_for_the_row_sums() -> None:
    usual, wide = ForwardConfig(128, 48, 4), TILES[128]
    assert usual.shared_bytes(128, 128) == 2 * (128 * 128 + 48 * 256)
    assert wide.shared_bytes(128, 128) == 2 * (128 * 128 + 64 * 256) + 4 * 128 * 4  # four sums of each thread
