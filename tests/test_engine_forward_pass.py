"""The passes over a layer's operators: the short way on a CPU and the public one are the same model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashkernel as fk
from flashkernel.engine import LLM, SamplingParams, forward_pass
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.lab.demo_operators import _one_thread

transformers = pytest.importorskip("transformers")
import tiny_models  # noqa: E402  it needs transformers

PROMPTS = tiny_models.prompts((5, 70, 33))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with _one_thread():
        yield


def _tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))]


def _passes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    seen: set[str] = set()
    select = forward_pass.select

    def watched(*arguments: Any) -> forward_pass.ForwardPass:
        made = select(*arguments)
        seen.add(type(made).__name__)
        return made

    monkeypatch.setattr(forward_pass, "select", watched)
    return seen


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_short_and_long_way_choose_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save(name, tmp_path)
    seen = _passes(monkeypatch)
    short = _tokens(LLM(tmp_path, device="cpu", kv_cache_tokens=1024, block_size=16))
    assert seen == {"TorchForwardPass"}
    seen.clear()
    assert _tokens(LLM(tmp_path, device="cpu", kv_cache_tokens=1024, block_size=16, enforce_eager=True)) == short
    assert seen == {"ForwardPass"}, "each operator goes through dispatch"
    seen.clear()
    with fk.use_backend("reference"):
        assert _tokens(LLM(tmp_path, device="cpu", kv_cache_tokens=1024, block_size=16)) == short
    assert seen == {"ForwardPass"}, "a backend that was asked for must be used"
    with fk.use_backend(decode_attention="reference"):
        assert _tokens(LLM(tmp_path, device="cpu", kv_cache_tokens=1024, block_size=16)) == short
    assert seen == {"ForwardPass"}


def test_scattered_pages(tmp_path: Path) -> None:
    """Pages of several sequences interleave while they grow, and windows begin in the middle of one."""
    tiny_models.save("mistral", tmp_path)
    together = LLM(tmp_path, device="cpu", kv_cache_tokens=1024, block_size=16)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    alone = [together.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert [one.outputs[0].token_ids for one in together.generate(PROMPTS, params)] == alone


def test_half_precision(tmp_path: Path) -> None:
    """The logits of one step in bfloat16 are as near to those in float32 as bfloat16 is."""
    tiny_models.save("llama", tmp_path)
    found = {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(tmp_path, device="cpu", dtype=dtype, kv_cache_tokens=512)
        params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)
        found[dtype] = [one.outputs[0].logprobs[0].logprob for one in llm.generate(PROMPTS, params)]  # type: ignore[index]
    for wide, narrow in zip(found["float32"], found["bfloat16"]):
        assert narrow == pytest.approx(wide, abs=0.3)


def test_backends_of_a_gpu_that_is_not_here() -> None:
    from flashkernel.core.device import KNOWN, pretend
    from flashkernel.core.shapes import Model

    model = dummy_transformer(Model(64, 128, 4, 2, 16, 1, 100), "cpu", torch.float16, max_position_embeddings=64)
    llm = LLM(model, kv_cache_tokens=64)
    with pretend(KNOWN["h200"]):
        found = forward_pass.backends(model, llm.engine.runner.storage.layers, prefill=True)
    assert set(found) == {"linear", "mlp", "append_kv", "paged_attention", "rms_norm"}
    assert found["paged_attention"] != "reference"
