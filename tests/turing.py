"""Runs what a Turing GPU (sm_75) executes on the newer GPU at hand: PTX for sm_75, finished by the driver.

Inside `turing()` dispatch and launch configs are those of a T4; every Triton kernel is compiled to PTX for sm_75 and
launched through the CUDA driver, and every CUDA C++ kernel is built for sm_75 (`flashkernel.core.cuda.built_for`).

    with turing() as launched:
        flashkernel.rms_norm(torch.randn(4, 64, device="cuda", dtype=torch.float16))
    assert launched == ["rms_norm_forward"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from compiled import Specialization

from flashkernel.core import cuda, driver, replay_switch
from flashkernel.core import device as devices
from flashkernel.core import launch as launching
from flashkernel.core.driver import LaunchRecord, PreparedLaunch
from flashkernel.core.launch import Launch

ARCH, GPU = 75, devices.KNOWN["t4"]
_UNASKED_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking for them
_loaded: dict[tuple[Any, ...], Any] = {}  # by kernel, specialization and device index


@contextmanager
def turing() -> Iterator[list[str]]:
    """Inside, kernels run as on a T4. Yields the names of the Triton kernels launched.

    Backward passes run on the calling thread: autograd's own threads do not see the context variables set here.
    """
    launched: list[str] = []

    def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        code = launch_for_turing(Launch(kernel, grid, args, constants))
        launched.append(kernel.fn.__name__)
        return code

    with (
        devices.pretend(GPU),
        cuda.built_for(ARCH),
        replay_switch.suspended(),
        torch.autograd.set_multithreading_enabled(False),
        mock.patch.object(launching, "_run", run),
    ):
        yield launched


def launch_for_turing(launch: Launch) -> Any:
    """Compile a launch for sm_75 and run it on the current stream of its first tensor's device."""
    first = launch.args[0][0] if isinstance(launch.args[0], tuple) else launch.args[0]
    with torch.cuda.device(first.device):
        code = _code(launch, first.device.index or 0)
        record = launching._launch_record(launch.kernel, code, launch.grid, launch.args, launch.constants)
        if isinstance(record, str):
            raise RuntimeError(f"{launch.name}: {record}")
        submit(record, torch.cuda.current_stream().cuda_stream)
    return code


def submit(record: LaunchRecord, stream: int) -> None:
    """Launch through the driver."""
    addresses = {
        index: value.data_ptr() if isinstance(value, torch.Tensor) else value or 0
        for index, (kind, value) in enumerate(record.params)
        if kind == "P"
    }
    prepared = PreparedLaunch(record, stream, (), addresses)
    status = driver.launch()(prepared.config, prepared.function, prepared.params, None)
    if status:
        prepared.handle_error(status)


def _code(launch: Launch, index: int) -> Any:
    """The compiled kernel with the attributes that core/launch.py reads of Triton's own, loaded on a GPU."""
    found = Specialization.of(launch)
    parts = (found.signature, found.constexprs, found.attributes, found.options)
    key = (launch.kernel, repr(parts), index)
    if key not in _loaded:
        code = found.compile(launch, ARCH)
        ptx = code.asm["ptx"]
        assert f".target sm_{ARCH}" in ptx, f"{launch.name} was not compiled for sm_{ARCH}"
        kernel, function = load(ptx, code.metadata.name, code.metadata.shared, index)
        _loaded[key] = SimpleNamespace(
            name=code.metadata.name, src=code.src, metadata=code.metadata, packed_metadata=code.packed_metadata,
            asm=code.asm, function=function, kernel=kernel,
        )  # fmt: skip
    return _loaded[key]


def load(ptx: str, name: str, shared: int, index: int) -> tuple[Any, int]:
    """(cuda-core's kernel, which keeps the code loaded; its CUfunction) of PTX that the driver compiles for its GPU."""
    cuda._adopt_context(index)
    kernel = cuda.core().ObjectCode.from_ptx(ptx.encode()).get_kernel(name)
    if shared > _UNASKED_SHARED:
        from cuda.bindings import driver as bindings

        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cuda._driver("cuKernelSetAttribute", attribute, shared, kernel.handle, cuda._driver("cuDeviceGet", index))
    return kernel, int(cuda._driver("cuKernelGetFunction", kernel.handle))
