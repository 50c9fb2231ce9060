"""Compiling CUDA C++ modules: targets, errors, the cache of machine code, and machines that cannot compile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cuda_sources import FILL, HEADER, SOURCE, _own_cache, needs_nvrtc, source_fixture  # noqa: F401

from flashkernel.core import cuda, nvrtc
from flashkernel.core import device as devices
from flashkernel.core.cuda import CompiledCubin, CompileError, Module, available, compile_cubin


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that were compiled rather than read from the cache."""
    made: list[str] = []

    def counted(source: str, names: list[str], arch: str, *args: object, **options: object) -> CompiledCubin:
        made.append(arch)
        return compile_cubin(source, names, arch, *args, **options)

    monkeypatch.setattr(cuda, "compile_cubin", counted)
    return made


def _cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cuda").iterdir())


@needs_nvrtc
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_a_template_compiles_for_every_architecture(source: Path, arch: int) -> None:
    compiled = Module(source).compile("row_sum<__half>", arch)
    assert compiled.code.startswith(b"\x7fELF")
    assert compiled.names["row_sum<__half>"].startswith("_Z7row_sum")
    assert compiled.names["row_sum<__half>"].encode() in compiled.code
    assert compiled.spilled_bytes == 0
    assert f"sm_{arch}" in compiled.log


@needs_nvrtc
def test_several_instances_compile_together(source: Path) -> None:
    names = ["row_sum<float>", "row_sum<__half>", "row_sum<__nv_bfloat16>", "fill"]
    compiled = compile_cubin(SOURCE, names, "sm_80", include=[source.parent])
    assert len(set(compiled.names.values())) == 4
    assert compiled.names["fill"] == "fill"


@needs_nvrtc
def test_targets(source: Path) -> None:
    assert Module(source).target(90) == "sm_90"
    assert Module(source, specific=True).target(90) == "sm_90a"
    assert Module(source, specific=True).target(80) == "sm_80"
    compiled = Module(source, virtual_arch=75).compile("fill", 90)
    assert b".target sm_75" in compiled.code


@needs_nvrtc
def test_spills_are_counted(source: Path) -> None:
    heavy = """extern "C" __global__ void heavy(float* x) {
        float v[96];
        for (int i = 0; i < 96; ++i) v[i] = x[i * 7 + threadIdx.x];
        for (int j = 0; j < 96; ++j) for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 1) % 96] + v[j];
        for (int i = 0; i < 96; ++i) x[i * 7 + threadIdx.x] = v[i];
    }"""
    starved = compile_cubin(heavy, ["heavy"], "sm_80", ["--maxrregcount=32"])
    assert starved.spilled_bytes > 0


@needs_nvrtc
def test_an_error_shows_the_log_and_the_lines() -> None:
    text = 'extern "C" __global__ void wrong(float* x) {\n    int fine = 1;\n    x[0] = missing + fine;\n}\n'
    with pytest.raises(CompileError) as caught:
        compile_cubin(text, ["wrong"], "sm_90", file_name="wrong.cu")
    message = str(caught.value)
    assert "wrong.cu does not compile for sm_90" in message
    assert 'identifier "missing" is undefined' in message
    assert ">    3 |     x[0] = missing + fine;" in message
    assert "     2 |     int fine = 1;" in message


@needs_nvrtc
def test_other_refusals_are_compile_errors_too(source: Path) -> None:
    with pytest.raises(CompileError, match="cannot open source file"):
        compile_cubin(SOURCE, ["fill"], "sm_90")  # its header is not on the path
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_cubin("", [], "sm_13")
    with pytest.raises(CompileError, match=r"INVALID_OPTION.*\n.*nonsense"):
        compile_cubin("", [], "sm_90", ["--nonsense"])
    with pytest.raises(CompileError, match="absent"):
        Module(source).compile("absent<float>", 90)


@needs_nvrtc
def test_machine_code_is_kept_and_read_back(source: Path, compiles: list[str], tmp_path: Path) -> None:
    first = Module(source).compile("row_sum<float>", 90)
    second = Module(source).compile("row_sum<float>", 90)
    assert first == second
    assert compiles == ["sm_90"]
    assert len(_cached(tmp_path)) == 1


