"""Ways to generate text from the same weights: the engine, and Transformers in its ways.

A contender is loaded once for a model and started once for a batch. What `start` gives then generates: prompts
[batch, tokens] and a count in, a `Run` out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.twin import twin


class AbsentError(RuntimeError):
    """A contender that cannot run here; the message says why."""


@dataclass(frozen=True)
class Run:
    """Seconds until every sequence has its first token, seconds of each further one, and the tokens themselves."""

    first_s: float
    steps_s: list[float]
    tokens: Tensor  # [batch, new]

    @classmethod
    def of(cls, began: float, times: Sequence[float], tokens: Tensor) -> Run:
        """By the times at which tokens were there."""
        return cls(times[0] - began, [after - before for before, after in pairwise(times)], tokens)


Generate = Callable[[Tensor, int], Run]


@dataclass(frozen=True)
class Contender:
    """`load` gives what `start` needs of a model; `start` takes it and the most (batch, prompt, new) there will be."""

    kind: str  # "backend" (ours) or "baseline"
    load: Callable[[Transformer], Any]
    start: Callable[[Any, int, int, int], Generate]


def _start_engine(model: Transformer, batch: int, prompt: int, new: int) -> Generate:
    """The engine with a cache of just the size it takes. Prompts go in chunks, as they do in service."""
    page = 16 if model.device.type == "cuda" else 64
    step_tokens = max(8192 if model.device.type == "cuda" else 1024, 2 * batch)
    early = -(-batch * prompt // (step_tokens - batch)) + 2  # tokens of the first sequences while the last ones start
    context = prompt + new + early
    if context > model.config.context:
        raise AbsentError(f"{context} tokens do not fit the model's context of {model.config.context}")
    llm = LLM(
        model, most_sequences=batch, step_tokens=step_tokens, context=context, page_size=page, prefix_caching=False,
        cache_tokens=batch * (-(-context // page) + 1) * page,
    )  # fmt: skip
    return partial(_run_engine, llm, early)


def _run_engine(llm: LLM, early: int, prompts: Tensor, new: int) -> Run:
    """Steps until all have their first token, then `new` - 1 in which every sequence gets one."""
    engine, params = llm.engine, SamplingParams(max_tokens=new + early, ignore_eos=True)
    given = prompts.tolist()
    began = time.perf_counter()
    names = [engine.add_request(one, params) for one in given]
    tokens: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for event in engine.step():
            if event.token is not None and event.request_id in tokens:
                tokens[event.request_id].append(event.token)
            if event.completion is not None:
                raise RuntimeError(f"a sequence ended early, by {event.completion.reason}") from engine.failure

    try:
        while not all(tokens.values()):
            step()
        times = [time.perf_counter()]
        for _ in range(new - 1):
            step()
            times.append(time.perf_counter())
    finally:
        for name in names:
            engine.abort(name)
        while engine.busy:
            engine.step()
    return Run.of(began, times, torch.tensor([tokens[name][:new] for name in names]))


class _Clock:
    """A stopping criterion that never stops and notes the time: exactly for the first token; later ones are on their
    way, but `generate` waits for each before it goes on, so that the differences are right."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def __call__(self, ids: Tensor, scores: Any, **how: Any) -> Tensor:
        if not self.times:
            synchronize(self.device)
            self.never = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        self.times.append(time.perf_counter())
        return self.never


def _load_transformers(model: Transformer, attention: str, patched: bool = False) -> Any:
    made = twin(model, attention)
    if patched:
        import flashkernel.hf

        flashkernel.hf.patch(made)
    return made


def _start_transformers(model: Any, batch: int, prompt: int, new: int, static: bool = False) -> Generate:
    options: dict[str, Any] = {}
    if static:
        if model.device.type != "cuda":
            raise AbsentError("generate compiles for a static cache on a GPU alone")
        from transformers import StaticCache

        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=prompt + new)
    return partial(run_transformers, model, options)


def run_transformers(model: Any, options: dict[str, Any], prompts: Tensor, new: int) -> Run:
    """`model.generate`, greedily, with the time of the first token; a static cache among the options starts anew."""
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
    clock.times[-1] = time.perf_counter()  # the last one is there now
    return Run.of(began, clock.times, tokens)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CONTENDERS: dict[str, Contender] = {
    "engine": Contender("backend", lambda model: model, _start_engine),
    "hf_sdpa": Contender("baseline", partial(_load_transformers, attention="sdpa"), _start_transformers),
    "hf_eager": Contender("baseline", partial(_load_transformers, attention="eager"), _start_transformers),
    "hf_patch": Contender("backend", partial(_load_transformers, attention="sdpa", patched=True), _start_transformers),
    "hf_compile": Contender(
        "baseline", partial(_load_transformers, attention="sdpa"), partial(_start_transformers, static=True)
    ),
}
