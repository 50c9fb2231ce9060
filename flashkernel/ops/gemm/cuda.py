"""The linear layer in CUDA C++: which instance of the kernels in kernel.cu to launch, with which grid."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.epilogue import Epilogue
from flashkernel.blocks.epilogue_cuda import cuda_steps
from flashkernel.core import cuda, tune
from flashkernel.core.cuda import TYPES, Module
from flashkernel.core.tune import ceil_div
from flashkernel.ops.gemm.configs import CUDA_LINEAR, TileConfig
from flashkernel.ops.gemm.params import LinearExtras, in_one_layout

FOLDER = Path(__file__).parent
MAX_WEIGHTS, VECTOR = 3, 8  # VECTOR: 16-bit elements in 16 bytes
MAX_STRIDE = 1 << 24  # elements; offsets within a tile are 32-bit
NORM_THREADS, COMBINE_THREADS, MAX_GRID_ROWS = 256, 256, 65535

_TILE_ARGUMENTS = ", ".join(["pointer"] * 10 + ["int32"] * 4 + ["int64"] * 2 + ["int32"] * 9)
_COMBINE_ARGUMENTS = ", ".join(["pointer"] * 6 + ["int64"] * 2 + ["int32"] * 5)
_NORM_ARGUMENTS = "pointer, pointer, pointer, int64, int32, float32, float32"


@lru_cache(maxsize=1024)
def module(chain: str, bias: torch.dtype, residual: torch.dtype, out: torch.dtype, norm: torch.dtype) -> Module:
    """kernel.cu with an epilogue and the dtypes of its operands."""
    defines = {
        "BIAS_TYPE": TYPES[bias], "RESIDUAL_TYPE": TYPES[residual], "OUT_TYPE": TYPES[out], "NORM_TYPE": TYPES[norm]
    }  # fmt: skip
    if chain:
        defines["EPILOGUE"] = cuda_steps(chain)
    return Module(FOLDER / "kernel.cu", defines=defines, include=CUDA_HEADERS)


def _tile_kernel(dtype: torch.dtype, config: TileConfig, gated: bool, transposed: bool, vector: bool) -> str:
    flags = (str(flag).lower() for flag in (gated, transposed, vector))
    return f"linear_tile<{', '.join([TYPES[dtype], *map(str, config.tile), *flags])}>"


def forward(x: Tensor, weights: list[Tensor], biases: list[Tensor], extras: LinearExtras) -> Tensor:
    """y [rows, outputs] of x [rows, inner]; the weights are [n, inner] each, and a gated chain's are gate and up.

    x and the residual have unit stride along their rows; the biases are none, or one for each weight.
    """
    residual, norm_weight, chain, _, eps, offset, dtype = extras
    rows, inner = x.shape
    gated = Epilogue.parse(chain).gated
    biases = [biases[index] for index, weight in enumerate(weights) if weight.shape[0]] if biases else []
    weights = [weight for weight in weights if weight.shape[0]]
    sizes = [weight.shape[0] for weight in (weights[:1] if gated else weights)]
    out = dtype if dtype in TYPES else torch.float32
    y = torch.empty((rows, sum(sizes)), dtype=out, device=x.device)
    if y.numel() == 0:
        return y.to(dtype)
    biases = in_one_layout(biases, TYPES)
    if residual is not None and residual.dtype not in TYPES:
        residual = residual.float()
    if norm_weight is not None and norm_weight.dtype not in TYPES:
        norm_weight = norm_weight.float()
    others = [x.dtype if tensor is None else tensor.dtype for tensor in (residual, norm_weight)]
    code = module(chain, biases[0].dtype if biases else x.dtype, others[0], out, others[1])
    if norm_weight is not None:
        x = _normalized(code, x, norm_weight, eps, offset)
    x = _addressable(x)
    weights, transposed = _one_layout(weights)
    vector = all(_is_vectorized(matrix) for matrix in (x, *(w.t() if transposed else w for w in weights)))

    shape = {"rows": rows, "columns": sum(sizes), "inner": inner, "streams": 2 if gated else 1}
    config = tune.pick(CUDA_LINEAR, cuda.target(x.device), shape)
    row_tiles, width = ceil_div(rows, config.block_m), config.block_n // shape["streams"]
    column_tiles, steps = sum(ceil_div(size, width) for size in sizes), ceil_div(inner, config.block_k)
    share = max(1, ceil_div(steps, config.splits))
    splits = max(1, ceil_div(steps, share))
    partial = None
    if splits > 1:
        partial = torch.empty((splits, rows, shape["streams"], sum(sizes)), dtype=torch.float32, device=x.device)
    operands = (*_three(biases), residual, y)
    strides = (biases[0].stride(0) if biases else 0, 0 if residual is None else residual.stride(0))
    sizes = [*sizes, *[0] * (MAX_WEIGHTS - len(sizes))]
    code.kernel(_tile_kernel(x.dtype, config, gated, transposed, vector), _TILE_ARGUMENTS).launch(
        (row_tiles * column_tiles, splits), 32 * config.warps_m * config.warps_n,
        (
            x, *_three(weights), *operands, partial, _row_stride(x),
            *[0 if w is None else _row_stride(w.t() if transposed else w) for w in _three(weights)],
            *strides, *sizes, rows, inner, y.shape[1], row_tiles, column_tiles, share,
        ),
        shared=config.shared_bytes,
    )  # fmt: skip
    if partial is not None:
        grid = (ceil_div(y.shape[1], COMBINE_THREADS), min(rows, MAX_GRID_ROWS), ceil_div(rows, MAX_GRID_ROWS))
        code.kernel(f"linear_combine<{str(gated).lower()}>", _COMBINE_ARGUMENTS).launch(
            grid, COMBINE_THREADS, (partial, *operands, *strides, *sizes[:2], rows, y.shape[1], splits)
        )
    return y.to(dtype)


def _normalized(code: Module, x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm of x [rows, inner], in x's dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = (x, norm_weight.contiguous(), y, x.stride(0), x.shape[1], eps, offset)
    code.kernel(f"normalize_rows<{TYPES[x.dtype]}>", _NORM_ARGUMENTS).launch(x.shape[0], NORM_THREADS, arguments)
    return y


def _one_layout(weights: list[Tensor]) -> tuple[list[Tensor], bool]:
    """The weights, and whether they are stored [inner, outputs]; a mixture is copied into [outputs, inner]."""
    if all(_unit_rows(weight) for weight in weights):
        return weights, False
    if all(_unit_rows(weight.t()) for weight in weights):
        return weights, True
    return [weight.contiguous() for weight in weights], False


def _unit_rows(matrix: Tensor) -> bool:
    """Whether rows are contiguous, and near enough for 32-bit offsets within a tile."""
    return (matrix.stride(1) == 1 or matrix.shape[1] <= 1) and _row_stride(matrix) < MAX_STRIDE


def _addressable(matrix: Tensor) -> Tensor:
    return matrix if _unit_rows(matrix) else matrix.contiguous()


def _row_stride(matrix: Tensor) -> int:
    """The row stride; of a single row, whose stride may be anything, its length."""
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def _is_vectorized(matrix: Tensor) -> bool:
    """Whether every row [n] of a matrix [rows, n] is made of aligned 16-byte vectors."""
    return matrix.shape[1] % VECTOR == 0 and _row_stride(matrix) % VECTOR == 0 and matrix.data_ptr() % 16 == 0


def _three(tensors: list[Tensor]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MAX_WEIGHTS - len(tensors))]
