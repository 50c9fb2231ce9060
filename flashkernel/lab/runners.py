"""Runners: ways to generate text from the same weights, with the engine, with Transformers or with llama.cpp.

A runner is loaded once for a model and started once for a batch. `start` returns a function that generates: it takes
prompts [batch, tokens] and the number of new tokens, and returns a `Run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.hf_equivalent import build_hf_equivalent
from flashkernel.lab.packages import require


class UnsupportedError(RuntimeError):
    """A runner cannot run on this device or at this size; the message says why."""


@dataclass(frozen=True)
class Run:
    """The times and tokens of one generation."""

    ttft_s: float  # time until every sequence has its first token
    steps_s: list[float]  # time of each further decoding step
    tokens: Tensor  # [batch, new]

    @classmethod
    def of(cls, began: float, times: Sequence[float], tokens: Tensor) -> Run:
        """From the clock readings at the start and after each token of the batch."""
        return cls(times[0] - began, [after - before for before, after in pairwise(times)], tokens)


Generate = Callable[[Tensor, int], Run]


@dataclass(frozen=True)
class Runner:
    """One way to generate: `load(model, gguf)` prepares the weights, `start(loaded, batch, prompt, new)` the buffers.

    `gguf` is the file that has the model's weights as they are, or None. `batch`, `prompt` and `new` are the largest
    sizes that the returned function will be called with.
    """

    kind: str  # "backend" (ours) or "baseline"
    load: Callable[[Transformer, Path | None], Any]
    start: Callable[[Any, int, int, int], Generate]


def _start_engine(model: Transformer, batch: int, prompt: int, new: int) -> Generate:
    """An engine whose KV cache has just the size needed; prompts are prefilled in chunks, as in serving."""
    page = 16 if model.device.type == "cuda" else 64
    step_tokens = max(8192 if model.device.type == "cuda" else 1024, 2 * batch)
    early = -(-batch * prompt // (step_tokens - batch)) + 2  # tokens that the first sequences get before the last
    context = prompt + new + early
    longest = model.config.max_position_embeddings
    if context > longest:
        raise UnsupportedError(f"{context} tokens do not fit the model's context of {longest}")
    llm = LLM(
        model, max_num_seqs=batch, max_num_batched_tokens=step_tokens, max_model_len=context, block_size=page,
        enable_prefix_caching=False, kv_cache_tokens=batch * (-(-context // page) + 1) * page, warm_up=False,
    )  # fmt: skip
    return partial(_run_engine, llm, early)


def _run_engine(llm: LLM, early: int, prompts: Tensor, new: int) -> Run:
    """Runs engine steps until all sequences have a first token, then `new` - 1 steps in which each gets one more."""
    engine, params = llm.engine, SamplingParams(max_tokens=new + early, ignore_eos=True)
    given = prompts.tolist()
    began = time.perf_counter()
    names = [engine.add_request(one, params) for one in given]
    tokens: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for event in engine.step():
            if event.token_id is not None and event.request_id in tokens:
                tokens[event.request_id].append(event.token_id)
            if event.request_output is not None:
                reason = event.request_output.outputs[0].finish_reason
                raise RuntimeError(f"a sequence ended early, by {reason}") from engine.failure

    try:
        while not all(tokens.values()):
            step()
        times = [time.perf_counter()]
        for _ in range(new - 1):
            step()
            times.append(time.perf_counter())
    finally:
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
    return Run.of(began, times, torch.tensor([tokens[name][:new] for name in names]))


class _Clock:
    """A stopping criterion that never stops and reads the clock after every token.

    The first reading waits for the GPU. Later ones do not; `generate` itself waits for each token, so their
    differences are right.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def __call__(self, ids: Tensor, scores: Any, **how: Any) -> Tensor:
        if not self.times:
            synchronize(self.device)
            self.never = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        self.times.append(time.perf_counter())
        return self.never


