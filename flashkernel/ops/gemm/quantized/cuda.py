"""Products with weights in tiles, on Hopper in CUDA C++: which kernel and instance to launch, with which grid."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.epilogue import Epilogue, Residual
from flashkernel.blocks.epilogue_cuda import cuda_steps
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.blocks.weight_formats.tiles import SUFFIX
from flashkernel.core import cuda, tune
from flashkernel.core.cuda import TYPES, Module
from flashkernel.core.driver import TensorMap
from flashkernel.core.tune import ceil_div
from flashkernel.ops.gemm.configs import MAX_COUNTERS
from flashkernel.ops.gemm.counters import counters
from flashkernel.ops.gemm.params import LinearExtras
from flashkernel.ops.gemm.quantized import few_rows
from flashkernel.ops.gemm.quantized.configs import QUANTIZED, TILE, QuantizedConfig, stage_bytes
from flashkernel.ops.gemm.quantized.schedule import whole_tiles

FOLDER = Path(__file__).parent
_TMA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle
_ARGUMENTS = ", ".join(["tensor_map"] + ["pointer"] * 12 + ["int64"] * 2 + ["int32"] * 8)


@lru_cache(maxsize=1024)
def module(chain: str, bias: torch.dtype, residual: torch.dtype, out: torch.dtype) -> Module:
    """kernel.cu with an epilogue and the dtypes of its operands."""
    defines = {"BIAS_TYPE": TYPES[bias], "RESIDUAL_TYPE": TYPES[residual], "OUT_TYPE": TYPES[out]}
    if chain:
        defines["EPILOGUE"] = cuda_steps(chain)
    pieces = Epilogue.parse(chain)
    if out.itemsize == 2 and not pieces.gated and not any(isinstance(piece, Residual) for piece in pieces.pieces):
        defines["ELEMENTWISE_EPILOGUE"] = "1"
    return Module(FOLDER / "kernel.cu", defines=defines, include=CUDA_HEADERS, specific=True)


class Call(few_rows.Product):
    """One launch: y [rows, outputs] of x [rows, inner] and a weight, or a gate's and an up weight."""

    @property
    def shape(self) -> dict[str, int]:
        """What the choice of a config looks at."""
        weight, (rows, inner) = self.weights[0], self.x.shape
        scales, columns = scales_of(weight), weight.group_shape[1]
        return {
            "rows": rows, "columns": self.y.shape[1], "inner": inner, "bits": 4 if weight.dtype == torch.uint8 else 8,
            "group": min(inner if columns == -1 else columns, 2 * TILE), "scale_bytes": scales.element_size(),
            "zeros": int(weight.zeros is not None), "parts": len(self.weights),
        }  # fmt: skip


def forward(x: Tensor, weights: list[Weight], biases: list[Tensor], extras: LinearExtras) -> Tensor:
    """y [rows, outputs] of x [rows, inner]; the weights are in tiles, and a gated chain's are gate and up."""
    residual, norm_weight, chain, *_, dtype = extras
    assert norm_weight is None  # a launch of its own, before
    gated = Epilogue.parse(chain).gated
    sizes = [weight.shape[0] for weight in (weights[:1] if gated else weights)]
    out = dtype if dtype in TYPES else torch.float32
    y = torch.empty((x.shape[0], sum(sizes)), dtype=out, device=x.device)
    if y.numel() == 0:
        return y.to(dtype)
    weights = [_contiguous(weight) for weight in weights]
    biases = [_readable(bias) for bias in biases]
    if len({bias.dtype for bias in biases}) > 1:
        biases = [bias.float() for bias in biases]
    residual = residual if residual is None or residual.dtype in TYPES else residual.float()
    x = cuda.vectorized(x if x.stride(0) or x.shape[0] == 1 else x.contiguous())  # TMA takes no rows at one address
    if gated:
        launch(Call(x, tuple(weights), y, tuple(biases), residual, chain))
        return y.to(dtype)
    for index, part in enumerate(y.split(sizes, 1)):
        if part.shape[1]:
            launch(Call(x, (weights[index],), part, tuple(biases[index : index + 1]), residual, chain))
    return y.to(dtype)


def _contiguous(weight: Weight) -> Weight:
    """The weight as bulk copies read it: contiguous, from multiples of 16 bytes on."""
    if all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in weight.tensors):
        return weight
    return Weight.from_tensors(
        [tensor.clone(memory_format=torch.contiguous_format) for tensor in weight.tensors], weight.layout
    )


def _readable(bias: Tensor) -> Tensor:
    return (bias if bias.dtype in TYPES else bias.float()).contiguous()


def launch(call: Call, config: QuantizedConfig | None = None) -> None:
    """Runs a call, with the config for its shape unless one is given."""
    x, y, weight = call.x, call.y, call.weights[0]
    shape, target = call.shape, cuda.target(x.device)
    config = tune.pick(QUANTIZED, target, shape) if config is None else config
    if config.warps:
        return few_rows.launch(few_rows.FewRows(**vars(call)), config, shape)
    rows, inner, outputs, parts = shape["rows"], shape["inner"], shape["columns"], shape["parts"]
    tall = config.warpgroups * config.height // parts  # tiles of outputs
    row_tiles, column_tiles = ceil_div(rows, config.tokens), ceil_div(outputs, TILE * tall)
    tiles, steps = row_tiles * column_tiles, inner // (TILE * config.blocks)
    blocks = min(target.sms, tiles * steps)
    whole = whole_tiles(blocks, tiles) if config.stream_k else tiles
    if (tiles - whole) * tall > MAX_COUNTERS:
        whole = tiles
    workspace = None
    if whole < tiles:
        size = 2 * blocks * tall * parts * TILE * config.tokens
        workspace = torch.empty(size, dtype=torch.float32, device=x.device)
    groups = scales_of(weight).shape[1]
    group_blocks = inner // groups // TILE if shape["group"] >= config.blocks * TILE else 0
    operands = [
        call.biases[0].dtype if call.biases else x.dtype,
        x.dtype if call.residual is None else call.residual.dtype,
    ]
    name = weight.format.removesuffix(SUFFIX).upper() + ("_ZEROS" if shape["zeros"] else "")
    instance = (
        TYPES[x.dtype], name, shape["group"], config.tokens, config.warpgroups, config.blocks, config.stages,
        "true" if parts == 2 else "false", config.height,
    )  # fmt: skip
    map_x = TensorMap(
        x, _TMA_TYPES[x.dtype], (inner, rows), ((x.stride(0) if rows > 1 else inner) * x.element_size(),),
        (TILE, config.tokens), _SWIZZLE_128B, nan_fill=False,
    )  # fmt: skip
    up = call.weights[-1]
    code = module(call.chain, *operands, y.dtype)
    code.kernel(f"linear_quantized<{', '.join(map(str, instance))}>", _ARGUMENTS).launch(
        blocks, 128 * (config.warpgroups + 1),
        (
            map_x, weight.data, weight.scales, weight.zeros, up.data, up.scales, up.zeros,
            *([call.biases[0], call.biases[-1]] if call.biases else [None, None]), call.residual, y, workspace,
            None if workspace is None else counters(x.device), 0 if call.residual is None else call.residual.stride(0),
            y.stride(0), rows, outputs, inner // TILE, groups, group_blocks, whole, row_tiles, column_tiles,
        ),
        shared=config.shared_bytes(stage_bytes(config, shape)), programmatic=True,
    )  # fmt: skip
