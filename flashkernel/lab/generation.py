"""Generation with whole models: prefill and decoding speed of the engine and of Transformers on the same weights.

Models have the shapes of their namesakes and random weights (SmolLM2 has its trained ones: dequantized as smollm2-135m,
as they are shipped, in 4 bits, as smollm2). Prompts are random tokens
of one length. Decoding is timed from the moment every sequence has its first token. The tokens of each runner are
checked against Transformers' logits: a token is right if no other token's logit is higher by more than rounding
explains. Speeds of a runner that fails the check are not compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.shapes import MODELS
from flashkernel.engine import LLM, hub
from flashkernel.engine.build import KV_CACHE_DTYPES
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.bench import free_memory
from flashkernel.lab.energy import EnergyMeter
from flashkernel.lab.engine_options import EngineOptions
from flashkernel.lab.hf_equivalent import build_hf_equivalent
from flashkernel.lab.host_memory import HostPeak
from flashkernel.lab.packages import MissingPackageError
from flashkernel.lab.results import GenerationRecord
from flashkernel.lab.runners import (
    DEFAULT_OPTIONS,
    RUNNERS,
    Generate,
    Run,
    Runner,
    UnsupportedError,
    engine_with,
    synchronize,
)

SMOLLM2, SHIPPED = "smollm2-135m", "smollm2"
# name -> (key of MODELS, options where the model differs from a Llama with tied embeddings)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {"learned_positions": True, "max_position_embeddings": 1024}),
    "llama-3.2-1b": ("llama-3.2-1b", {"max_position_embeddings": 8192}),
    "llama-3.1-8b": ("llama-3.1-8b", {"max_position_embeddings": 8192, "tie_word_embeddings": False}),
}
NAMES = (*SHAPES, SMOLLM2, SHIPPED)
DEFAULTS = ("gpt2-124m", SMOLLM2, "llama-3.2-1b")
WARM_UP_TOKENS = 8  # enough to compile kernels and capture graphs; the first run after it is discarded too
MIN_RUNS, MAX_RUNS, MIN_SECONDS = 2, 8, 1.5  # runs are repeated until MIN_SECONDS were timed
CHECKED = 2  # sequences of a batch that are checked against Transformers
# Largest gap of a right token's logit below the argmax, in standard deviations of the logits; wrong tokens: 2 to 5.
MAX_LOGIT_GAP = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.3}
MAX_LOGIT_GAP_KV = 0.6  # with keys and values in 8 bits, which Transformers' own are not


@dataclass(frozen=True)
class Workload:
    """What every runner generates.

    Args:
        batches: numbers of sequences, each measured by itself.
        prompt: tokens of each prompt.
        new: tokens generated for each sequence.
        rounds: how often all runners are measured, one after another; a busy host then slows all of them alike.
        period: tokens after which prompts repeat themselves; None: they do not.
    """

    batches: Sequence[int]
    prompt: int
    new: int
    rounds: int = 1
    period: int | None = None


@dataclass(frozen=True)
class RunnerSetup:
    """A runner, with options if it is the engine."""

    name: str
    options: EngineOptions = DEFAULT_OPTIONS

    @property
    def runner(self) -> Runner:
        return engine_with(self.options) if self.name == "engine" else RUNNERS[self.name]

    @property
    def label(self) -> str:
        return self.options.named(self.name)


class BenchModel:
    """A model under measurement, and its HF equivalent that the runners' tokens are checked against."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        if name not in NAMES:
            raise ValueError(f"e2e: unknown model {name!r}; known models: {', '.join(NAMES)}")
        self.name, self.device, self.dtype = name, device, dtype
        self.model = _build(name, device, dtype)
        self.gguf = hub.resolve(hub.DEFAULT_MODEL) if name == SHIPPED else None  # has the weights as they are

    @cached_property
    def hf_model(self) -> Any:
        plain = self.model if self.gguf is None else _build(SMOLLM2, self.device, self.dtype)
        return build_hf_equivalent(plain)

    def prompts(self, batch: int, length: int, period: int | None = None) -> Tensor:
        """Random token ids, int64 [batch, length], which repeat themselves after `period` tokens."""
        generator = torch.Generator().manual_seed(batch)
        drawn = torch.randint(
            1, self.model.config.vocab_size, (batch, period or length), generator=generator, device="cpu"
        )
        return drawn if period is None else drawn.repeat(1, -(-length // period))[:, :length]

    def max_logit_gap(self, options: EngineOptions = DEFAULT_OPTIONS) -> float:
        """Largest `logit_gap` of right tokens. Products of quantized weights round x to 8 bits, as bfloat16 does."""
        if options.kv_cache_dtype is not None and KV_CACHE_DTYPES[options.kv_cache_dtype].itemsize == 1:
            return MAX_LOGIT_GAP_KV
        return MAX_LOGIT_GAP[torch.bfloat16 if self.gguf is not None or options.quantization else self.dtype]

    def logit_gap(self, prompts: Tensor, tokens: Tensor, hf_model: Any = None) -> float:
        """Largest distance of a token's logit below the argmax, in standard deviations of the logits.

        Args:
            prompts: [batch, prompt] token ids.
            tokens: [batch, new] generated token ids, which follow the prompts.
            hf_model: a Transformers model with the weights that generated them; None: the model's own.
        """
        ids = torch.cat((prompts, tokens), 1)[:CHECKED].to(self.device)
        with torch.inference_mode():
            logits = (self.hf_model if hf_model is None else hf_model)(
                input_ids=ids[:, :-1], logits_to_keep=tokens.shape[1], use_cache=False
            ).logits.float()  # [sequences, new, vocab]
        chosen = logits.gather(2, ids[:, -tokens.shape[1] :, None])[..., 0]  # [sequences, new]
        return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())

    def step_bytes(
        self, batch: int, length: int, nbytes: int | None = None, options: EngineOptions = DEFAULT_OPTIONS
    ) -> int:
        """Bytes that a decoding step must read: all weights but the embedding tables, and the K and V of all tokens.

        Args:
            batch: sequences.
            length: tokens of each.
            nbytes: bytes of the weights; None: the model's own.
            options: of the engine, which may store K and V in fewer bits.
        """
        config, top = self.model.config, self.model.weights
        tables = [] if config.tie_word_embeddings else [top.embedding]
        tables += [] if top.position_embedding is None else [top.position_embedding]
        weights = (self.model.nbytes if nbytes is None else nbytes) - sum(table.nbytes for table in tables)
        kv_dtype = self.dtype if options.kv_cache_dtype is None else KV_CACHE_DTYPES[options.kv_cache_dtype]
        scales = 8 if kv_dtype in (torch.int8, torch.float8_e4m3fn) else 0  # of K and of V, in float32
        head = 2 * config.head_dim * kv_dtype.itemsize + scales
        return weights + batch * length * config.num_layers * config.kv_heads * head


def _build(name: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    if name in SHAPES:
        shape, how = SHAPES[name]
        return dummy_transformer(MODELS[shape], device, dtype, **how)
    precision = str(dtype).removeprefix("torch.")
    return LLM(
        "smollm2",
        device=str(device),
        dtype=precision,
        kv_cache_tokens=256,
        max_model_len=256,
        warm_up=False,
        quantization="plain" if name == SMOLLM2 else None,
    ).model


@dataclass
class Measured:
    """What was measured of one runner on one batch, over all rounds."""

    runs: list[Run] = field(default_factory=list)
    peak_bytes: int | None = None
    joules: float | None = 0.0  # None once a round had no energy meter
    logit_gap: float | None = 0.0  # None where tokens could not be checked
    unchecked: str = ""  # why not
    weight_bytes: int | None = None  # None: the model's own


def measure(
    model: BenchModel,
    names: Sequence[str],
    work: Workload,
    copy_tbs: float,
    on_progress: Callable[[str], None] = lambda text: None,
    engines: Sequence[EngineOptions] = (DEFAULT_OPTIONS,),
) -> Iterator[GenerationRecord]:
    """Yields a record for each runner and batch, again in every round; a runner that cannot run has an `error`.

    Args:
        model: the model, on its device.
        names: keys of `RUNNERS`.
        work: batches, prompt length, new tokens, rounds.
        copy_tbs: measured copy bandwidth in TB/s, for the `floor` of the records.
        on_progress: called with what is about to be measured.
        engines: the options that the engine is measured with, in turn.
    """
    setups = runner_setups(names, engines)
    measured: dict[tuple[RunnerSetup, int], Measured | str] = {}  # or the reason why nothing was measured
    for round_index in range(work.rounds):
        which = f" (round {round_index + 1} of {work.rounds})" if work.rounds > 1 else ""
        for setup in setups:
            loaded, reason = None, None
            on_progress(f"{model.name} {setup.label}{which}: loading")
            try:
                loaded = setup.runner.load(model.model, model.gguf)
            except Exception as error:  # a runner that cannot load must not end the others
                reason = _first_line(error)
            for batch in work.batches:
                describe = partial(_describe, on_progress, f"{model.name} {setup.label} batch {batch}{which}")
                so_far = measured.setdefault((setup, batch), Measured())
                if reason is not None:
                    measured[setup, batch] = reason
                elif isinstance(so_far, Measured):
                    try:
                        _measure_runs(so_far, model, setup, loaded, batch, work, describe)
                    except Exception as error:
                        measured[setup, batch] = _first_line(error)
                yield _record(model, setup, batch, work, measured[setup, batch], copy_tbs)
                free_memory(model.device)
            del loaded
            free_memory(model.device)


def runner_setups(names: Sequence[str], engines: Sequence[EngineOptions]) -> list[RunnerSetup]:
    """The runners of these names, the engine once for each of its options."""
    return [
        RunnerSetup(name, options) for name in names for options in (engines if name == "engine" else [DEFAULT_OPTIONS])
    ]


def _describe(on_progress: Callable[[str], None], head: str, phase: str) -> None:
    on_progress(f"{head}: {phase}")


def _measure_runs(
    measured: Measured,
    model: BenchModel,
    setup: RunnerSetup,
    loaded: Any,
    batch: int,
    work: Workload,
    describe: Callable[[str], None],
) -> None:
    """Times one runner on one batch; adds to what was measured in earlier rounds."""
    prompts, on_gpu = model.prompts(batch, work.prompt, work.period), model.device.type == "cuda"
    quantized = loaded if setup.options.quantization else None
    measured.weight_bytes = None if quantized is None else quantized.nbytes
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    host_peak = None if on_gpu else HostPeak()
    describe("warm-up")
    generate: Generate = setup.runner.start(loaded, batch, work.prompt, work.new)
    generate(prompts, min(WARM_UP_TOKENS, work.new))
    if on_gpu:  # the first full run is discarded
        generate(prompts, work.new)
    synchronize(model.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    runs: list[Run] = []
    began = time.perf_counter()
    with EnergyMeter(model.device) as meter:
        while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and time.perf_counter() - began < MIN_SECONDS):
            describe(f"run {len(runs) + 1}, {work.prompt} + {work.new} tokens")
            runs.append(generate(prompts, work.new))
    rise = torch.cuda.max_memory_allocated(model.device) - before if host_peak is None else host_peak.bytes()
    if rise is not None:
        weights = model.model.nbytes if measured.weight_bytes is None else measured.weight_bytes
        measured.peak_bytes = max(measured.peak_bytes or 0, rise + (0 if setup.runner.loads_at_start else weights))
    del generate
    measured.runs += runs
    measured.joules = None if measured.joules is None or meter.joules is None else measured.joules + meter.joules
    describe("checking tokens against Transformers")
    try:
        same = None if quantized is None else build_hf_equivalent(quantized)
        gaps = [measured.logit_gap or 0.0, *(model.logit_gap(prompts, run.tokens, same) for run in runs[:MIN_RUNS])]
    except MissingPackageError as error:
        measured.logit_gap, measured.unchecked = None, str(error)
    else:
        measured.logit_gap = math.nan if any(map(math.isnan, gaps)) else max(gaps)


def _record(
    model: BenchModel,
    setup: RunnerSetup,
    batch: int,
    work: Workload,
    measured: Measured | str,
    copy_tbs: float,
) -> GenerationRecord:
    options = setup.options
    common: dict[str, Any] = {
        "model": model.name, "implementation": setup.name, "kind": setup.runner.kind,
        "dtype": str(model.dtype).removeprefix("torch."), "batch": batch, "prompt": work.prompt, "new": work.new,
        "period": work.period, **options.fields(),
    }  # fmt: skip
    if isinstance(measured, str):
        return GenerationRecord(**common, correct=False, error=measured)
    runs, gap = measured.runs, measured.logit_gap
    correct = None if gap is None else gap <= model.max_logit_gap(options)  # a NaN is wrong
    note = measured.unchecked if gap is None else f"a token is {gap:.2f} standard deviations below the likeliest one"
    step_s = statistics.median(run.seconds_per_token for run in runs)
    length = work.prompt + work.new // 2
    floor_s = model.step_bytes(batch, length, measured.weight_bytes, options) / (copy_tbs * 1e12)
    drafted = sum(run.drafted for run in runs)
    return GenerationRecord(
        **common,
        correct=correct,
        ttft_ms=statistics.median(run.ttft_s for run in runs) * 1e3,
        ms_per_token=step_s * 1e3,
        tokens_per_s=batch / step_s,
        floor=floor_s / step_s,
        peak_bytes=measured.peak_bytes,
        joules_per_token=None if measured.joules is None else measured.joules / (batch * work.new * len(runs)),
        note=None if correct else note,
        accepted=sum(run.accepted for run in runs) / drafted if drafted else None,
    )


def _first_line(error: Exception) -> str:
    """What a record says of an error; the type's name is left out where the message is a sentence of ours."""
    lines = str(error).strip().splitlines() or [""]
    known = isinstance(error, (MissingPackageError, UnsupportedError))
    return lines[0] if known else f"{type(error).__name__}: {lines[0][:300]}"
