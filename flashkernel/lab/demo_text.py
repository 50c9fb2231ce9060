"""The demo text: a small model writes a paragraph on this machine, with the engine and with Transformers.

Where the model is neither cached nor can be downloaded, a tiny model with random weights takes its place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flashkernel import Weight
from flashkernel.core.device import model_dtype, properties
from flashkernel.core.shapes import Model
from flashkernel.engine import LLM, SamplingParams, StepOutput, hub
from flashkernel.engine.config import ModelError
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.forward_pass import backends
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.lab.hf_equivalent import build_hf_equivalent
from flashkernel.lab.packages import MissingPackageError
from flashkernel.lab.runners import Run, run_transformers

QUESTION = "Write a paragraph about the sea."
TOKENS = 96
ROUNDS, ROUND_TOKENS = 3, 24  # of the timing
PROMPT_ROWS = 128  # tokens of a prompt in the table of backends
TINY = Model(hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, layers=4, vocab=95)
CONTEXT = 1024


@dataclass(frozen=True)
class DemoTiming:
    """Median times of one implementation, and the tokens of its whole text."""

    implementation: str
    ttft_ms: float
    tokens_per_s: float
    tokens: list[int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def open_model(device: torch.device, log: Callable[[str], None], fetching: bool = True) -> LLM:
    """SmolLM2, downloaded if it is not cached; if it cannot be, a random model, and `log` gets the reason."""
    options: dict[str, Any] = {
        "max_model_len": CONTEXT, "kv_cache_tokens": 2 * CONTEXT, "enable_prefix_caching": False, "warm_up": False,
    }  # fmt: skip
    try:
        if not fetching:
            raise ModelError("a random model was asked for")
        return LLM(hub.resolve(hub.DEFAULT_MODEL), device=str(device), **options)
    except ModelError as error:
        log(f"{error}.\nThe demo continues with a tiny model of random weights, whose text means nothing.")
    torch.manual_seed(0)
    model = dummy_transformer(TINY, device, model_dtype(properties(device)), max_position_embeddings=CONTEXT)
    return LLM(model, _letters(), **options)


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
    if llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode(QUESTION)
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])


def write(llm: LLM, count: int = TOKENS) -> Iterator[StepOutput]:
    """Yields the outputs of the steps as it is generated."""
    return llm.stream(prompt(llm), SamplingParams(max_tokens=count))


def time_runners(llm: LLM, tokens: list[int], log: Callable[[str], None]) -> list[DemoTiming]:
    """Times the engine and Transformers on the same weights and prompt.

    They run alternately, so that a busy machine slows both alike. Transformers also writes the whole text once.

    Args:
        llm: the engine.
        tokens: the text that the engine wrote.
        log: gets a message where Transformers is not installed.
    """
    given, new = torch.tensor([prompt(llm)], device="cpu"), min(len(tokens), ROUND_TOKENS)
    runners: dict[str, Callable[[int], Run]] = {"engine": partial(_run_engine, llm)}
    written = {"engine": tokens}
    try:
        runners["transformers"] = partial(run_transformers, build_hf_equivalent(llm.model), {}, given)
        written["transformers"] = runners["transformers"](len(tokens)).tokens[0].tolist()
    except MissingPackageError as error:
        log(str(error))
    runs: dict[str, list[Run]] = {name: [] for name in runners}
    for _ in range(ROUNDS):
        for name, run in runners.items():
            runs[name].append(run(new))
    return [_timing(name, runs[name], written[name]) for name in runners]


def _run_engine(llm: LLM, new: int) -> Run:
    began, times, tokens = time.perf_counter(), [], []
    for event in llm.stream(prompt(llm), SamplingParams(max_tokens=new, ignore_eos=True)):
        times.append(time.perf_counter())
        tokens.append(event.token_id)
    return Run.of(began, times, torch.tensor([tokens], device="cpu"))


def _timing(name: str, runs: list[Run], tokens: list[int]) -> DemoTiming:
    steps = [step for run in runs for step in run.steps_s]
    ttft_s = statistics.median(run.ttft_s for run in runs)
    return DemoTiming(name, ttft_s * 1e3, 1 / statistics.median(steps) if steps else 0.0, tokens)


def agreement(llm: LLM, ours: DemoTiming, theirs: DemoTiming) -> str:
    """Says whether both implementations chose the same tokens, and why they may not."""
    same = next((index for index, (a, b) in enumerate(zip(ours.tokens, theirs.tokens)) if a != b), len(ours.tokens))
    if same == len(ours.tokens):
        return f"All {same} tokens are those that Transformers chose."
    found = f"The first {same} tokens are those that Transformers chose; the texts differ from there on."
    if not isinstance(llm.model.layers[0].down_proj, Weight):
        return found
    return f"{found} It has the weights dequantized; the engine rounds activations to 8 bits beside quantized ones."


def backends_used(llm: LLM) -> list[dict[str, str]]:
    """By operator, the backend for prefill and the one for a decoding step; "" where the operator does not run."""
    pages = llm.engine.runner.storage.layers
    prefill = backends(llm.model, pages, PROMPT_ROWS, prefill=True)
    decode = backends(llm.model, pages)
    return [
        {"operator": name, "prompt": prefill.get(name, ""), "token": decode.get(name, "")}
        for name in dict.fromkeys((*prefill, *decode))
    ]
