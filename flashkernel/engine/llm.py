"""`LLM`: a model that is ready to generate."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashkernel.core import device as devices
from flashkernel.engine import hub
from flashkernel.engine.checkpoint import Checkpoint, open_checkpoint
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.llm_engine import LLMEngine
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.model_runner import ModelRunner, Progress
from flashkernel.engine.outputs import RequestOutput, StepOutput
from flashkernel.engine.precompile import EngineSizes, precompile
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.tokenizer import Message, Tokenizer
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import KVCache, PageStorage
from flashkernel.kvcache.storage import bytes_per_page

Prompt = str | Sequence[int]  # a text, or token ids
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
QUANTIZATIONS = ("fp8", "int8", "int4", "mxfp4", "plain")
CPU_KV_CACHE_BYTES, MAX_CPU_MEMORY_SHARE = 2**31, 0.25
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
DEFAULT_BLOCK_SIZE = {"cpu": 64, "cuda": 16}
ACCEPTED_PROMPTS = "a str, a list of str, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True)
class EngineArgs:
    """How a model is run; vLLM's names. None takes what suits the device.

    Args:
        device: "cpu", "cuda" or "cuda:1"; the GPU if there is one.
        dtype: Of weights and activations: "float32", "float16" or "bfloat16". By default float32 on a CPU; on a GPU
            the dtype that the model is stored in, or float16 for bfloat16 on a GPU that has none (before sm_80).
        max_model_len: Most tokens of a sequence, prompt and output together; by default the model's own limit, if the
            KV cache holds it.
        max_num_seqs: Most sequences that run at the same time; further requests wait. 256 on a GPU, 64 on a CPU.
        max_num_batched_tokens: Most tokens of one step; longer prompts are computed in chunks. 8192 or 1024.
        block_size: Tokens of a KV cache block (page): a power of two from 16 to 256. 16 on a GPU, 64 on a CPU.
        kv_cache_tokens: Size of the KV cache in tokens; by default what fits.
        kv_cache_dtype: "float8_e4m3fn" or "int8" store keys and values in one byte; by default `dtype`.
        quantization: "fp8", "int8", "int4" or "mxfp4" stores the layers' projections in that format of
            `flashkernel.Weight`, rounded to nearest; by default they are as the checkpoint has them, and "plain"
            dequantizes what a GGUF file has. GPU kernels read "fp8", "int8", "int4" and "mxfp4", CPU kernels all but
            "fp8"; others are dequantized for each product, which saves memory and not time.
        gpu_memory_utilization: Share of a GPU's memory to use, weights included.
        enforce_eager: No CUDA graphs.
        enable_prefix_caching: Sequences that begin alike share blocks.
        num_speculative_tokens: Speculative decoding by prompt look-up: so many tokens are drafted from what followed
            the last ones before, and checked in one step. For greedy requests, few at a time; 0 is off.
        warm_up: Compiles all kernels and captures all CUDA graphs at the start, so that no request waits for them.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> from flashkernel.engine import EngineArgs
        >>> EngineArgs(max_num_seqs=8, max_model_len=2048).block_size is None
        True
        >>> EngineArgs(block_size=24)
        Traceback (most recent call last):
        ValueError: engine: block_size is 24; it must be a power of two from 16 to 256
    """

    device: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    warm_up: bool = True

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"engine: {name} is {value!r}; it must be a whole number above 0")
        for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES), ("quantization", QUANTIZATIONS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"engine: {name} is {value!r}; it must be one of {', '.join(known)}")
        if not isinstance(self.num_speculative_tokens, int) or not 0 <= self.num_speculative_tokens <= 64:
            raise ValueError(
                f"engine: num_speculative_tokens is {self.num_speculative_tokens!r}; it must be a number from 0 to 64"
            )
        share = self.gpu_memory_utilization
        if not 0 < share <= 1:
            raise ValueError(f"engine: gpu_memory_utilization is {share}; it must be a share above 0, at most 1")
        if self.block_size not in (None, 16, 32, 64, 128, 256):
            raise ValueError(f"engine: block_size is {self.block_size}; it must be a power of two from 16 to 256")


class LLM:
    """A model and the engine that serves it.

    Args:
        model: A folder as Transformers saves it, a GGUF file, a Hugging Face repository ("owner/name") that is in the
            local cache, "smollm2" (downloaded on first use), or a `Transformer`.
        tokenizer: Replaces the model's own.
        download: Downloads a Hugging Face repository that is not in the local cache.
        progress: Called as `progress(layers loaded, layers)` while the weights are loaded.
        start_progress: Called as `progress(what, done, total)` while kernels are compiled and graphs captured.
        **engine_args: The fields of `EngineArgs`.

    Raises:
        ModelError: The model cannot be found, read or run; the message says what to do.

    Example:
        >>> from flashkernel.engine import LLM, SamplingParams
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> llm = LLM(tiny_transformer(), kv_cache_tokens=256)
        >>> outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8))
        >>> [len(output.outputs[0].token_ids) for output in outputs]
        [8, 8]
    """

    def __init__(
        self,
        model: str | Path | Transformer = hub.DEFAULT_MODEL,
        tokenizer: Tokenizer | None = None,
        *,
        download: bool = False,
        progress: Callable[[int, int], None] | None = None,
        start_progress: Progress | None = None,
        **engine_args: Any,
    ) -> None:
        self.engine_args = EngineArgs(**engine_args)
        if isinstance(model, Transformer):
            quantization = self.engine_args.quantization
            self.model = model if quantization is None else model.quantized(quantization)
            self.tokenizer, self.name = tokenizer, model.config.architecture
        else:
            self.name = str(model)
            self.model, found = _load(hub.resolve(model, download), self.engine_args, progress)
            self.tokenizer = found if tokenizer is None else tokenizer
        self.engine = build_engine(self.model, self.tokenizer, self.engine_args, start_progress)
        self._step_lock = threading.Lock()
        self._queues: dict[str, deque[StepOutput]] = {}  # outputs of each request that nobody has read yet

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts together.

        A request that fails alone (its logits are NaN) has the finish_reason "error" and says why in `error`; the
        others are not affected.

        Args:
            prompts: A str, a list of str, a list of token ids, or a list of lists of token ids.
            sampling_params: One for all prompts, or one for each; None takes the defaults.

        Returns:
            One output for each prompt, in their order.

        Raises:
            TypeError: `prompts` is something else.
            RequestError: A prompt can never be served; none is started.
            RuntimeError: A step failed, or every request.

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
            >>> llm.generate([1, 2, 3], SamplingParams(max_tokens=5))[0].outputs[0].finish_reason
            'length'
            >>> llm.generate(b"abc")
            Traceback (most recent call last):
            TypeError: generate: prompts is bytes; it must be a str, a list of str, a list of token ids, or a list of \
lists of token ids
        """
        several = _as_list("generate", prompts)
        params = _for_each(sampling_params, len(several))
        requests = [(prompt, one) for prompt, given in zip(several, params) for one in _completions(given)]
        request_ids = self._add([prompt for prompt, _ in requests], [one for _, one in requests], streaming=False)
        found = {
            step.request_id: step.request_output for step in self._steps(request_ids) if step.request_output is not None
        }
        left = iter(request_ids)
        outputs = [_merged([found[next(left)] for _ in range(given.n)]) for given in params]
        if outputs and all(output.outputs[0].finish_reason == "error" for output in outputs):
            raise RuntimeError(outputs[0].error)
        return outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Generates for one prompt, token by token. Leaving the iteration aborts the request.

        Args:
            prompt: A str, or token ids.
            sampling_params: None takes the defaults.

        Returns:
            An iterator over a `StepOutput` for each token; the last one has the `request_output`.

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
            >>> len([step.token_id for step in llm.stream([1, 2, 3], SamplingParams(max_tokens=5))])
            5
        """
        request_ids = self._add([prompt], [sampling_params or SamplingParams()], streaming=True)
        return self._raising(self._steps(request_ids))

    def stream_batch(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, StepOutput]]:
        """Generates for several prompts together, token by token.

        Args:
            prompts: As for `generate`.
            sampling_params: One for all prompts, or one for each; None takes the defaults.

        Returns:
            An iterator over (index of the prompt, `StepOutput`).

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=256)
            >>> [index for index, _ in llm.stream_batch([[1, 2], [3]], SamplingParams(max_tokens=2))]
            [0, 1, 0, 1]
        """
        several = _as_list("stream_batch", prompts)
        request_ids = self._add(several, _for_each(sampling_params, len(several)), streaming=True)
        indices = {request_id: index for index, request_id in enumerate(request_ids)}
        return ((indices[step.request_id], step) for step in self._steps(request_ids))

    def chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Generates the next message of a conversation.

        Args:
            messages: Such as `[{"role": "user", "content": "Hello"}]`; the model's chat template renders them.
            sampling_params: None takes the defaults.

        Returns:
            The output; `outputs[0].text` is the message.

        Raises:
            ValueError: The model has no tokenizer or chat template, or these are no messages.

        Example:
            >>> import tokenizers
            >>> from flashkernel.engine import LLM, SamplingParams, Tokenizer
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "sea": 1}, "[UNK]"))
            >>> template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            >>> llm = LLM(tiny_transformer(), Tokenizer(words, chat_template=template), kv_cache_tokens=64)
            >>> llm.chat([{"role": "user", "content": "sea"}], SamplingParams(max_tokens=2)).prompt_token_ids
            (1,)
        """
        return self.generate([self._conversation(messages)], sampling_params)[0]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[StepOutput]:
        """Generates the next message, token by token; `messages` and `sampling_params` as for `chat`."""
        return self.stream(self._conversation(messages), sampling_params)

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("chat: the model came without a tokenizer")
        return self.tokenizer.apply_chat_template(messages)

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], streaming: bool) -> list[str]:
        """Queues all requests, or none if one is refused."""
        request_ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params):
                request_ids.append(self.engine.add_request(prompt, one, streaming=streaming))
                self._queues[request_ids[-1]] = deque()
        except BaseException:
            for request_id in request_ids:
                self._abort(request_id)
            raise
        return request_ids

    def _abort(self, request_id: str) -> None:
        self.engine.abort_request(request_id)
        self._queues.pop(request_id, None)

    def _steps(self, request_ids: Sequence[str]) -> Iterator[StepOutput]:
        """Outputs of these requests. Whoever iterates steps the engine, also for other threads that wait."""
        left, before = dict.fromkeys(request_ids), self.engine.failure
        try:
            while left:
                with self._step_lock:
                    ready = [request_id for request_id in left if self._queues[request_id]]
                    if not ready:
                        self._step()
                for request_id in ready:
                    while self._queues[request_id]:
                        step = self._queues[request_id].popleft()
                        if step.request_output is not None:
                            del left[request_id]
                            failed = step.request_output.error is not None
                            if failed and self.engine.failure is not before:
                                raise RuntimeError(step.request_output.error) from self.engine.failure
                        yield step
        finally:
            for request_id in left:
                self._abort(request_id)
            for request_id in request_ids:
                self._queues.pop(request_id, None)

    @staticmethod
    def _raising(steps: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """The outputs of one request; RuntimeError if it fails."""
        with contextlib.closing(steps):  # type: ignore[type-var]
            for step in steps:
                if step.request_output is not None and step.request_output.error is not None:
                    raise RuntimeError(step.request_output.error)
                yield step

    def _step(self) -> None:
        for step in self.engine.step():
            queue = self._queues.get(step.request_id)
            if queue is not None:
                queue.append(step)


def build_engine(
    model: Transformer, tokenizer: Tokenizer | None, engine_args: EngineArgs, progress: Progress | None = None
) -> LLMEngine:
    """Builds an engine with a KV cache as large as the arguments and the device allow.

    Args:
        model: The model; its device is the engine's.
        tokenizer: None takes prompts as token ids only.
        engine_args: How the model is run; `device` and `dtype` are the model's.
        progress: Called as `progress(what, done, total)` while kernels are compiled and graphs captured.

    Returns:
        The engine, ready for its first request.

    Raises:
        ModelError: No memory is left for the KV cache.

    Example:
        >>> from flashkernel.engine import EngineArgs, build_engine
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> build_engine(tiny_transformer(), None, EngineArgs(max_model_len=128, kv_cache_tokens=512)).max_model_len
        128
    """
    config, device = model.config, model.device
    max_num_seqs = engine_args.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type]
    longest = config.max_position_embeddings
    wanted = min(engine_args.max_model_len or longest, longest)
    tokens = engine_args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    tokens = max(tokens, max_num_seqs)  # every running sequence gets its token
    dtype = model.dtype if engine_args.kv_cache_dtype is None else KV_CACHE_DTYPES[engine_args.kv_cache_dtype]
    block_size = engine_args.block_size or DEFAULT_BLOCK_SIZE[device.type]
    told = progress or (lambda what, done, total: None)
    compiled = 0
    if engine_args.warm_up and device.type == "cuda":  # before the KV cache takes the memory
        compiled = precompile(model, EngineSizes(max_num_seqs, tokens, wanted, block_size, dtype), told)
    block_bytes = bytes_per_page(config.num_layers, block_size, config.kv_heads, config.head_dim, dtype)
    blocks = _num_blocks(model, engine_args, block_size, block_bytes, max_num_seqs, tokens, wanted)
    blocks += 1  # block 0 stays empty
    max_model_len = min(wanted, (blocks - 1) * block_size)
    storage = PageStorage(
        config.num_layers, blocks, block_size, config.kv_heads, config.head_dim, dtype=dtype, device=device
    )
    cache = KVCache(
        blocks, block_size, most_sequences=max_num_seqs, most_tokens=max_model_len,
        prefix_caching=engine_args.enable_prefix_caching, storage=storage,
    )  # fmt: skip
    runner = ModelRunner(model, storage, cache, max_num_seqs, tokens, engine_args.enforce_eager)
    scheduler = Scheduler(cache, max_num_seqs, tokens, engine_args.num_speculative_tokens)
    engine = LLMEngine(runner, scheduler, tokenizer, max_model_len, async_scheduling=device.type == "cuda")
    if engine_args.warm_up:
        engine.warm_up(told, compiled)
    return engine


