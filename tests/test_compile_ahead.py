"""Kernels of the engine's steps, found and compiled without a GPU: each once, under the keys that launches look for."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkernel.core import cache_key, compile_ahead, versions
from flashkernel.core.device import KNOWN, pretend
from flashkernel.core.launch import Launch
from flashkernel.core.shapes import Model
from flashkernel.engine import SamplingParams, precompile
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.model_runner import ModelRunner
from flashkernel.engine.prompt_lookup import PromptLookup
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.sequence import Sequence
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import KVCache, PageStorage

pytestmark = pytest.mark.compile
H200 = KNOWN["h200"]
SMALL = Model(hidden=512, intermediate=1024, heads=8, kv_heads=2, head_dim=64, layers=2, vocab=1000)
SIZES = precompile.EngineSizes(
    max_num_seqs=24, max_num_batched_tokens=256, max_model_len=512, block_size=16, kv_cache_dtype=torch.bfloat16
)


def _model(format: str | None = None) -> Transformer:
    model = dummy_transformer(SMALL, "meta", torch.bfloat16, max_position_embeddings=512)
    return model if format is None else model.quantized(format)


def _launches(format: str | None = None) -> list[compile_ahead.AnyLaunch]:
    return precompile.launches_of(precompile.describe(_model(format)), SIZES, H200)


def _triton_key(launch: Launch) -> str:
    """Triton's own key of the code of a launch."""
    from triton.runtime.jit import compute_cache_key

    cache_key.compute_cache_keys(launch.kernel)
    with compile_ahead._driver_without_gpu(90):
        _, known, _, _, binder = launch.kernel.device_caches[0]
        options = versions.compile_options(90) | launch.constants
        _, specialization, rest = binder(*map(compile_ahead._stand_in, launch.args), **options)
    return launch.name + compute_cache_key(known, specialization, rest)


@pytest.mark.parametrize("format", [None, "int4"])
def test_launches_are_told_apart_as_triton_does(format: str | None) -> None:
    """Each kernel is compiled once, and none is missing."""
    found = _launches(format)
    by_key: dict[Any, set[str]] = defaultdict(set)
    for launch in found:
        if isinstance(launch, Launch):
            by_key[compile_ahead._key(launch)].add(_triton_key(launch))
    assert len(by_key) > 20
    assert all(len(keys) == 1 for keys in by_key.values())
    assert len(set.union(*by_key.values())) == len(by_key)
    assert len(compile_ahead.distinct(found)) >= len(by_key)


def test_another_length_of_the_context_needs_no_other_kernels() -> None:
    """Kernels are compiled ahead for the length that is wanted; the KV cache may hold less, and any number of pages."""
    payload = precompile.describe(_model())
    wanted, shorter = (
        {compile_ahead._key(launch) for launch in precompile.launches_of(payload, sizes, KNOWN["l4"])}
        for sizes in (SIZES, replace(SIZES, max_model_len=SIZES.max_model_len - SIZES.block_size))
    )
    assert shorter <= wanted


