"""Calls with gradients in the C++ extension: an operator's forward program, and a node of autograd's graph that runs
its backward programs (autograd.h).

What the operator saves for its backward pass, and what its backward function does with it, is Python
(core/library.py, Gradient). It is asked once: `setup` is run on a stand-in for autograd's ctx, which says where each
saved tensor comes from; the backward function is recorded like any call, with the saved tensors and the gradients of
the outputs as its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashkernel.core import recording as rec
from flashkernel.core import replay
from flashkernel.core.native.describe import Inputs, call, program, whole_slot

if TYPE_CHECKING:
    from flashkernel.core.library import KernelOp

RECORD_BACKWARD_AFTER = 8  # calls of a node's backward function; the forward pass was seen replay.RECORD_AFTER times
_NOTHING, _TENSOR, _RESULT, _CONSTANT = range(4)  # OperatorCall::Source::Kind
Gradients = tuple[Tensor | None, ...]


class CannotConvert(Exception):
    """A call stays in Python; the message is the reason."""


def first_call(extension: Any, entry: replay.OperatorCall, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """(an OperatorCall of the extension, the result of this call). CannotConvert if there can be none."""
    op, recording = entry.op, entry.recording
    assert recording is not None
    if op.mutates:
        raise CannotConvert("it writes to its arguments")
    inputs, places = _inputs(entry, len(tensors))
    op_args = [tensors[value] if from_call else value for from_call, value in entry.template]
    outputs = rec.views_of(recording.result)
    edge_args = [index for index in op.differentiable if entry.template[index][0]]
    converted = extension.OperatorCall(
        name=op.name, forward=program(extension, recording, inputs), num_outputs=len(outputs),
        edges=[entry.template[index][1] for index in edge_args],
        returned=list(range(len(outputs)) if entry.returned is None else entry.returned),
        returns_tuple=isinstance(recording.result, tuple) if entry.returned is None else len(entry.returned) > 1,
    )  # fmt: skip
    found = converted.run(tensors)
    for index, (kind, place) in places.items():
        if kind == _RESULT:
            op_args[index] = found[place]
        elif isinstance(place, list):
            op_args[index] = [tensors[slot] for slot in place]
    ctx = _Context()
    op.setup(ctx, tuple(op_args), tuple(found[: len(outputs)]) if isinstance(recording.result, tuple) else found[0])
    attributes = ctx.attributes()
    if _holds_tensor(attributes):
        raise CannotConvert("it keeps a tensor for its backward pass that autograd does not save")
    returned = range(len(outputs)) if entry.returned is None else entry.returned
    differentiable = [
        found[index].is_floating_point() and all(found[index] is not x for x in ctx.non_differentiable)
        for index in returned
    ]
    sources = _sources(ctx.saved, tensors, found, op_args)
    backward = Backward(op, attributes, len(entry.template), edge_args, list(returned), len(outputs))
    converted.set_saved(sources, backward, differentiable)
    return converted, converted.attach(tensors, found)


def _inputs(entry: replay.OperatorCall, num_tensors: int) -> tuple[Inputs, dict[int, tuple[int, Any]]]:
    """Where the program has the tensors of the operator's arguments; and for each argument that is looked up, or is a
    list of tensors, (_RESULT, index of the program's result) or (_TENSOR, indices of the call's tensors)."""
    inputs = Inputs([], num_tensors)
    places: dict[int, tuple[int, Any]] = {}
    slots: dict[int, list[int]] = {}
    num_outputs = len(rec.views_of(entry.recording.result)) if entry.recording is not None else 0
    for index, (from_call, value) in enumerate(entry.template):
        if from_call:
            slots[index] = [value]
        elif isinstance(value, Tensor):
            slots[index] = [inputs.end]
            inputs.constants.append((inputs.end, value))
    for index, function, given, result in entry.derived:
        if function is replay.as_list:
            places[index], slots[index] = (_TENSOR, given), given
            continue
        slot = inputs.end

        def look_up(*found: Tensor, function: Any = function, result: int = result) -> tuple[Tensor]:
            return (function(*found)[result],)

        inputs.calls.append(call(look_up, [whole_slot(at) for at in given], [slot]))
        places[index], slots[index] = (_RESULT, num_outputs + len(inputs.saved)), [slot]
        inputs.saved.append(slot)
    inputs.slots = [slot for index in entry.tensors for slot in slots[index]]
    return inputs, places


def _sources(
    saved: Sequence[Tensor | None], tensors: Sequence[Tensor], found: Sequence[Tensor], op_args: Sequence[Any]
) -> list[tuple[int, Any]]:
    """For each saved tensor, where a call has it."""
    known: dict[int, tuple[int, Any]] = {id(x): (_CONSTANT, x) for x in op_args if isinstance(x, Tensor)}
    known |= {id(x): (_TENSOR, index) for index, x in enumerate(tensors)}
    known |= {id(x): (_RESULT, index) for index, x in enumerate(found)}
    try:
        return [(_NOTHING, None) if x is None else known[id(x)] for x in saved]
    except KeyError:
        raise CannotConvert("it saves a tensor that is neither an argument nor an output") from None


def _holds_tensor(value: Any, depth: int = 6) -> bool:
    """Whether a tensor is inside of a value."""
    if isinstance(value, Tensor) or depth == 0:
        return True
    if isinstance(value, (tuple, list, set)):
        return any(_holds_tensor(one, depth - 1) for one in value)
    if isinstance(value, dict):
        return any(_holds_tensor(one, depth - 1) for one in value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return any(_holds_tensor(getattr(value, one.name), depth - 1) for one in fields(value))
    return not isinstance(value, (int, float, str, bytes, type(None), torch.dtype, torch.device, type))


class _Context:
    """Stands in for autograd's ctx in `setup`."""

    def __init__(self) -> None:
        self.saved: tuple[Tensor | None, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        assert not value

    def attributes(self) -> dict[str, Any]:
        """What `setup` assigned."""
        return {name: value for name, value in vars(self).items() if name not in ("saved", "non_differentiable")}


class _BackwardContext:
    """Stands in for autograd's ctx in the backward function."""

    def __init__(self, op: KernelOp, saved: Gradients, needs: Sequence[bool], attributes: dict[str, Any]) -> None:
        self.saved_tensors, self.needs_input_grad = saved, needs
        self._forward_cls = op.function
        self.__dict__.update(attributes)


class Backward:
    """The backward pass of an operator in Python, for a node that has no program for it."""

    def __init__(
        self, op: KernelOp, attributes: dict[str, Any], num_args: int, edge_args: list[int], returned: list[int],
        num_outputs: int,
    ) -> None:  # fmt: skip
        self.op, self.attributes, self.num_args, self.edge_args = op, attributes, num_args, edge_args
        self.returned, self.num_outputs = returned, num_outputs

    def __call__(
        self, saved: Gradients, gradients: Gradients, wanted: Sequence[bool], calls: int
    ) -> tuple[Gradients, tuple[Any, list[int]] | None]:
        """(the gradients for the node's edges, what was recorded).

        Args:
            saved: The saved tensors.
            gradients: Those of the returned outputs.
            wanted: For each edge, whether its gradient is wanted.
            calls: How often the node's operator was called like this before; -1: not to be recorded.

        Returns:
            What was recorded is (a Program or None, for each edge the index of its result or -1).
        """
        since = calls - min(RECORD_BACKWARD_AFTER, replay.RECORD_AFTER)
        if calls < 0 or since < 0 or since % replay.RETRY_AFTER or not replay.may_record():
            return self._run(saved, gradients, wanted), None
        return self._record(saved, gradients, wanted)

    def _run(self, saved: Gradients, gradients: Gradients, wanted: Sequence[bool]) -> Gradients:
        needs = [False] * self.num_args
        for index, want in zip(self.edge_args, wanted):
            needs[index] = want
        of_outputs: list[Tensor | None] = [None] * self.num_outputs
        for index, gradient in zip(self.returned, gradients):
            of_outputs[index] = gradient
        ctx = _BackwardContext(self.op, saved, needs, self.attributes)
        results = self.op.pull_back(ctx, *of_outputs)
        return tuple([results[index] if want else None for index, want in zip(self.edge_args, wanted)])

    def _record(
        self, saved: Gradients, gradients: Gradients, wanted: Sequence[bool]
    ) -> tuple[Gradients, tuple[Any, list[int]] | None]:
        found: list[Gradients] = []

        def run() -> tuple[Tensor, ...]:
            found.append(self._run(saved, gradients, wanted))
            return tuple([x for x in found[0] if x is not None])

        given = [x for x in (*saved, *gradients) if x is not None]
        # On a CPU, what C++ kernels do is not seen.
        _, recorded = rec.record(run, given, launches=given[0].device.type == "cpu" and not self.op.torch_alone)
        if isinstance(recorded, str):
            return found[0], None if recorded in rec.TRANSIENT_REASONS else (None, [])
        order, number = [], 0
        for x in found[0]:
            order.append(-1 if x is None else number)
            number += x is not None
        from flashkernel.core.native.build import extension

        return found[0], (program(extension(), recorded), order)
