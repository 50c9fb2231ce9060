"""A tiny model in engines of any options, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from flashkernel.engine import LLM, SamplingParams

LENGTHS = (3, 40, 17, 65, 1, 29)


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", path)
    return path


@pytest.fixture(name="base", scope="module")
def base_fixture(folder: Path) -> LLM:
    """A model with room for everything, whose answers others are held against."""
    return LLM(folder, device="cpu", kv_cache_tokens=4096, block_size=16)


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


@pytest.fixture(name="ahead", params=[False, True], ids=["in-step", "ahead"])
def ahead_fixture(request: pytest.FixtureRequest) -> bool:
    """Whether a step is launched before the tokens of the one before are read, as on a GPU."""
    return request.param


def _set_ahead(llm: LLM, ahead: bool) -> LLM:
    llm.engine._async_scheduling = ahead
    return llm