ARCHITECTURES = [
    "llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_oss", "mixtral", "qwen3_moe", "phi3", "gemma3_text",
]  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_found_on_the_meta_device(name: str, tmp_path: Path) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    assert set(tiny_models.configs()) - {"llama3"} == set(ARCHITECTURES)
    tiny_models.save(name, tmp_path)
    model = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.bfloat16)
    sizes = replace(SIZES, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    found = compile_ahead.distinct(precompile.launches_of(precompile.describe(model), sizes, H200))
    names = {compile_ahead.name_of(launch) for launch in found}
    assert {"append_kv_kernel", "paged_prefill", "sample_rows"} <= names
    assert len(names) > 5


def test_an_address_that_is_not_aligned_is_another_kernel() -> None:
    whole = torch.empty(64, dtype=torch.int32, device="meta")
    kinds = [compile_ahead._kind(x, True, True) for x in (whole, whole[4:], whole[1:])]
    assert kinds[0] == kinds[1] != kinds[2]
    assert [compile_ahead._Pointer(x).data_ptr() % 16 for x in (whole, whole[4:], whole[1:])] == [0, 0, 4]
    assert compile_ahead._kind(16, True, True) != compile_ahead._kind(17, True, True)
    assert compile_ahead._kind(16, True, False) == compile_ahead._kind(17, True, False)
    assert compile_ahead._kind(1, True, False) != compile_ahead._kind(17, True, False)


_AGAIN = """
import random, sys
sys.path.insert(0, "tests")
import test_compile_ahead as t
from flashkernel.core import build_counter, compile_ahead
launches = compile_ahead.distinct(t._launches())[:int(sys.argv[1])]
random.Random(7).shuffle(launches)
build_counter.watch_triton()
for launch in launches:
    compile_ahead.compile_one(launch, 90)
print(build_counter.counts())
"""


def test_another_process_finds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order: Triton's keys depend on the order of launches, ours do not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = compile_ahead.distinct(_launches())[:12]
    found = list(compile_ahead.compile_all(launches, 90, 2, with_launchers=False))
    assert [one.failure for one in found] == [""] * 12
    assert all(one.cpu_seconds > 0 for one in found)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    again = subprocess.run(
        [sys.executable, "-c", _AGAIN, "12"], env=environment, capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == "BuildCounts(compiled=0, loaded=12, captured=0, tuned=0)"


def test_a_model_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it, for a pretended GPU: processes, progress, the files that say that it was done."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "flashkernel"))
    monkeypatch.setattr(precompile, "MIN_BYTES", 0)
    monkeypatch.setattr(compile_ahead, "num_cores", lambda: 2)
    sizes = replace(SIZES, max_num_seqs=2, max_num_batched_tokens=32)
    told: list[tuple[str, int, int]] = []
    with pretend(H200):
        built = precompile.precompile(_model(), sizes, lambda *now: told.append(now))
        assert precompile.precompile(_model(), sizes, lambda *now: told.append(now)) == 0
    assert told[0][0] == "starting compilers"
    assert told[-1] == ("compiling in processes", built, built)
    assert len(list((tmp_path / "triton").rglob("*.cubin"))) == told[-1][2] == len(told) - 1 > 5
    shutil.rmtree(tmp_path / "flashkernel" / "engine")
    with pretend(H200):
        assert precompile.precompile(_model(), sizes, lambda *now: told.append(now)) == 0, "all are in Triton's cache"
    assert told[-1][1] == built, "and it was looked for all of them"


def test_a_kernel_that_fails_is_reported() -> None:
    launch = next(one for one in _launches() if isinstance(one, Launch))
    wrong = Launch(launch.kernel, launch.grid, launch.args[:-1], launch.constants)
    (found,) = compile_ahead.compile_all([wrong], 90, 1, with_launchers=False)
    assert found.failure


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(seed, marks=pytest.mark.every_config) for seed in (2, 3)]])
def test_a_random_load_asks_for_no_other_kernel(seed: int) -> None:
    """Steps of random requests launch what the padded steps of the warm-up launch, and have their shapes."""
    model, draw = _model(), random.Random(seed)
    made = {compile_ahead._key(launch) for launch in _launches()}
    config = model.config
    storage = PageStorage(2, 60, 16, config.kv_heads, config.head_dim, dtype=torch.bfloat16, device="meta")
    cache = KVCache(60, 16, max_num_seqs=24, max_model_len=512, storage=storage)
    runner = ModelRunner(model, storage, cache, 24, 256, enforce_eager=True)
    scheduler, known = Scheduler(cache, 24, 256, num_speculative_tokens=3), set(runner.shapes.all())
    waiting = [_sequence(index, draw) for index in range(60)]
    steps = preempted = 0
    with compile_ahead.collect(H200) as found, torch.inference_mode():
        while waiting or scheduler.running or scheduler.waiting:
            for _ in range(min(len(waiting), draw.choice((0, 0, 1, 6)))):
                scheduler.add(waiting.pop())
            scheduled = scheduler.schedule()
            preempted = scheduler.num_preemptions
            if not scheduled.num_tokens:
                continue
            sampled, prefills = scheduled.sampled, scheduled.prefills
            most = max(len(prefills), sum(chunk.num_logits for chunk in prefills))
            shape = runner.shapes.find(len(scheduled.decodes), most, sum(chunk.count for chunk in prefills))
            assert shape in known
            runner._prepare(scheduled, sampled, shape)()
            steps += 1
            for sequence in dict.fromkeys(sampled):
                sequence.has_sampled = True
                sequence.token_ids.append(draw.randrange(10))
                scheduler.accept(sequence)
                if len(sequence.token_ids) >= sequence.max_tokens:
                    scheduler.finish(sequence)
    assert steps > 50
    assert preempted
    asked = {compile_ahead._key(launch): compile_ahead.name_of(launch) for launch in found}
    assert not {name for key, name in asked.items() if key not in made}


def _sequence(index: int, draw: random.Random) -> Sequence:
    prompt = [draw.randrange(10) for _ in range(draw.randint(1, 200))]
    most = len(prompt) + draw.randint(1, 100)
    sequence = Sequence(str(index), None, prompt, SamplingParams(), most, False, None)
    sequence.lookup = PromptLookup() if draw.random() < 0.3 else None
    return sequence
