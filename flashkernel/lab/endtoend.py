"""Whole models: how fast prompts are taken in and tokens come out, in the engine and in Transformers.

Models have their true shapes and random weights (SmolLM2 has its own), the same for all contenders; prompts are random
tokens, and all of a batch have one length. Decoding is timed from the moment every sequence has its first token. Each
contender's tokens are put before Transformers: a token counts as right where no other is likelier by more than rounding
can explain. A contender that fails this claims no speed.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.shapes import MODELS
from flashkernel.engine import LLM
from flashkernel.engine.synthetic import random_transformer
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.bench import DeviceLostError
from flashkernel.lab.contenders import CONTENDERS, Generate, Run, synchronize
from flashkernel.lab.energy import Meter
from flashkernel.lab.results import Generation
from flashkernel.lab.twin import twin

SMOLLM2 = "smollm2-135m"
# name -> the shape, and what differs from a Llama with a tied output layer
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {"learned_positions": True, "context": 1024}),
    "llama-3.2-1b": ("llama-3.2-1b", {"context": 8192}),
    "llama-3.1-8b": ("llama-3.1-8b", {"context": 8192, "tied": False}),
}
NAMES = (*SHAPES, SMOLLM2)
DEFAULTS = ("gpt2-124m", SMOLLM2, "llama-3.2-1b")
WARM_UP_TOKENS = 8  # enough for compilers and graphs; the first run after it is thrown away as well
LEAST_RUNS, MOST_RUNS, RUN_S = 2, 8, 1.5  # until so many seconds were timed
CHECKED = 2  # sequences of a batch that are put before Transformers
# How far below the likeliest token a right one may be, in standard deviations of the logits; a wrong one is 2 to 5 off.
SLACK = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Work:
    """What is asked of every contender."""

    batches: Sequence[int]
    prompt: int
    new: int
    rounds: int = 1  # all contenders one after another, so often: what a busy host slows for a while, it slows for all


def default_dtype(device: torch.device) -> torch.dtype:
    """What such models are served in."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class Subject:
    """A model under measurement, and Transformers' version of it as the judge."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        if name not in NAMES:
            raise ValueError(f"e2e: model {name!r} is not known; there are {', '.join(NAMES)}")
        self.name, self.device, self.dtype = name, device, dtype
        self.model = _build(name, device, dtype)

    @cached_property
    def judge(self) -> Any:
        return twin(self.model)

    def prompts(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randint(1, self.model.config.vocab, (batch, length), generator=generator)

    def gap(self, prompts: Tensor, tokens: Tensor) -> float:
        """How far below the likeliest token the worst of `tokens` is, in standard deviations of the logits."""
        ids = torch.cat((prompts, tokens), 1)[:CHECKED].to(self.device)
        with torch.inference_mode():
            logits = self.judge(input_ids=ids[:, :-1], logits_to_keep=tokens.shape[1], use_cache=False).logits.float()
        chosen = logits.gather(2, ids[:, -tokens.shape[1] :, None])[..., 0]  # [sequences, new]
        return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())

    def step_bytes(self, batch: int, length: int) -> int:
        """What a decoding step must read: every weight but the tables that are looked up, and all keys and values."""
        config, outer = self.model.config, self.model.outer
        tables = (() if config.tied else (outer.embedding,)) + (() if outer.positions is None else (outer.positions,))
        weights = self.model.nbytes - sum(table.nbytes for table in tables)
        return weights + 2 * batch * length * config.layers * config.kv_heads * config.head_dim * self.dtype.itemsize


def _build(name: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    if name != SMOLLM2:
        shape, how = SHAPES[name]
        return random_transformer(MODELS[shape], device, dtype, **how)
    precision = str(dtype).removeprefix("torch.")
    return LLM("smollm2", device=str(device), dtype=precision, cache_tokens=256, context=256).model


@dataclass
class Taken:
    """What was seen of one contender on one batch, over all rounds."""

    runs: list[Run] = field(default_factory=list)
    peak: int | None = None
    joules: float | None = 0.0  # None once a round had no meter
    gap: float = 0.0


def measure(
    subject: Subject,
    names: Sequence[str],
    work: Work,
    copy_tbs: float,
    step: Callable[[str], None] = lambda text: None,
) -> Iterator[Generation]:
    """A record for each contender and batch, anew in every round; one that cannot run says why in its `error`."""
    taken: dict[tuple[str, int], Taken | str] = {}  # or the reason why there is nothing
    for turn in range(work.rounds):
        which = f" (round {turn + 1} of {work.rounds})" if work.rounds > 1 else ""
        for name in names:
            contender, loaded, reason = CONTENDERS[name], None, None
            step(f"{subject.name} {name}{which}")
            try:
                loaded = contender.load(subject.model)
            except Exception as error:  # whatever a contender lacks must not end the others
                reason = _gist(error)
            for batch in work.batches:
                step(f"{subject.name} {name} batch {batch}{which}")
                so_far = taken.setdefault((name, batch), Taken())
                if reason is not None:
                    taken[name, batch] = reason
                elif isinstance(so_far, Taken):
                    try:
                        _take(so_far, subject, contender.start, loaded, batch, work)
                    except Exception as error:
                        taken[name, batch] = _gist(error)
                yield _record(subject, name, batch, work, taken[name, batch], copy_tbs)
                _clear(subject.device)
            del loaded
            _clear(subject.device)


def _take(taken: Taken, subject: Subject, start: Callable[..., Generate], loaded: Any, batch: int, work: Work) -> None:
    """One contender's runs on one batch, added to those that were taken before."""
    prompts, on_gpu = subject.prompts(batch, work.prompt), subject.device.type == "cuda"
    before = torch.cuda.memory_allocated(subject.device) if on_gpu else 0
    generate = start(loaded, batch, work.prompt, work.new)
    generate(prompts, min(WARM_UP_TOKENS, work.new))
    generate(prompts, work.new if on_gpu else min(WARM_UP_TOKENS, work.new))
    synchronize(subject.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(subject.device)
    runs: list[Run] = []
    began = time.perf_counter()
    with Meter(subject.device) as meter:
        while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() - began < RUN_S):
            runs.append(generate(prompts, work.new))
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(subject.device) - before + subject.model.nbytes
        taken.peak = max(taken.peak or 0, peak)
    del generate
    taken.runs += runs
    taken.joules = None if taken.joules is None or meter.joules is None else taken.joules + meter.joules
    gaps = [subject.gap(prompts, run.tokens) for run in runs[:LEAST_RUNS]]
    taken.gap = math.nan if any(map(math.isnan, gaps)) else max(taken.gap, *gaps)


