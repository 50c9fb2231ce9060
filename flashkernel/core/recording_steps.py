"""The steps of a recorded call, and the Python source that each becomes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flashkernel.core import driver
from flashkernel.core.driver import LaunchRecord, PreparedLaunch

if TYPE_CHECKING:
    from flashkernel.core.recording import CallRecorder

_aten = torch.ops.aten
_METHODS = {_aten.zero_.default: "zero_", _aten.fill_.Scalar: "fill_", _aten.copy_.default: "copy_"}
_FUNCTIONS = {_aten.mm.default: torch.mm, _aten.mm.out: torch.mm, _aten.addmm.default: torch.addmm,
              _aten.addmm.out: torch.addmm}  # half the host time of a call of the overload  # fmt: skip


class CannotRecord(Exception):
    """A replay would not do what the call does; the message is the reason."""


class Step(Protocol):
    """One action of a recorded call."""

    def slots(self) -> list[int]:
        """The slots that it uses, or makes."""

    def emit(self, out: SourceWriter) -> None:
        """Write its source."""


class SourceWriter:
    """The source of a generated function, and the objects that it refers to by name."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index  # -1: tensors are on the CPU, and kernels run under Triton's interpreter
        self.lines: list[str] = []
        self.null_slots: set[int] = set()
        self.names: dict[str, Any] = {"as_strided": torch.as_strided, "lock": threading.RLock(), "void": c_void_p}
        if device_index >= 0:
            from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

            from flashkernel.core.tables import keep_alive

            self.names.update(
                empty=_empty_strided_cuda, launch=driver.launch(), keep_alive=keep_alive,
                capturing=torch.cuda.is_current_stream_capturing, replace_address=driver.replace_address(),
            )  # fmt: skip
            self.stream = torch._C._cuda_getCurrentRawStream(device_index)
        else:
            self.names["empty"] = lambda size, stride, dtype: torch.empty_strided(
                size, stride, dtype=dtype, device="cpu"
            )

    def line(self, text: str) -> None:
        self.lines.append(text)

    def name(self, value: Any, prefix: str) -> str:
        """A new name, beginning with `prefix`, for a value that has no literal."""
        made = f"{prefix}{len(self.names)}"
        self.names[made] = value
        return made

    def source(self) -> str:
        return "def run(tensors):\n" + "".join(f"    {line}\n" for line in self.lines)

    def function(self, source: str) -> Callable[[Sequence[Tensor]], Any]:
        exec(compile(source, "<flashkernel recording>", "exec"), self.names)
        return self.names["run"]


class View:
    """A tensor as a strided view of a slot's tensor."""

    def __init__(self, slot: int, offset_bytes: int, tensor: Tensor, base: Tensor) -> None:
        if tensor.element_size() != base.element_size() or offset_bytes % tensor.element_size():
            raise CannotRecord("memory is read in another width than it was allocated in")
        self.slot, self.dtype = slot, tensor.dtype
        self.size, self.stride = tuple(tensor.shape), tensor.stride()
        self.offset = offset_bytes // tensor.element_size()  # in elements
        self.cast = tensor.dtype != base.dtype
        self.whole = not (self.cast or self.offset or tensor.shape != base.shape or self.stride != base.stride())

    def expression(self, num_inputs: int) -> str:
        """Source for this view. An input may begin anywhere in its storage; allocations begin at offset 0."""
        if self.whole:
            return f"v{self.slot}"
        offset = f"v{self.slot}.storage_offset() + {self.offset}" if self.slot < num_inputs else str(self.offset)
        text = f"as_strided(v{self.slot}, {self.size}, {self.stride}, {offset})"
        return f"{text}.view({_dtype_source(self.dtype)})" if self.cast else text


def _dtype_source(dtype: torch.dtype) -> str:
    return f"__import__('torch').{str(dtype).removeprefix('torch.')}"


class AllocationStep:
    """An allocation of uninitialized memory."""

    def __init__(self, slot: int, tensor: Tensor) -> None:
        self.slot, self.size, self.stride, self.dtype = slot, tuple(tensor.shape), tensor.stride(), tensor.dtype

    def slots(self) -> list[int]:
        return [self.slot]

    def emit(self, out: SourceWriter) -> None:
        if self.slot in out.null_slots:
            return
        out.line(f"v{self.slot} = empty({self.size}, {self.stride}, {out.name(self.dtype, 'dtype')})")


class OperationStep:
    """A torch operation. `slot` is that of its result, None where it writes to an argument."""

    def __init__(
        self, function: Any, args: list[Any], kwargs: dict[str, Any], slot: int | None, num_inputs: int
    ) -> None:
        self.function, self.args, self.kwargs, self.slot, self.num_inputs = function, args, kwargs, slot, num_inputs

    def slots(self) -> list[int]:
        used = [value.slot for value in (*self.args, *self.kwargs.values()) if isinstance(value, View)]
        return used if self.slot is None else [*used, self.slot]

    def emit(self, out: SourceWriter) -> None:
        def source(value: Any) -> str:
            return value.expression(self.num_inputs) if isinstance(value, View) else out.name(value, "value")

        args = [source(value) for value in self.args]
        args += [f"{name}={source(value)}" for name, value in self.kwargs.items()]
        method = _METHODS.get(self.function)
        if method is not None and not self.kwargs:
            out.line(f"{args[0]}.{method}({', '.join(args[1:])})")
            return
        target = "" if self.slot is None else f"v{self.slot} = "
        function = out.name(_FUNCTIONS.get(self.function, self.function), "operation")
        out.line(f"{target}{function}({', '.join(args)})")


