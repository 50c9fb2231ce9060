"""The rungs of the ladder: what each one does, and how its kernel is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.core import cuda
from flashkernel.core.cuda import TYPES, Kernel, Module
from flashkernel.core.device import Device
from flashkernel.core.driver import TensorMap
from flashkernel.core.tune import ceil_div

FOLDER = Path(__file__).parent
HALVES = (torch.float16, torch.bfloat16)
MAX_GRID_Y = 65535
MAX_INNER = 1 << 24  # of K and N: offsets within a tile are 32-bit
PIPELINED = {  # bytes of shared memory: BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES
    192 * 1024: (128, 256, 64, 2, 4, 4),
    144 * 1024: (128, 256, 64, 2, 4, 3),
    96 * 1024: (128, 256, 32, 2, 4, 4),
}
PIPELINED_SM75 = (128, 128, 32, 2, 4, 2)
_POINTERS = "pointer, pointer, pointer, int32, int32, int32"
_TMA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle
_WGMMA_TILE, _WGMMA_THREADS, _WGMMA_SHARED = (128, 256), 288, 4 * (48 * 1024 + 16)


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    Attributes:
        name: Its name in commands and results.
        idea: What it does that the rung before does not.
        reason: Why that makes it faster.
        file: Its .cu file.
        launch: Launches its kernel: (rung, A, B, C).
        dtypes: The dtypes of A, B and C that it takes.
        aligned: Whether it loads 16 bytes at a time, so that K and N must be multiples of 16 bytes.
        hopper: Whether it needs the instructions of sm_90a.
    """

    name: str
    idea: str
    reason: str
    file: str
    launch: Callable[[Rung, Tensor, Tensor, Tensor], None]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
    aligned: bool = True
    hopper: bool = False

    @cached_property
    def module(self) -> Module:
        """The .cu file of this rung."""
        return Module(FOLDER / self.file, include=CUDA_HEADERS, specific=self.hopper)

    def kernel(self, arguments: str, *template: object) -> Kernel:
        """The instance of this rung's kernel for these template arguments."""
        name = "gemm_" + self.file.removesuffix(".cu").partition("_")[2]
        return self.module.kernel(f"{name}<{', '.join(map(str, template))}>", arguments)