def _load_transformers(model: Transformer, gguf: Path | None, attention: str, patched: bool = False) -> Any:
    hf_model = build_hf_equivalent(model, attention)
    if patched:
        import flashkernel.hf

        flashkernel.hf.patch(hf_model)
    return hf_model


def _start_transformers(model: Any, batch: int, prompt: int, new: int, static: bool = False) -> Generate:
    options: dict[str, Any] = {}
    if static:
        if model.device.type != "cuda":
            raise UnsupportedError("Transformers compiles generate() for a static cache on a GPU only")
        from transformers import StaticCache

        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=prompt + new)
    return partial(run_transformers, model, options)


def run_transformers(model: Any, options: dict[str, Any], prompts: Tensor, new: int) -> Run:
    """Runs `model.generate` greedily; resets a static cache that is among the options."""
    from transformers import StoppingCriteriaList

    ids, clock = prompts.to(model.device), _Clock(model.device)
    if "past_key_values" in options:
        options["past_key_values"].reset()
    synchronize(model.device)
    began = time.perf_counter()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]), **options,
    )  # fmt: skip
    tokens = found[:, ids.shape[1] :].cpu()
    clock.times[-1] = time.perf_counter()  # .cpu() has waited for the last token
    return Run.of(began, clock.times, tokens)


def _load_llama_cpp(model: Transformer, gguf: Path | None) -> Path:
    require("llama_cpp", "a comparison with llama.cpp")
    if model.device.type != "cpu":
        raise UnsupportedError("llama.cpp is compared on a CPU only")
    if gguf is None:
        raise UnsupportedError("llama.cpp reads GGUF files, and this model has none; take --model smollm2")
    return gguf


def _start_llama_cpp(gguf: Path, batch: int, prompt: int, new: int) -> Generate:
    """llama.cpp with its defaults, on as many threads as torch has; its context has just the size needed."""
    from llama_cpp import Llama

    if batch != 1:
        raise UnsupportedError(f"llama.cpp is compared with one sequence, not with {batch}; take --batch 1")
    threads = torch.get_num_threads()
    return partial(
        _run_llama_cpp,
        Llama(str(gguf), n_ctx=prompt + new, n_threads=threads, n_threads_batch=threads, verbose=False),
    )


def _run_llama_cpp(llama: Any, prompts: Tensor, new: int) -> Run:
    """Greedy decoding by llama.cpp's own functions: the Python around them costs a few microseconds a token."""
    import llama_cpp

    context, vocab, size = llama.ctx, llama.n_vocab(), llama.n_batch
    tokens: list[int] = []
    times: list[float] = []
    given = prompts[0].tolist()
    began = time.perf_counter()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    chunks = [given[first : first + size] for first in range(0, len(given), size)]
    while len(tokens) < new:
        for chunk in chunks:
            array = (llama_cpp.llama_token * len(chunk))(*chunk)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(chunk))):
                raise RuntimeError(f"llama.cpp could not compute {len(chunk)} tokens behind {len(tokens)} new ones")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab,))
        tokens.append(int(logits.argmax()))
        times.append(time.perf_counter())
        chunks = [tokens[-1:]]
    return Run.of(began, times, torch.tensor([tokens]))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


RUNNERS: dict[str, Runner] = {
    "engine": Runner("backend", lambda model, gguf: model, _start_engine),
    "hf_sdpa": Runner("baseline", partial(_load_transformers, attention="sdpa"), _start_transformers),
    "hf_eager": Runner("baseline", partial(_load_transformers, attention="eager"), _start_transformers),
    "hf_patch": Runner("backend", partial(_load_transformers, attention="sdpa", patched=True), _start_transformers),
    "hf_compile": Runner(
        "baseline", partial(_load_transformers, attention="sdpa"), partial(_start_transformers, static=True)
    ),
    "llama_cpp": Runner("baseline", _load_llama_cpp, _start_llama_cpp),
}
DEFAULTS = tuple(name for name in RUNNERS if name != "llama_cpp")  # which reads GGUF files alone
