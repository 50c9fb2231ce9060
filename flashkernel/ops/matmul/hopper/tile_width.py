"""Products in tiles of 96, 160, 192 or 224 columns, in CUDA C++: which calls there are, and the launch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.epilogue import Activation, Bias, Epilogue, Residual, Scale
from flashkernel.blocks.epilogue_cuda import cuda_steps
from flashkernel.core.cuda import TYPES, Module
from flashkernel.core.device import properties
from flashkernel.core.driver import TensorMap
from flashkernel.core.tune import ceil_div
from flashkernel.ops.matmul.hopper.configs import HopperMatmul, tile_width_shared_bytes
from flashkernel.ops.matmul.hopper.descriptors import tma_compatible
from flashkernel.ops.matmul.kernel_args import EpilogueTensors

FOLDER = Path(__file__).parent
THREADS = 288  # two consumer warpgroups and the producer warp
_ARGUMENTS = ", ".join(["tensor_map"] * 2 + ["pointer"] * 3 + ["int64"] * 2 + ["int32"] * 5)
_BLOCK_K = 64
_TMA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle


@lru_cache(maxsize=1024)
def module(chain: str, bias: torch.dtype, residual: torch.dtype) -> Module:
    """tile_width.cu with an epilogue and the dtypes of its operands."""
    defines = {"BIAS_TYPE": TYPES[bias], "RESIDUAL_TYPE": TYPES[residual]}
    if chain:
        defines["EPILOGUE"] = cuda_steps(chain)
    return Module(FOLDER / "tile_width.cu", defines=defines, include=CUDA_HEADERS, specific=True)


def serves(a: Tensor, b: Tensor, epilogue: EpilogueTensors) -> bool:
    """True for one product of 16-bit operands whose rows TMA loads along K, with an epilogue of C's elements alone.

    a is [batch, M, K], b [batch, K, N].
    """
    c = epilogue.c
    others = (epilogue.z, epilogue.dz, epilogue.out_scale, epilogue.block_scales)
    if c.shape[0] != 1 or epilogue.gated or any(x is not None for x in others):
        return False
    if a.dtype not in _TMA_TYPES or c.dtype != a.dtype or c.shape[2] % 8 or not tma_compatible(c):
        return False
    pieces = Epilogue.parse(_chain(epilogue)).pieces
    if not all(isinstance(piece, (Bias, Activation, Scale, Residual)) for piece in pieces):
        return False
    read = (epilogue.bias, epilogue.residual)
    return all(x is None or x.dtype in TYPES for x in read) and tma_compatible(a) and tma_compatible(b.transpose(1, 2))


def _chain(epilogue: EpilogueTensors) -> str:
    return ";".join([part for part in epilogue.chains if part])


def multiply(a: Tensor, b: Tensor, epilogue: EpilogueTensors, config: HopperMatmul) -> None:
    """Writes `epilogue.c` [1, M, N] for a [1, M, K] and b [1, K, N] that `serves` takes."""
    (_, m, k), n, c = a.shape, b.shape[2], epilogue.c
    bias, residual = epilogue.bias, epilogue.residual
    if bias is not None:
        bias = bias.contiguous()
    row_tiles, column_tiles = ceil_div(m, config.block_m), ceil_div(n, config.block_n)
    code = module(
        _chain(epilogue), a.dtype if bias is None else bias.dtype, a.dtype if residual is None else residual.dtype
    )
    instance = f"matmul_tile_width<{TYPES[a.dtype]}, {config.block_n}, {config.num_stages}>"
    code.kernel(instance, _ARGUMENTS).launch(
        min(properties(a.device).sms, row_tiles * column_tiles), THREADS,
        (
            _tensor_map(a[0], config.block_m), _tensor_map(b[0].t(), config.block_n), bias, residual, c,
            0 if residual is None else residual.stride(1), c.stride(1), m, n, k, row_tiles, column_tiles,
        ),
        shared=tile_width_shared_bytes(config),
    )  # fmt: skip


def _tensor_map(x: Tensor, rows: int) -> TensorMap:
    """Tiles of `rows` rows of x [rows, K] and 64 of K."""
    count, inner = x.shape
    stride = x.stride(0) if count > 1 else ceil_div(inner, 8) * 8
    return TensorMap(
        x, _TMA_TYPES[x.dtype], (inner, count), (stride * x.element_size(),), (_BLOCK_K, rows), _SWIZZLE_128B,
        nan_fill=False,
    )  # fmt: skip
