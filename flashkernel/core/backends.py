"""The kinds of backend with their requirements on the machine; operators add requirements on the call (`supports`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from flashkernel.core import cpp as cpp_loader
from flashkernel.core import cuda as cuda_loader
from flashkernel.core import env
from flashkernel.core.op import FLOATS, Backend, Call
from flashkernel.core.tracing import assume_constant_result
from flashkernel.core.versions import INSTALL_TRITON

Supports = Callable[[Call], "str | None"]


@cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


@assume_constant_result  # not of the cached function itself: dynamo traces through the cache
def installed(module: str) -> bool:
    """Whether a module can be imported; it is not imported."""
    return _is_installed(module)


def _anything(call: Call) -> str | None:
    return None


def reference(target: str) -> Backend:
    """The ground truth in plain torch. Runs everywhere; used only on request."""
    return Backend("reference", target, _anything, composite=True, auto_devices=())


def torch_native(target: str, supports: Supports = _anything) -> Backend:
    """The best implementation in torch itself; the default on a CPU."""
    return Backend("torch", target, supports, composite=True, auto_devices=("cpu", "cuda"))


def triton(
    target: str, supports: Supports = _anything, dtypes: tuple[torch.dtype, ...] = FLOATS, min_arch: int = 75
) -> Backend:
    """Portable Triton kernels. On a CPU they run under Triton's interpreter, on request, for tests.

    Kernels with matrix products need `min_arch=80`: Triton does not use the tensor cores of older GPUs.
    """

    def answer(call: Call) -> str | None:
        if not installed("triton"):
            return f"triton is not installed; {INSTALL_TRITON}"
        if call.device.kind != "cuda" and not env.interpreting():
            return "it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
        if call.device.kind != "cuda" and call.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly; it needs a CUDA GPU, or float16 or float32"
        return _dtype(call, dtypes) or _arch(call, min_arch) or supports(call)

    return Backend("triton", target, answer)


def hopper(
    target: str,
    supports: Supports = _anything,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    deprioritized: Supports | None = None,
) -> Backend:
    """Gluon kernels for sm_90 only, with TMA and asynchronous warpgroup matrix products (wgmma)."""

    def answer(call: Call) -> str | None:
        if not installed("triton"):
            return f"triton is not installed; {INSTALL_TRITON}"
        if not installed("triton.experimental.gluon"):
            return f"this version of triton has no Gluon; {INSTALL_TRITON}"
        if call.device.kind != "cuda" or call.device.arch != 90:
            return f"it needs a Hopper GPU (sm_90); {call.device.name} is not one"
        return _dtype(call, dtypes) or supports(call)

    return Backend("hopper", target, answer, deprioritized=deprioritized)


def cuda(
    target: str,
    supports: Supports = _anything,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    auto_devices: tuple[str, ...] = (),
    deprioritized: Supports | None = None,
) -> Backend:
    """CUDA C++ kernels from sm_75 up, compiled at first use by NVRTC; used only on request unless `auto_devices`."""

    def answer(call: Call) -> str | None:
        if call.device.kind != "cuda" and cuda_loader.emulator is None:
            return "it needs a CUDA GPU"
        arch = cuda_loader.virtual_arch()
        if arch is not None and arch < 80 and call.dtype == torch.bfloat16:
            return f"bfloat16 needs sm_80 or newer; kernels are compiled for sm_{arch}"
        return _dtype(call, dtypes) or _arch(call, 75) or cuda_loader.available() or supports(call)

    return Backend("cuda", target, answer, auto_devices=auto_devices, deprioritized=deprioritized)


def cpp(
    target: str,
    supports: Supports = _anything,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    deprioritized: Supports | None = None,
) -> Backend:
    """C++ kernels for a CPU, compiled at first use by the machine's C++ compiler."""

    def answer(call: Call) -> str | None:
        if call.device.kind != "cpu":
            return "its kernels run on a CPU"
        return _dtype(call, dtypes) or supports(call) or cpp_loader.can_compile()

    return Backend("cpp", target, answer, auto_devices=("cpu",), deprioritized=deprioritized)


def _dtype(call: Call, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if call.dtype in dtypes:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"it computes in {names}, not in {str(call.dtype).removeprefix('torch.')}"


def _arch(call: Call, min_arch: int) -> str | None:
    if call.device.kind != "cuda":
        return None
    if call.device.arch < min_arch:
        return f"it needs sm_{min_arch} or newer; {call.device.name} is sm_{call.device.arch}"
    if call.dtype == torch.bfloat16 and call.device.arch < 80:
        return f"bfloat16 needs sm_80 or newer; {call.device.name} is sm_{call.device.arch}"
    return None
