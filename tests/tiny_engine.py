"""Engines of any options around the tiny model of conftest.py, and what tests ask of them."""

from __future__ import annotations

from typing import Any

from flashkernel.engine import LLM, SamplingParams

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
