"""Kernels as torch operators: one registration for eager mode, autograd, torch.compile and opcheck.

A `KernelOp` wraps two plain functions that launch kernels, forward and backward. In eager mode it calls them directly,
or through a thin autograd.Function, because torch.library's path through Python costs tens of microseconds. Under
torch.compile, FakeTensor, functorch or any dispatch mode it calls the operator that is registered with torch.library.
Both paths run the same functions; the eager one has a launch cache (core/replay.py).

An operator's functions take named groups of arguments; the registered operator has flat ones (core/argument_groups.py).
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashkernel.core.argument_groups import ArgumentGroups
from flashkernel.core.arguments import has_tangent
from flashkernel.core.launch import is_observed, tuple_like
from flashkernel.core.replay import LaunchCache, notify_applied
from flashkernel.core.tracing import assume_constant_result, compiled_graph

NAMESPACE = "flashkernel"
_PLAIN = (Tensor, torch.nn.Parameter)
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_in_dispatch_key = torch._C._dispatch_tls_is_dispatch_key_included
# torch.autograd.grad(is_grads_batched=True), whose vmap is not that of functorch
_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")
_in_functorch = torch._C._are_functorch_transforms_active
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def traced(tensor: Tensor) -> bool:
    """True if a call on `tensor` is not plain eager execution: something traces, transforms or intercepts it."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or (modes := torch._C._len_torch_dispatch_stack()) > 1
        or (modes == 1 and not is_observed())  # core/recording.py has a mode of its own
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _in_dispatch_key(_VMAP_MODE)
    )


def _on_plain_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on tensors whose memory has their values.

    That of a view such as .conj().imag has the other sign; public functions refuse such views, but gradients may be
    some. What functorch saved in a transform that has ended is a wrapper. torch.library resolves both for a registered
    operator.
    """

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(one) for one in value]
        return _unwrap_if_dead(value).resolve_neg() if isinstance(value, Tensor) else value

    def on_plain(*args: Any) -> Any:
        return function(*[resolved(value) for value in args])

    return on_plain


def _refuse_forward_mode(name: str) -> None:
    raise NotImplementedError(
        f"flashkernel::{name}: kernels have no forward-mode derivatives (torch.func.jvp, jacfwd and hessian, "
        'torch.autograd.forward_ad); differentiate in reverse mode, or call the function with backend="reference"'
    )


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    for value in args:
        for x in value if isinstance(value, list) else (value,):
            if isinstance(x, Tensor) and has_tangent(x):
                _refuse_forward_mode(name)


@assume_constant_result
def _traced_in_forward_mode() -> bool:
    """Whether torch.compile traces a function inside torch.func.jvp, where it cannot ask a tensor for its tangent."""
    return forward_ad._current_level >= 0


def empty_gradients(given: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Uninitialized gradients of `given`, as a fake backward function returns them; without elements if not wanted."""
    first = next(tensor for tensor in given if tensor is not None)
    return tuple(
        tensor.new_empty(tensor.shape) if tensor is not None and want else first.new_empty(0)
        for tensor, want in zip(given, wanted)
    )


class Gradient(NamedTuple):
    """How an operator is differentiated.

    Attributes:
        setup_context: Saves what the backward pass needs: a function of (ctx, the arguments as a tuple, the output).
        backward: A function of (ctx, wanted, *gradients of the outputs). `wanted` has a bool for each name in
            `differentiable`; the function returns as many gradients, and those not wanted may be anything. A gradient
            of an output may be None, but not all of them.
        differentiable: Names of the flat arguments that have a gradient.
    """

    setup_context: Callable[..., None]
    backward: Callable[..., Sequence[Any]]
    differentiable: tuple[str, ...]


