"""Every environment variable FlashKernel reads. They are read at each use, so a change takes effect at once.

| variable | meaning |
| --- | --- |
| FLASHKERNEL_CACHE_DIR | folder of compiled kernels and tuned launch configs; default: in the user's cache folder |
| FLASHKERNEL_CUDA_ARCH | compile CUDA C++ kernels for this older architecture, e.g. 75 (core/cuda.py) |
| FLASHKERNEL_REPLAY | 0: calls are not recorded and replayed (core/replay.py). cpp: replayed in C++ (core/native) |
| TRITON_INTERPRET | 1: Triton's own switch; its kernels run in Python, on CPU tensors |
| PTXAS_OPTIONS | Triton's own: additional options of ptxas |
| XDG_CACHE_HOME | the user's cache folder; default: `~/.cache` |
| CXX | the C++ compiler of CPU kernels; default: g++, c++ or clang++ (core/cpp.py) |
| CUDA_HOME | a CUDA toolkit, for the headers that CUDA C++ kernels include; default: `/usr/local/cuda` |
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels and tuned configs are kept; it may not exist yet."""
    chosen = os.environ.get("FLASHKERNEL_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flashkernel"


def cuda_arch() -> int | None:
    """The architecture to compile CUDA C++ kernels for instead of the GPU's own, as 75; None: the GPU's own."""
    chosen = os.environ.get("FLASHKERNEL_CUDA_ARCH")
    if chosen and not chosen.isdecimal():
        raise ValueError(f"FLASHKERNEL_CUDA_ARCH is {chosen!r}; it takes a number such as 75, for sm_75")
    return int(chosen) if chosen else None


def replaying() -> bool:
    """True if calls may be recorded and replayed (core/replay.py)."""
    return os.environ.get("FLASHKERNEL_REPLAY") != "0"


def replaying_in_cpp() -> bool:
    """True if calls are replayed by the C++ extension (core/native) where it is built."""
    return os.environ.get("FLASHKERNEL_REPLAY") == "cpp"


def interpreting() -> bool:
    """True if Triton kernels run under its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def ptxas_options() -> str:
    """The user's options for ptxas; options passed with a launch replace them, so `versions` appends these."""
    return os.environ.get("PTXAS_OPTIONS", "")


def cuda_home() -> Path:
    """The CUDA toolkit's folder; it may not exist."""
    return Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")


def cxx() -> str | None:
    """The C++ compiler that the user names; None: the usual ones."""
    return os.environ.get("CXX") or None


def of_child() -> dict[str, str]:
    """The environment of a Python process that imports from the same folders as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
