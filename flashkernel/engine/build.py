"""`EngineArgs`, and an engine built from them: the device, the dtype, and how large the KV cache is."""

from __future__ import annotations

import gc
import os
import warnings
from dataclasses import dataclass

import torch

from flashkernel.core import device as devices
from flashkernel.engine import step_memory
from flashkernel.engine.checkpoint import Checkpoint
from flashkernel.engine.config import ModelError
from flashkernel.engine.llm_engine import LLMEngine
from flashkernel.engine.model_runner import ModelRunner, Progress
from flashkernel.engine.precompile import EngineSizes, precompile
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import KVCache, PageStorage
from flashkernel.kvcache.storage import bytes_per_page

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
QUANTIZATIONS = ("fp8", "int8", "int4", "mxfp4", "plain")
CPU_KV_CACHE_BYTES, MAX_CPU_MEMORY_SHARE = 2**31, 0.25
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
DEFAULT_BLOCK_SIZE = {"cpu": 64, "cuda": 16}


@dataclass(frozen=True)
class EngineArgs:
    """How a model is run; vLLM's names. None takes what suits the device.

    Args:
        device: "cpu", "cuda" or "cuda:1"; the GPU if there is one.
        dtype: Of weights and activations: "float32", "float16" or "bfloat16". By default float32 on a CPU; on a GPU
            the dtype that the model is stored in; before sm_80 float16, for which alone there are kernels.
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
        enforce_eager: No CUDA graphs; on a CPU, steps layer by layer and each operator through dispatch.
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
    wanted = engine_args.max_model_len or longest
    if wanted > longest:
        raise ValueError(f"engine: max_model_len is {wanted}; this model takes up to {longest} tokens")
    tokens = engine_args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    tokens = max(tokens, max_num_seqs)  # every running sequence gets its token
    dtype = model.dtype if engine_args.kv_cache_dtype is None else KV_CACHE_DTYPES[engine_args.kv_cache_dtype]
    if dtype in DTYPES.values() and dtype != model.dtype:
        raise ValueError(
            f"engine: kv_cache_dtype is {engine_args.kv_cache_dtype!r}; a model in {model.dtype} stores keys and "
            "values in that dtype, or in 'float8_e4m3fn' or 'int8'"
        )
    block_size = engine_args.block_size or DEFAULT_BLOCK_SIZE[device.type]
    on_progress = progress or (lambda what, done, total: None)
    compiled, sizes = 0, EngineSizes(max_num_seqs, tokens, wanted, block_size, dtype)
    if engine_args.warm_up and device.type == "cuda":  # before the KV cache takes the memory
        compiled = precompile(model, sizes, on_progress)
    blocks = _num_blocks(model, engine_args, sizes)
    blocks += 1  # block 0 stays empty
    max_model_len = min(wanted, (blocks - 1) * block_size)
    if engine_args.max_model_len is not None and max_model_len < wanted:
        raise ValueError(
            f"engine: max_model_len is {wanted}, and the KV cache holds {max_model_len} tokens; choose a smaller "
            "max_model_len, or a larger cache (kv_cache_tokens, gpu_memory_utilization)"
        )
    storage = PageStorage(
        config.num_layers, blocks, block_size, config.kv_heads, config.head_dim, dtype=dtype, device=device
    )
    cache = KVCache(
        blocks, block_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
        prefix_caching=engine_args.enable_prefix_caching, storage=storage,
    )  # fmt: skip
    runner = ModelRunner(model, storage, cache, max_num_seqs, tokens, engine_args.enforce_eager)
    scheduler = Scheduler(cache, max_num_seqs, tokens, engine_args.num_speculative_tokens)
    engine = LLMEngine(runner, scheduler, tokenizer, max_model_len, async_scheduling=device.type == "cuda")
    if engine_args.warm_up:
        engine.warm_up(on_progress, compiled)
    return engine


def _num_blocks(model: Transformer, args: EngineArgs, sizes: EngineSizes) -> int:
    """Number of KV cache blocks: as asked for, or what fits."""
    config, block_size = model.config, sizes.block_size
    if args.kv_cache_tokens is not None:
        return -(-args.kv_cache_tokens // block_size)
    usable = sizes.max_num_seqs * -(-sizes.max_model_len // block_size)  # more could never be used
    block_bytes = bytes_per_page(config.num_layers, block_size, config.kv_heads, config.head_dim, sizes.kv_cache_dtype)
    if model.device.type == "cuda":
        # What torch has reserved and not allocated does not count: graphs of another engine keep it to themselves.
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        available = free - int((1 - args.gpu_memory_utilization) * total) - _bytes_of_steps(model, args, sizes, total)
    else:
        available = int(min(CPU_KV_CACHE_BYTES, MAX_CPU_MEMORY_SHARE * _main_memory()))
    blocks = min(usable, available // block_bytes)
    if blocks < 1:
        raise ModelError(
            f"engine: no memory is left for keys and values beside the weights ({model.nbytes / 2**30:.1f} GiB); "
            "choose a smaller model or dtype, a smaller max_num_batched_tokens, or another device"
        )
    return blocks


def _bytes_of_steps(model: Transformer, args: EngineArgs, sizes: EngineSizes, total: int) -> int:
    """Bytes of a GPU's memory, `total` in all, that steps take beside weights and KV cache.

    A step runs once before it is captured, in memory that its graph cannot use. Log probabilities come after it.
    """
    try:
        memory = step_memory.measure(model, sizes, devices.properties(model.device))
    except Exception as error:  # steps run without the estimate
        warnings.warn(
            f"engine: the memory of steps was not measured ({type(error).__name__}: {error}); they are left "
            f"{total >> 33} GiB, an eighth of the GPU's; kv_cache_tokens sets the size of the KV cache",
            stacklevel=2,
        )
        return total // 8
    logprobs = 3 * sizes.max_num_seqs * model.config.vocab_size * 4  # logits of the rows that ask, their softmax, ranks
    return memory.buffers + (1 if args.enforce_eager else 2) * memory.step + logprobs


def _main_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def device_and_dtype(checkpoint: Checkpoint, device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Where a checkpoint is loaded, and in which dtype: what is asked for, else what suits the machine."""
    target = parse_device(device)
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
    # Before sm_80 there is no bfloat16, and attention over pages in float32 is torch's, which holds all scores.
    return DTYPES.get(stored, half) if half == torch.bfloat16 else half


def parse_device(name: str | None) -> torch.device:
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
