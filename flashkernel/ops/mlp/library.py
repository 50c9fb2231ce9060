"""The MLP as a torch operator, with its gradients.

It saves its arguments and what goes into the activation; with `recompute` its arguments alone. The backward pass writes
the gradient of what goes into the activation over the saved values, unless the graph is kept for another pass.
"""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue
from flashkernel.core.arguments import unit_stride, without_autocast
from flashkernel.core.library import KernelOp, traced
from flashkernel.core.op import resolve
from flashkernel.ops.mlp.params import MlpParams, MlpTensors

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def mlp(
    kernels: str, tensors: MlpTensors, main_grads: list[Tensor | None], params: MlpParams, dtype: torch.dtype,
    recompute: bool,
) -> Tensor:  # fmt: skip
    """y [..., outputs]; x and the residual have any number of dims. Differentiable in all tensors but `main_grads`."""
    x, gate_up, down, gate_up_bias, down_bias, residual = tensors
    y, _ = _mlp(
        x, *_two(gate_up), down, *_two(gate_up_bias), down_bias, residual, *main_grads,
        params.activation.text, params.packed, dtype, recompute, params.backend or "", kernels,
    )  # fmt: skip
    return y


def _two(tensors: list[Any]) -> list[Any]:
    return [*tensors, *[None] * (2 - len(tensors))]


def _params(activation: str, packed: str, backend: str) -> MlpParams:
    piece: Any = Epilogue.parse(activation).pieces[0]
    return MlpParams(piece, packed, backend or None)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _rows(x: Tensor) -> Tensor:
    """[rows, columns] with unit stride along the row; a view where the layout allows one."""
    flat = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return unit_stride(flat)


def _forward(
    x: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    main_gate_up: Tensor | None,
    main_up: Tensor | None,
    main_down: Tensor | None,
    activation: str,
    packed: str,
    dtype: torch.dtype,
    recompute: bool,
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """(y, what went into the activation; empty with `recompute`)"""
    tensors = MlpTensors(
        _rows(x), _given(gate_up, up), down, _given(gate_up_bias, up_bias), down_bias,
        None if residual is None else _rows(residual),
    )  # fmt: skip
    params = _params(activation, packed, backend)
    y, preactivation = resolve(kernels).forward(tensors, params, dtype, not recompute)
    return y.view(*x.shape[:-1], y.shape[-1]), x.new_empty(0) if preactivation is None else preactivation


def _fake_forward(
    x, gate_up, up, down, gate_up_bias, up_bias, down_bias, residual, main_gate_up, main_up, main_down,
    activation, packed, dtype, recompute, backend, kernels,
):  # fmt: skip
    rows, width = x.shape[:-1].numel(), gate_up.shape[0] * (1 if up is None else 2)
    y = x.new_empty((*x.shape[:-1], down.shape[0]), dtype=dtype)
    return y, x.new_empty(0 if recompute else (rows, width))


def _backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    preactivation: Tensor | None,
    activation: str,
    packed: str,
    wanted: list[bool],
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate (or both), up, down and their biases; those not wanted are empty."""
    tensors = (dy, x, gate_up, up, down, gate_up_bias, up_bias, down_bias, preactivation)
    return _gradients(*tensors, [None, None, None], activation, packed, False, wanted, backend, kernels)


def _backward_in_place(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    preactivation: Tensor | None,
    main_gate_up: Tensor | None,
    main_up: Tensor | None,
    main_down: Tensor | None,
    activation: str,
    packed: str,
    in_place: bool,
    wanted: list[bool],
    backend: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_backward`; it adds to the main gradients, whose weights have none here, and may write to preactivation."""
    tensors = (dy, x, gate_up, up, down, gate_up_bias, up_bias, down_bias, preactivation)
    mains = [main_gate_up, main_up, main_down]
    return _gradients(*tensors, mains, activation, packed, in_place, wanted, backend, kernels)


def _gradients(
    dy, x, gate_up, up, down, gate_up_bias, up_bias, down_bias, preactivation, main_grads,
    activation, packed, in_place, wanted, backend, kernels,
):  # fmt: skip
    tensors = MlpTensors(_rows(x), _given(gate_up, up), down, _given(gate_up_bias, up_bias))
    results = resolve(kernels).backward(
        _rows(dy.to(x.dtype)), tensors, preactivation, main_grads, _params(activation, packed, backend), in_place,
        wanted,
    )  # fmt: skip
    found = [x.new_empty(0) if result is None else result for result in results]
    if wanted[0]:
        found[0] = found[0].view(x.shape)
    for index, bias in enumerate((gate_up_bias, up_bias, down_bias), 4):
        if wanted[index]:
            found[index] = found[index].to(bias.dtype)
    return tuple(found)


def _fake_backward(
    dy, x, gate_up, up, down, gate_up_bias, up_bias, down_bias, preactivation,
    activation, packed, wanted, backend, kernels,
):  # fmt: skip
    given = (x, gate_up, up, down, gate_up_bias, up_bias, down_bias)
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0) for tensor, want in zip(given, wanted))


