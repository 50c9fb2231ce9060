"""Runners: ways to generate text from the same weights, with the engine, with Transformers or with llama.cpp.

A runner is loaded once for a model and started once for a batch. `start` returns a function that generates: it takes
prompts [batch, tokens] and the number of new tokens, and returns a `Run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.engine_options import EngineOptions
from flashkernel.lab.hf_equivalent import build_hf_equivalent
from flashkernel.lab.packages import require

DEFAULT_OPTIONS = EngineOptions()


class UnsupportedError(RuntimeError):
    """A runner cannot run on this device or at this size; the message says why."""


@dataclass(frozen=True)
class Run:
    """The times and tokens of one generation."""

    ttft_s: float  # time until every sequence has its first token
    steps_s: list[float]  # time of each further decoding step
    tokens: Tensor  # [batch, new]
    decoded: int  # tokens that these steps gave all sequences together
    drafted: int = 0  # tokens that were drafted
    accepted: int = 0  # of these, tokens that were kept

    @classmethod
    def of(cls, began: float, times: Sequence[float], tokens: Tensor, decoded: int | None = None) -> Run:
        """From the clock readings at the start and after each decoding step, which gave every sequence a token unless
        `decoded` says how many tokens they gave."""
        steps = [after - before for before, after in pairwise(times)]
        return cls(times[0] - began, steps, tokens, tokens.shape[0] * len(steps) if decoded is None else decoded)

    @property
    def seconds_per_token(self) -> float:
        """Decoding time in which every sequence got a token, on average."""
        return sum(self.steps_s) * self.tokens.shape[0] / self.decoded


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
    loads_at_start: bool = False  # `start` reads the weights, not `load`


def engine_with(options: EngineOptions) -> Runner:
    """The engine with these options; the weights are quantized when it is loaded."""
    if not options.label:
        return RUNNERS["engine"]
    load, start = partial(_load_engine, options=options), partial(_start_engine, options=options)
    return replace(RUNNERS["engine"], load=load, start=start)


def _load_engine(model: Transformer, gguf: Path | None, options: EngineOptions) -> Transformer:
    if options.quantization is None:
        return model
    if gguf is not None:
        raise UnsupportedError("this model is in 4 bits as it is shipped; take --model smollm2-135m to quantize it")
    return model.quantized(options.quantization)


def _start_engine(
    model: Transformer, batch: int, prompt: int, new: int, options: EngineOptions = DEFAULT_OPTIONS
) -> Generate:
    """An engine whose KV cache has just the size needed; prompts are prefilled in chunks, as in serving."""
    drafts = options.num_speculative_tokens or 0
    page = 16 if model.device.type == "cuda" else 64
    step_tokens = max(8192 if model.device.type == "cuda" else 1024, 2 * batch * (1 + drafts))
    early = -(-batch * prompt // (step_tokens - batch)) + 2  # tokens that the first sequences get before the last
    context = prompt + new + early
    longest = model.config.max_position_embeddings
    if context > longest:
        raise UnsupportedError(f"{context} tokens do not fit the model's context of {longest}")
    llm = LLM(
        model, max_num_seqs=batch * (1 + drafts),  # a draft takes rows of logits that no sequence has
        max_num_batched_tokens=step_tokens, max_model_len=context, block_size=page, enable_prefix_caching=False,
        kv_cache_tokens=batch * (-(-context // page) + 1) * page, kv_cache_dtype=options.kv_cache_dtype,
        num_speculative_tokens=drafts, enforce_eager=bool(options.enforce_eager), warm_up=False,
    )  # fmt: skip
    return partial(_run_engine, llm, early)


def _run_engine(llm: LLM, early: int, prompts: Tensor, new: int) -> Run:
    """Runs engine steps until all sequences have a first token, then until all have `new`.

    A step gives each sequence a token, or several that were drafted; sequences then end at different steps.
    """
    engine, params = llm.engine, SamplingParams(max_tokens=new + early, ignore_eos=True)
    given = prompts.tolist()
    began = time.perf_counter()
    names = [engine.add_request(one, params) for one in given]
    tokens: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for event in engine.step():
            if event.token_id is not None and event.request_id in tokens:
                tokens[event.request_id].append(event.token_id)
            if event.request_output is not None and len(tokens[event.request_id]) < new:
                reason = event.request_output.outputs[0].finish_reason
                raise RuntimeError(f"a sequence ended early, by {reason}") from engine.failure

    def count() -> int:
        return sum(map(len, tokens.values()))

    stats = engine.stats()
    try:
        while not all(tokens.values()):
            step()
        times, first = [time.perf_counter()], count()
        while min(map(len, tokens.values())) < new:
            step()
            times.append(time.perf_counter())
        decoded, after = count() - first, engine.stats()
    finally:
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
    run = Run.of(began, times, torch.tensor([tokens[name][:new] for name in names], device="cpu"), decoded)
    return replace(
        run, drafted=after.num_draft_tokens - stats.num_draft_tokens,
        accepted=after.num_accepted_tokens - stats.num_accepted_tokens,
    )  # fmt: skip


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
    return Run.of(began, times, torch.tensor([tokens], device="cpu"))


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
    "llama_cpp": Runner("baseline", _load_llama_cpp, _start_llama_cpp, loads_at_start=True),
}
DEFAULTS = tuple(name for name in RUNNERS if name != "llama_cpp")  # which reads GGUF files alone
