"""The versions of triton that were tried, and the compiler options that make them compile alike."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

from flashkernel.core import env

# The tests compile every kernel with the first, which constraints.txt pins, and some of every kind with the last.
# pyproject.toml allows no later minor version than the last.
TRIED_TRITON = ("3.6.0", "3.9.0")
INSTALL_TRITON = "pip install 'triton>=3.6,<3.10'"


@cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed triton; None where there is none."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


@cache
def compile_options(arch: int) -> dict[str, Any]:
    """Options for Triton's compiler that hold for every kernel on `sm_<arch>`; to be passed with each launch.

    enable_fp_fusion: a multiplication and an addition become one FMA. That was always the default; 3.9 warns where it
    is not given, since 3.10 changes it.

    ptx_options: from 3.7 on, Triton passes `--regAllocOptLevel=2` to ptxas, against a fault of ptxas 13.1 on Blackwell.
    3.9 takes ptxas 13.4 for Hopper, where kernels that need nearly all registers then spill in their loops. The option
    given last counts: level 4 compiles as ptxas does without the option.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    version = triton_version()
    if version is not None and version >= (3, 7) and 90 <= arch < 100:
        options["ptx_options"] = f"--regAllocOptLevel=4 {env.ptxas_options()}".rstrip()
    return options
