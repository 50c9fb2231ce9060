"""Compiles CUDA C++ and launches its kernels on torch's stream.

A `Module` is a .cu file. NVRTC compiles its kernels at their first use, for the GPU at hand, and the machine code is
kept on disk under a hash of everything it depends on. cuda-core loads and launches it. A kernel may be a template
instance, `module.kernel("row_sum<__nv_bfloat16>")`; each is compiled separately, so unused ones cost no time.

    SUM = Module(Path(__file__).with_name("kernel.cu")).kernel("row_sum<float>", "pointer, pointer, int32")
    SUM.launch((rows,), (256,), (x, out, x.shape[1]))

Launches neither synchronize nor allocate and may be captured into a CUDA graph, even the first one. Compiling needs
NVRTC and the CUDA headers but no GPU: `Module.compile(name, arch)` gives the code for any architecture.

`built_for(75)`, or FLASHKERNEL_CUDA_ARCH=75, compiles every kernel to PTX for that older architecture, which the driver
finishes for the GPU at hand: what a T4 executes can be tested and timed on any newer GPU. Launchers choose their tiles
by `target(device)`, never by the device's own properties.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashkernel.core import build_counter, driver, env, nvrtc, replay_switch
from flashkernel.core import device as devices
from flashkernel.core.cuda_arguments import ARGUMENT_TYPES, declared, undeclared
from flashkernel.core.driver import LaunchRecord, PreparedLaunch
from flashkernel.core.launch import is_observed, notify_launch
from flashkernel.core.nvrtc import CompiledCubin, CompileError, can_compile, compile_cubin, core

SCHEMA = 1
MAX_LAUNCH_CONFIGS = 4096  # kept; grids depend on shapes, so there may be many

__all__ = [
    "ARGUMENT_TYPES",
    "TYPES",
    "CompileError",
    "CompiledCubin",
    "Kernel",
    "Module",
    "available",
    "can_compile",
    "compile_cubin",
]

# C++ names of the dtypes that kernels compute in.
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

_FORMATS = {
    "pointer": "P", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
    "bool": "?", "tensor_map": "M",
}  # fmt: skip

_has_gpu = cache(torch.cuda.is_available)
_built_for: ContextVar[int | None] = ContextVar("built_for", default=None)

# Takes launches on tensors that are not on a GPU: (kernel, grid, block, args, shared). `recorded_launches` sets it, and
# tests, to run kernels on a CPU.
emulator: Callable[[Kernel, Any, Any, Sequence[Any], int], None] | None = None


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch that `recorded_launches` took: the kernel, threads of a block, bytes of dynamic shared memory."""

    kernel: Kernel
    threads: int
    shared: int


@contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Collect the launches on CPU and meta tensors inside instead of running them."""
    global emulator
    before, launches = emulator, []

    def record(kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared: int) -> None:
        launches.append(RecordedLaunch(kernel, math.prod(block) if isinstance(block, tuple) else block, shared))

    emulator = record
    try:
        with replay_switch.suspended():
            yield launches
    finally:
        emulator = before


@contextmanager
def built_for(arch: int | None) -> Iterator[None]:
    """Within it, kernels are compiled for the older architecture `sm_<arch>` and finished by the driver."""
    with replay_switch.scoped(_built_for, arch):
        yield


def in_built_for() -> bool:
    """True inside `built_for`: decisions made there hold nowhere else."""
    return _built_for.get() is not None


def virtual_arch() -> int | None:
    """The older architecture that kernels are compiled for, or None: the GPU's own."""
    return _built_for.get() or env.cuda_arch()


