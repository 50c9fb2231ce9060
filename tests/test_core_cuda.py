"""The CUDA C++ loader: compiling, which needs no GPU, and launching, on a stand-in and on a GPU."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashkernel.core import cuda, nvrtc
from flashkernel.core import device as devices
from flashkernel.core.cuda import CompiledCubin, CompileError, Module, available, compile_cubin

needs_nvrtc = pytest.mark.skipif(nvrtc.can_compile() is not None, reason=str(nvrtc.can_compile()))

HEADER = """
#pragma once
template <typename T> __device__ float widen(T value) { return static_cast<float>(value); }
"""

SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include "widen.cuh"

#ifndef FACTOR
#define FACTOR 1
#endif

// out[row] = FACTOR * sum of x[row, :]
template <typename T>
__global__ void row_sum(const T* x, float* out, int width) {
    __shared__ float partial[32];
    float sum = 0.f;
    for (int column = threadIdx.x; column < width; column += blockDim.x)
        sum += widen(x[static_cast<long long>(blockIdx.x) * width + column]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
        out[blockIdx.x] = FACTOR * total;
    }
}

extern "C" __global__ void fill(float* out, float value, long long count, bool on) {
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (on && out != nullptr && index < count) out[index] = value;
}

// Reverses a block of values through dynamic shared memory.
extern "C" __global__ void reverse(float* values, int count) {
    extern __shared__ float stage[];
    for (int index = threadIdx.x; index < count; index += blockDim.x) stage[index] = values[index];
    __syncthreads();
    for (int index = threadIdx.x; index < count; index += blockDim.x) values[index] = stage[count - 1 - index];
}
"""
ROW_SUM = "pointer, pointer, int32"
FILL = "pointer, float32, int64, bool"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "widen.cuh").write_text(HEADER)
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    return path


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
    room, blocks = tmp_path / "room", tmp_path / "blocks"
    room.mkdir()
    blocks.mkdir()
    (room / "kernel.cu").write_text('#include <shared.cuh>\nextern "C" __global__ void k(int* x) { *x = VALUE; }\n')
    (blocks / "shared.cuh").write_text("#define VALUE 1\n")
    module = Module(room / "kernel.cu", include=[blocks])
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


