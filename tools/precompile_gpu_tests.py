"""Compiles what the GPU tests and random calls launch, on a machine that needs no GPU, for one whose time is dear.

Usage: python tools/precompile_gpu_tests.py ARCHIVE [--calls N] [--gpu NAME] [--workers N]

    tar -xf ARCHIVE -C /tmp                        # on the GPU machine, beside a checkout of the same commit
    export TRITON_CACHE_DIR=/tmp/kernels/cache PYTHONPATH=/tmp/kernels/site
    make gpu-test
    flashkernel check --random --calls 2000 --seed 0

Triton names what it compiled by its own files, among them a library that each version of Python has another one of.
The archive's `sitecustomize.py` names it by Triton's version instead: the two machines may differ in their Python.
Kernels that torch.compile writes and those in CUDA C++ are not in the archive, but compiled when they are launched.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT, AT = Path(__file__).parents[1], "/tmp/kernels"
KEPT = (".cubin", ".json")  # of what Triton writes for a kernel, what a launch reads
HOOK = '''"""Names compiled kernels by Triton's version."""
import importlib.abc
import importlib.util
import sys


class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "triton.runtime.cache":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            import triton

            run(module)
            module.triton_key = lambda: f"triton {triton.__version__}"

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Hook())
'''


def meta(value: Any) -> Any:
    """A tensor without data, of the same shape, strides and place in its storage."""
    import torch

    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else -1
    storage = torch.empty(value.storage_offset() + last + 1, dtype=value.dtype, device="meta")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def options_without_data(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose tensors, such as the tables of masks, have no data."""
    import torch

    tensors: list[Any] = []

    class Writer(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, torch.Tensor):
                return None
            tensors.append(meta(value))
            return len(tensors) - 1

    class Reader(pickle.Unpickler):
        def persistent_load(self, place: int) -> Any:
            return tensors[place]

    text = io.BytesIO()
    Writer(text).dump(dict(options))
    return Reader(io.BytesIO(text.getvalue())).load()


def launches(gpu: str, calls: int) -> Iterator[Any]:
    """What the matrix, the tests that are generated beside it, and random calls launch, with repetitions."""
    import torch
    from test_citizenship import _kernel_backend, _kernel_dtype, _some_cases
    from test_matrix import _in_turn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flashkernel.core import compile_ahead, device
    from flashkernel.core.check import execute, wanted_gradients
    from flashkernel.core.dispatch import BackendError
    from flashkernel.core.op import grid_of_cases
    from flashkernel.core.random_case import draw
    from flashkernel.lab.random_calls import schedule
    from flashkernel.ops import registry

    def call(op: Any, case: Any, dtype: torch.dtype, backend: str | None, seed: int = 0) -> list[Any]:
        with FakeTensorMode():
            drawn = op.make_inputs(case, dtype, "cpu", seed)
        inputs = {name: meta(value) for name, value in drawn.items()}
        options = {**options_without_data(case.options), **({} if backend is None else {"backend": backend})}
        for wanted in (wanted_gradients(op, case, inputs), []):
            try:
                with compile_ahead.collect(device.KNOWN[gpu]) as found:
                    execute(op.observed(op.call), inputs, options, wanted)
            except BackendError:  # at least with gradients
                continue
            return [launch for launch in found if isinstance(launch, compile_ahead.Launch)]
        return []

    for op in registry().values():
        compiled = [backend for backend in op.backends if backend.name in ("triton", "hopper")]
        for case, dtype in grid_of_cases(op):
            for backend in compiled:
                if _in_turn(op, case, dtype, backend, "cuda"):
                    yield from call(op, case, dtype, backend.name)
        if any(backend.name == "triton" for backend in compiled):  # test_replay
            cases = {case.name: case for case, dtype in grid_of_cases(op) if dtype == torch.float16}
            for case in list(cases.values())[:6]:
                yield from call(op, case, torch.float16, "triton")
        for case in _some_cases(op):
            yield from call(op, case, _kernel_dtype(op), _kernel_backend(op))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield from call(op, op.cases[0], dtype, None)
    for batch in schedule(list(registry().values()), 0, "large", calls):
        for one in batch:
            op = registry()[one.op]
            case, dtype = draw(op, one.seed, one.sizes)
            for backend in op.backends:
                if backend.name in ("triton", "hopper"):
                    yield from call(op, case, dtype, backend.name, one.seed)


def compile_into(cache: Path, gpu: str, calls: int, workers: int) -> int:
    """Compiles each kernel once; returns the number of those that failed."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    exec(HOOK, {})
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    warnings.simplefilter("ignore")
    from flashkernel.core import compile_ahead, device

    found = compile_ahead.distinct(launches(gpu, calls))
    print(f"{len(found)} kernels", flush=True)
    failed = 0
    for count, one in enumerate(compile_ahead.compile_all(found, device.KNOWN[gpu].arch, workers, False), 1):
        failed += bool(one.failure)
        if one.failure:
            print(f"{one.name}: {one.failure}")
        if count % 100 == 0 or count == len(found):
            print(f"{count} of {len(found)} compiled", flush=True)
    return failed


def pack(cache: Path, archive: Path) -> None:
    """Writes the archive: code and metadata of each kernel, listed under the place where it will lie, and the hook."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "site").mkdir()
        (top / "site" / "sitecustomize.py").write_text(HOOK)
        for group in sorted(cache.glob("*/__grp__*")):
            made = top / "cache" / group.parent.name
            made.mkdir(parents=True, exist_ok=True)
            names = [name for name in json.loads(group.read_text())["child_paths"] if name.endswith(KEPT)]
            for name in names:
                shutil.copy(group.parent / name, made / name)
            paths = {name: f"{AT}/cache/{group.parent.name}/{name}" for name in names}
            (made / group.name).write_text(json.dumps({"child_paths": paths}))
        partial = archive.with_name(archive.name + ".partial")
        with tarfile.open(partial, "w:xz") as file:
            file.add(top, Path(AT).name)
        partial.replace(archive)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="the .tar.xz to write")
    parser.add_argument("--calls", type=int, default=2000, help="random calls, from seed 0 on")
    parser.add_argument("--gpu", default="h200", help="a GPU by the name that `flashkernel ops --device` takes")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failed = compile_into(Path(folder), given.gpu, given.calls, given.workers)
        pack(Path(folder), given.archive)
    print(f"{given.archive}: {given.archive.stat().st_size / 2**20:.1f} MiB; {failed} kernels failed to compile")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
