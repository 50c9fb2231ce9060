"""The start: step shapes, graphs captured before the first request, and nothing compiled or captured in service."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import _as_on_a_gpu, _capture, _drained, _other, _tokens

from flashkernel.core import build_counter, cpp, tune
from flashkernel.core.device import KNOWN
from flashkernel.engine import LLM, SamplingParams, build, precompile, step_memory
from flashkernel.engine.dummy_weights import tiny_transformer
from flashkernel.engine.model_runner import ModelRunner, StepGraph
from flashkernel.engine.step_shapes import StepShape, StepShapes, decode_sizes
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import BatchTensors, KVCache
from flashkernel.kvcache.storage import bytes_per_page


@pytest.fixture(name="padded")
def padded_fixture(base: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    llm = _other(base, kv_cache_tokens=1024, max_num_seqs=6, max_num_batched_tokens=128, enable_prefix_caching=False)
    return _as_on_a_gpu(llm, monkeypatch)


def _mixed_load(vocab: int, count: int = 14) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all lengths and settings."""
    draw = random.Random(5)
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 70))] for _ in range(count)]
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.2, "top_k": 7, "min_p": 0.01},
        {"repetition_penalty": 1.3}, {"temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 3},
        {"logit_bias": {3: 4.0}, "temperature": 0.5}, {"min_tokens": 5},
        {"prompt_logprobs": 2},
    ]  # fmt: skip
    params = [
        SamplingParams(
            max_tokens=draw.randint(5, 25), seed=index, ignore_eos=index % 3 != 0, **kinds[index % len(kinds)]
        )
        for index in range(count)
    ]
    return prompts, params


def test_a_mixed_load_compiles_and_captures_nothing(base: LLM, padded: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    padded.engine.warm_up(lambda *now: told.append(now))
    shapes = padded.engine.runner.shapes.all()
    assert padded.engine.runner.num_graphs == len(shapes)
    assert told[-1] == ("ready", len(shapes), len(shapes))
    assert padded.engine.stats().compiled_in_service == 0
    prompts, params = _mixed_load(padded.config.vocab_size)
    done = padded.generate(prompts, params)
    expected = base.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in done] == [one.outputs[0].token_ids for one in expected]
    for one, other in zip(done, expected):
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for found, wanted in zip(one.prompt_logprobs or (), other.prompt_logprobs or ()):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    stats = padded.engine.stats()
    assert stats.compiled_in_service == 0
    assert stats.num_finished == len(prompts)
    assert _drained(padded)


def test_kernels_compiled_at_the_start_are_counted(padded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process and those of workers; loads and captures are no sign of cold caches."""
    assert padded.engine.stats().compiled_at_start == 0
    prepare = ModelRunner._prepare_shape

    def compiling(self: ModelRunner, shape: StepShape) -> None:
        build_counter.note("compiled" if shape.num_decodes == 1 and not shape.num_prefills else "loaded")
        prepare(self, shape)

    monkeypatch.setattr(ModelRunner, "_prepare_shape", compiling)
    padded.engine.warm_up(compiled_before=41)
    stats = padded.engine.stats()
    assert (stats.compiled_at_start, stats.compiled_in_service) == (42, 0)
    monkeypatch.setattr(ModelRunner, "_prepare_shape", prepare)
    padded.engine.warm_up()
    assert padded.engine.stats().compiled_at_start == 0


_COLD = """
import torch
from flashkernel.core import build_counter
from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.dummy_weights import tiny_transformer
for format in (None, "int8"):
    llm = LLM(tiny_transformer(), kv_cache_tokens=256, quantization=format)
    loaded = build_counter.counts()
    for settings in ({}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2, "logprobs": 2}):
        llm.generate([[1, 2, 3], [4] * 40], SamplingParams(max_tokens=3, **settings))
    stats = llm.engine.stats()
    assert stats.compiled_in_service == 0, "compiled while requests waited"
    print(stats.compiled_at_start)
"""


@pytest.mark.skipif(cpp.can_compile() is not None, reason=str(cpp.can_compile()))
def test_a_cpu_compiles_nothing_in_service(tmp_path: Path) -> None:
    """With a cold cache its C++ kernels are compiled at the start, those of quantized weights only for such; later
    starts find them."""
    environment = {**os.environ, "FLASHKERNEL_CACHE_DIR": str(tmp_path)}
    for expected in ([1, 2], [0, 0]):
        command = [sys.executable, "-c", _COLD]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [int(line) for line in done.stdout.split()] == expected


def test_what_is_captured_in_service_is_counted(base: LLM, padded: LLM) -> None:
    """Without a warm-up the same load is served, and the counter says what it cost."""
    prompts, params = _mixed_load(padded.config.vocab_size, 6)
    assert _tokens(padded, prompts, params) == _tokens(base, prompts, params)
    assert padded.engine.stats().compiled_in_service == padded.engine.runner.num_graphs > 0


def test_nothing_is_collected_in_a_capture_in_service(padded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collection frees, such as another model's graphs, a capture may forbid."""
    during: list[bool] = []

    def watched(runner: ModelRunner, compute: Callable[[], Any]) -> StepGraph:
        during.append(gc.isenabled())
        return _capture(runner, compute)

    monkeypatch.setattr(ModelRunner, "_capture", watched)
    padded.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert during
    assert not any(during)
    assert gc.isenabled()


