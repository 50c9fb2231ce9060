"""Shapes with equal buckets share a launch config: a bucket tells apart what a tunable's functions read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.dispatch import BackendError
from flashkernel.core.launch import collect_launches
from flashkernel.core.tune import Tunable
from flashkernel.lab import selection
from flashkernel.ops import registry

BACKENDS = {"t4": ("cuda",), "h200": ("hopper", "triton")}
MAX_CASES = 30  # of an operator, evenly


class _Reads(dict[str, Any]):
    """A shape that notes which of its entries are read."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__(shape)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _picked(gpu: str) -> dict[Tunable, list[Mapping[str, Any]]]:
    """The shapes that calls of every case would pick configs for."""
    found: dict[Tunable, list[Mapping[str, Any]]] = {}
    with devices.pretend(devices.KNOWN[gpu]), collect_launches(), tune.collect_picks() as picks:
        for op in registry().values():
            for case in op.cases[:: 1 + len(op.cases) // MAX_CASES]:
                dtype = torch.float16 if torch.float16 in case.dtypes else case.dtypes[-1]
                for backend in BACKENDS[gpu]:
                    if backend not in {one.name for one in op.backends}:
                        continue
                    try:
                        op.call(**selection.shapes_only(op, case, dtype), **case.options, backend=backend)
                    except (BackendError, NotImplementedError, RuntimeError, ValueError):
                        continue  # declined, it looks at values, or it launches CUDA C++, the config being picked
    for (tunable, _), shape in picks.items():
        found.setdefault(tunable, []).append(shape)
    return found


def _others(value: Any) -> Iterator[Any]:
    """Values far from an entry of a shape."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (0, 1, 2, 4, 16, 64, 4096, 1 << 20)


@pytest.mark.parametrize("gpu", BACKENDS)
def test_a_bucket_has_all_that_is_read(gpu: str) -> None:
    device, missing, seen = devices.KNOWN[gpu], set(), 0
    for tunable, shapes in _picked(gpu).items():
        seen += 1
        for shape in shapes[:50]:
            reads = _Reads(shape)
            config = tunable.heuristic(device, reads)
            tunable.valid(config, device, reads)
            for name in reads.read & shape.keys():
                others = [{**shape, name: other} for other in _others(shape[name])]
                if others and all(tunable.bucket(other) == tunable.bucket(shape) for other in others):
                    missing.add((tunable.name, name))
    assert seen >= 4
    assert not missing, f"{device.name}: (tunable, entry of its shape) {sorted(missing)}"