def _record(subject: Subject, name: str, batch: int, work: Work, taken: Taken | str, copy_tbs: float) -> Generation:
    common: dict[str, Any] = {
        "model": subject.name, "implementation": name, "kind": CONTENDERS[name].kind,
        "dtype": str(subject.dtype).removeprefix("torch."), "batch": batch, "prompt": work.prompt, "new": work.new,
    }  # fmt: skip
    if isinstance(taken, str):
        return Generation(**common, correct=False, error=taken)
    runs = taken.runs
    correct = taken.gap <= SLACK[subject.dtype]  # NaN is not
    step_s = statistics.median(statistics.mean(run.steps_s) for run in runs)
    floor_s = subject.step_bytes(batch, work.prompt + work.new // 2) / (copy_tbs * 1e12)
    return Generation(
        **common,
        correct=correct,
        ttft_ms=statistics.median(run.first_s for run in runs) * 1e3,
        ms_per_token=step_s * 1e3,
        tokens_per_s=batch / step_s,
        floor=floor_s / step_s,
        peak_bytes=taken.peak,
        joules_per_token=None if taken.joules is None else taken.joules / (batch * work.new * len(runs)),
        note=None if correct else f"a token is {taken.gap:.2f} standard deviations below the likeliest one",
    )


def _gist(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU is lost to this process: {_gist(error)}") from None