class KernelOp:
    """A function that launches kernels, registered as `flashkernel::<name>`.

    All functions take the parameters of `forward`, groups among them.

    Args:
        name: The operator's name in the namespace.
        forward: Launches the kernels. Its annotations are the schema; its first argument is a tensor, and no output
            aliases an input.
        fake: Gives empty outputs of the right shapes and dtypes.
        gradient: How it is differentiated; None: it is not.
        mutates: Names of the flat arguments that `forward` writes to.
        torch_alone: Some calls run torch's operators alone. They are recorded as others are; without this, a call that
            launches nothing is not, since what it did may have gone unseen (C++ on a CPU).
    """

    def __init__(self, name, forward, fake, gradient: Gradient | None = None, *, mutates=(), torch_alone=False):
        self.name, self.mutates, self.torch_alone = name, bool(mutates), torch_alone
        self.arguments = ArgumentGroups(forward)
        self.flatten = self.arguments.flatten if self.arguments.grouped else None
        flat = self.arguments.flat(forward)
        self.forward = LaunchCache(_on_plain_tensors(flat), name, torch_alone=torch_alone)
        schema = torch.library.infer_schema(flat, mutates_args=mutates)

        def in_graph(*args):
            with compiled_graph():
                return flat(*args)

        self.registered = torch.library.custom_op(f"{NAMESPACE}::{name}", in_graph, mutates_args=mutates, schema=schema)
        self.registered.register_fake(self.arguments.flat(fake))
        if not mutates:
            self.registered.register_vmap(_one_by_one(self.registered))
        self.function = None
        if gradient is not None:
            setup, pull_back = _flat_autograd(self.arguments, gradient)
            self.registered.register_autograd(pull_back, setup_context=setup)
            self.differentiable = [self.arguments.names.index(one) for one in gradient.differentiable]
            self.setup, self.pull_back = setup, differentiable_once(name)(_without_lists(pull_back))
            self.function = _autograd_function(name, self.forward, setup, self.pull_back)
            self.functional = _functional(name, self.registered, setup, self.pull_back)
            # Function.apply without its check for functorch, which costs as much as the call: `traced` checks for it.
            self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *args):
        if self.flatten is not None:
            args = self.flatten(*args)
        if traced(args[0]):
            return self._transformed(args)
        if self.function is not None and torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    outputs = self.apply(*args, None)
                    notify_applied(self, args, outputs)
                    return outputs
        return self.forward(args, {})

    def _transformed(self, args):
        """A call that is not plain eager execution."""
        if torch.compiler.is_compiling():
            if _traced_in_forward_mode():
                _refuse_forward_mode(self.name)
            return self.registered(*args)
        if forward_ad._current_level >= 0:
            _refuse_tangents(self.name, args)
        if _in_dispatch_key(_VMAP_MODE):
            return _batched_gradients(self.registered, args)
        if self.function is not None and _in_functorch():
            return self.functional.apply(*args)
        return self.registered(*args)

    def may_overwrite(self, ctx, gradient: Tensor) -> bool:
        """Whether a backward pass may write to what was saved: it is not read later, in eager mode, unless the graph
        is kept. An operator of torch.library returns what it saves."""
        eager = getattr(ctx, "_forward_cls", None) is self.function
        return eager and not traced(gradient) and not _keeps_graph()


