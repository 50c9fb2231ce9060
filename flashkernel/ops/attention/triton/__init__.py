"""Launchers of the Triton attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import seed_word, threshold
from flashkernel.blocks.expression import Expression
from flashkernel.blocks.mask import Mask
from flashkernel.blocks.runs import Runs, plan, span
from flashkernel.core import device, tune
from flashkernel.core.generate import jit_function
from flashkernel.core.launch import launch
from flashkernel.ops.attention.configs import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, Tiles
from flashkernel.ops.attention.triton.backward import attention_backward_keys, attention_backward_queries
from flashkernel.ops.attention.triton.forward import attention_forward
from flashkernel.ops.attention.triton.sources import sources

WIDEST_TOGETHER = 128  # heads up to which one program holds both dk and dv in registers
_INDICES = "b, h, q, k, sq, sk, tables"


@dataclass(frozen=True)
class Problem:
    """One attention call: everything but the tensors that have gradients."""

    mask: Mask | None
    scale: float
    softcap: float
    score: Expression | None
    dropout: float
    seed: int | Tensor

    def functions(self) -> tuple[Any, Any, Any, tuple[Any, ...], tuple[Any, ...]]:
        """(mask, score, its derivative, the score's tables, the mask's tables) as the kernels take them."""
        mask = score = slope = None
        score_tables: list[Tensor] = []
        mask_tables: list[Tensor] = []
        if self.mask is not None:
            mask_tables = list(self.mask.tables)
            mask = jit_function("visible", _INDICES, self.mask.text)
        if self.score is not None:
            derivative = ex.derivative(self.score, "score")
            score_tables = ex.tables(self.score)
            score_tables += [table for table in ex.tables(derivative) if not any(table is t for t in score_tables)]
            score = jit_function("score_of", f"score, {_INDICES}", ex.score_source(self.score, score_tables))
            slope = jit_function("slope_of", f"score, {_INDICES}", ex.triton_source(derivative, score_tables))
        return mask, score, slope, ex.table_arguments(score_tables), ex.table_arguments(mask_tables)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, queries, heads, value_dim) in q's dtype, lse (batch, heads, queries) in float32."""
    batch, queries, heads, _ = q.shape
    keys, values = k.shape[1], v.shape[3]
    o = torch.empty((batch, queries, heads, values), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    config = _config(FORWARD, q, k, v, bias, problem)
    runs, _ = _planned(problem.mask, q, k, config)
    mask, score, _, tables, mask_tables = problem.functions()
    tiles = tune.ceil_div(queries, config.rows)
    (q_tiles, k_tiles, v_tiles), described = sources((q, config.rows), (k, config.columns), (v, config.columns))
    launch(
        attention_forward, (tiles * heads * batch,),
        q_tiles, k_tiles, v_tiles, q if bias is None else bias, sinks, slopes, o, lse,
        tables, mask_tables, runs.table, runs.count,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_bias_strides(bias), _slope_stride(slopes),
        *_run_strides(runs), heads, heads // k.shape[2], queries, keys, tiles, runs.table.shape[3],
        *_numbers(problem),
        MASK=mask, SCORE=score, HAS_BIAS=bias is not None, HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None,
        TMA=described, **_constants(problem, q, k, v, bias, slopes, config),
    )  # fmt: skip
    return o, lse


def backward(
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
    problem: Problem,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv, dbias, dsinks, dslopes); those without their input, and a bias gradient not wanted, are None."""
    delta = torch.empty_like(lse)
    dq, dbias, dsinks, dslopes = _backward_queries(
        do, dlse, q, k, v, bias, sinks, slopes, o, lse, delta, problem, want_bias
    )
    dk, dv = _backward_keys(do, q, k, v, bias, slopes, lse, delta, problem)
    if sinks is not None and dsinks is not None:
        dsinks = dsinks.sum((0, 2)).to(sinks.dtype)  # [heads]
    if slopes is not None and dslopes is not None:
        dslopes = dslopes.sum(-1)  # [batch, heads]
        dslopes = (dslopes.sum(0) if slopes.ndim == 1 else dslopes).to(slopes.dtype)
    if bias is not None and dbias is not None:
        dbias = dbias.to(bias.dtype)
    return dq, dk, dv, dbias, dsinks, dslopes


def _backward_queries(
    do, dlse, q, k, v, bias, sinks, slopes, o, lse, delta, problem: Problem, want_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dbias, and of each tile the gradients of sinks and slopes); fills `delta`, which the keys' kernel reads."""
    batch, queries, heads, width = q.shape
    keys, pairs = k.shape[1], k.shape[2]
    dq = torch.empty((batch, queries, heads, width), dtype=q.dtype, device=q.device)
    config = _config(BACKWARD_QUERIES, q, k, v, bias, problem)
    runs, _ = _planned(problem.mask, q, k, config)
    mask, score, slope, tables, mask_tables = problem.functions()
    tiles = tune.ceil_div(queries, config.rows)
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=q.device) if want_bias else None
    dsinks, dslopes = (
        None if x is None else torch.empty((batch, heads, tiles), dtype=torch.float32, device=q.device)
        for x in (sinks, slopes)
    )
    (q_tiles, k_tiles, v_tiles, do_tiles), described = sources(
        (q, config.rows), (k, config.columns), (v, config.columns), (do, config.rows)
    )
    launch(
        attention_backward_queries, (tiles * heads * batch,),
        q_tiles, k_tiles, v_tiles, q if bias is None else bias, sinks, slopes, o, do_tiles, lse, dlse, delta,
        dq, q if dbias is None else dbias, dsinks, dslopes, tables, mask_tables, runs.table, runs.count,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *_bias_strides(bias),
        *_bias_strides(dbias), _slope_stride(slopes), *_run_strides(runs), heads, heads // pairs, queries, keys,
        tiles, runs.table.shape[3],
        *_numbers(problem),
        MASK=mask, SCORE=score, SLOPE=slope, HAS_BIAS=bias is not None, HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None, HAS_DLSE=dlse is not None, WANT_BIAS=want_bias, TMA=described,
        **_constants(problem, q, k, v, bias, slopes, config),
    )  # fmt: skip
    return dq, dbias, dsinks, dslopes