def _num_blocks(
    model: Transformer, args: EngineArgs, block_size: int, block_bytes: int, max_num_seqs: int, tokens: int, length: int
) -> int:
    """Number of KV cache blocks: as asked for, or what fits."""
    if args.kv_cache_tokens is not None:
        return -(-args.kv_cache_tokens // block_size)
    usable = max_num_seqs * -(-length // block_size)  # more could never be used
    config = model.config
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        widest = max(layer.gate_up_proj.shape[-2] for layer in model.layers)
        activations = (tokens + max_num_seqs) * (8 * config.hidden_size + 3 * widest) * model.dtype.itemsize
        logits = 5 * max_num_seqs * config.vocab_size * 4  # logits, changed logits, counts of tokens, and copies
        available = free - int((1 - args.gpu_memory_utilization) * total) - activations - logits
    else:
        available = int(min(CPU_KV_CACHE_BYTES, MAX_CPU_MEMORY_SHARE * _main_memory()))
    blocks = min(usable, available // block_bytes)
    if blocks < 1:
        raise ModelError(
            f"engine: no memory is left for keys and values beside the weights ({model.nbytes / 2**30:.1f} GiB); "
            "choose a smaller model or dtype, a smaller max_num_batched_tokens, or another device"
        )
    return blocks


def _main_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def _load(
    path: Path, args: EngineArgs, progress: Callable[[int, int], None] | None
) -> tuple[Transformer, Tokenizer | None]:
    checkpoint = open_checkpoint(path)
    device, dtype = device_and_dtype(checkpoint, args.device, args.dtype)
    return load_model(checkpoint, device, dtype, progress, args.quantization), checkpoint.tokenizer()


def device_and_dtype(checkpoint: Checkpoint, device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Where a checkpoint is loaded, and in which dtype: what is asked for, else what suits the machine."""
    target = _device(device)
    stored = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype", "float32"))
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"engine: dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return target, _dtype(dtype, stored, devices.properties(target))


def _dtype(requested: str | None, stored: str, device: devices.Device) -> torch.dtype:
    """The dtype of weights and activations; ValueError for one that the device does not compute in."""
    half = devices.half_dtype(device)
    if requested is not None:
        if requested == "bfloat16" and half != torch.bfloat16:
            raise ValueError(
                f"engine: bfloat16 needs sm_80 or newer, and {device.name} is sm_{device.arch}; use dtype='float16'"
            )
        return DTYPES[requested]
    if device.kind == "cpu":
        return torch.float32
    wanted = DTYPES.get(stored, torch.bfloat16)
    return half if wanted == torch.bfloat16 else wanted


def _device(name: str | None) -> torch.device:
    """The device that was asked for; by default the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"engine: {name!r} is no device; it must be cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"engine: {name!r} was asked for, and there is no CUDA GPU here; use device='cpu'")
    if device.type not in DEFAULT_MAX_NUM_SEQS:
        raise ValueError(f"engine: models run on 'cpu' and 'cuda', not on {name!r}")
    return device


def _as_list(caller: str, prompts: Any) -> list[Prompt]:
    """The prompts as a list; TypeError if they are none. The engine checks the token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise TypeError(f"{caller}: prompts is {type(prompts).__name__}; it must be {ACCEPTED_PROMPTS}")
    several = list(prompts)
    if several and all(_is_token_id(one) for one in several):
        return [several]
    for one in several:
        if not isinstance(one, str) and not _is_sequence(one):
            raise TypeError(f"{caller}: prompts has a {type(one).__name__} in it; it must be {ACCEPTED_PROMPTS}")
    return several


def _is_sequence(value: Any) -> bool:
    """Whether this can be a list of prompts or of token ids. Bytes are neither text nor token ids."""
    return isinstance(value, (Sequence, np.ndarray, torch.Tensor)) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def _is_token_id(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_floating_point()
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _completions(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions of a prompt: with a seed, their seeds differ."""
    first, alone = replace(params, n=1), replace(params, n=1, prompt_logprobs=None)  # the prompt's are the same for all
    if params.seed is None:
        return [first, *[alone] * (params.n - 1)]
    return [first, *(replace(alone, seed=(params.seed + index) % 2**63) for index in range(1, params.n))]


def _merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the completions of all."""
    completions = tuple(replace(output.outputs[0], index=index) for index, output in enumerate(outputs))
    error = next((output.error for output in outputs if output.error is not None), None)
    return replace(outputs[0], outputs=completions, error=error) if len(outputs) > 1 else outputs[0]


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"generate: {len(params)} sampling_params were given for {count} prompts; give one, or one for each"
        )
    return list(params)