class DerivedStep:
    """A look-up of what follows from arguments of the call alone (core/derived.py)."""

    def __init__(self, function: Callable[..., Any], given: list[View], results: list[int], num_inputs: int) -> None:
        self.function, self.given, self.results, self.num_inputs = function, given, results, num_inputs

    def slots(self) -> list[int]:
        return [*[view.slot for view in self.given], *self.results]

    def emit(self, out: SourceWriter) -> None:
        results = "".join(f"v{slot}, " for slot in self.results)
        given = ", ".join(view.expression(self.num_inputs) for view in self.given)
        out.line(f"{results}= {out.name(self.function, 'derived')}({given})")


class LaunchStep:
    """A kernel launch whose tensor parameters are traced to slots."""

    def __init__(self, record: LaunchRecord, recorder: CallRecorder) -> None:
        self.num_inputs = recorder.num_inputs
        self.sources: dict[int, tuple[int, int]] = {}  # parameter index -> (slot, byte offset from the slot's tensor)
        self.views: dict[int, View] = {}  # for the interpreter, which takes tensors
        self.persistent: list[Tensor] = []  # tables that live longer than the call
        params = list(record.params)
        for index, (kind, value) in enumerate(params):
            tensor = value.base if isinstance(value, driver.TensorMap) else value
            if not isinstance(tensor, Tensor):
                continue
            source = recorder.source(tensor)
            if source is None:
                self.persistent.append(tensor)
                continue
            self.sources[index] = source
            if record.rerun is not None:
                self.views[index] = View(*source, tensor, recorder.tensors[source[0]])
            # The address alone: the recording outlives the call, and would keep its tensors' memory.
            address = tensor.data_ptr()
            params[index] = (kind, replace(value, base=address) if isinstance(value, driver.TensorMap) else address)
        self.record = replace(record, params=tuple(params))

    def slots(self) -> list[int]:
        return [slot for slot, _ in self.sources.values()]

    def prepare(self, stream: int, null_slots: set[int]) -> tuple[PreparedLaunch, dict[int, tuple[int, int]]]:
        """The packed launch, and the (slot, byte offset) of each parameter that changes from launch to launch."""
        sources = {index: source for index, source in self.sources.items() if source[0] not in null_slots}
        variable = [index for index in sources if self.record.params[index][0] == "P"]
        fixed: dict[int, int] = {}
        for index, (kind, value) in enumerate(self.record.params):
            pointed = value.base if kind == "M" else value
            if kind == "M" or (kind == "P" and index not in sources):
                fixed[index] = 0 if pointed is None else pointed.data_ptr() if isinstance(pointed, Tensor) else pointed
        return PreparedLaunch(self.record, stream, variable, fixed), sources

    def emit(self, out: SourceWriter) -> None:
        if self.record.rerun is not None:
            values = [
                self.views[index].expression(self.num_inputs) if index in self.views else out.name(value, "value")
                for index, (_, value) in enumerate(self.record.params)
            ]
            out.line(f"{out.name(self.record.rerun, 'rerun')}(({', '.join(values)},))")
            return
        prepared, sources = self.prepare(out.stream, out.null_slots)
        variable = [index for index in sources if self.record.params[index][0] == "P"]
        kernel = out.name(prepared, "kernel")
        out.names.update({
            f"{kernel}_pack": prepared.pack, f"{kernel}_buffer": prepared.buffer, f"{kernel}_config": prepared.config,
            f"{kernel}_function": prepared.function, f"{kernel}_params": prepared.params,
            f"{kernel}_words": prepared.words,
        })  # fmt: skip
        addresses = {index: _address(*source) for index, source in sources.items()}
        maps = [index for index in prepared.maps if index in addresses]
        opaque = [index for index in maps if index not in prepared.map_words]
        for index in opaque:
            out.line(f"a{index} = void({addresses[index]})")
        out.line("with lock:")  # threads share the packed parameters
        if variable:
            listed = ", ".join(addresses[index] for index in variable)
            out.line(f"    {kernel}_pack({kernel}_buffer, 0, {listed})")
        for index in maps:
            if index in prepared.map_words:
                out.line(f"    {kernel}_words[{prepared.map_words[index]}] = {addresses[index]}")
        for index in opaque:
            out.line(f"    replace_address({out.name(prepared.maps[index], 'map')}, a{index})")
        out.line(f"    status = launch({kernel}_config, {kernel}_function, {kernel}_params, None)")
        out.line(f"    if status: {kernel}.handle_error(status)")


class WriteStep:
    """Increments the version counter of an argument that a kernel has written to."""

    def __init__(self, view: View) -> None:
        self.view = view

    def slots(self) -> list[int]:
        return [self.view.slot]

    def emit(self, out: SourceWriter) -> None:
        out.names["increment_version"] = torch.autograd.graph.increment_version
        out.line(f"if not v{self.view.slot}.is_inference(): increment_version(v{self.view.slot})")


def _address(slot: int, offset_bytes: int) -> str:
    return f"v{slot}.data_ptr() + {offset_bytes}" if offset_bytes else f"v{slot}.data_ptr()"
