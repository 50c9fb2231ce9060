"""linear in CUDA C++, beyond the generated matrix: every tile, shared sums, both layouts; run by cuda_emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_emulator import emulated, unavailable

import flashkernel as fk
from flashkernel.blocks.epilogue_cuda import cuda_steps
from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.op import Case
from flashkernel.ops.gemm import configs
from flashkernel.ops.gemm.spec import LINEAR

needs_emulator = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
_GATED = ("bias", "residual", "up", "up_bias")
_THREE = ("second", "third", "bias", "second_bias", "third_bias")


def _axes(rows: int, columns: int, inner: int, **more: int) -> dict[str, int]:
    return {"rows": rows, "columns": columns, "inner": inner, **more}


CASES = (
    Case("shared-sums", _axes(3, 72, 1024), {"activation": "gelu"}, present=("bias", "residual")),
    Case("shared-sums-gated", _axes(9, 40, 1024), {"activation": "swiglu"}, present=_GATED),
    Case("shared-sums-three", _axes(17, 40, 600, second=24, third=9), present=_THREE),
    Case("shared-sums-odd", _axes(33, 37, 1031), {"activation": "gelu_tanh"}, present=("bias",)),
    Case("shared-sums-transposed", _axes(2, 72, 1024), present=("bias",), layout="transposed"),
    Case("middle-tile", _axes(50, 200, 136), {"activation": "gelu"}, present=("bias",)),
    Case("large-tile", _axes(260, 272, 104), {"activation": "gelu"}, present=("bias", "residual")),
    Case("large-tile-gated", _axes(130, 136, 72), {"activation": "geglu"}, present=_GATED),
    Case("large-tile-transposed", _axes(200, 264, 40), present=("bias",), layout="transposed"),
    Case("large-tile-gated-transposed", _axes(129, 200, 40), {"activation": "reglu"}, present=("up",),
         layout="transposed"),
    Case("large-tile-three", _axes(140, 129, 40, second=260, third=8), present=_THREE),
)  # fmt: skip


def _builds() -> Iterator[object]:
    """Every case for sm_75, and for sm_80 in one dtype after the other: a kernel takes a second to compile."""
    for index, case in enumerate(CASES):
        yield pytest.param(case, torch.float16, 75, id=f"{case.name}-float16-sm75")
        dtype = (torch.float16, torch.bfloat16)[index % 2]
        yield pytest.param(case, dtype, 80, id=f"{case.name}-{str(dtype).removeprefix('torch.')}-sm80")


@needs_emulator
@pytest.mark.parametrize("case, dtype, arch", list(_builds()))
def test_every_tile_is_right(case: Case, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name.startswith("large"):  # so few tiles would not be chosen for a GPU of many SMs
        monkeypatch.setattr(configs, "_cuda_tiles", lambda config, shape: 1 << 20)
    with emulated(arch if arch < 80 else None):
        failures = [report.message for report in verify(LINEAR, case, dtype, "cuda") if not report.ok]
    assert not failures, "\n".join(failures)


@needs_emulator
def test_shared_sums_are_the_same_at_every_run() -> None:
    x, weight = torch.randn(5, 2048).half(), torch.randn(40, 2048).half()
    with emulated():
        first, second = (fk.linear(x, weight, backend="cuda") for _ in range(2))
    assert torch.equal(first, second)


def test_an_epilogue_is_written_as_steps() -> None:
    text = cuda_steps("bias;gate gpt_oss 1.702 inf;scale 0.5;residual")
    limit = "__int_as_float(0x7f800000)"
    assert text == f"output.bias(); output.gate<GPT_OSS>(1.702f, {limit}); output.scale(0.5f); output.residual();"
    assert cuda_steps("") == ""


@pytest.mark.parametrize(
    "rows, transposed, expected",
    [(1, False, "triton"), (4, False, "triton"), (1, True, "cuda"), (5, False, "cuda"), (64, True, "cuda"),
     (65, False, "torch")],
)  # fmt: skip
def test_the_choice_on_a_t4(rows: int, transposed: bool, expected: str) -> None:
    x = torch.empty(rows, 64, dtype=torch.float16, device="meta")
    weight = torch.empty(64, 32, dtype=torch.float16, device="meta")
    weight = weight.t() if transposed else weight.view(32, 64)
    with devices.pretend(devices.KNOWN["t4"]):
        assert fk.explain(fk.linear, x, weight).chosen == expected
    with devices.pretend(devices.KNOWN["h200"]):
        assert fk.explain(fk.linear, x, weight).chosen == ("torch" if rows >= 64 else "triton")
