"""Activations in Triton: one forward and one backward kernel for all of them, elementwise and gated.

A program handles a run of consecutive columns of one row. Where everything is contiguous the tensors are one long row,
so that rows cost nothing. The backward recomputes from the inputs.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.activation_triton import activate, clamp_gate, clamp_up
from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.core.tune import ceil_div
from flashkernel.ops.activation.configs import BACKWARD, FORWARD, BlockConfig


@triton.jit
def _row_and_column(BLOCK: tl.constexpr):
    """(row, first column) of this program; rows fill the grid's second axis and, past its limit, its third."""
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return row, tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def _load_pair(
    gate, up, row, first, gate_stride, up_stride, up_start, width, LAYOUT: tl.constexpr, BLOCK: tl.constexpr
):
    """(gate, up), each [BLOCK] in float32; up is the gate again where there is none."""
    column = tl.arange(0, BLOCK)
    if LAYOUT == "interleaved":
        both = tl.arange(0, 2 * BLOCK)
        values = tl.load(gate + row * gate_stride + 2 * first + both, mask=2 * first + both < 2 * width, other=0.0)
        gate_value, up_value = tl.split(tl.reshape(values, (BLOCK, 2)))
    else:
        inside = first + column < width
        gate_value = tl.load(gate + row * gate_stride + first + column, mask=inside, other=0.0)
        if LAYOUT == "plain":
            up_value = gate_value
        else:
            up_value = tl.load(up + row * up_stride + up_start + first + column, mask=inside, other=0.0)
    return gate_value.to(tl.float32), up_value.to(tl.float32)


@triton.jit
def activation_forward(
    gate, up, y, gate_stride, up_stride, up_start, rows, width, alpha, limit,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_enter()
    row, first = _row_and_column(BLOCK)
    if row >= rows:
        return
    gate_value, up_value = _load_pair(gate, up, row, first, gate_stride, up_stride, up_start, width, LAYOUT, BLOCK)
    value, _ = activate(clamp_gate(gate_value, limit, KIND), KIND, alpha)
    if LAYOUT != "plain":
        value *= clamp_up(up_value, limit, KIND)
    column = tl.arange(0, BLOCK)
    tl.store(y + row * width + first + column, value, mask=first + column < width)


@triton.jit
def activation_backward(
    dy, gate, up, dgate, dup, dy_stride, gate_stride, up_stride, up_start, rows, width, alpha, limit,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = _row_and_column(BLOCK)
    if row >= rows:
        return
    column = tl.arange(0, BLOCK)
    inside = first + column < width
    grad_out = tl.load(dy + row * dy_stride + first + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    gate_value, up_value = _load_pair(gate, up, row, first, gate_stride, up_stride, up_start, width, LAYOUT, BLOCK)
    value, derivative = activate(clamp_gate(gate_value, limit, KIND), KIND, alpha)
    grad_gate = grad_out * derivative
    if LAYOUT != "plain":
        grad_gate *= clamp_up(up_value, limit, KIND)
    grad_up = grad_out * value
    if KIND == "gpt_oss":
        grad_gate = tl.where(gate_value > limit, 0.0, grad_gate)
        grad_up = tl.where((up_value > limit) | (up_value < -limit), 0.0, grad_up)

    if LAYOUT == "interleaved":
        both = tl.arange(0, 2 * BLOCK)
        pair = tl.interleave(grad_gate.to(dgate.dtype.element_ty), grad_up.to(dgate.dtype.element_ty))
        tl.store(dgate + 2 * (row * width + first) + both, pair, mask=2 * first + both < 2 * width)
    elif LAYOUT == "halves":
        tl.store(dgate + 2 * row * width + first + column, grad_gate, mask=inside)
        tl.store(dgate + 2 * row * width + width + first + column, grad_up, mask=inside)
    else:
        tl.store(dgate + row * width + first + column, grad_gate, mask=inside)
        if LAYOUT == "separate":
            tl.store(dup + row * width + first + column, grad_up, mask=inside)


def forward(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, layout: str, alpha: float, limit: float
) -> torch.Tensor:
    """The activation of gate, times up where the layout has one."""
    columns = gate.shape[-1] if gate.ndim else 1
    width = columns if layout in ("plain", "separate") else columns // 2
    y = torch.empty((*gate.shape[:-1], width) if gate.ndim else (), dtype=gate.dtype, device=gate.device)
    gate = _row_major(gate)
    up = gate if up is None else _row_major(up)
    rows, width = _rows(layout, y, gate, up) or (y.numel() // max(1, width), width)
    config = _pick(FORWARD, gate, rows, width, 1 if layout == "plain" else 2)
    launch(
        activation_forward, _grid(rows, ceil_div(width, config.elements)),
        gate, up, y, _stride(gate), _stride(up), width if layout == "halves" else 0, rows, width, alpha, limit,
        KIND=kind, LAYOUT=layout, BLOCK=config.elements, num_warps=config.num_warps,
        **pdl_options(device.properties(gate.device), gate.nbytes + up.nbytes),
    )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kind: str, layout: str, alpha: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup); a packed input has one packed gradient, and dup is empty."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(0 if up is None else up.shape, dtype=gate.dtype, device=gate.device)
    width = dy.shape[-1] if dy.ndim else 1
    dy, gate = _row_major(dy), _row_major(gate)
    up = gate if up is None else _row_major(up)
    rows, width = _rows(layout, dy, gate, up) or (dy.numel() // max(1, width), width)
    config = _pick(BACKWARD, gate, rows, width, 2 if layout == "plain" else 3)
    launch(
        activation_backward, _grid(rows, ceil_div(width, config.elements)),
        dy, gate, up, dgate, dup, _stride(dy), _stride(gate), _stride(up), width if layout == "halves" else 0,
        rows, width, alpha, limit,
        KIND=kind, LAYOUT=layout, BLOCK=config.elements, num_warps=config.num_warps,
    )  # fmt: skip
    return dgate, dup


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, or [rows, columns] with unit stride along the row; a view where the layout allows one."""
    if x.is_contiguous():
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _stride(x: torch.Tensor) -> int:
    """Elements between two rows of a readable tensor."""
    if x.is_contiguous():
        return x.shape[-1] if x.ndim else 1
    return x.stride(0)


def _rows(layout: str, *tensors: torch.Tensor) -> tuple[int, int] | None:
    """(1, elements) where the tensors are one long row each."""
    if layout in ("plain", "separate") and all(tensor.is_contiguous() for tensor in tensors):
        return 1, tensors[0].numel()
    return None


def _grid(rows: int, blocks: int) -> tuple[int, int, int]:
    """Blocks of a row first, so that neighbors in time are neighbors in memory; axes after the first hold 65535."""
    across = min(rows, 65535)
    return blocks, across, ceil_div(rows, max(1, across))


def _pick(tunable: tune.Tunable, x: torch.Tensor, rows: int, width: int, loads: int) -> BlockConfig:
    shape = {"rows": rows, "width": width, "bytes": x.element_size(), "loads": loads}
    return tune.pick(tunable, device.properties(x.device), shape)
