"""Kernels of all steps compiled side by side, in processes, before the first start with a model on a machine.

A worker builds a copy of the model with one layer of each kind and memory without values, and runs a padded step of
some shapes. What it compiles stays in the caches on disk (Triton's, and ours of CUDA C++), from which the engine's own
process loads it. A file says that it was done: later starts do without workers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashkernel
from flashkernel.core import env, files
from flashkernel.core.worker_pool import WorkerPool
from flashkernel.engine.model_runner import ModelRunner, Progress
from flashkernel.engine.step_shapes import StepShape, StepShapes
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import KVCache, PageStorage

MAX_WORKERS = 12
MIN_BYTES = 64 << 20  # of weights; a smaller model is compiled by the engine's own process
WORKER_BYTES = 2 << 30  # of GPU memory beside the weights: a context, activations, logits
TIMEOUT_S = 600.0
NUM_BLOCKS = 8


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that kernels depend on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    kv_cache_dtype: torch.dtype


def precompile(model: Transformer, sizes: EngineSizes, progress: Progress) -> bool:
    """Compiles the kernels of every step shape in worker processes, unless that was done before.

    Args:
        model: The model, on a GPU.
        sizes: Sizes of the engine.
        progress: Called as `progress(what, done, total)`.

    Returns:
        Whether workers were started.
    """
    if model.nbytes < MIN_BYTES:
        return False
    marker = _marker(model, sizes)
    workers = _num_workers(model)
    if marker.exists() or workers < 2:
        return False
    shapes = StepShapes(sizes.max_num_seqs, sizes.max_num_batched_tokens).all()
    progress("starting compilers", 0, len(shapes))
    # A process of its own starts the workers: they import the main module, which may be a user's script.
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work.pickle")
        work.write_bytes(pickle.dumps((_describe(model), sizes, shapes, workers)))
        start = "import sys; from flashkernel.engine import precompile; precompile.run_workers(sys.argv[1])"
        command = [sys.executable, "-c", start, str(work)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env.of_child()) as process:
            assert process.stdout is not None
            failures = []
            for line in process.stdout:
                try:
                    found = json.loads(line)
                except ValueError:  # what a library prints
                    sys.stderr.write(line)
                    continue
                progress("compiling in processes", found["done"], len(shapes))
                failures += found["failures"]
    if process.returncode:
        warnings.warn(f"compiling ahead ended with exit code {process.returncode}; its message is above", stacklevel=2)
    elif failures:
        warnings.warn(f"{len(failures)} steps were not compiled ahead; the first: {failures[0]}", stacklevel=2)
    else:
        files.write_whole(marker, json.dumps({"shapes": len(shapes)}))
    return True


def run_workers(path: str) -> None:
    """Compiles what a file describes; prints a line of JSON for each shape."""
    payload, sizes, shapes, workers = pickle.loads(Path(path).read_bytes())
    pool = WorkerPool(_compile, (payload, sizes), min(workers, len(shapes)), TIMEOUT_S)
    for done, (shape, failure, lost) in enumerate(pool.run(_batches(shapes, workers)), 1):
        failures = [f"{shape}: {failure or lost}"] if failure or lost else []
        print(json.dumps({"done": done, "failures": failures}), flush=True)


def _batches(shapes: list[StepShape], workers: int) -> Iterator[list[StepShape]]:
    """Neighbouring shapes, which share kernels, go to one worker."""
    size = max(1, len(shapes) // (2 * workers))
    ordered = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_decodes))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _num_workers(model: Transformer) -> int:
    """As many as cores and free memory allow; a worker holds the embedding, the LM head and a layer."""
    free, _ = torch.cuda.mem_get_info(model.device)
    each = WORKER_BYTES + 3 * model.weights.embedding.nbytes + model.nbytes // max(1, len(model.layers))
    return min(MAX_WORKERS, os.cpu_count() or 1, int(free // each))


def _marker(model: Transformer, sizes: EngineSizes) -> Path:
    """The file that says that everything is compiled: its name has all that kernels depend on."""
    package = Path(flashkernel.__file__).parent
    code = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cu"), *package.rglob("*.cuh")]):
        code.update(path.read_bytes())
    versions = [metadata.version(name) for name in ("torch", "triton")]
    device = torch.cuda.get_device_name(model.device), torch.cuda.get_device_capability(model.device)
    kinds = [_kind(layer) for layer in _distinct(model)]
    key = repr((model.config, model.dtype, kinds, sizes, versions, device, code.hexdigest()))
    return env.cache_dir() / "engine" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _distinct(model: Transformer) -> list[Any]:
    """One layer of each kind: kinds differ in windows and in their tensors."""
    found: dict[Any, Any] = {}
    for layer, window in zip(model.layers, model.config.sliding_windows):
        found.setdefault((window, _kind(layer)), layer)
    return list(found.values())


def _kind(layer: Any) -> str:
    return repr([(name, type(x).__name__, getattr(x, "shape", None)) for name, x in sorted(vars(layer).items())])


class _Pickler(pickle.Pickler):
    """Pickles tensors by shape, strides and dtype, without their values."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _empty, (tuple(value.shape), value.stride(), value.dtype, str(value.device))
        return NotImplemented


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def _describe(model: Transformer) -> bytes:
    """The model with one layer of each kind, pickled without values."""
    windows = {id(layer): window for layer, window in zip(model.layers, model.config.sliding_windows)}
    layers = _distinct(model)
    config = replace(
        model.config, num_layers=len(layers), sliding_windows=tuple(windows[id(layer)] for layer in layers)
    )
    buffer = io.BytesIO()
    _Pickler(buffer).dump((config, model.weights, layers))
    return buffer.getvalue()


_runners: dict[bytes, ModelRunner] = {}  # of a worker


def _compile(payload: bytes, sizes: EngineSizes, shape: StepShape) -> str:
    """Runs a padded step in a worker; returns the error, or ""."""
    try:
        if payload not in _runners:
            _runners[payload] = _build(payload, sizes)
        runner = _runners[payload]
        runner.run_padding(shape)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
    except Exception as error:  # compilers raise anything; the engine's own process meets it again and reports it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _build(payload: bytes, sizes: EngineSizes) -> ModelRunner:
    config, weights, layers = pickle.loads(payload)
    model = Transformer(config, weights, layers)
    storage = PageStorage(
        config.num_layers, NUM_BLOCKS, sizes.block_size, config.kv_heads, config.head_dim, dtype=sizes.kv_cache_dtype,
        device=model.device,
    )  # fmt: skip
    cache = KVCache(
        NUM_BLOCKS, sizes.block_size, most_sequences=sizes.max_num_seqs, most_tokens=sizes.max_model_len,
        storage=storage,
    )  # fmt: skip
    runner = ModelRunner(model, storage, cache, sizes.max_num_seqs, sizes.max_num_batched_tokens, enforce_eager=True)
    runner.padded = True
    return runner