class _Stream:
    """Stands in for a CUDA stream."""

    def __init__(self) -> None:
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


def test_steps_on_different_streams_follow_one_another(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may run in `torch.cuda.stream` or in a thread with another stream, and the last step may still run."""
    first, second = _Stream(), _Stream()
    current = [first]
    monkeypatch.setattr(ModelRunner, "_current_stream", lambda runner: current[0])
    llm = _other(base, kv_cache_tokens=256)
    for stream in (first, first, second, first):
        current[0] = stream
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert (first.waited_for, second.waited_for) == ([second], [first])


def test_compiled_and_tuned_kernels_are_counted() -> None:
    """Triton tells of every kernel that it compiles; a search for configs counts as well."""
    knobs = pytest.importorskip("triton").knobs
    build_counter.watch_triton()
    build_counter.watch_triton()
    before = build_counter.counts()
    for cache_hit in (False, True, True):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
    assert build_counter.counts().compiled == before.compiled + 1
    assert build_counter.counts().loaded == before.loaded + 2
    from flashkernel.core import device
    from flashkernel.ops.sampling.configs import SAMPLE

    with pytest.raises(RuntimeError, match="no config could run"):
        tune.search(SAMPLE, device.properties(torch.device("cpu")), {"vocab": 64, "bytes": 4}, _no_call)
    assert build_counter.counts().tuned == before.tuned + 1


def _no_call(config: Any) -> Any:
    raise ValueError("not run")


def test_shapes_are_few_and_fit_every_step() -> None:
    shapes = StepShapes(256, 8192)
    assert len(shapes.all()) <= 100
    assert len(set(shapes.all())) == len(shapes.all())
    known = set(shapes.all())
    draw = random.Random(0)
    for _ in range(2000):
        decodes = draw.randint(0, 256)
        prefills = draw.randint(0, 256 - decodes)
        if decodes + prefills == 0:
            continue
        tokens = draw.randint(prefills, 8192 - decodes) if prefills else 0
        found = shapes.find(decodes, prefills, tokens)
        assert found in known
        assert found.num_decodes >= decodes
        assert found.num_prefills >= prefills
        assert found.num_prefill_tokens >= tokens
    assert StepShapes(1, 16).find(0, 1, 16) == StepShape(0, 1, 16)
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == [1, 2, 4, 6]
    assert all(after <= max(2 * before, before + 64) for before, after in pairwise(decode_sizes(1000)))


def test_decodes_are_padded_before_the_prompts() -> None:
    """The tensors of a padded step are those of the step without padding, with padding in between."""
    cache = KVCache(64, 16, max_num_seqs=8, max_model_len=128)
    rows = [cache.add() for _ in range(4)]
    counts = [1, 1, 20, 7]
    for row, count in zip(rows, (5, 17, 20, 30)):
        cache.grow(row, count)
    plain = BatchTensors(cache, 8, 64).fill(rows, counts)
    padded = BatchTensors(cache, 8, 64).fill(rows, counts, pad=(7, 40), decodes=(2, 4))
    assert padded.lengths.tolist() == [*plain.lengths[:2].tolist(), 0, 0, *plain.lengths[2:].tolist(), 0]
    assert padded.slots.tolist() == [
        *plain.slots[:2].tolist(), -1, -1, *plain.slots[2:].tolist(), *[-1] * (40 - 4 - 27)
    ]  # fmt: skip
    assert padded.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 24, 31, 31]
    assert torch.equal(padded.page_table[[0, 1, 4, 5]], plain.page_table)
    with pytest.raises(ValueError, match="does not fit"):
        BatchTensors(cache, 8, 64).fill(rows, counts, pad=(5, 40), decodes=(2, 4))
    again = BatchTensors(cache, 8, 64)
    again.fill(rows[::-1], counts[::-1])
    assert np.array_equal(
        again.fill(rows, counts, pad=(7, 40), decodes=(2, 4)).page_table[[0, 1, 4, 5]], plain.page_table
    )


def test_workers_have_a_copy_of_the_model_without_values() -> None:
    """One layer of each kind, the same shapes, and no memory."""
    model = tiny_transformer()
    payload = precompile.describe(model)
    assert len(payload) < model.nbytes
    runner = precompile.build_runner(precompile.load(payload), precompile.EngineSizes(4, 64, 128, 16, torch.float32))
    assert len(runner.model.layers) == 1
    assert runner.model.layers[0].qkv_proj.shape == model.layers[0].qkv_proj.shape
    assert runner.device.type == "meta"
    assert runner.padded


def test_what_was_compiled_is_remembered_by_all_it_depends_on() -> None:
    """Sizes, formats of weights; in each of the caches."""
    pytest.importorskip("triton")
    model, sizes = tiny_transformer(), precompile.EngineSizes(4, 64, 128, 16, torch.float32)
    first = precompile._markers(model, sizes)
    assert len({path.parent for path in first}) == 2
    assert precompile._markers(model, sizes) == first
    others = [
        precompile._markers(model, replace(sizes, max_num_seqs=5)),
        *(precompile._markers(model.quantized(format), sizes) for format in ("int8", "fp8")),
    ]
    assert len({path for paths in (first, *others) for path in paths}) == 8


SIZES = precompile.EngineSizes(8, 256, 128, 16, torch.bfloat16)
EXPERTS, INNER = 16, 192


class _OnSecondGpu(Transformer):
    """A model that says that it lies on a GPU."""

    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]


def _parts(model: Transformer) -> tuple[Any, ...]:
    return model.config, model.weights, model.layers


def _with_experts(format: str | None) -> Transformer:
    """Two experts of 16 for each token, plain or in MXFP4."""
    base = tiny_transformer(dtype=torch.bfloat16)
    stacks = {
        "gate_up_proj": torch.zeros(EXPERTS, 2 * INNER, 32, dtype=torch.bfloat16),
        "down_proj": torch.zeros(EXPERTS, 32, INNER, dtype=torch.bfloat16),
        "router": torch.zeros(EXPERTS, 32, dtype=torch.bfloat16),
    }
    config = replace(base.config, num_experts=EXPERTS, num_experts_per_token=2)
    model = Transformer(config, base.weights, [replace(layer, **stacks) for layer in base.layers])
    return model if format is None else model.with_mxfp4_experts()


def test_steps_memory_has_experts_that_are_dequantized() -> None:
    """For many tokens both stacks of a layer are, whatever the backend; rows of all experts of a token count."""
    plain, quantized = (step_memory.measure(_with_experts(format), SIZES, KNOWN["l4"]) for format in (None, "mxfp4"))
    dense = EXPERTS * 3 * INNER * 32 * 2
    assert quantized.step - plain.step >= 0.9 * dense
    assert plain.step >= 2 * 264 * (INNER + 32) * 2  # between the products, and behind them
    assert plain.buffers == quantized.buffers >= (SIZES.max_num_seqs + 1) * 100 * 4  # counts of tokens
    fewer = step_memory.measure(_with_experts(None), replace(SIZES, max_num_batched_tokens=64), KNOWN["l4"])
    assert fewer.step < plain.step


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_the_kv_cache_leaves_memory_for_steps(format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step runs before it is captured, and its graph has memory of its own: both must fit."""
    model = _with_experts(format)
    on_gpu = _OnSecondGpu(*_parts(model))
    steps, page = step_memory.measure(model, SIZES, KNOWN["l4"]), bytes_per_page(2, 16, 2, 8, torch.bfloat16)
    usable = SIZES.max_num_seqs * SIZES.max_model_len // SIZES.block_size * page
    total = 10**9
    free = total // 100 + steps.buffers + 2 * steps.step + usable // 2

    cached = [10**6]  # torch returns it; the rest of what it has reserved belongs to graphs of another engine

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        assert device.index == 1
        return free - sum(cached), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**8)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(build.devices, "properties", lambda device: KNOWN["l4"])
    blocks = {}
    for eager in (False, True):
        args = build.EngineArgs(gpu_memory_utilization=0.99, enforce_eager=eager)
        blocks[eager] = build._num_blocks(on_gpu, args, SIZES)
        assert blocks[eager] * page + steps.buffers + (1 if eager else 2) * steps.step <= free - total // 100
    assert 0.8 * usable // 2 < blocks[False] * page < blocks[True] * page


