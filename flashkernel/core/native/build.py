"""Builds and loads the C++ extension.

It is compiled against the torch that is installed, by the machine's own compiler, once, and kept in the cache folder.
Compiling takes half a minute of one core, so a process that finds none starts another one that makes it, and goes on in
Python: calls use the extension from the process after that on, or as soon as it is there (`request`).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashkernel.core import cpp, env, replay_switch, tune
from flashkernel.core.files import locked, write_whole

MODULE = "flashkernel_replay"
LOOK_AGAIN_AFTER = 20.0  # seconds
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={MODULE}")
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")
_FOLDER = Path(__file__).parent
_loaded: Any = None
_looked = -LOOK_AGAIN_AFTER
_building: subprocess.Popen[bytes] | None = None


def extension() -> Any:
    """The loaded extension, or None."""
    return _loaded


def request() -> None:
    """Load the extension if it was built; if it was not, build it in another process."""
    global _looked, _building
    if _loaded is not None or time.monotonic() - _looked < LOOK_AGAIN_AFTER or unavailable() is not None:
        return
    _looked = time.monotonic()
    if path().exists():
        load()
    elif not failure_path().exists() and (_building is None or _building.poll() is not None):
        _building = subprocess.Popen(
            [sys.executable, "-m", "flashkernel.core.native.build"], env=env.of_child(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def unavailable() -> str | None:
    """The reason why the extension cannot be built here; None where it can."""
    if os.name != "posix":
        return "it is built on Linux only"
    return None if cpp.compiler() else "there is no C++ compiler; install g++ or clang++, or set CXX"


def status() -> str:
    """One line for `flashkernel doctor`."""
    if not env.replaying_in_cpp():
        return "calls are replayed in Python; FLASHKERNEL_REPLAY=cpp replays them in C++"
    reason = unavailable()
    if reason is not None:
        return f"calls are replayed in Python: {reason}"
    if path().exists():
        return f"calls are replayed in C++, by {path()}"
    if failure_path().exists():
        return f"calls are replayed in Python: the extension was not built, see {failure_path()}"
    return "calls are replayed in C++ once the extension is built, which the first process starts"


def load() -> Any:
    """Load the extension that was built."""
    global _loaded
    if _loaded is None:
        from triton import knobs

        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path()))
        spec = importlib.util.spec_from_file_location(MODULE, path(), loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.configure(
            suspensions=replay_switch.suspensions.buffer_info()[0], generation=tune.generation.buffer_info()[0],
            takes_cpu=env.interpreting(), parameter=torch.nn.Parameter, knobs=knobs.runtime,
        )  # fmt: skip
        _loaded = module
    return _loaded


def build() -> Path:
    """Compile the extension if it was not; CompileError if it does not compile."""
    with locked(path().with_suffix(".lock")):
        if not path().exists():
            _compile(path())
    return path()


def _compile(target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = [torch_folder / "include", torch_folder / "include" / "torch" / "csrc" / "api" / "include"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [
            str(cpp.compiler()), *_FLAGS, "-shared", str(_FOLDER / "replay.cpp"), "-o", str(built),
            f"-I{sysconfig.get_path('include')}", *[f"-isystem{one}" for one in include],
            f"-L{torch_folder / 'lib'}", *_LIBRARIES,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise cpp.CompileError(f"the extension that replays calls does not compile:\n{done.stderr.strip()}")
        os.replace(built, target)


@cache
def path() -> Path:
    """Where the compiled extension is kept: a file for each torch, Python, compiler and version of the source."""
    sources = [file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.[ch]*")) if file.suffix != ".py"]
    compiler = cpp.compiler() or ""
    parts = [torch.__version__, torch.version.git_version or "", sys.version, compiler, *_FLAGS, *sources]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return env.cache_dir() / "replay" / f"{MODULE}-{key}.so"


def failure_path() -> Path:
    """The file with the compiler's errors, which keeps later processes from trying again."""
    return path().with_suffix(".txt")


def _main() -> None:
    """Build in a process of its own, unless another one does."""
    with suppress(OSError):
        os.nice(10)
    try:
        build()
    except cpp.CompileError as error:
        write_whole(failure_path(), str(error))


if __name__ == "__main__":
    _main()
