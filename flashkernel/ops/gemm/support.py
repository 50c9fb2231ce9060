"""Which backends serve a linear layer, and why the others decline or are not preferred."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashkernel.blocks import linear_cpp
from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.weight import GRANULARITIES, Layout, format_named
from flashkernel.blocks.weight_formats.tiles import SUFFIX
from flashkernel.core import cuda
from flashkernel.core.op import Call
from flashkernel.ops.gemm.configs import DEQUANTIZED, MAX_ROWS, TILE_ROWS, VECTOR_ROWS

_AND = " and "  # between the layouts of several weights
_WIDEST_TILE_ROWS = MAX_ROWS // 2  # more rows have the widest tiles of the kernels for few rows
_FEW, _SOME = f"1 to {VECTOR_ROWS}", f"{VECTOR_ROWS + 1} to {_WIDEST_TILE_ROWS}"
_MOST, _MANY = f"{_WIDEST_TILE_ROWS + 1} to {MAX_ROWS}", f"over {MAX_ROWS}"
_WIDE = 16384  # columns of a weight; what was measured has up to 14336, or 28672 and more


def row_class(rows: int) -> str:
    """All that the choice of a backend asks of the number of rows."""
    limits = ((VECTOR_ROWS, _FEW), (_WIDEST_TILE_ROWS, _SOME), (MAX_ROWS, _MOST))
    return next((name for most, name in limits if rows <= most), _MANY)


def product_class(sizes: list[int], alone: bool) -> str:
    """All that the choice of a backend asks of the weights' outputs: "wide" or "narrow" for one weight whose outputs
    are 16-byte vectors, else "". `alone`: the product has no norm in front, no factor, and x's dtype."""
    if len(sizes) > 1 or not alone or sizes[0] % 8:
        return ""
    return "wide" if sizes[0] > _WIDE else "narrow"


_CUBLAS_SOME = (
    f"on Hopper cuBLAS serves {_WIDEST_TILE_ROWS + 1} to {MAX_ROWS} rows by one weight better, without a norm or a gate"
)
_TRITON_FP8 = f"on Hopper up to {MAX_ROWS} rows by more than {_WIDE} columns in fp8 are served better by Triton"
_CUBLAS = f"beyond {MAX_ROWS} rows the weight's bytes no longer bound the product, and cuBLAS serves it better"
_DEQUANTIZED = f"beyond {MAX_ROWS} rows a weight that is not multiplied in 8 bits is dequantized, for cuBLAS"
_DEQUANTIZED_TILES = f"beyond {TILE_ROWS} rows cuBLAS gains more time than a pass that dequantizes the weight takes"
_INT8_GROUPS = (GRANULARITIES["tensor"], GRANULARITIES["row"])
_FP8_GROUPS = (*_INT8_GROUPS, GRANULARITIES["block"])


_MAIN_GRADS = "its backward pass adds no gradients to main_grads"


def _reads(backend: str) -> Callable[[Call], str | None]:
    """Why the kernels of a backend cannot read the call's weights."""

    def answer(call: Call) -> str | None:
        if "main_grads" in call.facts:
            return _MAIN_GRADS
        given = call.facts.get("weight")
        if given is None:
            return None
        parsed = [Layout.parse(text) for text in given.split(_AND)]
        reasons = [format_named(layout.format).declines(backend, layout) for layout in parsed]
        if any(reasons):
            return next(reason for reason in reasons if reason)
        if len({layout.format for layout in parsed}) > 1:
            return f"its kernels take weights of one format, not {given}"
        if dequantizes(given):
            if len(parsed) > 1:
                return f"its kernels take weights of one layout, not {given}"
            if call.device.kind == "cuda" and call.device.arch < 80:
                return "it dequantizes weights for tensor cores, which Triton has from sm_80 on"
            return None
        if call.device.kind == "cuda" and call.device.arch < 89:
            return f"it reads 8-bit floats from sm_89 on; {call.device.name} is sm_{call.device.arch}"
        return None

    return answer


def in_blocks(columns: int) -> bool:
    """Whether kernels that read blocks of columns read whole ones: all that a choice asks of a quantized weight's
    columns."""
    return columns > 0 and columns % linear_cpp.BLOCK == 0


def cpp(call: Call) -> str | None:
    """It reads quantized weights, forward only."""
    given = call.facts.get("weight")
    if given is None:
        return "its kernels read quantized weights; torch multiplies floats"
    if "main_grads" in call.facts:
        return _MAIN_GRADS
    if call.gradients:
        return "its kernels are forward only; torch dequantizes for the backward pass"
    reasons = [linear_cpp.unsupported(Layout.parse(text)) for text in given.split(_AND)]
    if any(reasons):
        return next(reason for reason in reasons if reason)
    return None if call.facts["blocks"] else f"its kernels read {linear_cpp.BLOCK} columns at a time"


_reads_triton, reads_cuda = _reads("triton"), _reads("cuda")


def triton(call: Call) -> str | None:
    if multiplies_in_8_bits(call.facts.get("weight"), call.facts["rows"]):
        return _products_of_8_bits(call)
    reason = _reads_triton(call)
    if reason is not None:
        return reason
    if "weight" in call.facts and dequantizes(call.facts["weight"]):
        return None
    if call.facts["rows"] == _MANY and "weight" in call.facts:
        return _DEQUANTIZED
    if call.device.kind == "cuda" and call.device.arch < 80:
        if call.facts["rows"] != _FEW:
            return f"more than {VECTOR_ROWS} rows need tensor cores, which Triton has from sm_80 on"
        if call.facts["transposed"]:
            return "weights stored (in, out) need tensor cores, which Triton has from sm_80 on"
    return None


