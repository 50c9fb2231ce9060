"""The kinds of backend, each with what it needs from the machine; a room adds what it needs from the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from flashkernel.core import cuda as cuda_loader
from flashkernel.core import env
from flashkernel.core.op import FLOATS, Backend, Call
from flashkernel.core.versions import INSTALL_TRITON

Supports = Callable[[Call], "str | None"]
_installed = cache(find_spec)


def _anything(call: Call) -> str | None:
    return None


def reference(target: str) -> Backend:
    """The ground truth; runs everywhere, picked only when asked for."""
    return Backend("reference", target, _anything, composite=True, auto_devices=())


def torch_native(target: str, supports: Supports = _anything) -> Backend:
    """The best that torch itself offers; the default on a CPU."""
    return Backend("torch", target, supports, composite=True, auto_devices=("cpu", "cuda"))


def triton(
    target: str, supports: Supports = _anything, dtypes: tuple[torch.dtype, ...] = FLOATS, least: int = 75
) -> Backend:
    """Portable Triton kernels. On a CPU they run under Triton's interpreter, for tests, when asked for.

    Kernels that multiply matrices need sm_80: before, Triton has no tensor cores for them.
    """

    def answer(call: Call) -> str | None:
        if _installed("triton") is None:
            return f"triton is not installed; {INSTALL_TRITON}"
        if call.device.kind != "cuda" and not env.interpreting():
            return "it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
        return _dtype(call, dtypes) or _arch(call, least) or supports(call)

    return Backend("triton", target, answer)


def hopper(
    target: str,
    supports: Supports = _anything,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    deprioritised: Supports | None = None,
) -> Backend:
    """Gluon kernels for sm_90 alone: tile copies and matrix products that run beside the warps that issue them."""

    def answer(call: Call) -> str | None:
        if _installed("triton") is None:
            return f"triton is not installed; {INSTALL_TRITON}"
        if _installed("triton.experimental.gluon") is None:
            return f"this version of triton has no Gluon; {INSTALL_TRITON}"
        if call.device.kind != "cuda" or call.device.arch != 90:
            return f"it needs a Hopper GPU (sm_90); {call.device.name} is not one"
        return _dtype(call, dtypes) or supports(call)

    return Backend("hopper", target, answer, deprioritised=deprioritised)


def cuda(target: str, supports: Supports = _anything, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Backend:
    """CUDA C++ compiled at first use by NVRTC; picked only when asked for, unless a room says otherwise."""

    def answer(call: Call) -> str | None:
        if call.device.kind != "cuda":
            return "it needs a CUDA GPU"
        return _dtype(call, dtypes) or _arch(call, 75) or cuda_loader.available() or supports(call)

    return Backend("cuda", target, answer, auto_devices=())


def _dtype(call: Call, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if call.dtype in dtypes:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"it computes in {names}, not in {str(call.dtype).removeprefix('torch.')}"


def _arch(call: Call, least: int) -> str | None:
    if call.device.kind != "cuda":
        return None
    if call.device.arch < least:
        return f"it needs sm_{least} or newer; {call.device.name} is sm_{call.device.arch}"
    if call.dtype == torch.bfloat16 and call.device.arch < 80:
        return f"bfloat16 needs sm_80 or newer; {call.device.name} is sm_{call.device.arch}"
    return None