def vectorized(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where 16-byte loads cannot read its rows."""
    unit = 16 // x.element_size()
    apart = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
    if x.data_ptr() % 16 or x.stride(-1) != 1 or any(stride % unit for stride in apart):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def target(device: torch.device) -> devices.Device:
    """The GPU that kernels are compiled for: the one at hand, with the limits of an older one under `built_for`."""
    own = devices.KNOWN["a100"] if device.type == "cpu" and emulator is not None else devices.properties(device)
    arch = virtual_arch()
    if arch is None or arch >= own.arch:
        return own
    known = next((one for one in devices.KNOWN.values() if one.arch == arch), None)
    shared = own.shared_per_block if known is None else known.shared_per_block
    return replace(own, arch=arch, shared_per_block=min(shared, own.shared_per_block))


def available() -> str | None:
    """The reason why CUDA C++ kernels cannot run here, or None; a pretended GPU counts as present."""
    reason = can_compile()
    if reason is None and not devices.pretending() and emulator is None and not _has_gpu():
        return "torch sees no CUDA GPU"
    return reason


class Module:
    """A .cu file and how to compile it.

    Args:
        source_path: The .cu file.
        defines: Macros by name.
        options: Options of NVRTC, e.g. "--use_fast_math".
        include: Folders of project headers.
        specific: Compile for architecture-specific instructions (sm_90a) from sm_90 on.
        virtual_arch: Compile to PTX for this older architecture, whatever `built_for` says.
    """

    def __init__(
        self,
        source_path: Path,
        *,
        defines: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        include: Sequence[Path] = (),
        specific: bool = False,
        virtual_arch: int | None = None,
    ) -> None:
        self.source_path = Path(source_path)
        self.include = (self.source_path.parent, *map(Path, include))
        self.specific = specific
        self.virtual_arch = virtual_arch
        macros = [f"--define-macro={name}={_macro(value)}" for name, value in (defines or {}).items()]
        self.options = (*options, *macros)
        self._kernels: dict[tuple[str, str | None], Kernel] = {}

    def kernel(self, name: str, arguments: str | None = None) -> Kernel:
        """A kernel by name expression. `arguments` declares its parameters ("pointer, int32, float32"), so that plain
        Python numbers can be passed; without it, scalars must come as ctypes or numpy values."""
        key = (name, arguments)
        if key not in self._kernels:
            self._kernels[key] = Kernel(self, name, arguments)
        return self._kernels[key]

    def older_arch(self) -> int | None:
        """The architecture below the GPU's own that it is compiled for, if any."""
        return self.virtual_arch or virtual_arch()

    def target(self, arch: int) -> str:
        """NVRTC's name of the architecture that a GPU of `sm_<arch>` gets code for."""
        older = self.older_arch()
        if older is not None and (older < arch or self.virtual_arch is not None):
            return f"compute_{older}"
        return f"sm_{arch}a" if self.specific and arch >= 90 else f"sm_{arch}"

    def compile(self, name: str, arch: int, cache_dir: Path | None = None) -> CompiledCubin:
        """The code of one kernel for `sm_<arch>`, from the disk cache if it is there: the user's, or `cache_dir`."""
        source = self.source_path.read_text(encoding="utf-8")
        reason = can_compile()
        if reason is not None:
            raise CompileError(f"{self.source_path.name}: {reason}")
        path = (cache_dir or env.cache_dir()) / "cuda" / f"{self._digest(source, name, arch)}.json"
        compiled = nvrtc.read_cached(path, name)
        build_counter.note("loaded" if compiled is not None else "compiled")
        if compiled is None:
            file_name, options = self.source_path.name, self.options
            target, include = self.target(arch), self.include
            compiled = compile_cubin(source, [name], target, options, file_name=file_name, include=include)
            nvrtc.write_cached(path, compiled)
        return compiled

    def _digest(self, source: str, name: str, arch: int) -> str:
        """A hash of all that the code depends on: source, project headers, options, target, compiler, CUDA headers."""
        headers = [(path.name, path.read_bytes()) for path in _project_headers(self.source_path, self.include)]
        toolkit = [nvrtc.header_version(folder) for folder in nvrtc.include_dirs()]
        how = (name, self.target(arch), self.options, nvrtc.version(), toolkit)
        return hashlib.sha256(repr((SCHEMA, source, headers, how)).encode()).hexdigest()


def _macro(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _project_headers(source_path: Path, folders: Sequence[Path]) -> list[Path]:
    """Files of the project's folders that a source includes, directly or through one another, in order."""
    found: dict[Path, None] = {}
    waiting = [source_path]
    while waiting:
        current = waiting.pop(0)
        text = current.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE):
            for folder in (current.parent, *folders):
                header = (folder / name).resolve()
                if header.is_file():
                    if header not in found:
                        found[header] = None
                        waiting.append(header)
                    break
    return list(found)


_streams: dict[tuple[int, int], Any] = {}
_launch_configs: dict[tuple[Any, Any, int, bool], Any] = {}
_thread = threading.local()  # .devices: indices whose context this thread has made current
_load_lock = threading.Lock()


class Kernel:
    """A kernel of a module, compiled and loaded on each GPU when first launched there."""

    def __init__(self, module: Module, name: str, arguments: str | None) -> None:
        self.module = module
        self.name = name
        self.arguments = None if arguments is None else tuple(part.strip() for part in arguments.split(","))
        unknown = [part for part in self.arguments or () if part not in ARGUMENT_TYPES]
        if unknown:
            raise ValueError(f"{name}: argument type {unknown[0]!r} is not one of {', '.join(ARGUMENT_TYPES)}")
        self._loaded: dict[tuple[int, int | None], Any] = {}  # by device index and architecture
        self._shared: dict[tuple[int, int | None], int] = {}  # dynamic shared memory allowed so far

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any],
        shared: int = 0,
        device: torch.device | None = None,
        programmatic: bool = False,
    ) -> None:
        """Run on the current stream of `device` (by default the first tensor's); an empty grid launches nothing.

        Tensors pass their data pointer and None a null pointer; numbers follow the declared arguments. `shared` is
        dynamic shared memory in bytes. `programmatic` is programmatic dependent launch, from sm_90 on: the kernel may
        start before its predecessor ends, and must wait (griddepcontrol.wait) before it accesses memory.
        """
        if grid == 0 or (isinstance(grid, tuple) and 0 in grid):
            return
        if device is None:
            device = next((value.device for value in args if isinstance(value, torch.Tensor)), torch.device("cuda"))
        if device.type != "cuda" and emulator is not None:
            return emulator(self, grid, block, args, shared)
        if device.type != "cuda":
            raise ValueError(f"{self.name}: tensors are on {device}; CUDA kernels need them on a GPU")
        current = torch.cuda.current_device()
        if device.index is None or device.index == current:
            return self._launch(current, grid, block, args, shared, programmatic)
        with torch.cuda.device(device):
            return self._launch(device.index, grid, block, args, shared, programmatic)

    def _launch(self, index: int, grid: Any, block: Any, args: Sequence[Any], shared: int, programmatic: bool) -> None:
        older = self.module.older_arch()
        kernel = self._loaded.get((index, older)) or self.load(index)
        if index not in getattr(_thread, "devices", ()):
            _adopt_context(index)
        if shared > self._shared.get((index, older), 0):
            self._allow_shared(index, kernel, shared)
        # Code for an older architecture has no griddepcontrol.wait.
        key = (grid, block, shared, programmatic and (older or 90) >= 90)
        config = _launch_configs.get(key)
        if config is None:
            if len(_launch_configs) >= MAX_LAUNCH_CONFIGS:
                _launch_configs.clear()
            config = _launch_configs[key] = _launch_config(*key)
        handle = torch._C._cuda_getCurrentRawStream(index)
        if self.arguments is not None and "tensor_map" in self.arguments:
            return self._launch_prepared(self._launch_record(kernel, key, args), self.pack(args, index), handle)
        stream = _streams.get((index, handle))
        if stream is None:
            stream = _streams[index, handle] = core().Stream.from_handle(handle)
        core().launch(stream, config, kernel, *self.pack(args, index))
        if is_observed():
            notify_launch(self._launch_record(kernel, key, args))

    def _launch_prepared(self, record: Any, packed: Sequence[Any], stream: int) -> None:
        """Launch through the driver, which takes tensor maps; cuda-core packs them from version 1.2 on only."""
        addresses = {
            index: value.base.data_ptr() if kind == "M" else value
            for index, ((kind, _), value) in enumerate(zip(record.params, packed))
            if kind in "MP"
        }
        prepared = PreparedLaunch(record, stream, (), addresses)
        prepared.handle_error(driver.launch()(prepared.config, prepared.function, prepared.params, None))
        if is_observed():
            notify_launch(record)

    def _launch_record(self, kernel: Any, key: tuple[Any, Any, int, bool], args: Sequence[Any]) -> LaunchRecord | str:
        """The record that the driver repeats this launch from, or the reason why there is none."""
        if self.arguments is None:
            return f"{self.name} has no declared arguments"
        grid, block, shared, programmatic = key
        (x, y, z), (u, v, w) = (
            ((*sizes, 1, 1) if isinstance(sizes, tuple) else (sizes, 1, 1))[:3] for sizes in (grid, block)
        )
        params = tuple((_FORMATS[kind], value) for kind, value in zip(self.arguments, args))
        function = int(_driver("cuKernelGetFunction", kernel.handle))
        return LaunchRecord(
            self.name, params, function, (x, y, z), (u, v, w), shared, programmatic, owner=kernel
        )  # fmt: skip

    def load(self, index: int) -> Any:
        """Compile (or take from the disk) and load for the GPU of this index; launches do it themselves."""
        key = (index, self.module.older_arch())
        with _load_lock, torch.cuda.device(index), _loading_allowed():
            if key not in self._loaded:
                _adopt_context(index)
                major, minor = torch.cuda.get_device_capability(index)
                arch = 10 * major + minor
                compiled = self.module.compile(self.name, arch)
                kind = core().ObjectCode
                is_ptx = self.module.target(arch).startswith("compute_")
                code = (kind.from_ptx if is_ptx else kind.from_cubin)(compiled.code)
                kernel = code.get_kernel(compiled.names[self.name])
                self._check_declaration(kernel)
                _driver("cuKernelGetFunction", kernel.handle)  # loads the code now, not at a launch inside a capture
                self._loaded[key] = kernel
        return self._loaded[key]

    def pack(self, args: Sequence[Any], index: int) -> list[Any]:
        """Arguments as cuda-core takes them: pointers as ints, scalars as ctypes or numpy values."""
        if self.arguments is None:
            return [undeclared(self.name, value, index) for value in args]
        if len(args) != len(self.arguments):
            wanted = f"{len(self.arguments)} arguments ({', '.join(self.arguments)})"
            raise TypeError(f"{self.name} takes {wanted}, {len(args)} were given")
        return [declared(self.name, kind, value, index) for kind, value in zip(self.arguments, args)]

    def _check_declaration(self, kernel: Any) -> None:
        """Compare the declared arguments with the compiled kernel's parameters, where the driver can list them."""
        if self.arguments is None:
            return
        with suppress(NotImplementedError, AttributeError):  # a driver before CUDA 12.4
            actual = [parameter.size for parameter in kernel.arguments_info]
            declared = [ctypes.sizeof(ARGUMENT_TYPES[kind]) for kind in self.arguments]
            if actual != declared:
                text = f"{self.name}: declared ({', '.join(self.arguments)}), of {declared} bytes"
                raise TypeError(f"{text}, but the kernel's parameters are of {actual} bytes")

    def _allow_shared(self, index: int, kernel: Any, shared: int) -> None:
        """Dynamic shared memory beyond 48 KiB must be asked for, kernel by kernel."""
        properties: Any = torch.cuda.get_device_properties(index)
        most = properties.shared_memory_per_block_optin
        if shared > most:
            raise ValueError(f"{self.name}: {shared} bytes of shared memory; this GPU gives a block at most {most}")
        from cuda.bindings import driver as bindings

        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver("cuKernelSetAttribute", attribute, shared, kernel.handle, _driver("cuDeviceGet", index))
        self._shared[index, self.module.older_arch()] = shared