def test_a_start_goes_on_without_the_memory_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "measure", lambda *_: 1 // 0)
    monkeypatch.setattr(build.devices, "properties", lambda device: KNOWN["l4"])
    args = build.EngineArgs(gpu_memory_utilization=0.9)
    with pytest.warns(UserWarning, match=r"not measured \(ZeroDivisionError.*left 10 GiB.*kv_cache_tokens"):
        found = build._bytes_of_steps(_OnSecondGpu(*_parts(_with_experts(None))), args, SIZES, 80 << 30)
    assert found == 10 << 30


@pytest.mark.gpu
def test_a_gpu_compiles_and_captures_nothing_in_service() -> None:
    """Twice a mixed load: nothing is built, and tokens are those of requests alone and of steps without graphs."""
    model = tiny_transformer("cuda")
    options: dict[str, Any] = {"kv_cache_tokens": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    llm = LLM(model, **options)
    assert llm.engine.stats().warm_up_s > 0
    assert llm.engine.runner.num_graphs == len(llm.engine.runner.shapes.all())
    prompts, params = _mixed_load(llm.config.vocab_size, 24)
    first = _tokens(llm, prompts, params)
    assert _tokens(llm, prompts, params) == first
    assert llm.engine.stats().compiled_in_service == 0
    assert [_tokens(llm, [prompt], one)[0] for prompt, one in zip(prompts[:8], params)] == first[:8]
    assert _tokens(LLM(model, **options, enforce_eager=True), prompts, params) == first
