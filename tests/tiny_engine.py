"""Engines of any options around the tiny model of conftest.py, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.model_runner import LaunchedStep, ModelRunner, StepGraph

LENGTHS = (3, 40, 17, 65, 1, 29)


def _other(base: LLM, **options: Any) -> LLM:
    """The same weights under other options."""
    return LLM(base.model, base.tokenizer, **{"block_size": 16, **options})


def _tokens(llm: LLM, prompts: list[list[int]], params: Any) -> list[tuple[int, ...]]:
    return [done.outputs[0].token_ids for done in llm.generate(prompts, params)]


def _drained(llm: LLM) -> bool:
    """Nothing is held or queued; a step that was launched ahead may be left to read."""
    if llm.engine._launched:
        assert llm.engine.step() == []
    cache = llm.engine.scheduler.cache
    return (
        not llm.engine.has_unfinished_requests() and not cache.sequences and cache.pool.in_use == 0 and not llm._queues
    )


def _greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def _set_ahead(llm: LLM, ahead: bool) -> LLM:
    llm.engine._async_scheduling = ahead
    return llm


class _EagerGraph:
    """Stands in for a CUDA graph: runs what would be replayed, into the same tensors."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.result = compute, compute()

    def replay(self) -> None:
        for old, fresh in zip(self.result, self.compute()):
            old.copy_(fresh)


def _capture(runner: ModelRunner, compute: Callable[[], Any]) -> StepGraph:
    made = _EagerGraph(compute)
    return StepGraph(made, made.result)  # type: ignore[arg-type]


_copy_to_host = ModelRunner._copy_to_host


def _copied(runner: ModelRunner, *given: Any) -> LaunchedStep:
    """What is copied to the host outlives the next step, which writes to the same tensors."""
    step = _copy_to_host(runner, *given)
    return replace(step, results=[x.clone() for x in step.results], scores=[x.clone() for x in step.scores])


def _as_on_a_gpu(llm: LLM, monkeypatch: pytest.MonkeyPatch, graphs: bool = True) -> LLM:
    """What a GPU does, without one: steps are padded, and graphs read and write the tensors they were made with. States
    of all rows are there, and pages that were never written hold NaN."""
    monkeypatch.setattr(ModelRunner, "_capture", _capture)
    monkeypatch.setattr(ModelRunner, "_copy_to_host", _copied)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    runner = llm.engine.runner
    runner.padded, runner.use_graphs = True, graphs
    for name in ("token_counts", "bias_ids", "allowed"):
        runner.states._need(name)
    for pages in (runner.storage.k, runner.storage.v):
        pages[:, 1:] = float("nan")
    return llm
