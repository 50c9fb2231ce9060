"""The tested versions of triton, and the compiler options with which they generate comparable code."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

from flashkernel.core import env

# The tests compile every kernel with the first, which constraints.txt pins, and some of every kind with the last.
# pyproject.toml allows no later minor version than the last.
TESTED_TRITON = ("3.6.0", "3.9.0")
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
    """Options of Triton's compiler for every kernel on `sm_<arch>`; `launch` passes them.

    enable_fp_fusion: a multiplication and an addition become one FMA. This is the default up to 3.9, which warns where
    the option is not given, since 3.10 changes the default.

    ptx_options: from 3.7 on, Triton passes `--regAllocOptLevel=2` to ptxas, to avoid a bug of ptxas 13.1 on Blackwell.
    3.9 has ptxas 13.4 for Hopper, with which kernels that need nearly all registers then spill in their loops. The last
    option wins: level 4 is what ptxas does without the option.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    version = triton_version()
    if version is not None and version >= (3, 7) and 90 <= arch < 100:
        options["ptx_options"] = f"--regAllocOptLevel=4 {env.ptxas_options()}".rstrip()
    return options