def _launch_config(grid: Any, block: Any, shared: int, programmatic: bool) -> Any:
    """A LaunchConfig of cuda-core. Versions before 1.2 have no programmatic dependent launch: it is left out."""
    kind = core().LaunchConfig
    pdl = programmatic and hasattr(kind, "programmatic_stream_serialization")
    options = {"programmatic_stream_serialization": True} if pdl else {}
    return kind(grid=grid, block=block, shmem_size=shared, **options)


def _driver(function: str, *args: Any) -> Any:
    """Call the CUDA driver; its result, or an error that names the call."""
    from cuda.bindings import driver as bindings

    status, *results = getattr(bindings, function)(*args)
    if int(status) != 0:
        raise RuntimeError(f"{function} failed: {status.name}")
    return results[0] if results else None


def _adopt_context(index: int) -> None:
    """Make torch's context current for driver calls: autograd's threads may have none."""
    with _loading_allowed():
        core().Device(index).set_current()
    _thread.devices = {*getattr(_thread, "devices", ()), index}


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Allow code to be loaded while this thread captures a graph: loading is not work on the stream."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    from cuda.bindings import driver as bindings

    before = _driver("cuThreadExchangeStreamCaptureMode", bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        _driver("cuThreadExchangeStreamCaptureMode", before)