def _one_by_one(operator: Callable[..., Any]):
    """The rule by which torch.vmap runs an operator: once for each entry of the batch."""

    def entry(value, dim, index):
        if isinstance(value, (list, tuple)):
            return [entry(one, of_one, index) for one, of_one in zip(value, dim)] if dim is not None else value
        return value if dim is None else value.select(dim, index)

    def rule(info, in_dims, *args):
        found = [operator(*entry(args, in_dims, index)) for index in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple([torch.stack(one) for one in zip(*found)]), (0,) * len(found[0])

    return rule


def _batched_gradients(operator: Callable[..., Any], args: Sequence[Any]):
    """A call inside torch.autograd.grad(is_grads_batched=True), once for each entry of the batch."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes: set[int] = set()

    def whole(value):
        if isinstance(value, (list, tuple)):
            return [whole(one) for one in value]
        if not isinstance(value, Tensor) or not torch._C._functorch.is_legacy_batchedtensor(value):
            return value, None
        found = torch._remove_batch_dim(value, level, 1, 0)
        sizes.add(found.shape[0])
        return found, 0

    def part(pairs, number):
        return [one[number] if isinstance(one, tuple) else part(one, number) for one in pairs]

    pairs = [whole(value) for value in args]
    if not sizes:
        return operator(*args)
    rule = _one_by_one(operator)
    found, dims = rule(SimpleNamespace(batch_size=sizes.pop()), part(pairs, 1), *part(pairs, 0))
    if isinstance(found, Tensor):
        return torch._add_batch_dim(found, dims, level)
    return tuple([torch._add_batch_dim(one, dim, level) for one, dim in zip(found, dims)])


class _Once(torch.autograd.Function):
    """Passes gradients on, tied to all that they depend on: to differentiate them raises an error.

    torch's once_differentiable ties them to nothing, and torch.autograd.grad then leaves their share out of a sum.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name, count, *tensors):
        return tuple([x.detach() for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            f"flashkernel::{ctx.name}: there are no second derivatives here; call the function with "
            'backend="reference", which has them'
        )

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_forward_mode(ctx.name)


class _Unpacked:
    """The context of a backward pass, its saved tensors read once: activation checkpointing refuses a second time."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks the backward function of an autograd.Function whose results have no derivatives; to differentiate them is
    an error in the name of the operator."""

    def decorate(run_backward):
        def run(ctx, *gradients):
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # without create_graph=True
                return run_backward(ctx, *gradients)
            unpacked = _Unpacked(ctx)
            with torch.no_grad():
                results = run_backward(unpacked, *gradients)
            depends = [x for x in (*gradients, *unpacked.saved_tensors) if x is not None and x.is_floating_point()]
            found = [x for x in results if x is not None]
            passed = iter(_Once.apply(name, len(found), *found, *depends))
            return tuple([None if x is None else next(passed) for x in results])

        return run

    return decorate


def _without_lists(backward):
    """The backward function as autograd.Function takes it. For a list of tensors, torch.library takes a list of
    gradients and autograd.Function one None."""

    def run_backward(ctx, *gradients):
        return tuple([None if isinstance(value, list) else value for value in backward(ctx, *gradients)])

    return run_backward


def _functional(name, operator, setup_context, backward):
    """An operator as an autograd.Function that torch.func.grad and vmap can transform."""
    body = {
        "forward": staticmethod(lambda *args: operator(*args)), "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward), "generate_vmap_rule": True,
        "jvp": staticmethod(lambda ctx, *tangents: _refuse_forward_mode(name)),
    }  # fmt: skip
    return type(f"{name}_functional", (torch.autograd.Function,), body)


def _flat_autograd(arguments: ArgumentGroups, gradient: Gradient):
    """The functions of a gradient as torch.library.register_autograd takes them."""
    setup_context, backward, differentiable = gradient
    rebuild = arguments.rebuild if arguments.grouped else None
    count, lists = len(arguments.names), arguments.tensor_lists
    indices = [arguments.names.index(name) for name in differentiable]

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        if lists:
            ctx.list_lengths = [len(inputs[index]) for index in lists]
        setup_context(ctx, inputs if rebuild is None else rebuild(*inputs), output)

    def pull_back(ctx, *gradients):
        results: list[Any] = [None] * count
        if lists:
            for index, length in zip(lists, ctx.list_lengths):
                results[index] = [None] * length
        for gradient in gradients:
            if gradient is not None:
                break
        else:
            return tuple(results)
        needs = ctx.needs_input_grad
        wanted = [needs[index] for index in indices]
        for index, want, found in zip(indices, wanted, backward(ctx, wanted, *gradients)):
            if want:
                results[index] = found
        return tuple(results)

    return setup, pull_back


def _without_views(output):
    """The outputs of a forward pass as tensors of their own: autograd lets nobody write in place to a view that was
    made inside a function."""
    if isinstance(output, tuple):
        return tuple_like(output, [one.detach() if one._is_view() else one for one in output])
    return output.detach() if output._is_view() else output


def _autograd_function(name, forward, setup_context, backward):
    def run_forward(ctx, *given):
        # The last argument is None, or (a recording of this call, its tensors, indices of the outputs to return).
        args, recorded = given[:-1], given[-1]
        if recorded is None:
            output = _without_views(forward(args, {}))
            setup_context(ctx, args, output)
            return output
        recording, tensors, returned = recorded
        output = _without_views(recording.run(tensors))
        setup_context(ctx, args, output)
        ctx.returned = returned
        if returned is None:
            return output
        ctx.outputs = len(output)
        return output[returned[0]] if len(returned) == 1 else tuple([output[index] for index in returned])

    def run_backward(ctx, *gradients):
        returned = getattr(ctx, "returned", None)
        if returned is not None:  # the other outputs have no gradient
            padded = [None] * ctx.outputs
            for index, gradient in zip(returned, gradients):
                padded[index] = gradient
            gradients = tuple(padded)
        return *backward(ctx, *gradients), None

    body = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), body)
