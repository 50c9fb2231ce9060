"""Training steps (forward and backward) of a Transformers model, timed for each implementation.

The model is gpt-oss with its widths, attention sinks and sliding windows but fewer layers and experts, or Llama-3.2-1B.
Implementations differ in attention; `hf_patch` also replaces norms, MLP or experts, RoPE and loss. Weights are random.
The batch is one sequence, or several of different lengths packed into one, with the `position_ids`, `cu_seq_lens` and
labels that Transformers' DataCollatorWithFlattening makes. The losses of all implementations must agree; a step with
another loss is marked wrong and its time is not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from flashkernel.core.device import half_dtype, properties
from flashkernel.core.shapes import MODELS
from flashkernel.lab.packages import require
from flashkernel.lab.results import Record

OP = "training_step"
ATTENTION, PATCH = "fkernel", "hf_patch"
OURS = (ATTENTION, PATCH)
IMPLEMENTATIONS = {  # Transformers refuses sdpa for gpt-oss
    "gpt-oss": (PATCH, ATTENTION, "flex_attention", "eager"),
    "llama-3.2-1b": (PATCH, "sdpa"),
}
PEER = "flash_attention_4"  # Transformers' own name; measured where its package is installed
LOSS_GAP = 0.02  # relative: bfloat16 rounding in another order may change the loss by this much
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
WARM_UP_STEPS = 2
OnStep = Callable[[str, int], None]


def gpt_oss(layers: int, experts: int, vocab: int) -> Any:
    from transformers import GptOssConfig

    size = MODELS["gpt-oss-20b"]
    return GptOssConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, vocab_size=vocab, num_hidden_layers=layers,
        num_local_experts=experts, num_experts_per_tok=min(4, experts), sliding_window=128,
        layer_types=(["sliding_attention", "full_attention"] * layers)[:layers],
    )  # fmt: skip


def llama(layers: int, vocab: int) -> Any:
    from transformers import LlamaConfig

    size = MODELS["llama-3.2-1b"]
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, vocab_size=vocab, num_hidden_layers=layers,
        tie_word_embeddings=True, max_position_embeddings=131072, rope_parameters=rope,
    )  # fmt: skip


def implementations(model: str, sequences: int = 1) -> tuple[str, ...]:
    """What is measured by default. Packed sequences are also measured with FlashAttention-4, where it is installed."""
    names = IMPLEMENTATIONS[model]
    if sequences == 1:
        return names
    from transformers.utils import is_flash_attn_4_available

    return (*names, PEER) if is_flash_attn_4_available() else names


def packed_lengths(tokens: int, sequences: int) -> list[int]:
    """Lengths of sequences packed into so many tokens; each is about as much longer than the one before."""
    if sequences > tokens:
        raise ValueError(f"step: {sequences} sequences cannot be packed into {tokens} tokens; give more --tokens")
    spare, whole = tokens - sequences, sequences * (sequences + 1)
    ends = [number + spare * number * (number + 1) // whole for number in range(sequences + 1)]
    return [end - start for start, end in pairwise(ends)]


def make_batch(vocab: int, tokens: int, sequences: int, device: torch.device) -> dict[str, Any]:
    """The arguments of a step: tokens and labels, and of packed sequences where each begins."""
    batch = torch.randint(0, vocab, (1, tokens), generator=torch.Generator().manual_seed(1), device="cpu").to(device)
    if sequences == 1:
        return {"input_ids": batch, "labels": batch}
    lengths = packed_lengths(tokens, sequences)
    positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None].to(device)
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device=device, dtype=torch.int32)
    return {
        "input_ids": batch, "labels": batch.masked_fill(positions == 0, -100), "position_ids": positions,
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def build(model: str, layers: int | None, experts: int, vocab: int | None) -> tuple[Any, str]:
    """Returns (a Transformers config, the case's name).

    Args:
        model: a key of `IMPLEMENTATIONS`.
        layers: number of layers; by default 4 for gpt-oss, all for Llama.
        experts: experts per layer of gpt-oss.
        vocab: vocabulary size; by default the model's own.
    """
    if model not in IMPLEMENTATIONS:
        raise ValueError(f"step: unknown model {model!r}; known models: {', '.join(IMPLEMENTATIONS)}")
    require("transformers", "flashkernel step")
    if model == "gpt-oss":
        layers = layers or 4
        return gpt_oss(layers, experts, vocab or MODELS["gpt-oss-20b"].vocab), f"gpt-oss-{layers}layers"
    size = MODELS["llama-3.2-1b"]
    return llama(layers or size.layers, vocab or size.vocab), model if layers is None else f"{model}-{layers}layers"


def measure(
    tokens: int,
    implementations: Sequence[str],
    device: torch.device,
    model: str = "gpt-oss",
    layers: int | None = None,
    experts: int = 8,
    vocab: int | None = None,
    steps: int = 8,
    on_step: OnStep = lambda text, done: None,
    sequences: int = 1,
) -> Iterator[Record]:
    """Yields a record for each implementation; the loss of the first that runs is the expected one.

    Args:
        tokens: length of the sequence, or of all packed sequences.
        implementations: attention implementations that Transformers knows, or "hf_patch".
        device: where to train.
        model, layers, experts, vocab: see `build`.
        steps: steps to time, after `WARM_UP_STEPS`.
        on_step: called before every step with what it is and how many steps of this implementation are done.
        sequences: how many are packed into these tokens.
    """
    expected: float | None = None
    config, case = build(model, layers, experts, vocab)
    axes = {"tokens": tokens, "layers": config.num_hidden_layers, "vocab": config.vocab_size}
    if model == "gpt-oss":
        axes["experts"] = experts
    case = f"{case}-{tokens}"
    if sequences > 1:
        axes["sequences"], case = sequences, f"{case}-packed{sequences}"
    batch = make_batch(config.vocab_size, tokens, sequences, device)
    for name in implementations:
        common: dict[str, Any] = {
            "op": OP, "case": case, "axes": axes, "dtype": str(dtype_of(device)).removeprefix("torch."),
            "direction": "fwd+bwd", "implementation": name, "kind": "backend" if name in OURS else "baseline",
        }  # fmt: skip
        try:
            seconds, peak, loss = _run(name, model, config, batch, device, steps, on_step)
        except (torch.OutOfMemoryError, ImportError, ValueError, RuntimeError) as error:
            yield Record(**common, correct=False, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        expected = loss if expected is None else expected
        close = abs(loss - expected) <= LOSS_GAP * abs(expected)
        note = None if close else f"loss {loss:.4f}, expected {expected:.4f}"
        yield Record(**common, correct=close, ms=statistics(seconds), peak_bytes=peak, mode="steps", note=note)


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype of the measured models: the 16-bit one of the device."""
    return half_dtype(properties(device))


def _run(
    implementation: str, model_name: str, config: Any, batch: dict[str, Any], device: torch.device, steps: int,
    on_step: OnStep,
) -> tuple[list[float], int | None, float]:  # fmt: skip
    """Returns (seconds of each step after the warm-up, peak memory in bytes, the first loss)."""
    from transformers import AutoModelForCausalLM

    if implementation in OURS:
        import flashkernel.hf

        flashkernel.hf.register()
    tokens = batch["input_ids"].numel()
    on_step(f"{implementation}, {tokens} tokens: building the model", 0)
    torch.manual_seed(0)
    attention = IMPLEMENTATIONS[model_name][-1] if implementation == PATCH else implementation
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype_of(device))
    if implementation == PATCH:
        flashkernel.hf.patch(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for step in range(steps + WARM_UP_STEPS):
        warm_up = "warm-up " if step < WARM_UP_STEPS else ""
        on_step(f"{implementation}, {tokens} tokens: {warm_up}step {step + 1} of {steps + WARM_UP_STEPS}", step)
        began = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the device, so the clock may be read
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return seconds[WARM_UP_STEPS:], peak, losses[0]


def statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles, mean, standard deviation, minimum and maximum in ms, as a record keeps them."""
    ms = np.array(seconds) * 1e3
    found = {name: float(np.percentile(ms, share)) for name, share in PERCENTILES.items()}
    return {**found, "mean": float(ms.mean()), "std": float(ms.std()), "min": float(ms.min()), "max": float(ms.max())}
