"""The attention kernels as a torch operator.

A mask and a score function are expressions, which no operator can take as arguments. Their text can: it names a
template, and the tensors they read travel as a list.
"""

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, recalled
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve


def run(
    kernels: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask: Mask | None,
    score: ex.Traced | None,
    scale: float,
    softcap: float,
    dropout: float,
    seed: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """(o, lse) by the kernels of a backend; differentiable in every tensor."""
    drawn = seed if isinstance(seed, Tensor) else None
    return _attention(
        q, k, v, bias, sinks, slopes, drawn,
        [] if mask is None else list(mask.tables), [] if score is None else list(score.tables),
        "" if mask is None else mask.text, "" if score is None else score.text,
        scale, softcap, dropout, 0 if isinstance(seed, Tensor) else seed, kernels,
    )  # fmt: skip


def _problem(kernels, drawn, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed):
    return resolve(kernels).Problem(
        recalled(mask, mask_tables) if mask else None,
        scale, softcap, ex.recall(score, score_tables) if score else None, dropout, seed if drawn is None else drawn,
    )  # fmt: skip


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    drawn: Tensor | None,
    mask_tables: list[Tensor],
    score_tables: list[Tensor],
    mask: str,
    score: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: int,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    problem = _problem(kernels, drawn, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed)
    slopes = None if slopes is None else slopes.float().contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    return resolve(kernels).forward(_unit(q), _unit(k), _unit(v), _wide(bias), sinks, slopes, problem)


def _fake_forward(q, k, v, *_):
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])), q.new_empty((batch, heads, queries), dtype=torch.float32)


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    o: Tensor,
    lse: Tensor,
    drawn: Tensor | None,
    mask_tables: list[Tensor],
    score_tables: list[Tensor],
    mask: str,
    score: str,
    scale: float,
    softcap: float,
    dropout: float,
    seed: int,
    want_bias: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsinks, dslopes); those without an input, or not wanted, are empty."""
    problem = _problem(kernels, drawn, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed)
    plain = None if slopes is None else slopes.float().contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    dq, dk, dv, dbias, dsinks, dslopes = resolve(kernels).backward(
        _unit(do), None if dlse is None else dlse.contiguous(), _unit(q), _unit(k), _unit(v), _wide(bias), sinks, plain,
        o, lse, problem, want_bias and bias is not None,
    )  # fmt: skip
    nothing = [q.new_empty(0) for _ in range(3)]
    return (
        dq, dk, dv,
        nothing[0] if dbias is None or bias is None else dbias.view(bias.shape),
        nothing[1] if dsinks is None else dsinks,
        nothing[2] if dslopes is None or slopes is None else dslopes.to(slopes.dtype),
    )  # fmt: skip


def _fake_backward(do, dlse, q, k, v, bias, sinks, slopes, *settings):
    want = settings[-2]
    optional = [
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias if want else None, sinks, slopes)
    ]  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *optional


def _setup_context(ctx, inputs, output):
    q, k, v, bias, sinks, slopes, drawn, mask_tables, score_tables, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, sinks, slopes, drawn, *output, *mask_tables, *score_tables)
    ctx.counts = (len(mask_tables), len(score_tables))
    ctx.settings = settings
    ctx.want_bias = bias is not None and bias.requires_grad


def _pull_back(ctx, do, dlse):
    q, k, v, bias, sinks, slopes, drawn, o, lse, *tables = ctx.saved_tensors
    masks, scores = ctx.counts
    if do is None:
        do = torch.zeros_like(o)
    *settings, kernels = ctx.settings
    gradients = _attention_backward(
        do, dlse, q, k, v, bias, sinks, slopes, o, lse, drawn, tables[:masks], tables[masks:], *settings,
        ctx.want_bias, kernels,
    )  # fmt: skip
    given = (q, k, v, bias if ctx.want_bias else None, sinks, slopes)
    picked = [None if x is None else gradient for x, gradient in zip(given, gradients)]
    return *picked, None, [None] * masks, [None] * scores, *[None] * 7


_attention_backward = KernelOp("attention_backward", _backward, _fake_backward)
_attention = KernelOp("attention", _forward, _fake_forward, setup_context=_setup_context, backward=_pull_back)
