"""Runs CUDA C++ kernels on CPU tensors: g++ compiles them, and the threads of a block are fibers (machine.h).

Inside `emulated()` the `cuda` backends accept CPU tensors. The kernels' own source is compiled, with two replacements:
the headers where all PTX instructions are, and CUDA's built-in names. Beside the arithmetic, a launch checks that

- barriers and instructions of a warp are met by all threads that they wait for,
- shared memory is not read before it is written (it holds NaN) nor accessed outside of what the launch asked for,
- global memory is not accessed outside of the tensors' storages,
- no thread reads an asynchronous copy before it waits for it, or overwrites one that is under way; copies by TMA and
  Hopper's asynchronous products are the same, and their mbarriers get the arrivals and bytes that they expect,
- setmaxnreg moves no more registers than the block has,
- kernels do not depend on the order in which warps run between barriers.

It does not see bank conflicts, registers or timing.

    with emulated():
        flashkernel.softmax(torch.randn(4, 100), backend="cuda")

`emulated(75)` builds what a Turing GPU executes; launchers choose their tiles for it. `emulated(90)` builds what a
Hopper GPU executes, with its shared memory; launchers that ask `cuda.target` choose tiles for an A100.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashkernel.core import cuda, dispatch, env, nvrtc, replay_switch
from flashkernel.core.cuda import ARGUMENT_TYPES, Kernel
from flashkernel.core.device import KNOWN
from flashkernel.core.driver import TensorMap

FOLDER = Path(__file__).parent
# Headers with PTX instructions, by models of them.
REPLACED = ("ptx.cuh", "hopper_ptx.cuh", "wgmma_registers.cuh", "wgmma_shared.cuh")
ARCH = 80  # of the GPU that launchers see
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing", "-w",
    "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-fsanitize=alignment",
)  # fmt: skip
# Dynamic shared memory, as a kernel declares it: extern __shared__ __align__(1024) unsigned char shared[];
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_INCLUDE = re.compile(r'^(\s*#\s*include\s*)[<"]([^">]+)[">]', re.MULTILINE)

_lock = threading.Lock()  # a compiled kernel has one machine
_libraries: dict[str, ctypes.CDLL] = {}


class EmulationError(AssertionError):
    """A kernel did what a GPU does not allow."""


@cache
def unavailable() -> str | None:
    """The reason why kernels cannot be emulated here, or None."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    return nvrtc.can_compile()  # and with it the CUDA headers


@contextmanager
def emulated(arch: int | None = None) -> Iterator[None]:
    """Within it, CUDA C++ kernels run on CPU tensors, compiled for sm_<arch> if given, else for sm_80."""
    before, choices = cuda.emulator, dispatch._choices
    cuda.emulator, dispatch._choices = launch, {}
    try:
        with cuda.built_for(arch), replay_switch.suspended():
            yield
    finally:
        cuda.emulator, dispatch._choices = before, choices


def launch(kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared: int) -> None:
    """Run all blocks of a launch; EmulationError where a GPU would fail or hang."""
    limit = (KNOWN["h200"] if cuda.virtual_arch() == 90 else cuda.target(torch.device("cpu"))).shared_per_block
    if shared > limit:
        raise EmulationError(f"{kernel.name}: {shared} bytes of shared memory; a block has at most {limit}")
    library = _library(kernel, kernel.module.older_arch() or ARCH)
    values = [_pack(value) for value in kernel.pack(args, -1)]
    sizes = (ctypes.c_uint * 256)()
    expected = [sizes[i] for i in range(library.parameter_sizes(sizes))]
    given = [ctypes.sizeof(value) for value in values]
    if given != expected:
        raise EmulationError(f"{kernel.name} has parameters of {expected} bytes; {given} bytes are passed")
    addresses = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
    found = [
        index for index, value in enumerate(values) if isinstance(value, (ctypes.c_void_p, ctypes.Array))
    ]  # a tensor map starts with its pointer
    pointers = (ctypes.c_uint * max(1, len(found)))(*found)
    tensors = [value.base if isinstance(value, TensorMap) else value for value in args]
    kept = [value.untyped_storage() for value in tensors if isinstance(value, torch.Tensor)]
    sizes_by_address = {storage.data_ptr(): storage.nbytes() for storage in kept if storage.nbytes()}
    storages = (_Storage * max(1, len(sizes_by_address)))(*sizes_by_address.items())
    with _lock:
        message = library.launch(
            addresses, pointers, len(found), storages, len(sizes_by_address), _three(grid), _three(block), shared
        )
    if message is not None:
        raise EmulationError(f"{kernel.name}: {message.decode()}")


