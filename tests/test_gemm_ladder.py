"""The GEMM ladder: every rung against torch on a CPU emulator, compiled for every architecture, and on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled import disassemble
from cuda_emulator import emulated
from cuda_emulator import unavailable as no_emulator
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.core import cuda
from flashkernel.core import device as devices
from flashkernel.core.check import compare
from flashkernel.core.driver import TensorMap
from flashkernel.core.roofline import Ceilings
from flashkernel.lab import ladder as lab_ladder
from flashkernel.lab import ladder_tables, results
from flashkernel.lab.cuda_resources import GPUS, ptxas_report
from flashkernel.lab.plot import plot
from flashkernel.lab.tables import regenerate
from flashkernel.ops.gemm import ladder
from flashkernel.ops.gemm.ladder import rungs

EMULATED = [rung for rung in ladder.RUNGS if not rung.hopper]
SHAPES = [(1, 8, 8), (7, 136, 40), (130, 264, 72), (129, 8, 200), (40, 512, 8)]
ODD_SHAPES = [(1, 1, 1), (33, 17, 5), (3, 65, 97)]

needs_emulator = pytest.mark.skipif(no_emulator() is not None, reason=str(no_emulator()))
needs_nvrtc = pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))
on_gpu = pytest.mark.gpu
by_name = {"ids": lambda rung: rung.name}


def _matrices(m: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(m + 1000 * n + k)
    a = torch.randn(m, k, generator=generator, device=device).to(dtype)
    return a, torch.randn(k, n, generator=generator, device=device).to(dtype)


def _check(a: torch.Tensor, b: torch.Tensor, rung: ladder.Rung) -> None:
    found = ladder.matmul(a, b, rung.name)
    assert found.dtype == a.dtype
    report = compare("C", found, a.double() @ b.double(), a @ b)
    assert report.ok, f"{rung.name} {tuple(a.shape)} x {tuple(b.shape)}: {report.message}"


@needs_emulator
@pytest.mark.parametrize("arch", [80, 75])
@pytest.mark.parametrize("rung", EMULATED, **by_name)
def test_emulated(rung: ladder.Rung, arch: int) -> None:
    shapes = [*SHAPES, *(ODD_SHAPES if not rung.aligned else [])]
    with emulated(None if arch == 80 else arch):
        for shape in shapes:
            _check(*_matrices(*shape, torch.float16), rung)


@needs_emulator
@pytest.mark.parametrize("rung", EMULATED, **by_name)
def test_other_dtypes(rung: ladder.Rung) -> None:
    with emulated():
        for dtype in set(rung.dtypes) - {torch.float16}:
            _check(*_matrices(33, 40, 24, dtype), rung)


@needs_emulator
@pytest.mark.parametrize("rung", EMULATED, **by_name)
def test_empty_sizes(rung: ladder.Rung) -> None:
    with emulated():
        for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
            found = ladder.matmul(*_matrices(m, n, k, torch.float16), rung.name)
            assert found.shape == (m, n)
            assert not found.any()


@needs_emulator
def test_small_shared_memory_takes_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rung 6 selects on GPUs with 99 KB of shared memory per block computes the same."""
    config = rungs.pipelined_config(devices.KNOWN["l4"])
    assert config == (128, 256, 32, 2, 4, 4)
    monkeypatch.setattr(rungs, "pipelined_config", lambda device: config)
    with emulated():
        _check(*_matrices(130, 264, 200, torch.float16), ladder.RUNGS[5])


@needs_emulator
def test_refusals_say_why() -> None:
    half, single = _matrices(8, 8, 8, torch.float16), _matrices(8, 8, 8, torch.float32)
    with emulated():
        with pytest.raises(ValueError, match=r"tensor-cores: the dtype is torch.float32; it takes torch.float16"):
            ladder.matmul(*single, "tensor-cores")
        with pytest.raises(ValueError, match=r"wgmma exists on sm_90 \(H100, H200\) only and the kernel is for sm_80"):
            ladder.matmul(*half, "wgmma-tma")
        with pytest.raises(ValueError, match=r"K is 9 and N is 8; .* both must be multiples of 8"):
            ladder.matmul(*_matrices(8, 8, 9, torch.float16), "double-buffering")
        with pytest.raises(ValueError, match="must be contiguous"):
            ladder.matmul(half[0].t(), half[1], "naive")
        with pytest.raises(ValueError, match=r"A \[M, K\] and B \[K, N\] must have one dtype and device"):
            ladder.matmul(half[0], single[1], "naive")
    with emulated(75), pytest.raises(ValueError, match="bfloat16 needs sm_80"):
        ladder.matmul(*_matrices(8, 8, 8, torch.bfloat16), "naive")


def _compiled(rung: ladder.Rung, arch: int, dtype: torch.dtype) -> tuple[cuda.RecordedLaunch, cuda.CompiledCubin]:
    """The launch of a rung on a pretended GPU and its machine code."""
    a, b = (torch.empty(512, 512, dtype=dtype, device="meta") for _ in range(2))
    with devices.pretend(GPUS[arch]), cuda.recorded_launches() as launches:
        ladder.matmul(a, b, rung.name)
    (launch,) = launches
    return launch, launch.kernel.module.compile(launch.kernel.name, arch)


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in (75, 90) else pytest.mark.every_arch) for arch in GPUS]
)
def test_compiles_without_spills(arch: int) -> None:
    for rung in ladder.RUNGS:
        if rung.hopper and arch != 90:
            continue
        for dtype in rung.dtypes:
            if dtype == torch.bfloat16 and arch < 80:
                continue
            launch, code = _compiled(rung, arch, dtype)
            (taken,) = ptxas_report(code.log).values()
            assert taken["spilled"] == 0, f"{launch.kernel.name} spills on sm_{arch}"
            assert taken["shared"] + launch.shared <= GPUS[arch].shared_per_block
            assert taken["registers"] * launch.threads <= GPUS[arch].registers_per_sm