def dequantizes(given: str) -> bool:
    """Whether weights of such layouts become x's dtype in registers, before the product."""
    return all(Layout.parse(text).format in DEQUANTIZED for text in given.split(_AND))


def in_tiles(given: str | None) -> bool:
    """Whether all weights of such layouts are in tiles, for the kernel of `quantized`."""
    return given is not None and all(Layout.parse(text).format.endswith(SUFFIX) for text in given.split(_AND))


def _tiles(call: Call) -> str | None:
    """Why the kernel for weights in tiles does not serve a call."""
    if "main_grads" in call.facts:
        return _MAIN_GRADS
    if _AND in call.facts["weight"]:
        return f"its kernel takes weights of one layout, not {call.facts['weight']}"
    if call.facts.get("interleaved"):
        return "gate and up in tiles must be two weights or halves of one, of whole tiles each"
    if call.dtype == torch.float32:
        return "it computes in float16 and bfloat16, not in float32"
    return cuda.available()


def multiplies_in_8_bits(given: str | None, rows: str) -> bool:
    """Whether all weights of such layouts are in fp8 and ask for x in fp8, or in int8 around 0 for x in int8.

    Weights in MXFP4 become fp8 for many rows. For few, that pass would take longer than the product.
    """
    if given is None:
        return False
    parsed = [Layout.parse(text) for text in given.split(_AND)]
    kinds = {(layout.format, layout.activation_dtype, layout.zeros) for layout in parsed}
    if kinds == {("mxfp4", FP8, False)}:
        return rows == _MANY
    return kinds in ({("fp8", FP8, False)}, {("int8", torch.int8, False)})


def _products_of_8_bits(call: Call) -> str | None:
    """Why products of 8-bit operands do not serve a call whose weights ask for x in 8 bits."""
    if "main_grads" in call.facts:
        return _MAIN_GRADS
    if call.gradients:
        return "products of 8-bit operands are forward only"
    if call.facts["weights"] > 1:
        return "gate and up in 8 bits must be one packed weight, and other weights a call each"
    layout = Layout.parse(call.facts["weight"])
    group = layout.group_shape
    if layout.format != "mxfp4" and group not in (_FP8_GROUPS if layout.format == "fp8" else _INT8_GROUPS):
        blocks = ", and blocks of 128x128" if layout.format == "fp8" else " of int8"
        return f"its kernels scale rows{blocks}, not groups of {group[0]}x{group[1]}"
    if layout.format == "int8":
        too_old = call.device.kind == "cuda" and call.device.arch < 80
        return f"it multiplies 8-bit integers from sm_80 on; {call.device.name} is older" if too_old else None
    if call.device.kind == "cuda" and call.device.arch < 89:
        return f"it multiplies 8-bit floats from sm_89 on; {call.device.name} is sm_{call.device.arch}"
    return None


def hopper(call: Call) -> str | None:
    """It serves many rows, and products of 8-bit operands."""
    given = call.facts.get("weight")
    if multiplies_in_8_bits(given, call.facts["rows"]):
        if call.facts["fused"] == "gate" and Layout.parse(call.facts["weight"]).group_shape == GRANULARITIES["block"]:
            return "gate and up with block scales would need four accumulators"
        return _products_of_8_bits(call)
    if "main_grads" in call.facts:
        return _MAIN_GRADS
    if in_tiles(given):
        return _tiles(call)
    if given is not None:
        return "it reads weights in tiles (Weight.tiled), and weights in fp8 with x in fp8"
    return None if call.facts["rows"] == _MANY else f"up to {MAX_ROWS} rows have kernels of their own"


def cublas_is_faster(call: Call) -> str | None:
    given = call.facts.get("weight")
    if in_tiles(given):
        return _DEQUANTIZED_TILES if call.facts["many_tokens"] else None
    if call.facts["rows"] == _MOST and given is None and call.dtype.itemsize == 2 and call.device.arch == 90:
        return _CUBLAS_SOME if call.facts["product"] == "narrow" and call.facts["fused"] != "gate" else None
    if call.facts["rows"] != _MANY:
        return None
    if given is not None:
        in_8_bits = multiplies_in_8_bits(given, call.facts["rows"])
        return _DEQUANTIZED if dequantizes(given) and not in_8_bits else None
    if not call.facts["fused"]:
        return _CUBLAS
    return "cuBLAS serves float32 products better" if call.dtype == torch.float32 else None


def hopper_is_slower(call: Call) -> str | None:
    """Why cuBLAS or Triton serves a call better than Hopper's kernels."""
    reason = cublas_is_faster(call)
    if reason is None and call.facts["rows"] != _MANY and call.facts["product"] == "wide":
        fp8 = not call.facts["fused"] and multiplies_in_8_bits(call.facts.get("weight"), call.facts["rows"])
        return _TRITON_FP8 if fp8 and "fp8" in call.facts["weight"] else None
    return reason


def others_are_faster(call: Call) -> str | None:
    """CUDA C++ fills the hole that Triton leaves before sm_80."""
    if call.facts["rows"] == _MANY:
        return _CUBLAS
    return "Triton's kernels serve few rows from sm_80 on" if call.device.arch >= 80 else None
