"""`LLM`: a model ready to make text."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashkernel.engine import fetch
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.core import Engine
from flashkernel.engine.runner import Runner
from flashkernel.engine.sampling import SamplingParams
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.sequence import Completion, Event
from flashkernel.engine.tokenizer import Message, Tokenizer
from flashkernel.engine.transformer import Transformer, load
from flashkernel.kvcache import KVCache, PageStorage
from flashkernel.kvcache.storage import bytes_per_page

Prompt = str | Sequence[int]  # a text, or tokens
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
CPU_CACHE_BYTES, LARGEST_CPU_SHARE = 2**31, 0.25
DEFAULT_SEQUENCES = {"cpu": 64, "cuda": 256}
DEFAULT_STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
DEFAULT_PAGE_SIZE = {"cpu": 64, "cuda": 16}


@dataclass(frozen=True)
class EngineOptions:
    """How a model is run. None takes what suits the device."""

    device: str | None = None  # "cpu", "cuda", "cuda:1"; the GPU where there is one
    dtype: str | None = None  # of weights and activations; float32 on a CPU, on a GPU as the model is stored
    context: int | None = None  # most tokens of a sequence; the model's own where the cache holds it
    most_sequences: int | None = None  # that run at the same time; further requests wait
    step_tokens: int | None = None  # most tokens computed in one step; longer prompts go in chunks
    page_size: int | None = None  # tokens of a page: 16 on a GPU, 64 on a CPU, which likes long runs of memory
    cache_tokens: int | None = None  # room for keys and values; on a GPU the memory that is left
    cache_dtype: str | None = None  # "float8_e4m3fn" or "int8" store keys and values in a byte each
    memory: float = 0.9  # share of a GPU's memory to use
    graphs: bool = True  # CUDA graphs for decoding
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("context", "most_sequences", "step_tokens", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"engine: {name} is {value!r}; it must be a whole number above 0")
        for name, known in (("dtype", DTYPES), ("cache_dtype", CACHE_DTYPES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"engine: {name} is {value!r}; it must be one of {', '.join(known)}")
        if not 0 < self.memory <= 1:
            raise ValueError(f"engine: memory is {self.memory}; it must be a share above 0, at most 1")
        if self.page_size not in (None, 16, 32, 64, 128, 256):
            raise ValueError(f"engine: page_size is {self.page_size}; it must be a power of two from 16 to 256")


class LLM:
    """A model, and an engine that serves it.

    `model` is a folder as Transformers saves it, a GGUF file, "smollm2" (fetched on first use), or a Transformer.
    Options are those of `EngineOptions`. `progress(done, total)` is told how far loading is.
    """

    def __init__(
        self,
        model: str | Path | Transformer = fetch.DEFAULT_MODEL,
        tokenizer: Tokenizer | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self.options = EngineOptions(**options)
        if isinstance(model, Transformer):
            self.model, self.tokenizer, self.name = model, tokenizer, model.config.architecture
        else:
            self.name = str(model)
            self.model, found = _load(fetch.resolve(model), self.options, progress)
            self.tokenizer = found if tokenizer is None else tokenizer
        self.engine = build_engine(self.model, self.tokenizer, self.options)
        self._turn = threading.Lock()
        self._inboxes: dict[str, deque[Event]] = {}

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete texts, all at once; the completions come in the order of the prompts.

        A request that fails alone (its logits are NaN) has the reason "error" and says why in `error`; the others are
        not touched. RuntimeError where a step failed, or every request.
        """
        many = _several(prompts)
        wanted = _each(params, len(many))
        names = self._add(many, wanted, streaming=False)
        found = {event.request_id: event.completion for event in self._events(names) if event.completion is not None}
        done = [found[name] for name in names]
        if done and all(one.reason == "error" for one in done):
            raise RuntimeError(done[0].error)
        return done

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Complete one text, token by token. Leaving the iteration ends the request."""
        names = self._add([prompt], [params or SamplingParams()], streaming=True)
        return self._raising(self._events(names))

    def stream_many(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Event]]:
        """Complete several texts at once: (number of the prompt, event) as they come."""
        many = _several(prompts)
        names = self._add(many, _each(params, len(many)), streaming=True)
        numbers = {name: number for number, name in enumerate(names)}
        return ((numbers[event.request_id], event) for event in self._events(names))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The model's next message in a conversation."""
        return self.generate([self._conversation(messages)], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Event]:
        return self.stream(self._conversation(messages), params)

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("chat: the model came without a tokenizer")
        return self.tokenizer.chat(messages)

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], streaming: bool) -> list[str]:
        """Queue all requests, or none where one is refused."""
        names: list[str] = []
        try:
            for prompt, wanted in zip(prompts, params):
                names.append(self.engine.add_request(prompt, wanted, streaming=streaming))
                self._inboxes[names[-1]] = deque()
        except BaseException:
            for name in names:
                self._leave(name)
            raise
        return names

    def _leave(self, name: str) -> None:
        self.engine.abort(name)
        self._inboxes.pop(name, None)

    def _events(self, names: Sequence[str]) -> Iterator[Event]:
        """Events of these requests; whoever iterates takes the steps, for others that wait as well."""
        left, before = dict.fromkeys(names), self.engine.failure
        try:
            while left:
                with self._turn:
                    waiting = [name for name in left if self._inboxes[name]]
                    if not waiting:
                        self._step()
                for name in waiting:
                    while self._inboxes[name]:
                        event = self._inboxes[name].popleft()
                        if event.completion is not None:
                            del left[name]
                            if event.completion.reason == "error" and self.engine.failure is not before:
                                raise RuntimeError(event.completion.error) from self.engine.failure
                        yield event
        finally:
            for name in left:
                self._leave(name)
            for name in names:
                self._inboxes.pop(name, None)

    @staticmethod
    def _raising(events: Iterator[Event]) -> Iterator[Event]:
        """The events of one request; RuntimeError in place of one that says that it failed."""
        with contextlib.closing(events):  # type: ignore[type-var]
            for event in events:
                if event.completion is not None and event.completion.reason == "error":
                    raise RuntimeError(event.completion.error)
                yield event

    def _step(self) -> None:
        for event in self.engine.step():
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.append(event)


