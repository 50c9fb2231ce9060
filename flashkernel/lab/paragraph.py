"""The demonstration: a small model writes a paragraph on this machine, in the engine and in Transformers.

Without the network, and where the model was never fetched, a tiny one with random weights takes its place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flashkernel.core.shapes import Model
from flashkernel.engine import LLM, SamplingParams, fetch
from flashkernel.engine.config import ModelError
from flashkernel.engine.operators import backends
from flashkernel.engine.sequence import Event
from flashkernel.engine.synthetic import random_transformer
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.lab.contenders import Run, run_transformers
from flashkernel.lab.twin import twin

QUESTION = "Write a paragraph about the sea."
TOKENS = 96
ROUNDS, ROUND_TOKENS = 3, 24  # of the race
PROMPT_ROWS = 128  # what the table takes for a prompt
TINY = Model(hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, layers=4, vocab=95)
CONTEXT = 1024


@dataclass(frozen=True)
class Telling:
    """How one implementation wrote: the medians of the race, and the tokens of the whole text."""

    implementation: str
    first_ms: float
    tokens_per_s: float
    tokens: list[int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def open_model(device: torch.device, tell: Callable[[str], None], fetching: bool = True) -> LLM:
    """SmolLM2, fetched where it is not here yet; where it cannot be, a random model, and a word on why."""
    options: dict[str, Any] = {"context": CONTEXT, "cache_tokens": 2 * CONTEXT, "prefix_caching": False}
    try:
        if not fetching:
            raise ModelError("a random model was asked for")
        return LLM(fetch.resolve(fetch.DEFAULT_MODEL), device=str(device), **options)
    except ModelError as error:
        tell(f"{error}.\nThe demonstration goes on with a tiny model of random weights: its text means nothing.")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    return LLM(random_transformer(TINY, device, dtype, context=CONTEXT), _letters(), **options)


def _letters() -> Tokenizer:
    """A token for each printable character."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def prompt(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    if llm.tokenizer.template is None:
        return llm.tokenizer.encode(QUESTION)
    return llm.tokenizer.chat([{"role": "user", "content": QUESTION}])


def write(llm: LLM, count: int = TOKENS) -> Iterator[Event]:
    """The paragraph, as it comes."""
    return llm.stream(prompt(llm), SamplingParams(max_tokens=count))


def race(llm: LLM, tokens: list[int], tell: Callable[[str], None]) -> list[Telling]:
    """How fast the engine writes, and Transformers with the same weights and prompt: in turns, since the machine may
    have other things to do. Transformers writes as many tokens once, to be compared."""
    given, new = torch.tensor([prompt(llm)]), min(len(tokens), ROUND_TOKENS)
    ways: dict[str, Callable[[int], Run]] = {"engine": partial(_run_engine, llm)}
    written = {"engine": tokens}
    try:
        ways["transformers"] = partial(run_transformers, twin(llm.model), {}, given)
        written["transformers"] = ways["transformers"](len(tokens)).tokens[0].tolist()
    except ImportError as error:
        tell(f"Transformers cannot be run for comparison ({error}); pip install 'flashkernel[hf]'")
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            runs[name].append(way(new))
    return [_telling(name, runs[name], written[name]) for name in ways]


def _run_engine(llm: LLM, new: int) -> Run:
    began, times, tokens = time.perf_counter(), [], []
    for event in llm.stream(prompt(llm), SamplingParams(max_tokens=new, ignore_eos=True)):
        times.append(time.perf_counter())
        tokens.append(event.token)
    return Run.of(began, times, torch.tensor([tokens]))


def _telling(name: str, runs: list[Run], tokens: list[int]) -> Telling:
    steps = [step for run in runs for step in run.steps_s]
    first_s = statistics.median(run.first_s for run in runs)
    return Telling(name, first_s * 1e3, 1 / statistics.median(steps) if steps else 0.0, tokens)


def agreement(ours: Telling, theirs: Telling) -> str:
    """Whether both chose the same tokens."""
    same = next((place for place, (a, b) in enumerate(zip(ours.tokens, theirs.tokens)) if a != b), len(ours.tokens))
    if same == len(ours.tokens):
        return f"All {same} tokens are those that Transformers chose."
    return f"The first {same} tokens are those that Transformers chose; then two were about as likely, and texts part."


def served(llm: LLM) -> list[dict[str, str]]:
    """By operator, the backend that serves a prompt and the one that serves a decoding step; "" where it is not run."""
    pages = llm.engine.runner.storage.layers
    prefill = backends(llm.model, pages, PROMPT_ROWS, prompt=True)
    decode = backends(llm.model, pages)
    return [
        {"operator": name, "prompt": prefill.get(name, ""), "token": decode.get(name, "")}
        for name in dict.fromkeys((*prefill, *decode))
    ]
