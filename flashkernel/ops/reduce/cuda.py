"""The reductions in CUDA C++: which instance of each kernel in kernel.cu to launch, with which grid."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.core.cuda import TYPES, Kernel, Module, target
from flashkernel.core.launch import pdl_options
from flashkernel.core.tune import power_of_2
from flashkernel.ops.reduce import kinds
from flashkernel.ops.reduce.masks import PLAIN, MaskRows, Pair, Scores

FOLDER = Path(__file__).parent
MODULE = Module(FOLDER / "kernel.cu", include=CUDA_HEADERS)
WARP, IN_FLIGHT, MAX_THREADS = 32, 4, 512  # as in row.cuh
MAX_COLUMNS = 16384  # of a softmax that keeps its row in registers: 32 values a thread
MAX_SINGLE_COLUMNS = 8192  # the same where rows are not whole vectors: every load takes a register of its own
MIN_STEPS = 4  # a shorter row is not worth the second launch that a split costs
MAX_SPLITS = 1024
MAX_GRID_ROWS = 65535  # of a grid's second and third dimension
ALL, CAUSAL, MASKED = range(3)  # what a row of the softmax sees, as in kernel.cu

_POINTERS = "pointer, pointer, pointer, pointer, pointer"
_MASK = "int64, int64, int64, int64, int64, int64"
_ARGUMENTS = {
    "row_reduce": f"{_POINTERS}, int64, int64, int64, int64, int64, float32, int64, {_MASK}",
    "finish_rows": "pointer, pointer, pointer, pointer, int64, int64, int32",
    "row_softmax": f"pointer, pointer, pointer, int64, int64, int32, float32, int64, {_MASK}",
    "row_softmax_backward": "pointer, pointer, pointer, int64, int64, int64, int32, float32, int64",
    "spread_rows": f"{_POINTERS}, pointer, int64, int64, int64, int64, int32, float32, int64, {_MASK}",
    "weighted_backward": f"{_POINTERS}, int64, int64, int64",
    "column_sum": "pointer, pointer, int64, int64",
}  # fmt: skip


@cache
def kernel(name: str, *parameters: str | int) -> Kernel:
    """An instance of a template: kernel("row_softmax", "float", 4, 2, True) is row_softmax<float, 4, 2, true>."""
    values = (str(value).lower() if isinstance(value, bool) else str(value) for value in parameters)
    return MODULE.kernel(f"{name}<{', '.join(values)}>", _ARGUMENTS[name])


def _early(x: torch.Tensor, moved: int = 0) -> bool:
    """Whether a kernel that moves so many bytes is launched before the one before it has ended."""
    return pdl_options(target(x.device), moved)["PDL"]


def reduce(x: torch.Tensor, weight: torch.Tensor | None, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, saved) of x [rows, width]: y in x's dtype; saved is for the backward of max and logsumexp, else empty."""
    (rows, width), (y, saved) = x.shape, kinds.new_outputs(x, kind)
    a, b = _reduce_pairs(x, weight, kind, whole=(y, saved))
    if a is not y:
        finish = kernel("finish_rows", TYPES[x.dtype], kind)
        arguments = (a, b, y, saved, rows, width, a.shape[1])
        finish.launch((-(-rows // 4),), (WARP, 4), arguments, programmatic=_early(x))
    return y, saved


def reduce_backward(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, saved: torch.Tensor, kind: int) -> torch.Tensor:
    """dx [rows, width] of max or logsumexp, from dy [rows], x [rows, width] and what the forward pass gave."""
    return _spread(x, dy, (y, saved), kind)


def softmax(x: torch.Tensor, mask: MaskRows, scale: float, queries: int) -> torch.Tensor:
    """The softmax of scale * x [rows, width] over what each row sees; queries > 0 says causal."""
    rows, width = x.shape
    vector = _vector(x)
    if width > (MAX_COLUMNS if vector > 1 else MAX_SINGLE_COLUMNS):
        scores = Scores(scale, queries, mask)
        return _spread(x, None, _reduce_pairs(x, None, kinds.SOFTMAX, scores), kinds.SOFTMAX, scores)
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    masking = MASKED if mask.tensor is not None else CAUSAL if queries else ALL
    sms = target(x.device).sms
    values = _values_in_registers(rows, width, sms, vector, masking)
    grid, block = _row_in_registers(rows, width, values)
    arguments = (x, mask.tensor, y, x.stride(0), rows, width, scale, queries, *mask.layout)
    forward = kernel("row_softmax", TYPES[x.dtype], vector, values // vector, masking)
    forward.launch(grid, block, arguments, programmatic=_early(x, 2 * x.nbytes))
    return y


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, queries: int) -> torch.Tensor:
    """dx [rows, width] from dy and the softmax y."""
    rows, width = y.shape
    vector = _vector(y, dy)
    if width > (MAX_COLUMNS if vector > 1 else MAX_SINGLE_COLUMNS):
        sums = _reduce_pairs(y, dy, kinds.WEIGHTED, Scores(seqlen_q=queries))
        return _spread(y, dy, sums, kinds.SOFTMAX_BACKWARD, Scores(scale, queries))
    dx = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    values = _values_in_registers(rows, width)
    grid, block = _row_in_registers(rows, width, values)
    arguments = (dy, y, dx, dy.stride(0), y.stride(0), rows, width, scale, queries)
    kernel("row_softmax_backward", TYPES[y.dtype], vector, values // vector).launch(grid, block, arguments)
    return dx


def weighted_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, want_x: bool, want_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dweight) from dy [rows], x [rows, width] and weight [width]; the one not wanted comes back empty."""
    rows, width = x.shape
    vector, threads = _vector(x), 128
    blocks = -(-width // (threads * vector))
    row_programs = max(1, min(-(-rows // IN_FLIGHT), 8 * target(x.device).sms // max(1, blocks)))
    dx = torch.empty((rows, width) if want_x else 0, dtype=x.dtype, device=x.device)
    share = weight.dtype if row_programs == 1 else torch.float32
    partial = torch.empty((row_programs, width) if want_weight else 0, dtype=share, device=x.device)
    backward_kernel = kernel("weighted_backward", TYPES[x.dtype], TYPES[weight.dtype], TYPES[share], vector)
    wanted = (dx if want_x else None, partial if want_weight else None)
    backward_kernel.launch((blocks, row_programs), (threads,), (dy, x, weight, *wanted, x.stride(0), rows, width))
    if not want_weight:
        return dx, weight.new_empty(0)
    if row_programs == 1:
        return dx, partial.view(width)
    dweight = torch.empty(width, dtype=weight.dtype, device=x.device)
    add = kernel("column_sum", TYPES[weight.dtype])
    add.launch((-(-width // WARP),), (WARP, 8), (partial, dweight, row_programs, width))
    return dx, dweight


def _vector(*tensors: torch.Tensor) -> int:
    """Columns of a 16-byte load where rows are made of whole vectors, else 1."""
    count = 16 // tensors[0].element_size()
    whole = all(
        tensor.shape[1] % count == 0 and tensor.stride(0) % count == 0 and tensor.data_ptr() % 16 == 0
        for tensor in tensors
    )
    return count if whole else 1


def _values_in_registers(rows: int, width: int, sms: int = 0, vector: int = 1, masking: int = ALL) -> int:
    """Columns a thread holds in a softmax that reads its rows once."""
    if width <= 8 * WARP:
        return 8
    if width > 16 * MAX_THREADS:
        return 32
    if vector > 1 and sms <= rows < 16 * sms and width >= 4096:
        return 32  # half the threads, so that all rows are resident at once
    if vector > 1 and rows >= 16 * sms and width >= 1024 and masking != ALL:
        return 32  # half the threads, which find out half as often what their row sees
    return 16


def _row_in_registers(rows: int, width: int, values: int) -> tuple[tuple[int], tuple[int, int]]:
    """(grid, block) of a softmax that reads its rows once, so many columns a thread."""
    threads = max(WARP, power_of_2(-(-width // values)))
    together = 4 if threads == WARP else 1  # rows of a block
    return (-(-rows // together) if width else 0,), (threads, together)


def _reduce_pairs(
    x: torch.Tensor, weight: torch.Tensor | None, kind: int, scores: Scores = PLAIN, whole: Pair | None = None
) -> Pair:
    """The pairs (a, b), each [rows, splits], of x [rows, width]; or `whole`, filled, where one block a row will do.

    `weight` is [width], or [rows, width] for one of its own per row.
    """
    (rows, width), (scale, queries, mask) = x.shape, scores
    sms, vector = target(x.device).sms, 16 // x.element_size()
    # IN_FLIGHT loads a thread; many threads only for few rows that are too short to be split.
    # Maxima and exponentials cost more to merge than to add up: on short rows half the threads, each with twice the
    # columns.
    many = 64 if kind >= kinds.MAX and width <= 8192 else 128
    most = MAX_THREADS if rows < 4 * sms and width <= 65536 else many
    # A few short rows: what counts is how soon one is done, so two loads a thread.
    loads = 2 if rows < sms and width <= 8192 else IN_FLIGHT
    threads = max(WARP, min(most, power_of_2(-(-width // (vector * loads)))))
    together = 4 if threads == WARP else 1  # rows of a block
    steps = -(-width // (threads * vector * IN_FLIGHT))
    # Threads a multiprocessor holds at once, by the registers that each kind takes.
    resident = 1024 if kind in (kinds.WEIGHTED, kinds.SOFTMAX) else 1536
    wanted = min(MAX_SPLITS, steps, resident * sms // (threads * max(1, rows)))
    splits = wanted if wanted > 1 and steps >= MIN_STEPS else 1
    split_columns = -(-steps // splits) * threads * vector * IN_FLIGHT
    splits = max(1, -(-width // split_columns)) if split_columns else 1
    pair = whole
    if pair is None or splits > 1:
        a, b = torch.empty((2, rows, splits), dtype=torch.float32, device=x.device).unbind(0)
        pair = a, b
    weight_type = TYPES[x.dtype if weight is None else weight.dtype]
    weight_stride = weight.stride(0) if weight is not None and weight.ndim == 2 else 0
    kernel("row_reduce", TYPES[x.dtype], weight_type, kind, pair is not whole, mask.tensor is not None).launch(
        (-(-rows // together), splits), (threads, together),
        (x, weight, mask.tensor, *pair, x.stride(0), weight_stride, rows, width, split_columns, scale, queries,
         *mask.layout), programmatic=_early(x, x.nbytes),
    )  # fmt: skip
    return pair


def _spread(
    x: torch.Tensor, dy: torch.Tensor | None, pair: Pair, kind: int, scores: Scores = PLAIN
) -> torch.Tensor:  # fmt: skip
    """A tensor like x [rows, width]; dy is [rows] or [rows, width], the pair's are [rows] or [rows, splits]."""
    (rows, width), (first, second), (scale, queries, mask) = x.shape, pair, scores
    result = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    matrix = [dy] if dy is not None and dy.ndim == 2 else []
    vector, threads = _vector(x, *matrix), 128
    items = 2 if vector > 1 and not matrix else 1  # loads under way per thread
    blocks = -(-width // (threads * vector * items))
    kernel("spread_rows", TYPES[x.dtype], vector, kind, items, mask.tensor is not None).launch(
        (blocks, min(rows, MAX_GRID_ROWS), -(-rows // MAX_GRID_ROWS)), (threads,),
        (x, dy, mask.tensor, first, second, result, x.stride(0), matrix[0].stride(0) if matrix else 0, rows, width,
         first.shape[1] if first.ndim == 2 else 1, scale, queries, *mask.layout),
        programmatic=_early(x, 2 * x.nbytes),
    )  # fmt: skip
    return result
