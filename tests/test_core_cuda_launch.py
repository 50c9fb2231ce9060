"""Launching CUDA C++ kernels: how arguments are packed and refused, and launches on a stand-in and on a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_sources import FILL, ROW_SUM, _own_cache, needs_nvrtc, source_fixture  # noqa: F401

from flashkernel.core import cuda, nvrtc
from flashkernel.core.cuda import CompiledCubin, Module


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
    Module(source).kernel("fill", FILL).launch((2,), (256,), arguments, programmatic=True)
    cuda._launch_configs.clear()
    cuda.core().LaunchConfig.programmatic_stream_serialization = False  # as from cuda-core 1.2 on
    for module in (Module(source), Module(source, virtual_arch=75), Module(source, virtual_arch=90)):
        for programmatic in (False, True):
            module.kernel("fill", FILL).launch((2,), (256,), arguments, programmatic=programmatic)
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
    monkeypatch.setattr(cuda, "MAX_LAUNCH_CONFIGS", 10)
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
@pytest.mark.alone
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