@needs_nvrtc
@pytest.mark.compile
def test_instructions_of_the_rungs() -> None:
    sass = {rung.name: disassemble(_compiled(rung, 90, torch.float16)[1].code) for rung in ladder.RUNGS[3:]}
    assert "FFMA" in sass["register-tiles"]
    assert "LDG.E.128" in sass["register-tiles"]
    assert "HMMA.16816.F32" in sass["tensor-cores"]
    assert "LDGSTS" in sass["double-buffering"]
    assert "LDSM.16.MT88.4" in sass["double-buffering"]
    assert "HGMMA.64x256x16.F32" in sass["wgmma-tma"]
    assert "UTMALDG.2D" in sass["wgmma-tma"]
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in sass["wgmma-tma"], "products wait for one another"
    assert "HMMA.1688.F32" in disassemble(_compiled(ladder.RUNGS[5], 75, torch.float16)[1].code)


def _save_results(folder: Path) -> None:
    ceilings = Ceilings("NVIDIA H200", 4.2, {"float16": 700.0})
    file = results.ResultsFile.in_folder(folder, ladder_tables.OP, ceilings, "abc")
    assert file is not None
    records = []
    for index, name in enumerate([*(rung.name for rung in ladder.RUNGS), lab_ladder.BASELINE]):
        kind = "baseline" if name == lab_ladder.BASELINE else "backend"
        ms = dict.fromkeys(results.STATISTICS, 100.0 / 2**index)
        sizes = {"m": 4096, "n": 4096, "k": 4096}
        record = results.Record(ladder_tables.OP, "4096", sizes, "float16", "fwd", name, kind, correct=True, ms=ms)
        records.append(replace(record, tflops=1.37 * 2**index, roof=0.01, bound="compute", mode="events"))
    file.add(records)


@needs_emulator
def test_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rung that the device takes is checked and timed, and cuBLAS; a wrong or failing one says why."""
    cpu, ceilings = torch.device("cpu"), Ceilings("CPU", 0.1, {"float16": 1.0})
    with emulated():
        records = list(lab_ladder.measure(16, torch.float16, cpu, ceilings, budget_s=0.01))
        assert [record.implementation for record in records] == [*(rung.name for rung in EMULATED), "cublas"]
        assert all(record.comparable and record.tflops for record in records)

        def product(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
            if name == "coalesced":
                raise cuda.CompileError("no compiler")
            return a @ b + (name == "naive")

        monkeypatch.setattr(ladder, "matmul", product)
        naive, coalesced, *rest = lab_ladder.measure(16, torch.float16, cpu, ceilings, budget_s=0.01)
    assert naive.note
    assert naive.ms is None
    assert not naive.correct
    assert coalesced.error == "CompileError: no compiler"
    assert all(record.comparable for record in rest)
    assert "failed" in ladder_tables.markdown([coalesced])
    assert "wrong" in ladder_tables.markdown([naive])


def test_tensor_maps_are_checked() -> None:
    kernel = ladder.RUNGS[6].kernel("tensor_map, pointer", "float")
    matrix = torch.empty(64, 64, dtype=torch.float16)
    tensor_map = TensorMap(matrix, 6, (64, 64), (128,), (64, 64), 3, nan_fill=False)
    assert kernel.pack((tensor_map, matrix), -1) == [tensor_map, matrix.data_ptr()]
    for value, index in ((matrix, -1), (tensor_map, 0)):
        with pytest.raises(ValueError, match="takes a TensorMap of a tensor on cuda"):
            kernel.pack((value, None), index)


def test_table_and_chart(tmp_path: Path) -> None:
    _save_results(tmp_path / "results" / "h200")
    text = regenerate("<!-- results:gemm_ladder -->\n<!-- /results -->\n", tmp_path / "results")
    assert "| 1 | naive | one thread per output | 1.4 | 0.8% |" in text
    assert "| | cublas |" in text
    assert "50.0%" in text
    plot(results.load(tmp_path / "results" / "h200" / "gemm_ladder.json"), tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, ["tables", str(tmp_path / "results" / "h200")])
    assert shown.exit_code == 0
    assert "register-tiles" in shown.output


def test_command_needs_a_gpu_and_takes_no_operators() -> None:
    run = CliRunner().invoke(app, ["bench", "gemm", "--ladder", "--device", "cpu"])
    assert run.exit_code != 0
    assert "--ladder times GPU kernels" in run.output
    run = CliRunner().invoke(app, ["bench", "rms_norm", "--ladder"])
    assert run.exit_code != 0
    assert "--ladder times the rungs of the GEMM ladder" in run.output


@on_gpu
@pytest.mark.parametrize("rung", ladder.RUNGS, **by_name)
def test_on_a_gpu(rung: ladder.Rung) -> None:
    if rung.hopper and cuda.target(torch.device("cuda")).arch != 90:
        pytest.skip("wgmma needs sm_90")
    for shape in (*SHAPES, (1000, 1032, 1016), (2048, 2048, 2048), *(ODD_SHAPES if not rung.aligned else [])):
        for dtype in rung.dtypes:
            _check(*_matrices(*shape, dtype, "cuda"), rung)


@on_gpu
def test_command_on_a_gpu(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        app, ["bench", "gemm", "--ladder", "--size", "1024", "--budget", "0.05", "--save", str(tmp_path)]
    )
    assert run.exit_code == 0, run.output
    saved = json.loads((tmp_path / "gemm_ladder.json").read_text())
    assert {record["implementation"] for record in saved["records"]} >= {"naive", "double-buffering", "cublas"}
    assert all(record["correct"] for record in saved["records"])