def _fake_backward_in_place(
    dy, x, gate_up, up, down, gate_up_bias, up_bias, down_bias, preactivation, main_gate_up, main_up, main_down,
    activation, packed, in_place, wanted, backend, kernels,
):  # fmt: skip
    given = (x, gate_up, up, down, gate_up_bias, up_bias, down_bias)
    kept = _without(wanted, (main_gate_up, main_up, main_down))
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0) for tensor, want in zip(given, kept))


def _without(wanted, main_grads):
    """`wanted` without the weights whose gradients are added elsewhere."""
    added = [False, *[main is not None for main in main_grads], False, False, False]
    return [want and not elsewhere for want, elsewhere in zip(wanted, added)]


def _setup_context(ctx, inputs, output):
    x, gate_up, up, down, gate_up_bias, up_bias, down_bias, residual, *main_grads = inputs[:11]
    activation, packed, _, recompute, backend, kernels = inputs[11:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(
        x, gate_up, up, down, gate_up_bias, up_bias, down_bias, None if recompute else output[1]
    )  # fmt: skip
    ctx.main_grads = main_grads  # not saved: other calls add to them before this one's backward pass
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.settings = (activation, packed, backend, kernels)


def _may_overwrite(ctx, dy):
    """Whether nobody reads the saved preactivation after this pass: in eager mode, unless the graph is kept."""
    eager = getattr(ctx, "_forward_cls", None) is _mlp.function  # not an operator of torch.library, which returns it
    return eager and not traced(dy) and not _keeps_graph()


def _pull_back(ctx, dy, _):
    if dy is None:
        return (None,) * 17
    activation, packed, backend, kernels = ctx.settings
    wanted, in_place = list(ctx.needs_input_grad[:7]), _may_overwrite(ctx, dy)
    results: list[Any] = [None] * 7
    if any(wanted):
        with without_autocast(dy):  # of a backward() that is called inside it
            if in_place or any(main is not None for main in ctx.main_grads):
                results = _mlp_backward_in_place(
                    dy, *ctx.saved_tensors, *ctx.main_grads, activation, packed, in_place, wanted, backend, kernels
                )
            else:
                results = _mlp_backward(dy, *ctx.saved_tensors, activation, packed, wanted, backend, kernels)
    kept = _without(wanted, ctx.main_grads)
    residual = dy.to(ctx.residual_dtype) if ctx.needs_input_grad[7] else None
    return *[result if want else None for result, want in zip(results, kept)], residual, *[None] * 9


_mlp_backward = KernelOp("mlp_backward", _backward, _fake_backward)
_mlp_backward_in_place = KernelOp(
    "mlp_backward_in_place", _backward_in_place, _fake_backward_in_place,
    mutates=("preactivation", "main_gate_up", "main_up", "main_down"),
)  # fmt: skip
_mlp = KernelOp("mlp", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
