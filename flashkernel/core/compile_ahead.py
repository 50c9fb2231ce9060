"""Kernels compiled ahead, side by side, in processes that never touch the GPU.

A call on meta tensors inside `collect()` launches nothing; what it would launch is kept. `compile_all` compiles each
distinct kernel once, in forked processes that share the parent's imports. The code goes into the caches on disk
(Triton's, and ours of CUDA C++), where a later launch finds it: the arguments go through Triton's own specialization,
so the keys are the same.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from flashkernel.core import build_counter, cache_key, cuda, versions
from flashkernel.core.device import Device, pretend
from flashkernel.core.launch import Launch, collect_launches, tuple_like
from flashkernel.core.worker_pool import WorkerPool

TIMEOUT_S = 600.0
_DIVISOR = 16  # Triton compiles in whether integers and addresses are divisible by it
_INT32 = 2**31


@dataclass(frozen=True)
class Compiled:
    """One kernel that was compiled.

    Args:
        name: The kernel's name.
        seconds: Wall time in its worker.
        cpu_seconds: CPU time of the worker and of the programs that it ran (ptxas, the C compiler).
        failure: What went wrong; "" if nothing did.
        was_cached: It was on disk already.
    """

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failure: str = ""
    was_cached: bool = False


AnyLaunch = Launch | cuda.RecordedLaunch


@contextmanager
def collect(device: Device) -> Iterator[list[AnyLaunch]]:
    """Collects what calls on meta tensors would launch on `device`; the list is complete when the block ends."""
    found: list[AnyLaunch] = []
    with pretend(device), collect_launches() as triton_launches, cuda.recorded_launches() as cuda_launches:
        yield found
    found += triton_launches
    found += cuda_launches


def distinct(launches: Iterable[AnyLaunch]) -> list[AnyLaunch]:
    """One launch of each kernel that has code of its own, those that take the compiler longest first."""
    found: dict[Any, AnyLaunch] = {}
    for launch in launches:
        found.setdefault(_key(launch), launch)
    return sorted(found.values(), key=_cost, reverse=True)


def name_of(launch: AnyLaunch) -> str:
    """The kernel's name."""
    return launch.name if isinstance(launch, Launch) else launch.kernel.name


def compile_all(launches: list[AnyLaunch], arch: int, workers: int, with_launchers: bool) -> Iterator[Compiled]:
    """Compiles each of `launches` for sm_`arch`; yields them as they are done.

    The process must not have used a GPU: it forks.

    Args:
        launches: As `distinct` gives them.
        arch: 90 for sm_90.
        workers: Processes, at most.
        with_launchers: Builds the C functions through which Triton launches, which needs the driver's library.
    """
    _share_before_fork(launches)
    pool = WorkerPool(_work, (launches, arch, with_launchers), min(workers, len(launches)), TIMEOUT_S, "fork")
    for index, result, lost in pool.run([index] for index in range(len(launches))):
        yield result if result is not None else Compiled(name_of(launches[index]), failure=lost)


def _share_before_fork(launches: list[AnyLaunch]) -> None:
    """Computes what every worker would compute: the keys of kernels and of Triton itself, and loads its compiler."""
    kernels = {id(launch.kernel): launch.kernel for launch in launches if isinstance(launch, Launch)}
    for kernel in kernels.values():
        cache_key.compute_cache_keys(kernel)
    if kernels:
        with suppress(ImportError):  # later versions keep it elsewhere
            from triton.runtime.cache import triton_key

            triton_key()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_one(launch: AnyLaunch, arch: int, with_launcher: bool = False) -> Any:
    """Compiles one kernel into the cache on disk; returns Triton's compiled kernel, or the code of a CUDA kernel."""
    if not isinstance(launch, Launch):
        return launch.kernel.module.compile(launch.kernel.name, arch)
    cache_key.compute_cache_keys(launch.kernel)
    with _driver_without_gpu(arch):
        options = versions.compile_options(arch) | launch.constants
        code = launch.kernel.warmup(*map(_stand_in, launch.args), grid=launch.grid, **options)
    if with_launcher:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(code.src, code.metadata)
    return code


def _work(launches: list[AnyLaunch], arch: int, with_launchers: bool, index: int) -> Compiled:
    name, began, cpu = name_of(launches[index]), time.monotonic(), _cpu_seconds()
    build_counter.watch_triton()
    before = build_counter.counts()
    failure = ""
    try:
        compile_one(launches[index], arch, with_launchers)
    except Exception as error:  # compilers raise anything; the launch meets it again and reports it
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    was_cached = build_counter.counts().compiled == before.compiled
    return Compiled(name, time.monotonic() - began, _cpu_seconds() - cpu, failure, was_cached)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class _Driver:
    """Tells Triton which GPU to compile for, without one."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _driver_without_gpu(arch: int) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        driver._active = before


class _Pointer:
    """Stands for a tensor: its dtype, and an address with the alignment of the tensor's view in its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._address = tensor.dtype, _address(tensor)

    def data_ptr(self) -> int:
        return self._address


def _address(tensor: torch.Tensor) -> int:
    """The place in its storage, whose own address torch aligns."""
    return int(tensor.storage_offset()) * tensor.element_size() % _DIVISOR


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Pointer(value)
    if isinstance(value, tuple):
        return tuple_like(value, [_stand_in(element) for element in value])
    return value


def _key(launch: AnyLaunch) -> Any:
    """What the code of a launch depends on."""
    if not isinstance(launch, Launch):
        kernel = launch.kernel
        return id(kernel.module), kernel.name
    kernel = launch.kernel
    parts: list[Any] = [id(kernel), repr(sorted(launch.constants.items()))]
    for parameter, value in zip(kernel.params, launch.args):
        if parameter.is_constexpr:
            parts.append(repr(value))
        else:
            plain = parameter.do_not_specialize
            parts.append(_kind(value, not plain, not (plain or parameter.do_not_specialize_on_alignment)))
    return tuple(parts)


def _kind(value: Any, specialize: bool, align: bool) -> Any:
    """The type of an argument, and what of its value is compiled in."""
    if isinstance(value, tuple):
        return tuple(_kind(element, specialize, align) for element in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, align and _address(value) == 0
    if type(value) is int:
        small = -_INT32 <= value < _INT32
        return small, specialize and value == 1, align and value % _DIVISOR == 0
    if isinstance(value, (bool, float)):
        return type(value)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return value.base.dtype, tuple(value.block_shape), repr(getattr(value, "layout", None))
    return repr(value)


def _cost(launch: AnyLaunch) -> int:
    """Larger for kernels that take longer to compile: by the length of their text, which ranks them well enough."""
    return len(launch.kernel.src) if isinstance(launch, Launch) else launch.kernel.module.source_path.stat().st_size