class _Storage(ctypes.Structure):
    """As in machine/fibers.h: a tensor's storage, and room for where the kernel sees it."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("region", ctypes.c_void_p), ("copy", ctypes.c_void_p),
    ]  # fmt: skip


def _pack(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_void_p(value)
    if isinstance(value, TensorMap):  # as hopper_ptx.cuh here declares it
        words = (value.base.data_ptr(), *value.sizes, *value.strides, *value.box, value.swizzle)
        return (ctypes.c_uint64 * 16)(*words)
    if isinstance(value, ctypes._SimpleCData):
        return value
    return ARGUMENT_TYPES[str(value.dtype)](value.item())  # a numpy scalar


def _three(sizes: int | Sequence[int]) -> Any:
    parts = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return (ctypes.c_uint * 3)(*parts, *[1] * (3 - len(parts)))


def _library(kernel: Kernel, arch: int) -> ctypes.CDLL:
    """The kernel compiled for the CPU, from the cache where it is there."""
    module = kernel.module
    sources = _sources(module.source_path, module.include)
    machine = _machine()
    digest = _digest(machine.name, sources, kernel.name, module.options, arch)
    if digest in _libraries:
        return _libraries[digest]
    target = _cache() / f"{digest}.so"
    with _lock:
        if not target.exists():
            _compile(target, machine, sources, module.source_path.name, kernel.name, module.options, arch)
        library = ctypes.CDLL(str(target))
    library.launch.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.launch.argtypes = [pointer, pointer, size, pointer, size, pointer, pointer, ctypes.c_uint]
    _libraries[digest] = library
    return library


def _compile(
    target: Path, machine: Path, sources: dict[str, str], main: str, name: str, options: Sequence[str], arch: int
) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for file_name, text in sources.items():
            (Path(folder) / file_name).write_text(text)
        macros = [option.removeprefix("--define-macro=") for option in options if option.startswith("--define-macro=")]
        lines = ['#include "machine.h"', f"#define __CUDA_ARCH__ {10 * arch}"]
        lines += [f"#define {macro.partition('=')[0]} {macro.partition('=')[2] or 1}" for macro in macros]
        lines += [
            f'#include "{main}"',
            f"using Kernel = cuda_emulator::Entry<&{name}>;",
            '#define EXPORTED extern "C" __attribute__((visibility("default")))',
            "EXPORTED unsigned parameter_sizes(unsigned* size) { return Kernel::sizes(size); }",
            "EXPORTED const char* launch(void** arguments, const unsigned* pointers, size_t pointer_count,",
            "        cuda_emulator::Storage* storages, size_t storage_count, const unsigned* grid,",
            "        const unsigned* block, unsigned shared) {",
            "    return cuda_emulator::launch(&Kernel::run, arguments, pointers, pointer_count, storages,",
            "                                 storage_count, grid, block, shared);",
            "}",
        ]
        (Path(folder) / "entry.cpp").write_text("\n".join(lines) + "\n")
        made = Path(folder) / "library.so"
        parts = [Path(folder) / "entry.cpp", machine / "machine.o"]
        _gpp([*FLAGS, "-shared", "-o", made, *parts, f"-I{machine}", f"-I{folder}"], name)
        made.replace(target)


def _gpp(arguments: Sequence[Any], name: str) -> None:
    headers = [f"-isystem{folder}" for folder in nvrtc.include_dirs()]
    done = subprocess.run(["g++", *map(str, arguments), *headers], capture_output=True, text=True)
    if done.returncode != 0:
        raise cuda.CompileError(f"{name} does not compile for the CPU:\n{done.stderr[:10000]}")


def _sources(source_path: Path, folders: Sequence[Path]) -> dict[str, str]:
    """The texts of a .cu file and of the project headers it includes, by file name; those with PTX and mma.h are ours.

    All go to one folder: a quoted include looks beside its own file first, where the real ptx.cuh is.
    """
    texts: dict[str, str] = {}
    for path in (source_path, *cuda._project_headers(source_path, folders)):
        origin = FOLDER / path.name if path.name in REPLACED else path
        if path.name in texts:
            raise ValueError(f"{source_path.name} includes two files of the name {path.name}")
        text = _DYNAMIC_SHARED.sub(r"DYNAMIC_SHARED(\1, \2);", origin.read_text(encoding="utf-8"))
        text = _INCLUDE.sub(lambda found: f'{found[1]}"{Path(found[2]).name}"', text)
        texts[path.name] = f'#line 1 "{origin}"\n{text}'
    if any('#include "mma.h"' in text for text in texts.values()):  # wmma
        texts["mma.h"] = (FOLDER / "mma.h").read_text(encoding="utf-8")
    return texts


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _cache() -> Path:
    folder = env.cache_dir() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _machine() -> Path:
    """The folder of machine.h, precompiled: it, its parts and CUDA's headers take longer to read than a kernel. Beside
    it is what all kernels are linked with, machine.o."""
    paths = [*sorted(FOLDER.glob("machine.*")), *sorted((FOLDER / "machine").iterdir())]
    texts = {str(path.relative_to(FOLDER)): path.read_text() for path in paths}
    folder = _cache() / f"machine-{_digest(texts, _compiler(), FLAGS, nvrtc.include_dirs())[:16]}"
    with _lock:
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as making:
                header = Path(making) / "made" / "machine.h"
                (header.parent / "machine").mkdir(parents=True)
                for name, text in texts.items():
                    (header.parent / name).write_text(text)
                source = header.with_suffix(".cpp")
                _gpp([*FLAGS, "-O2", "-c", source, "-o", source.with_suffix(".o")], "machine.cpp")
                _gpp([*FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], "machine.h")
                with suppress(OSError):  # another process was faster
                    header.parent.replace(folder)
    return folder


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