def build_engine(model: Transformer, tokenizer: Tokenizer | None, options: EngineOptions) -> Engine:
    """An engine with its cache, as large as the options and the device allow."""
    config, device = model.config, model.device
    sequences = options.most_sequences or DEFAULT_SEQUENCES[device.type]
    wanted = min(options.context or config.context, config.context)
    tokens = options.step_tokens or DEFAULT_STEP_TOKENS[device.type]
    tokens = max(tokens, sequences)  # every sequence that runs gets its token
    dtype = model.dtype if options.cache_dtype is None else CACHE_DTYPES[options.cache_dtype]
    page = options.page_size or DEFAULT_PAGE_SIZE[device.type]
    size = bytes_per_page(config.layers, page, config.kv_heads, config.head_dim, dtype)
    pages = _page_count(model, options, page, size, sequences, tokens, wanted) + 1  # page 0 stays empty
    context = min(wanted, (pages - 1) * page)
    storage = PageStorage(config.layers, pages, page, config.kv_heads, config.head_dim, dtype=dtype, device=device)
    cache = KVCache(
        pages, page, most_sequences=sequences, most_tokens=context,
        prefix_caching=options.prefix_caching, storage=storage,
    )  # fmt: skip
    runner = Runner(model, storage, cache, sequences, tokens, options.graphs)
    return Engine(runner, Scheduler(cache, sequences, tokens), tokenizer, context, ahead=device.type == "cuda")


def _page_count(
    model: Transformer, options: EngineOptions, page: int, size: int, sequences: int, tokens: int, context: int
) -> int:
    """Pages for keys and values: as asked, or what fits."""
    if options.cache_tokens is not None:
        return -(-options.cache_tokens // page)
    most = sequences * -(-context // page)  # more could never be used
    config = model.config
    if model.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        widest = max(layer.up.shape[-2] for layer in model.layers)
        activations = tokens * (8 * config.hidden + 3 * widest) * model.dtype.itemsize
        logits = 4 * sequences * config.vocab * 4
        room = free - int((1 - options.memory) * whole) - activations - logits
    else:
        room = int(min(CPU_CACHE_BYTES, LARGEST_CPU_SHARE * _main_memory()))
    pages = min(most, room // size)
    if pages < 1:
        raise ModelError(
            f"engine: no memory is left for keys and values beside the weights ({model.nbytes / 2**30:.1f} GiB); "
            "choose a smaller model or dtype, fewer step_tokens, or another device"
        )
    return pages


def _main_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def _load(
    path: Path, options: EngineOptions, progress: Callable[[int, int], None] | None
) -> tuple[Transformer, Tokenizer | None]:
    checkpoint = open_checkpoint(path)
    device = _device(options.device)
    stored = checkpoint.settings.get("dtype", checkpoint.settings.get("torch_dtype", "float32"))
    name = options.dtype or ("float32" if device.type == "cpu" else stored if stored in DTYPES else "bfloat16")
    return load(checkpoint, device, DTYPES[name], progress), checkpoint.tokenizer()


def _device(name: str | None) -> torch.device:
    """The device asked for, or the GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"engine: {name!r} is no device; it must be cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"engine: {name!r} was asked for, and there is no CUDA GPU here; use device='cpu'")
    if device.type not in DEFAULT_SEQUENCES:
        raise ValueError(f"engine: models run on 'cpu' and 'cuda', not on {name!r}")
    return device


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(one, int) for one in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"generate: {len(params)} settings were given for {count} prompts; give one, or one for each")
    return list(params)
