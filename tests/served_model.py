"""A tiny model with and without a server, as fixtures, and the requests that several files send it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from running_server import NAME, Running, other, serve

from flashkernel.engine import LLM, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
USER = [{"role": "user", "content": "the sea"}]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """More would only be in each other's way on a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / NAME
    tiny_models.save("llama", path)
    return path


@pytest.fixture(scope="module", name="base")
def base_fixture(folder: Path) -> LLM:
    """The model without a server, whose answers the server's are held against."""
    return LLM(folder, device="cpu", kv_cache_tokens=4096)


@pytest.fixture(scope="module", name="running")
def running_fixture(base: LLM) -> Iterator[Running]:
    with serve(other(base)) as made:
        yield made


@pytest.fixture(scope="module", name="client")
def client_fixture(running: Running) -> Any:
    return running.client()


def _expected(base: LLM, prompt: Any, count: int, **more: Any) -> Any:
    return base.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True, **more))[0]


def _plain() -> dict[str, Any]:
    return {"model": NAME, "prompt": "the sea", "temperature": 0, "ignore_eos": True}