def matmul(a: Tensor, b: Tensor, rung: str) -> Tensor:
    """The matrix product C = A B by one rung of the ladder.

    Args:
        a: A [M, K], contiguous, on a GPU; float32 (the first four rungs), float16, or bfloat16 from sm_80 on.
        b: B [K, N] of the same dtype, contiguous.
        rung: The name of a rung: "naive", "coalesced", "shared-tiles", "register-tiles", "tensor-cores",
            "double-buffering" or "wgmma-tma".

    Returns:
        C [M, N] in the dtype of A; sums are float32.

    Raises:
        ValueError: The rung does not take these matrices on this GPU; the message says why.

    Example:
        >>> matmul(torch.ones(2, 3), torch.ones(3, 4), "fastest")
        Traceback (most recent call last):
            ...
        ValueError: ladder: there is no rung 'fastest'; the rungs are naive, coalesced, shared-tiles, register-tiles, \
tensor-cores, double-buffering, wgmma-tma
    """
    found = next((one for one in RUNGS if one.name == rung), None)
    if found is None:
        raise ValueError(f"ladder: there is no rung {rung!r}; the rungs are {', '.join(one.name for one in RUNGS)}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        shapes = f"{tuple(a.shape)} {a.dtype} on {a.device} and {tuple(b.shape)} {b.dtype} on {b.device}"
        raise ValueError(f"{rung}: A and B are {shapes}; A [M, K] and B [K, N] must have one dtype and device")
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    reason = unsupported(found, a, b, cuda.target(a.device))
    if reason is not None:
        raise ValueError(f"{rung}: {reason}")
    if c.numel() == 0 or a.shape[1] == 0:
        return c.zero_()
    found.launch(found, a, b, c)
    return c


def unsupported(rung: Rung, a: Tensor, b: Tensor, device: Device) -> str | None:
    """The reason why a rung does not take A and B on a GPU, or None."""
    if a.dtype not in rung.dtypes:
        return f"the dtype is {a.dtype}; it takes {', '.join(map(str, rung.dtypes))}"
    if a.dtype == torch.bfloat16 and device.arch < 80:
        return f"bfloat16 needs sm_80 or newer and the kernel is for sm_{device.arch}; use float16"
    if rung.hopper and device.arch != 90:
        return f"wgmma exists on sm_90 (H100, H200) only and the kernel is for sm_{device.arch}"
    if not a.is_contiguous() or not b.is_contiguous():
        return "A and B must be contiguous; call .contiguous() first"
    (m, k), n, vector = a.shape, b.shape[1], 16 // a.element_size()
    if rung.aligned and (k % vector or n % vector or a.data_ptr() % 16 or b.data_ptr() % 16):
        return (
            f"K is {k} and N is {n}; it loads 16 bytes at a time, so both must be multiples of {vector}, and A and B "
            "must start at addresses that are multiples of 16"
        )
    if max(k, n) >= MAX_INNER or m >= 1 << 31 or (not rung.hopper and ceil_div(n, 16) > MAX_GRID_Y):
        return f"M, N and K are {m}, {n}, {k}; it takes N up to {16 * MAX_GRID_Y} and K below {MAX_INNER}"
    return None


def _one_output_per_thread(rung: Rung, a: Tensor, b: Tensor, c: Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    by_row = rung.name == "naive"
    block = (32, 16) if by_row else (32, 32)  # (threadIdx.x, threadIdx.y)
    rows, columns = block if by_row else block[::-1]
    grid = (ceil_div(m, rows), ceil_div(n, columns))
    rung.kernel(_POINTERS, TYPES[a.dtype]).launch(grid, block, (a, b, c, m, n, k))


def _tile_128(rung: Rung, a: Tensor, b: Tensor, c: Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    grid = (ceil_div(m, 128), ceil_div(n, 128))
    rung.kernel(_POINTERS, TYPES[a.dtype]).launch(grid, 256, (a, b, c, m, n, k))


def pipelined_config(device: Device) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES) of rung 6: the most stages that the shared memory holds."""
    if device.arch < 80:
        return PIPELINED_SM75
    return next(config for size, config in PIPELINED.items() if size <= device.shared_per_block)


def _pipelined(rung: Rung, a: Tensor, b: Tensor, c: Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    config = pipelined_config(cuda.target(a.device))
    block_m, block_n, block_k, warps_m, warps_n, stages = config
    tiles = (ceil_div(m, block_m), ceil_div(n, block_n))
    rung.kernel(f"{_POINTERS}, int32, int32", TYPES[a.dtype], *config).launch(
        tiles[0] * tiles[1], 32 * warps_m * warps_n, (a, b, c, m, n, k, *tiles),
        shared=stages * 2 * block_k * (block_m + block_n),
    )  # fmt: skip


def _wgmma(rung: Rung, a: Tensor, b: Tensor, c: Tensor) -> None:
    (m, k), n = a.shape, b.shape[1]
    tiles = (ceil_div(m, _WGMMA_TILE[0]), ceil_div(n, _WGMMA_TILE[1]))
    kind, size = _TMA_TYPES[a.dtype], a.element_size()
    maps = (
        TensorMap(a, kind, (k, m), (k * size,), (64, 128), _SWIZZLE_128B, nan_fill=False),
        TensorMap(b, kind, (n, k), (n * size,), (64, 64), _SWIZZLE_128B, nan_fill=False),
    )
    arguments = "tensor_map, tensor_map, pointer, int32, int32, int32, int32, int32"
    rung.kernel(arguments, TYPES[a.dtype]).launch(
        min(tiles[0] * tiles[1], cuda.target(a.device).sms), _WGMMA_THREADS, (*maps, c, m, n, k, *tiles),
        shared=_WGMMA_SHARED,
    )  # fmt: skip


RUNGS = (
    Rung(
        "naive",
        "one thread per output",
        "the definition; each load of A touches 32 cache lines",
        "rung1_naive.cu",
        _one_output_per_thread,
        aligned=False,
    ),
    Rung(
        "coalesced",
        "a warp's threads take neighboring columns",
        "a warp's loads of B and stores of C touch one or two cache lines instead of 32",
        "rung2_coalesced.cu",
        _one_output_per_thread,
        aligned=False,
    ),
    Rung(
        "shared-tiles",
        "32 x 32 tiles in shared memory",
        "each element is loaded from global memory once per 32 outputs instead of once per output",
        "rung3_shared_tiles.cu",
        _one_output_per_thread,
        aligned=False,
    ),
    Rung(
        "register-tiles",
        "8 x 8 outputs per thread, 16-byte loads",
        "a multiply-add needs a quarter of a load from shared memory instead of two",
        "rung4_register_tiles.cu",
        _tile_128,
    ),
    Rung(
        "tensor-cores",
        "wmma fragments of 16 x 16 x 16",
        "tensor cores multiply many times faster than the float32 units",
        "rung5_tensor_cores.cu",
        _tile_128,
        dtypes=HALVES,
    ),
    Rung(
        "double-buffering",
        "asynchronous copies into several buffers, swizzled; ldmatrix and mma.sync",
        "loads run while the tensor cores multiply, and shared memory has no bank conflicts",
        "rung6_double_buffering.cu",
        _pipelined,
        dtypes=HALVES,
    ),
    Rung(
        "wgmma-tma",
        "warpgroup products on tiles that TMA brings; a producer warp, persistent blocks",
        "wgmma reads shared memory itself and reaches the full rate; no warp computes addresses or waits for copies",
        "rung7_wgmma_tma.cu",
        _wgmma,
        dtypes=HALVES,
        hopper=True,
    ),
)