def _backward_keys(do, q, k, v, bias, slopes, lse, delta, problem: Problem) -> tuple[Tensor, Tensor]:
    batch, queries, heads, width = q.shape
    keys, pairs, values = k.shape[1], k.shape[2], v.shape[3]
    dk = torch.empty((batch, keys, pairs, width), dtype=k.dtype, device=k.device)
    dv = torch.empty((batch, keys, pairs, values), dtype=v.dtype, device=v.device)
    config = _config(BACKWARD_KEYS, q, k, v, bias, problem)
    _, runs = _planned(problem.mask, q, k, config)
    mask, score, slope, tables, mask_tables = problem.functions()
    (q_tiles, k_tiles, v_tiles, do_tiles), described = sources(
        (q, config.rows), (k, config.columns), (v, config.columns), (do, config.rows)
    )
    for want in ("kv",) if max(width, values) <= WIDEST_TOGETHER else ("k", "v"):
        launch(
            attention_backward_keys, (tune.ceil_div(keys, config.columns) * pairs * batch,),
            q_tiles, k_tiles, v_tiles, q if bias is None else bias, slopes, do_tiles, lse, delta, dk, dv,
            tables, mask_tables, runs.table, runs.count,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *_bias_strides(bias),
            _slope_stride(slopes), *_run_strides(runs), heads, heads // pairs, queries, keys, runs.table.shape[3],
            *_numbers(problem),
            MASK=mask, SCORE=score, SLOPE=slope, HAS_BIAS=bias is not None, HAS_SLOPES=slopes is not None,
            TMA=described, WANT_K=want != "v", WANT_V=want != "k", **_constants(problem, q, k, v, bias, slopes, config),
        )  # fmt: skip
    return dk, dv


def _config(
    tunable: tune.Tunable, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, problem: Problem
) -> Tiles:  # fmt: skip
    """`gathers`: whether a tensor is read pair by pair, a bias or the table of a mask or a score function."""
    seen = span(problem.mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    masked = problem.mask is not None and len(problem.mask.tables) > 0
    scored = problem.score is not None and len(ex.tables(problem.score)) > 0
    shape = {
        "queries": q.shape[1], "keys": k.shape[1], "span": seen, "head_dim": q.shape[3], "value_dim": v.shape[3],
        "bytes": q.element_size(), "gathers": int(bias is not None or masked or scored),
    }  # fmt: skip
    return tune.pick(tunable, device.facts(q.device), shape)


def _planned(mask: Mask | None, q: Tensor, k: Tensor, config: Tiles) -> tuple[Runs, Runs]:
    return plan(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1], config.rows, config.columns, q.device)


def _run_strides(runs: Runs) -> tuple[int, int]:
    """Rows of the run table between two batches and between two heads; 0 where they share it."""
    batch, heads, tiles = runs.count.shape
    return heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0


def _bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    if bias is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride()))


def _slope_stride(slopes: Tensor | None) -> int:
    return slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0


def _numbers(problem: Problem) -> tuple[float, float, int | Tensor, int, float]:
    kept = 1.0 / (1.0 - problem.dropout) if problem.dropout < 1 else 0.0
    seed = problem.seed if isinstance(problem.seed, Tensor) else seed_word(problem.seed)
    return problem.scale, problem.softcap, seed, threshold(problem.dropout), kept


def _constants(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None, config: Tiles
) -> dict[str, Any]:
    changed = problem.score is not None or problem.softcap > 0 or bias is not None or slopes is not None
    width, values = q.shape[3], v.shape[3]
    even = q.shape[1] % config.rows == 0 and k.shape[1] % config.columns == 0
    precise = q.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {
        "CAP": problem.softcap > 0, "DROP": problem.dropout > 0, "DRAWN": isinstance(problem.seed, Tensor),
        "PRECISION": "ieee" if precise else "tf32",
        "WIDTH": width, "VALUES": values, "BLOCK_D": max(16, tune.power_of_2(width)),
        "BLOCK_V": max(16, tune.power_of_2(values)), "ROWS": config.rows, "COLUMNS": config.columns,
        "STAGES": config.stages, "PLAIN": problem.scale > 0 and not changed, "EVEN": even, "num_warps": config.warps,
    }  # fmt: skip