@needs_nvrtc
def test_whatever_the_code_depends_on_makes_it_new(
    source: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def count(**settings: object) -> int:
        Module(source, **settings).compile(settings.pop("name", "fill"), 90)
        return len(compiles)

    assert count() == 1
    assert count(defines={"FACTOR": 2}) == 2
    assert count(defines={"FACTOR": 3}) == 3
    assert count(options=["--use_fast_math"]) == 4
    assert count(specific=True) == 5
    assert count(virtual_arch=80) == 6
    Module(source).compile("fill", 80)
    Module(source).compile("reverse", 90)
    assert len(compiles) == 8
    (tmp_path / "widen.cuh").write_text('#include "deeper.cuh"\n' + HEADER)
    (tmp_path / "deeper.cuh").write_text("// nothing yet\n")
    assert count() == 9
    (tmp_path / "deeper.cuh").write_text("// a header of a header\n")
    assert count() == 10
    source.write_text(SOURCE + "\n")
    assert count() == 11
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 99))
    assert count() == 12
    assert count() == 12


@needs_nvrtc
def test_headers_of_other_project_folders_count(compiles: list[str], tmp_path: Path) -> None:
    package, blocks = tmp_path / "package", tmp_path / "blocks"
    package.mkdir()
    blocks.mkdir()
    (package / "kernel.cu").write_text('#include <shared.cuh>\nextern "C" __global__ void k(int* x) { *x = VALUE; }\n')
    (blocks / "shared.cuh").write_text("#define VALUE 1\n")
    module = Module(package / "kernel.cu", include=[blocks])
    module.compile("k", 90)
    module.compile("k", 90)
    (blocks / "shared.cuh").write_text("#define VALUE 2\n")
    module.compile("k", 90)
    assert len(compiles) == 2


def _damage_checksum(text: str) -> str:
    stored = json.loads(text)
    stored["sha256"] = "0" * 64
    return json.dumps(stored)


def _drop_names(text: str) -> str:
    return json.dumps({**json.loads(text), "names": {}})


@needs_nvrtc
@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[]", _damage_checksum, _drop_names],
)
def test_a_damaged_cache_entry_is_compiled_again(
    source: Path, compiles: list[str], tmp_path: Path, damage: Callable[[str], str]
) -> None:
    good = Module(source).compile("fill", 90)
    (entry,) = _cached(tmp_path)
    entry.write_text(damage(entry.read_text()))
    with pytest.warns(UserWarning, match="this cached kernel is damaged"):
        again = Module(source).compile("fill", 90)
    assert (again.code, again.names) == (good.code, good.names)
    assert len(compiles) == 2
    assert Module(source).compile("fill", 90) == again  # whole again
    assert len(compiles) == 2


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_no_obstacle(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert Module(source).compile("fill", 90).code


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers about this machine are kept for the process: forget them before and after."""
    kept = (nvrtc.core, nvrtc.version, nvrtc.include_dirs, nvrtc.can_compile, cuda._has_gpu)
    for function in kept:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in kept:
        function.cache_clear()


def test_a_missing_cuda_core_is_named(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    reason = available()
    assert reason is not None
    assert "cuda-core cannot be imported" in reason
    assert "flashkernel[cuda]" in reason
    with pytest.raises(CompileError, match=r"kernel.cu: cuda-core cannot be imported"):
        compile_cubin("", [], "sm_90")


@needs_nvrtc
def test_a_missing_nvrtc_is_named(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.13 not found\nsearched everywhere")

    monkeypatch.setattr(nvrtc, "version", missing)
    assert "NVRTC cannot be loaded (libnvrtc.so.13 not found); install" in str(available())


@needs_nvrtc
def test_missing_headers_are_named(forgetful: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nvidia", None)
    assert "cuda_fp16.h" in str(available())


@needs_nvrtc
def test_a_toolkit_serves_where_the_packages_are_missing(
    forgetful: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_fp16.h").touch()
    (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {nvrtc.version()[0]}000\n")
    assert nvrtc.include_dirs() == (str(include),)
    nvrtc.include_dirs.cache_clear()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  9000\n")  # another major version's headers
    assert nvrtc.include_dirs() == ()


@needs_nvrtc
def test_a_machine_without_a_gpu_says_so_unless_one_is_pretended(
    forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_has_gpu", lambda: False)
    assert available() == "torch sees no CUDA GPU"
    with devices.pretend(devices.KNOWN["h200"]):
        assert available() is None


@pytest.mark.gpu
@needs_nvrtc
def test_code_from_the_cache_runs(source: Path, compiles: list[str]) -> None:
    for _ in range(2):  # the second module reads what the first has kept
        out = torch.zeros(100, device="cuda")
        Module(source).kernel("fill", FILL).launch(1, 128, (out, 2.5, 100, True))
        assert out.tolist() == [2.5] * 100
    assert len(compiles) == 1
