"""Memory that steps take on a GPU, measured without it: padded steps of a model on the meta device.

The model has one layer of each kind, and what it would launch is dropped. The tensors that are alive at a time are
summed up. So experts that are dequantized for many tokens count, whichever backend does that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashkernel.core import cuda
from flashkernel.core.device import Device, pretend
from flashkernel.core.launch import Launch, collect_launches, observe
from flashkernel.engine import precompile
from flashkernel.engine.transformer import Transformer


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the buffers that all steps share, and the most that one step allocates beside them."""

    buffers: int
    step: int


def measure(model: Transformer, sizes: precompile.EngineSizes, device: Device) -> StepMemory:
    """The memory of steps of up to these sizes on `device`.

    Args:
        model: The model, on any device.
        sizes: Sizes of the engine.
        device: The GPU.
    """
    with pretend(device), collect_launches() as launches, cuda.recorded_launches():
        without_values = precompile.load(precompile.describe(model))
        live = _LiveBytes(launches)
        with live, observe(live):
            runner = precompile.build_runner(without_values, sizes)
            buffers = live.count()
            live.most = 0
            shapes = runner.shapes.all()  # largest first
            for shape in (shapes[0], next(shape for shape in shapes if not shape.num_prefills)):
                runner.run_padding(shape)
    return StepMemory(buffers, max(0, live.most - buffers))


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors on the meta device that were made inside and are alive. An observer of launches as well:
    operators then call their launchers, whose workspaces count, and not the functions that only give shapes."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.most = 0
        self._launches = launches
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self) -> int:
        """Bytes that are alive now."""
        self._launches.clear()  # they hold their tensors
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._add(result, made=True)
        self.most = max(self.most, self.count())
        return result

    def _add(self, values: Any, made: bool) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.device.type == "meta":
                storage = value.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if made else 0

    def paused(self) -> AbstractContextManager[None]:
        """As `launch.LaunchObserver` has it, like the methods below."""
        return nullcontext()

    def on_launch(self, record: Any) -> None:
        """Nothing is launched."""

    def on_write(self, x: Tensor) -> None:
        """Writes take no memory."""

    def on_derived(self, function: Any, tensors: Any, results: Any) -> None:
        """What was made is counted by then."""
