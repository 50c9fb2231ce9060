"""Kernels of all steps compiled side by side, in processes, before the first start with a model on a machine.

A process of its own builds a copy of the model with one layer of each kind, on the meta device, and takes a padded step
of every shape: nothing runs, and what would be launched is known. It then compiles each kernel once, in forked workers
that use no GPU (core/compile_ahead.py), into the caches on disk, from which the engine's own process loads them. A file
says that it was done: later starts do without.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashkernel
from flashkernel import Weight
from flashkernel.core import compile_ahead, env, files
from flashkernel.core.device import Device, properties
from flashkernel.engine.model_runner import ModelRunner, Progress
from flashkernel.engine.transformer import Transformer
from flashkernel.kvcache import KVCache, PageStorage

MIN_BYTES = 64 << 20  # of weights; a smaller model is compiled by the engine's own process
NUM_BLOCKS = 8


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that kernels depend on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    kv_cache_dtype: torch.dtype


def precompile(model: Transformer, sizes: EngineSizes, progress: Progress) -> int:
    """Compiles the kernels of every step shape in worker processes, unless that was done before.

    Args:
        model: The model, on a GPU.
        sizes: Sizes of the engine.
        progress: Called as `progress(what, done, total)`.

    Returns:
        How many kernels were compiled; those that were on disk already do not count.
    """
    if model.nbytes < MIN_BYTES:
        return 0
    markers, workers = _markers(model, sizes), compile_ahead.num_cores()
    if all(marker.exists() for marker in markers) or workers < 2:
        return 0
    progress("starting compilers", 0, 1)
    total, built, failures = 0, 0, []
    # A process of its own forks the workers: this one has used the GPU.
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work.pickle")
        on_gpu = model.device.type == "cuda"  # its driver's library is needed for launchers
        work.write_bytes(pickle.dumps((describe(model), sizes, properties(model.device), workers, on_gpu)))
        start = "import sys; from flashkernel.engine import precompile; precompile.run_workers(sys.argv[1])"
        command = [sys.executable, "-c", start, str(work)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env.of_child()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    found = json.loads(line)
                except ValueError:  # what a library prints
                    sys.stderr.write(line)
                    continue
                total = found["total"]
                progress("compiling in processes", found["done"], total)
                built += found["built"]
                failures += found["failures"]
    if process.returncode:
        warnings.warn(f"compiling ahead ended with exit code {process.returncode}; its message is above", stacklevel=2)
    elif failures:
        warnings.warn(f"{len(failures)} kernels were not compiled ahead; the first: {failures[0]}", stacklevel=2)
    else:
        for marker in markers:
            files.write_whole(marker, json.dumps({"kernels": total}))
    return built


def run_workers(path: str) -> None:
    """Compiles what a file describes; prints a line of JSON for each kernel."""
    payload, sizes, device, workers, with_launchers = pickle.loads(Path(path).read_bytes())
    launches = compile_ahead.distinct(launches_of(payload, sizes, device))
    found = compile_ahead.compile_all(launches, device.arch, workers, with_launchers)
    for done, compiled in enumerate(found, 1):
        failures = [f"{compiled.name}: {compiled.failure}"] if compiled.failure else []
        facts = {"done": done, "total": len(launches), "built": int(not compiled.was_cached), "failures": failures}
        print(json.dumps(facts), flush=True)


def launches_of(payload: bytes, sizes: EngineSizes, device: Device) -> list[compile_ahead.AnyLaunch]:
    """What steps of every shape launch on `device`, for the model that `describe` gave."""
    with compile_ahead.collect(device) as found:
        runner = build_runner(load(payload), sizes)
        for shape in runner.shapes.all():
            runner.run_padding(shape)
    return found


def _markers(model: Transformer, sizes: EngineSizes) -> list[Path]:
    """Files that say that everything is compiled, one in each cache, since either may be emptied.

    Their name has all that kernels depend on.
    """
    from triton import knobs

    package = Path(flashkernel.__file__).parent
    code = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cu"), *package.rglob("*.cuh")]):
        code.update(path.read_bytes())
    versions = [metadata.version(name) for name in ("torch", "triton")]
    kinds = [_kind(part) for part in (model.weights, *_distinct(model))]
    key = repr((model.config, kinds, sizes, versions, properties(model.device), code.hexdigest()))
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    return [env.cache_dir() / "engine" / name, Path(knobs.cache.dir) / "flashkernel" / name]


def _distinct(model: Transformer) -> list[Any]:
    """One layer of each kind: kinds differ in windows and in their tensors."""
    found: dict[Any, Any] = {}
    for layer, window in zip(model.layers, model.config.sliding_windows):
        found.setdefault((window, _kind(layer)), layer)
    return list(found.values())


def _kind(part: Any) -> str:
    """Names, shapes, dtypes and formats of the weights of a layer, or of the rest of the model."""
    return repr([(name, _weight_kind(x)) for name, x in sorted(vars(part).items())])


def _weight_kind(x: Any) -> Any:
    if isinstance(x, tuple):
        return [_weight_kind(one) for one in x]
    if isinstance(x, Weight):
        return x.layout, [_weight_kind(tensor) for tensor in x.tensors]
    return None if x is None else (tuple(x.shape), x.stride(), x.dtype)


class _Pickler(pickle.Pickler):
    """Pickles tensors by shape, strides and dtype, without their values: they are read on the meta device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _empty, (tuple(value.shape), value.stride(), value.dtype)
        return NotImplemented


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def describe(model: Transformer) -> bytes:
    """The model with one layer of each kind, pickled without values."""
    windows = {id(layer): window for layer, window in zip(model.layers, model.config.sliding_windows)}
    layers = _distinct(model)
    config = replace(
        model.config, num_layers=len(layers), sliding_windows=tuple(windows[id(layer)] for layer in layers)
    )
    buffer = io.BytesIO()
    _Pickler(buffer).dump((config, model.weights, layers))
    return buffer.getvalue()


def load(payload: bytes) -> Transformer:
    """The model that `describe` gave, on the meta device."""
    return Transformer(*pickle.loads(payload))


def build_runner(model: Transformer, sizes: EngineSizes) -> ModelRunner:
    """A runner of padded steps of a model on the meta device."""
    config = model.config
    storage = PageStorage(
        config.num_layers, NUM_BLOCKS, sizes.block_size, config.kv_heads, config.head_dim, dtype=sizes.kv_cache_dtype,
        device=model.device,
    )  # fmt: skip
    cache = KVCache(
        NUM_BLOCKS, sizes.block_size, max_num_seqs=sizes.max_num_seqs, max_model_len=sizes.max_model_len,
        storage=storage,
    )  # fmt: skip
    return ModelRunner(model, storage, cache, sizes.max_num_seqs, sizes.max_num_batched_tokens, enforce_eager=True)