def test_arguments_follow_their_declaration(source: Path) -> None:
    kernel = Module(source).kernel("fill", FILL)
    x = torch.ones(4)  # a CPU tensor, whose device index is -1
    packed = kernel.pack((x, 2, 1 << 40, True), -1)
    assert packed[0] == x.data_ptr()
    assert [type(value) for value in packed[1:]] == [ctypes.c_float, ctypes.c_int64, ctypes.c_bool]
    assert [value.value for value in packed[1:]] == [2.0, 1 << 40, True]
    assert kernel.pack((None, np.float32(0.5), np.int64(3), False), -1)[0] == 0
    assert kernel.pack((0x1234, 0.1, 3, False), -1)[0] == 0x1234


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((None, 1.0, 1), TypeError, r"takes 4 arguments \(pointer, float32, int64, bool\), 3 were given"),
        ((None, 1.0, 1 << 63, True), OverflowError, "does not fit int64"),
        ((None, 1.0, 1.5, True), TypeError, "int"),
        ((1.5, 1.0, 1, True), TypeError, "takes a tensor, None or an address, not 1.5"),
        ((True, 1.0, 1, True), TypeError, "takes a tensor, None or an address, not True"),
        ((torch.ones(1), 1.0, 1, True), ValueError, "a tensor is on cpu and the launch on cuda:0"),
    ],
)
def test_wrong_arguments_are_refused(source: Path, arguments: tuple, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Module(source).kernel("fill", FILL).pack(arguments, 0)


def test_undeclared_numbers_are_refused_and_typed_ones_pass(source: Path) -> None:
    kernel = Module(source).kernel("fill")
    typed = (ctypes.c_float(1.0), np.int64(3), ctypes.c_bool(True))
    assert kernel.pack((None, *typed), 0) == [0, *typed]
    for value in (1, 1.0, True):
        with pytest.raises(TypeError, match="has no declared type"):
            kernel.pack((None, value), 0)


def test_a_kernel_is_made_once_and_its_declaration_checked(source: Path) -> None:
    module = Module(source)
    assert module.kernel("fill", FILL) is module.kernel("fill", FILL)
    with pytest.raises(ValueError, match="argument type 'half' is not one of pointer"):
        module.kernel("fill", "pointer, half")


def test_cpu_tensors_are_refused_and_an_empty_grid_launches_nothing(source: Path) -> None:
    kernel = Module(source).kernel("fill", FILL)
    with pytest.raises(ValueError, match="CUDA kernels need them on a GPU"):
        kernel.launch(1, 32, (torch.ones(1), 1.0, 1, True))
    kernel.launch(0, 32, (torch.ones(1), 1.0, 1, True))
    kernel.launch((4, 0), 32, (torch.ones(1), 1.0, 1, True))


class StandIn:
    """cuda-core and the driver, as far as a launch uses them, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
        self.launches: list[tuple] = []
        self.drivers: list[tuple] = []
        self.made: list[str] = []
        self.capturing = False
        kernel = SimpleNamespace(handle="handle", arguments_info=[SimpleNamespace(size=size) for size in sizes])

        def make(kind: str) -> Callable[..., tuple]:
            return lambda *args, **settings: self.made.append(kind) or (kind, *args, *settings.values())

        code = SimpleNamespace(get_kernel=lambda name: self.made.append(f"kernel {name}") or kernel)
        core = SimpleNamespace(
            LaunchConfig=make("config"),
            Stream=SimpleNamespace(from_handle=make("stream")),
            ObjectCode=SimpleNamespace(from_cubin=lambda code_bytes: code, from_ptx=lambda code_bytes: code),
            Device=lambda index: SimpleNamespace(set_current=lambda: self.made.append(f"context {index}")),
            launch=lambda *args: self.launches.append(args),
        )

        @contextmanager
        def on_device(index: int) -> Iterator[None]:
            yield

        monkeypatch.setattr(cuda, "core", lambda: core)
        monkeypatch.setattr(cuda, "_driver", lambda *args: self.drivers.append(args) or "before")
        monkeypatch.setattr(cuda, "_streams", {})
        monkeypatch.setattr(cuda, "_launch_configs", {})
        monkeypatch.setattr(cuda, "_thread", threading.local())
        properties = SimpleNamespace(shared_memory_per_block_optin=232448)
        for name, fake in {
            "device": on_device,
            "current_device": lambda: 0,
            "get_device_capability": lambda index: (9, 0),
            "get_device_properties": lambda index: properties,
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        compiled = CompiledCubin(b"", {"fill": "fill"}, "")
        monkeypatch.setattr(Module, "compile", lambda module, name, arch: self.made.append(f"sm_{arch}") or compiled)


def test_a_launch_makes_each_thing_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, (8, 4, 8, 1))
    kernel = Module(source).kernel("fill", FILL)
    for _ in range(3):
        kernel.launch((2,), (256,), (None, 1.0, 512, True))
    assert stand_in.made == ["context 0", "sm_90", "kernel fill", "config", "stream"]
    kernel.launch((3,), (256,), (None, 1.0, 768, True), device=torch.device("cuda", 0))
    assert stand_in.made[5:] == ["config"]
    assert len(stand_in.launches) == 4
    stream, config, _, *packed = stand_in.launches[0]
    assert stream == ("stream", 7)
    assert config == ("config", (2,), (256,), 0)
    assert packed[0] == 0
    assert [value.value for value in packed[1:]] == [1.0, 512, True]
    assert [call[0] for call in stand_in.drivers] == ["cuKernelGetFunction"]


def test_a_wrong_declaration_is_found_when_the_kernel_is_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, (8, 4, 4, 1))
    with pytest.raises(TypeError, match=r"of \[8, 4, 8, 1\] bytes, but the kernel's parameters are of \[8, 4, 4, 1\]"):
        Module(source).kernel("fill", FILL).launch(1, 32, (None, 1.0, 1, True))


@needs_nvrtc
def test_shared_memory_is_asked_for_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, (8, 4, 8, 1))
    kernel = Module(source).kernel("fill", FILL)
    for shared in (1024, 100_000, 50_000, 100_000):
        kernel.launch(1, 32, (None, 1.0, 1, True), shared=shared)
    asked = [call[2] for call in stand_in.drivers if call[0] == "cuKernelSetAttribute"]
    assert asked == [1024, 100_000]
    with pytest.raises(ValueError, match="gives a block at most 232448"):
        kernel.launch(1, 32, (None, 1.0, 1, True), shared=300_000)


@needs_nvrtc
def test_loading_inside_a_capture_relaxes_it_and_restores_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, (8, 4, 8, 1))
    stand_in.capturing = True
    kernel = Module(source).kernel("fill", FILL)
    kernel.launch(1, 32, (None, 1.0, 1, True))
    modes = [call[1] for call in stand_in.drivers if call[0] == "cuThreadExchangeStreamCaptureMode"]
    assert len(modes) == 4  # around loading, and within it around the context
    assert modes[-1] == "before"
    before = len(stand_in.drivers)
    kernel.launch(1, 32, (None, 1.0, 1, True))
    assert len(stand_in.drivers) == before  # nothing more to set up


def test_a_chained_launch_asks_for_an_early_start_where_it_can(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, (8, 4, 8, 1))
    arguments = (None, 1.0, 512, True)
    Module(source).kernel("fill", FILL).launch((2,), (256,), arguments, chained=True)
    cuda._launch_configs.clear()
    cuda.core().LaunchConfig.programmatic_stream_serialization = False  # as from cuda-core 1.2 on
    for module in (Module(source), Module(source, virtual_arch=75), Module(source, virtual_arch=90)):
        for chained in (False, True):
            module.kernel("fill", FILL).launch((2,), (256,), arguments, chained=chained)
    usual, early = ("config", (2,), (256,), 0), ("config", (2,), (256,), 0, True)
    assert [launch[1] for launch in stand_in.launches] == [usual, usual, early, usual, usual, usual, early]


@needs_nvrtc
def test_launch_config_of_cuda_core_knows_the_early_start() -> None:
    config = cuda._launch_config((2,), (256,), 0, True)
    if not hasattr(nvrtc.core().LaunchConfig, "programmatic_stream_serialization"):
        pytest.skip("cuda-core before 1.2")
    assert config.programmatic_stream_serialization
    assert not cuda._launch_config((2,), (256,), 0, False).programmatic_stream_serialization


def test_launch_configs_do_not_pile_up(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch, (8, 4, 8, 1))
    monkeypatch.setattr(cuda, "MOST_LAUNCH_CONFIGS", 10)
    kernel = Module(source).kernel("fill", FILL)
    for grid in range(1, 50):
        kernel.launch(grid, 32, (None, 1.0, 1, True))
    assert len(cuda._launch_configs) <= 10


def test_a_thread_without_a_context_gets_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, (8, 4, 8, 1))
    kernel = Module(source).kernel("fill", FILL)
    kernel.launch(1, 32, (None, 1.0, 1, True))
    thread = threading.Thread(target=lambda: kernel.launch(1, 32, (None, 1.0, 1, True)))
    thread.start()
    thread.join()
    assert stand_in.made.count("context 0") == 2


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize(
    "dtype, name", [(torch.float32, "float"), (torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")]
)
def test_a_template_computes(source: Path, dtype: torch.dtype, name: str) -> None:
    x = torch.randn(37, 1000, device="cuda").to(dtype)
    out = torch.full((37,), float("nan"), device="cuda")
    Module(source).kernel(f"row_sum<{name}>", ROW_SUM).launch((37,), (256,), (x, out, 1000))
    torch.testing.assert_close(out, x.float().sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@needs_nvrtc
def test_macros_reach_the_kernel(source: Path) -> None:
    x = torch.ones(4, 64, device="cuda")
    out = torch.empty(4, device="cuda")
    Module(source, defines={"FACTOR": 3}).kernel("row_sum<float>", ROW_SUM).launch((4,), (32,), (x, out, 64))
    assert out.tolist() == [192.0] * 4


@pytest.mark.gpu
@needs_nvrtc
def test_code_from_the_cache_runs(source: Path, compiles: list[str]) -> None:
    for _ in range(2):  # the second module reads what the first has kept
        out = torch.zeros(100, device="cuda")
        Module(source).kernel("fill", FILL).launch(1, 128, (out, 2.5, 100, True))
        assert out.tolist() == [2.5] * 100
    assert len(compiles) == 1


@pytest.mark.gpu
@needs_nvrtc
def test_a_turing_build_runs_through_the_driver(source: Path) -> None:
    out = torch.zeros(100, device="cuda")
    Module(source, virtual_arch=75).kernel("fill", FILL).launch(1, 128, (out, 2.5, 100, True))
    assert out.tolist() == [2.5] * 100


@pytest.mark.gpu
@needs_nvrtc
def test_null_pointers_and_wrong_declarations(source: Path) -> None:
    module = Module(source)
    module.kernel("fill", FILL).launch(1, 32, (None, 1.0, 10, True))
    torch.cuda.synchronize()
    with pytest.raises(TypeError, match="the kernel's parameters are of"):
        module.kernel("fill", "pointer, float64, int64, bool").launch(1, 32, (None, 1.0, 10, True))
    with pytest.raises(ValueError, match="a tensor is on cpu"):
        module.kernel("row_sum<float>", ROW_SUM).launch(1, 32, (torch.ones(1, device="cuda"), torch.ones(1), 1))


@pytest.mark.gpu
@needs_nvrtc
def test_more_than_48_kib_of_shared_memory(source: Path) -> None:
    count = 15_000  # 60 kB
    values = torch.arange(count, device="cuda", dtype=torch.float32)
    Module(source).kernel("reverse", "pointer, int32").launch(1, 256, (values, count), shared=4 * count)
    assert torch.equal(values, torch.arange(count - 1, -1, -1, device="cuda", dtype=torch.float32))


@pytest.mark.gpu
@needs_nvrtc
def test_launches_go_to_the_current_stream(source: Path) -> None:
    kernel = Module(source).kernel("fill", FILL)
    out = torch.zeros(1 << 20, device="cuda")
    kernel.launch(1, 32, (out, 0.0, 1, True))  # loaded before the streams matter
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        kernel.launch(4096, 256, (out, 3.0, out.numel(), True))
        marker = torch.cuda.Event()
        marker.record()
    assert not marker.query()  # still behind the sleep on its own stream
    side.synchronize()
    assert bool((out == 3.0).all())


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("loaded_before", [True, False])
def test_a_launch_is_captured_into_a_graph(source: Path, loaded_before: bool) -> None:
    kernel = Module(source).kernel("row_sum<float>", ROW_SUM)
    x = torch.randn(16, 256, device="cuda")
    out = torch.zeros(16, device="cuda")
    if loaded_before:
        kernel.launch((16,), (64,), (x, out, 256))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch((16,), (64,), (x, out, 256))
    for _ in range(3):
        x.normal_()
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, x.sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@needs_nvrtc
def test_a_backward_pass_may_launch(source: Path) -> None:
    """Autograd runs it on a thread of its own, which has no context of the driver's yet."""
    kernel = Module(source).kernel("fill", FILL)

    class Twos(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            dx = torch.empty_like(dy)
            kernel.launch(1, 64, (dx, 2.0, dx.numel(), True))
            return dx

    x = torch.ones(50, device="cuda", requires_grad=True)
    Twos.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 50


@pytest.mark.gpu
@needs_nvrtc
def test_a_launch_is_cheap(source: Path) -> None:
    kernel = Module(source).kernel("fill", FILL)
    out = torch.zeros(32, device="cuda")
    args = (out, 1.0, 32, True)
    for _ in range(100):
        kernel.launch(1, 32, args)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        kernel.launch(1, 32, args)
    torch.cuda.synchronize()
    assert (time.perf_counter() - start) / 1000 < 30e-6
