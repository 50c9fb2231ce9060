"""A module that holds a `Weight`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from flashkernel.blocks.weight import Weight, assembled


class WeightBuffers(nn.Module):
    """A module that holds a `Weight`: its tensors are in the state dict and move with the module.

    A plain weight that has a gradient is a parameter, everything else a buffer. A change of the module's dtype
    (`module.half()`) leaves the tensors of a quantized weight as they are.

    Args:
        weight: The Weight.
    """

    def __init__(self, weight: Weight) -> None:
        nn.Module.__init__(self)  # whatever other kind of layer a subclass is
        self._context = (weight.format, weight.group_shape, weight.activation_dtype)
        if weight.format == "plain" and weight.data.requires_grad:
            self.data = weight.data if isinstance(weight.data, nn.Parameter) else nn.Parameter(weight.data)
        else:
            self.register_buffer("data", weight.data)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)

    @property
    def weight(self) -> Weight:
        """The Weight of the tensors that are here now."""
        return assembled((self.data, self.scales, self.zeros), self._context)

    def get_extra_state(self) -> str:
        """The layout, so that tensors of another one are not loaded."""
        return self.weight.layout

    def set_extra_state(self, state: str) -> None:
        """ValueError if a state dict has another layout than the module."""
        if state != self.weight.layout:
            raise ValueError(f"the state dict has a weight in {state!r}; the module's is in {self.weight.layout!r}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WeightBuffers:
        if self._context[0] == "plain":
            return super()._apply(fn, recurse)
        stored = [id(tensor) for tensor in self.weight.tensors]

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in stored and moved.dtype != tensor.dtype else moved

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        """The weight's own text."""
        return repr(self.weight)
