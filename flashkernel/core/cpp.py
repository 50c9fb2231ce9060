"""C++ kernels for the CPU: compiled at first use by the machine's own compiler, cached on disk, called by ctypes.

They are compiled for the CPU they run on (-march=native), so the cache's key has the CPU's features in it. OpenMP's
runtime is the one that torch has loaded, so that both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flashkernel.core import build_counter, env

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-w")
_lock = threading.Lock()


class CompileError(RuntimeError):
    """The C++ compiler failed; the message has its errors."""


@cache
def compiler() -> str | None:
    """Path of the C++ compiler; None where there is none."""
    return next((found for name in (env.cxx() or (), *_COMPILERS) if name and (found := shutil.which(name))), None)


@cache
def can_compile() -> str | None:
    """The reason why C++ cannot be compiled here; None where it can."""
    if compiler() is None:
        return "there is no C++ compiler; install g++ or clang++, or set CXX"
    try:
        _compile("int answer() { return 42; }", ())
    except CompileError as error:
        return str(error)
    return None


@cache
def library(path: Path) -> ctypes.CDLL:
    """The compiled library of a C++ file, whose includes lie beside it. CompileError if it does not compile."""
    with _lock:
        included = tuple(sorted(path.parent.glob("*.h")))
        return ctypes.CDLL(str(_compile(path.read_text(encoding="utf-8"), included, path.stem, count=True)))


def _compile(source: str, included: Sequence[Path], name: str = "probe", count: bool = False) -> Path:
    """A shared library, from the cache or compiled now, which the build counter is told if it shall `count`."""
    command = compiler()
    assert command is not None
    parts = [source, *[path.read_text(encoding="utf-8") for path in included], _version(command), _cpu(), *_FLAGS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    target = env.cache_dir() / "cpp" / f"{name}-{key}.so"
    if count:
        build_counter.note("loaded" if target.exists() else "compiled")
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent))
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="flashkernel-"))
        warnings.warn(f"{target}: this compiled kernel cannot be kept ({error})", stacklevel=4)
        target = folder / target.name
    try:
        (folder / f"{name}.cpp").write_text(source, encoding="utf-8")
        include = [f"-I{included[0].parent}"] if included else []
        built = _build([command, *_FLAGS, *include], folder / f"{name}.cpp")
        os.replace(built, target)
    finally:
        if folder != target.parent:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _build(command: list[str], source: Path) -> Path:
    """Compiles and links. OpenMP comes from the libraries torch has loaded, else from the compiler's; else there is
    one thread."""
    shared, object_file = source.with_suffix(".so"), source.with_suffix(".o")
    message = ""
    for openmp, linked in ((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], [])):
        message = _run([*command, *openmp, "-c", str(source), "-o", str(object_file)])
        message = message or _run([command[0], "-shared", str(object_file), *linked, "-o", str(shared)])
        if not message:
            try:
                ctypes.CDLL(str(shared))
                return shared
            except OSError as error:
                message = str(error)
    raise CompileError(f"{source.name} does not compile: {message}")


def _run(command: list[str]) -> str:
    """The errors of a command; "" if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{command[0]} ended with {done.returncode}"


@cache
def _version(command: str) -> str:
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    return done.stdout


@cache
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
