"""Kernels as torch operators: one registration for eager mode, autograd, torch.compile and opcheck.

A `KernelOp` wraps two plain functions that launch kernels, forward and backward. In eager mode it calls them directly,
or through a thin autograd.Function, because torch.library's path through Python costs tens of microseconds. Under
torch.compile, FakeTensor, functorch or any dispatch mode it calls the operator that is registered with torch.library.
Both paths run the same functions; the eager one has a launch cache (core/replay.py).
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from flashkernel.core.launch import is_observed
from flashkernel.core.replay import LaunchCache, notify_applied

NAMESPACE = "flashkernel"
_PLAIN = (Tensor, torch.nn.Parameter)


def traced(tensor: Tensor) -> bool:
    """True if a call on `tensor` is not plain eager execution: something traces, transforms or intercepts it."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or (modes := torch._C._len_torch_dispatch_stack()) > 1
        or (modes == 1 and not is_observed())  # core/recording.py has a mode of its own
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


class KernelOp:
    """A function that launches kernels, registered as `flashkernel::<name>`.

    Args:
        name: The operator's name in the namespace.
        forward: Launches the kernels. Its annotations are the schema; its first argument is a tensor, and no output
            aliases an input.
        fake: Gives empty outputs of the right shapes and dtypes, as torch.library.register_fake takes it.
        setup_context: Saves what the backward needs, as torch.library.register_autograd takes it.
        backward: The backward function, in the same form. Without it the operator is not differentiable.
        mutates: Names of the arguments that `forward` writes to.
    """

    def __init__(self, name, forward, fake, *, setup_context=None, backward=None, mutates=()):
        self.name = name
        self.forward = LaunchCache(forward, name)
        self.registered = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=mutates)
        self.registered.register_fake(fake)
        self.function = None
        if backward is not None:
            self.registered.register_autograd(backward, setup_context=setup_context)
            self.function = _autograd_function(name, self.forward, setup_context, backward)
            # Function.apply without its check for functorch, which costs as much as the call: `traced` checks for it.
            self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *args):
        if traced(args[0]):
            return self.registered(*args)
        if self.function is not None and torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    outputs = self.apply(*args, None)
                    notify_applied(self, args, outputs)
                    return outputs
        return self.forward(args, {})


def _autograd_function(name, forward, setup_context, backward):
    def run_forward(ctx, *given):
        # The last argument is None, or (a recording of this call, its tensors, indices of the outputs to return).
        args, recorded = given[:-1], given[-1]
        if recorded is None:
            output = forward(args, {})
            setup_context(ctx, args, output)
            return output
        recording, tensors, returned = recorded
        output = recording.run(tensors)
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
        # For a list of tensors, torch.library takes a list of gradients and autograd.Function one None.
        results = backward(ctx, *gradients)
        return *[None if isinstance(value, list) else value for value in results], None

    run_once = once_differentiable(run_backward)

    def differentiable_once(ctx, *gradients):
        """Grad mode is on only if a second derivative is asked for, which once_differentiable refuses."""
        return run_once(ctx, *gradients) if torch.is_grad_enabled() else run_backward(ctx, *gradients)

    body = {"forward": staticmethod(run_forward), "backward": staticmethod(differentiable_once)}
    return type(name, (torch.autograd.Function,), body)
