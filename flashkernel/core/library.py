"""Kernels as citizens of torch: one registration that serves eager mode, autograd, torch.compile and opcheck.

A `KernelOp` wraps a pair of plain functions, forward and backward, that launch kernels. In eager mode it calls them
directly, or through a thin autograd.Function, because the dispatcher's route through Python costs tens of
microseconds. Under torch.compile, FakeTensor, functorch or any dispatch mode it calls the operator registered
with torch.library, which the tracers understand. Both routes run the same functions; the eager one records the
launches of calls that come again (core/replay.py).
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from flashkernel.core.launch import listened
from flashkernel.core.replay import CallCache, applied

NAMESPACE = "flashkernel"
_PLAIN = (Tensor, torch.nn.Parameter)


def traced(tensor: Tensor) -> bool:
    """Whether something other than plain eager execution is looking at this call."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or (modes := torch._C._len_torch_dispatch_stack()) > 1
        or (modes == 1 and not listened())  # a recording looks on from outside
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


class KernelOp:
    """A function that launches kernels, registered as `flashkernel::<name>`.

    `forward` carries real annotations (torch infers the schema from them); its first argument is a tensor, and its
    outputs alias no input. `fake` gives the outputs' shapes. With `setup_context` and `backward`, in the form
    torch.library.register_autograd takes, it is differentiable. `mutates` names the arguments it writes to.
    """

    def __init__(self, name, forward, fake, *, setup_context=None, backward=None, mutates=()):
        self.name = name
        self.forward = CallCache(forward, name)
        self.registered = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=mutates)
        self.registered.register_fake(fake)
        self.function = None
        if backward is not None:
            self.registered.register_autograd(backward, setup_context=setup_context)
            self.function = _autograd_function(name, self.forward, setup_context, backward)
            # Function.apply without its look at functorch, which costs as much as the call: `traced` has looked.
            self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *args):
        if traced(args[0]):
            return self.registered(*args)
        if self.function is not None and torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    outputs = self.apply(*args, None)
                    applied(self, args, outputs)
                    return outputs
        return self.forward(args, {})


def _autograd_function(name, forward, setup_context, backward):
    def run_forward(ctx, *given):
        # The last argument is None, or (a recording of this call, the tensors it takes, the outputs that are wanted).
        args, recorded = given[:-1], given[-1]
        if recorded is None:
            output = forward(args, {})
            setup_context(ctx, args, output)
            return output
        recording, tensors, ctx.picked = recorded
        output = recording.run(tensors)
        setup_context(ctx, args, output)
        if ctx.picked is None:
            return output
        ctx.outputs = len(output)
        return output[ctx.picked[0]] if len(ctx.picked) == 1 else tuple([output[place] for place in ctx.picked])

    def run_backward(ctx, *gradients):
        picked = getattr(ctx, "picked", None)
        if picked is not None:  # of the operator's outputs only these were returned
            padded = [None] * ctx.outputs
            for place, gradient in zip(picked, gradients):
                padded[place] = gradient
            gradients = tuple(padded)
        # torch.library wants a list of gradients for a list of tensors, autograd.Function a plain None.
        results = backward(ctx, *gradients)
        return *[None if isinstance(value, list) else value for value in results], None

    run_once = once_differentiable(run_backward)

    def backward_or_refusal(ctx, *gradients):
        """A second derivative is refused; where none is asked for, grad mode is off already."""
        return run_once(ctx, *gradients) if torch.is_grad_enabled() else run_backward(ctx, *gradients)

    body = {"forward": staticmethod(run_forward), "backward": staticmethod(backward_or_refusal)}
    return type(name, (torch.autograd.Function,), body)
