"""The compile tier of CUDA C++: every kernel that dispatch selects, for every architecture, by NVRTC and by nvcc.

A spill fails. NVRTC, which users have, compiles every kernel for every architecture; nvcc every file for every
architecture, with one set of its macros in turn. Kernels that only sm_90a has (backend `hopper`) are compiled for it,
all of them by both. `--whole-matrix` compiles the kernels of all declared cases, not only of the benchmarks and a few
cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import flashkernel
from flashkernel.core import cuda
from flashkernel.core import device as devices
from flashkernel.core.op import Op
from flashkernel.lab import cuda_resources
from flashkernel.lab.cuda_resources import GPUS, Instance, Resources, by_module, compile_nvcc, compile_nvrtc, instances

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile())),
]
needs_nvcc = pytest.mark.skipif(not cuda_resources.has_nvcc(), reason="nvcc is not on the PATH")


# Architectures of the usual compile tier, by NVRTC; what runs on all of them is compiled by `make compile-test-cuda`.
QUICK: dict[str, tuple[int, ...]] = {"cuda": (), "hopper": (90,)}
NONE: dict[str, tuple[int, ...]] = {"cuda": (), "hopper": ()}


def _packages(quick: dict[str, tuple[int, ...]]) -> Iterator[object]:
    """(operators, backend, architecture) for each launcher module: operators of one module share kernels."""
    modules: dict[tuple[str, str], list[Op]] = {}
    for op in cuda_resources.operators():
        for backend in cuda_resources.backends(op, 90):
            modules.setdefault((op.backend(backend).target, backend), []).append(op)
    for (target, backend), ops in modules.items():
        for arch in GPUS if backend == "cuda" else (90,):
            name = target.removeprefix("flashkernel.ops.").removesuffix(".cuda")
            marks = () if arch in quick[backend] else (pytest.mark.every_arch,)
            yield pytest.param(ops, backend, arch, id=f"{name}-sm{arch}", marks=marks)


def _selected(ops: list[Op], backend: str, arch: int, config: pytest.Config) -> list[Instance]:
    every = config.getoption("--whole-matrix")
    cases = (lambda op: (*op.benches, *op.cases)) if every else cuda_resources.default_cases
    return instances(arch, ops, cases, lambda op, arch: [backend])


@pytest.mark.parametrize("ops, backend, arch", list(_packages(QUICK)))
def test_nvrtc_compiles_without_spills(ops: list[Op], backend: str, arch: int, pytestconfig: pytest.Config) -> None:
    selected = _selected(ops, backend, arch, pytestconfig)
    assert selected, f"no kernel of {ops[0].name} is selected on sm_{arch}"
    taken = [one for group in by_module(selected) for one in compile_nvrtc(group, arch)]
    limit = GPUS[arch].shared_per_block
    assert not [_described(one) for one in taken if one.spilled], "registers are spilled"
    assert not [_described(one) for one in taken if one.shared > limit], f"a block has {limit} bytes of shared memory"
    assert not [_described(one) for one in taken if one.registers * one.threads > GPUS[arch].registers_per_sm]


@needs_nvcc
@pytest.mark.parametrize("ops, backend, arch", list(_packages(NONE)))
def test_nvcc_compiles_without_spills(ops: list[Op], backend: str, arch: int, pytestconfig: pytest.Config) -> None:
    groups = by_module(_selected(ops, backend, arch, pytestconfig))
    every = backend == "hopper" or pytestconfig.getoption("--whole-matrix")
    for group in groups if every else _in_turn(groups, arch):
        report = compile_nvcc(group, arch)
        assert len(report) == len(group)
        assert not {symbol: found for symbol, found in report.items() if found["spilled"]}, "registers are spilled"


def _in_turn(groups: list[list[Instance]], arch: int) -> Iterator[list[Instance]]:
    """Of every file, the groups whose turn this architecture is: at least one, and each for one of them."""
    turn = list(GPUS).index(arch)
    files: dict[Path, list[list[Instance]]] = {}
    for group in groups:
        files.setdefault(group[0].kernel.module.source_path, []).append(group)
    for found in files.values():
        turns = min(len(found), len(GPUS))
        yield from (group for place, group in enumerate(found) if place % turns == turn % turns)


def _described(one: Resources) -> str:
    return f"{one.source}: {one.kernel} [{one.macros}]: {one.registers} registers, {one.spilled} bytes spilled"


def test_every_file_is_compiled() -> None:
    """A .cu file that no declared case launches is in no test, but for those that no heuristic picks: the GEMM ladder
    (test_gemm_ladder.py), tile_width.cu (test_matmul_tile_width.py) and window_backward.cu
    (test_attention_window_backward.py)."""
    package = Path(flashkernel.__file__).parent
    reached = {one.kernel.module.source_path for arch in (75, 90) for one in instances(arch)}
    searched = {package / "ops/matmul/hopper/tile_width.cu", package / "ops/attention/hopper/window_backward.cu"}
    missing = set(package.rglob("*.cu")) - reached - searched - set((package / "ops" / "gemm" / "ladder").glob("*.cu"))
    assert not missing, f"no benchmark or case launches a kernel of {', '.join(sorted(map(str, missing)))}"


def test_spills_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "heavy.cu"
    path.write_text("""template <int N> __global__ void __launch_bounds__(1024) heavy(float* x) {
        float v[N];
        for (int i = 0; i < N; ++i) v[i] = x[i * 7 + threadIdx.x];
        for (int j = 0; j < N; ++j) for (int i = 0; i < N; ++i) v[i] = v[i] * v[(i + 1) % N] + v[j];
        for (int i = 0; i < N; ++i) x[i * 7 + threadIdx.x] = v[i];
    }""")
    module = cuda.Module(path, defines={"HAS_BIAS": True})
    group = [Instance(module.kernel(f"heavy<{count}>"), ("sum",), 1024, 512) for count in (4, 96)]
    few, many = compile_nvrtc(group, 80)
    assert few.spilled == 0
    assert few.shared == 512
    assert many.spilled > 0
    if cuda_resources.has_nvcc():
        assert sorted(found["spilled"] > 0 for found in compile_nvcc(group, 80).values()) == [False, True]
    cuda_resources.save(tmp_path, [few, many])
    saved = cuda_resources.load(tmp_path)
    assert saved is not None
    table = cuda_resources.markdown(saved)
    assert f"| `heavy<96>` `bias` | {many.registers}, 0.5 KiB ({many.spilled} B spilled) |" in table
    assert cuda_resources.markdown(saved, "ops/*") == ""


@pytest.mark.parametrize("arch", GPUS)
def test_the_saved_resources_are_of_the_kernels_that_are_selected(arch: int) -> None:
    """Nothing is compiled here."""
    saved = cuda_resources.load(Path(flashkernel.__file__).parents[1] / "results")
    assert saved is not None
    differ = cuda_resources.differences(saved, arch)
    remedy = "run `python -m flashkernel.lab.cuda_resources results` and `flashkernel tables --write`"
    assert not differ, f"{len(differ)} kernels differ; {remedy}; the first are {differ[:3]}"


def test_the_gpus_have_their_architecture() -> None:
    assert {arch: gpu.arch for arch, gpu in GPUS.items()} == {arch: arch for arch in (75, 80, 86, 89, 90, 120)}
    assert set(GPUS.values()) <= set(devices.KNOWN.values())
