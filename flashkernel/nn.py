"""Modules over the operators: linear layers and MLPs that take the place of those in a model.

Their parameters have the names and shapes of what they replace, so that state dicts, optimizers and checkpoints fit. A
layer inside that is more than a linear layer (an adapter, a hook) is called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.activation_modules import activation_of
from flashkernel.blocks.epilogue import ACTIVATIONS, GATES, check_activation
from flashkernel.blocks.gate_up import PACKINGS, split_gate_up
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_module import WeightBuffers
from flashkernel.core.arguments import is_float
from flashkernel.ops.gemm import linear
from flashkernel.ops.mlp import mlp

_linear: Any = linear  # returns one tensor or several, depending on its arguments
# Attributes of MLPs: the layers ahead of the activation, and the one after it.
_LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Mistral, Qwen, Gemma
    (("gate_up_proj",), "down_proj"),  # Phi-3: gate and up packed
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),  # GPT-2
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_ACTIVATION_NAMES = ("act_fn", "act", "activation_fn", "activation")


class FusedLinear(nn.Linear):
    """A linear layer with its activation, bias and residual in the product: a module over `flashkernel.linear`.

    Args:
        in_features: Columns of x.
        out_features: Rows of the weight. With a gated activation they hold gate and up, and the output has half of it.
        bias: Whether it has a bias.
        activation: As in `flashkernel.linear`.
        packed: How the weight holds gate and up: "halves" or "interleaved".
        fuse_wgrad_accumulation: Adds the weight's gradient to `weight.main_grad`, a float32 tensor (or one in the
            weight's dtype) that the training loop sets, as in Megatron; the weight then gets no `grad`.
        backend: As in `flashkernel.linear`.
        device: Of the parameters.
        dtype: Of the parameters.

    Example:
        >>> import torch, flashkernel as fk
        >>> layer = fk.FusedLinear(8, 4, activation="silu")
        >>> layer(torch.randn(2, 8), residual=torch.randn(2, 4)).shape
        torch.Size([2, 4])
        >>> sorted(layer.state_dict())
        ['bias', 'weight']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        packed: str = "halves",
        fuse_wgrad_accumulation: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_activation("FusedLinear", activation)
        if packed not in PACKINGS:
            raise ValueError(f"FusedLinear: packed is {packed!r}; it must be 'halves' or 'interleaved'")
        if activation in GATES and out_features % 2:
            raise ValueError(f"FusedLinear: {out_features} outputs do not divide into gate and up; give an even number")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation, self.packed, self.backend = activation, packed, backend
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    @classmethod
    def from_linear(cls, layer: nn.Linear, **options: Any) -> FusedLinear:
        """Returns a FusedLinear with the parameters of a torch.nn.Linear: the same tensors, not copies.

        A layer that does more than a torch.nn.Linear is refused: a subclass with a forward of its own (quantized,
        with an adapter), one with hooks, one whose weight is no plain tensor.

        Args:
            layer: The layer.
            options: activation, packed, fuse_wgrad_accumulation and backend, as of FusedLinear.

        Example:
            >>> import torch, flashkernel as fk
            >>> layer = torch.nn.Linear(8, 4)
            >>> fused, x = fk.FusedLinear.from_linear(layer), torch.randn(2, 8)
            >>> torch.allclose(fused(x), layer(x), atol=1e-6), fused.weight is layer.weight
            (True, True)
        """
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"FusedLinear.from_linear: the layer is a {type(layer).__name__}; it must be a nn.Linear")
        fused = isinstance(layer, FusedLinear)
        own = type(layer).forward not in (nn.Linear.forward, FusedLinear.forward) or "forward" in layer.__dict__
        if own or _hooks(layer) or (fused and layer.activation is not None):
            raise TypeError(
                f"FusedLinear.from_linear: a {type(layer).__name__} with "
                f"{'hooks' if _hooks(layer) else 'a forward of its own' if own else 'an activation'} is more than a "
                "linear layer, and would lose that; give a plain nn.Linear"
            )
        if type(layer.weight) not in (nn.Parameter, Tensor) or not is_float(layer.weight):
            raise TypeError(
                f"FusedLinear.from_linear: the weight is a {type(layer.weight).__name__} in {layer.weight.dtype}; it "
                "must be a float tensor: give a flashkernel.Weight to flashkernel.linear"
            )
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta", **options)
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(x weight^T + bias) + residual.

        Args:
            x: (..., in_features).
            residual: (..., out_features), added to the product; None: nothing.
        """
        return _linear(
            x, self.weight, self.bias, residual, activation=self.activation, packed=self.packed,
            main_grads=_main_grads(self, [self.weight]), backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes, and the activation."""
        return super().extra_repr() + ("" if self.activation is None else f", activation={self.activation!r}")


class FusedMLP(nn.Module):
    """The MLP of a transformer in two launches: a module over `flashkernel.mlp`.

    It has the layers of the MLPs in Transformers: gate_proj, up_proj and down_proj, or up_proj and down_proj where the
    activation has no gate. `from_mlp` takes over an MLP's own.

    Args:
        hidden_size: Columns of x and of the output.
        intermediate_size: Width between the products.
        bias: Whether the layers have biases.
        activation: As in `flashkernel.mlp`.
        recompute: Saves x alone for the backward pass, as in `flashkernel.mlp`.
        fuse_wgrad_accumulation: As of `FusedLinear`, for every layer.
        backend: As in `flashkernel.mlp`.
        device: Of the parameters.
        dtype: Of the parameters.

    Example:
        >>> import torch, flashkernel as fk
        >>> layer = fk.FusedMLP(8, 24)
        >>> layer(torch.randn(2, 5, 8)).sum().backward()
        >>> list(layer.state_dict())
        ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight']
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        activation: str = "swiglu",
        recompute: bool = False,
        fuse_wgrad_accumulation: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in (*GATES, *ACTIVATIONS):
            raise ValueError(
                f"FusedMLP: activation is {activation!r}; it must be one of {', '.join((*GATES, *ACTIVATIONS))}"
            )
        self._layout = _LAYOUTS[0] if activation in GATES else _LAYOUTS[2]
        self.activation, self.packed, self.recompute, self.backend = activation, "halves", recompute, backend
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in self._layout[0]:
            setattr(self, name, nn.Linear(hidden_size, intermediate_size, bias, **where))
        setattr(self, self._layout[1], nn.Linear(intermediate_size, hidden_size, bias, **where))

    @classmethod
    def from_mlp(cls, module: nn.Module, **options: Any) -> FusedMLP:
        """Returns a FusedMLP with the layers of an MLP of Transformers: the same modules, not copies.

        It knows MLPs built as those of Llama, Qwen, Gemma, Phi-3 and GPT-2 are, by the names of their layers and the
        class of their activation. A dropout at the end stays. Layers that are more than linear (quantized, with
        adapters or hooks) are called. An MLP with other parts, with sizes that do not fit, or that computes something
        else is refused; the latter is seen on two random rows, where its weights are plain floats in memory.

        Args:
            module: The MLP.
            options: activation (where the module's own cannot be recognized), recompute, fuse_wgrad_accumulation and
                backend, as of FusedMLP.

        Example:
            >>> import torch, flashkernel as fk, transformers
            >>> config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48)
            >>> module = transformers.models.llama.modeling_llama.LlamaMLP(config)
            >>> fused, x = fk.FusedMLP.from_mlp(module), torch.randn(2, 32)
            >>> torch.allclose(fused(x), module(x), atol=1e-6), list(fused.state_dict()) == list(module.state_dict())
            (True, True)
        """
        layout = next((one for one in _LAYOUTS if all(hasattr(module, name) for name in (*one[0], one[1]))), None)
        if layout is None:
            raise TypeError(
                f"FusedMLP.from_mlp: a {type(module).__name__} has none of the layers "
                f"{'; '.join(', '.join((*wide, down)) for wide, down in _LAYOUTS)}"
            )
        gated = len(layout[0]) == 2 or layout[0] == ("gate_up_proj",)
        _check_parts(module, layout)
        activation = options.pop("activation", None) or _activation_of(module, gated)
        if (activation in GATES) != gated and activation in (*GATES, *ACTIVATIONS):
            raise ValueError(
                f"FusedMLP.from_mlp: activation is {activation!r}; with {' and '.join(layout[0])} it must be one of "
                f"{', '.join(GATES if gated else ACTIVATIONS)}"
            )
        made = cls(1, 1, activation=activation, device="meta", **options)
        for name in (*made._layout[0], made._layout[1]):
            delattr(made, name)
        made._layout = layout
        for name in (*layout[0], layout[1]):
            setattr(made, name, getattr(module, name))
        if isinstance(getattr(module, "dropout", None), nn.Dropout):
            made.dropout = module.dropout
        made.training = module.training  # its layers keep their own modes
        _check_computes(made, module)
        return made

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """down(activation(up(x))) + residual, or activation(gate(x)) * up(x) in its middle.

        Args:
            x: (..., hidden).
            residual: (..., hidden), added to the result; None: nothing.
        """
        wide, down = [getattr(self, name) for name in self._layout[0]], getattr(self, self._layout[1])
        dropout = getattr(self, "dropout", None)
        inside = residual if dropout is None else None  # the residual is added after a dropout
        parts = [_weight_and_bias(layer) for layer in (*wide, down)]
        biases = [part[1] for part in parts[:-1] if part is not None]
        if None in parts or (None in biases and biases.count(None) < len(biases)):
            y = down(self._activated([layer(x) for layer in wide]))
            y = y if inside is None else y + inside
        else:
            weights = [part[0] for part in parts]  # type: ignore[index]
            y = mlp(
                x, weights[0] if len(wide) == 1 else weights[:-1], weights[-1],
                None if None in biases else biases[0] if len(wide) == 1 else biases, parts[-1][1], inside,  # type: ignore[index,arg-type]
                activation=self.activation, packed=self.packed, recompute=self.recompute and torch.is_grad_enabled(),
                main_grads=_main_grads(self, weights), backend=self.backend,
            )  # fmt: skip
        if dropout is not None:
            y = dropout(y)
            return y if residual is None else y + residual
        return y

    def _activated(self, products: list[Tensor]) -> Tensor:
        """The activation by torch's operators, between layers that are called."""
        if self.activation not in GATES:
            return NATIVE[self.activation](products[0])
        pair = products if len(products) == 2 else split_gate_up(products[0], self.packed)
        return apply_gate(NATIVE, GATES[self.activation], *pair)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"


def _hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _check_parts(module: nn.Module, layout: tuple[tuple[str, ...], str]) -> None:
    """TypeError for an MLP with parts or hooks that would be lost, ValueError for layers that do not fit together."""
    kind, names = type(module).__name__, (*layout[0], layout[1])
    inside = dict(module.named_children())
    known = (*names, *_ACTIVATION_NAMES, "dropout")
    stored = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    others = [name for name in inside if name not in known] + [name for name, _ in stored]
    if others:
        raise TypeError(f"FusedMLP.from_mlp: a {kind} also has {', '.join(others)}; it is more than an MLP")
    for name, part in (("itself", module), *inside.items()):
        if name not in names and _hooks(part):
            raise TypeError(f"FusedMLP.from_mlp: a {kind} has hooks ({name}) that would not be called; remove them")
    plain = {name: found[0] for name in names if (found := _weight_and_bias(inside.get(name))) is not None}
    given = ", ".join(f"{name} {weight.dtype} {tuple(weight.shape)}" for name, weight in plain.items())
    floats = [weight for weight in plain.values() if isinstance(weight, Tensor)]
    if len({(weight.dtype, weight.device) for weight in floats}) > 1 or not all(is_float(one) for one in floats):
        raise ValueError(f"FusedMLP.from_mlp: the layers are {given}; they must be of one float dtype on one device")
    wide = [plain[name].shape for name in layout[0] if name in plain]
    down = plain[layout[1]].shape if layout[1] in plain else None
    share = 2 if layout[0] == ("gate_up_proj",) else 1
    if any(one != wide[0] for one in wide) or (wide and down is not None and wide[0][0] != share * down[1]):
        raise ValueError(f"FusedMLP.from_mlp: the layers are {given}; their sizes do not fit together")


def _check_computes(made: FusedMLP, module: nn.Module) -> None:
    """TypeError for an MLP that computes something else than these layers with this activation, on two random rows."""
    parts = [_weight_and_bias(getattr(made, name)) for name in (*made._layout[0], made._layout[1])]
    weights = [part[0] for part in parts if part is not None]
    if len(weights) < len(parts) or any(not isinstance(one, Tensor) or one.device.type == "meta" for one in weights):
        return
    first = weights[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, first.shape[1], generator=generator, device="cpu").to(first.device, first.dtype)  # type: ignore[arg-type]
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            expected = module(x)
            found = getattr(made, made._layout[1])(
                made._activated([getattr(made, name)(x) for name in made._layout[0]])
            )
    finally:
        for one, training in modes:
            one.training = training
    same = isinstance(expected, Tensor) and expected.shape == found.shape
    if same and bool(found.isfinite().all()):  # weights that are still to be loaded may hold anything
        limit = (1e-4 if x.dtype.itemsize > 2 else 3e-2) * found.abs().amax()
        same = bool((expected - found).abs().le(limit).all())
    if not same:
        raise TypeError(
            f"FusedMLP.from_mlp: a {type(module).__name__} computes something else than {made.activation} between "
            f"{', '.join(made._layout[0])} and {made._layout[1]}; its result differs on two random rows"
        )


def _activation_of(module: nn.Module, gated: bool) -> str:
    inner = next((getattr(module, name) for name in _ACTIVATION_NAMES if hasattr(module, name)), None)
    found = activation_of(inner, gated)
    if found is None:
        raise TypeError(
            f"FusedMLP.from_mlp: the activation {type(inner).__name__} of a {type(module).__name__} is none of its "
            "own; name the one it stands for with activation="
        )
    return found


def _weight_and_bias(layer: Any) -> tuple[Tensor | Weight, Tensor | None] | None:
    """(weight (out, in), bias) of a layer that is a linear layer and nothing more; None for any other."""
    if layer is None or _hooks(layer) or "forward" in layer.__dict__:
        return None
    kind = type(layer)
    if kind is nn.Linear or (kind is FusedLinear and layer.activation is None and not layer.fuse_wgrad_accumulation):
        return (layer.weight, layer.bias) if type(layer.weight) in (nn.Parameter, Tensor) else None
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return layer.weight.t(), layer.bias  # stored (in, out)
    if isinstance(layer, WeightBuffers) and hasattr(layer, "bias"):  # a linear layer with a quantized weight
        return layer.weight, layer.bias  # type: ignore[return-value]
    return None


def _main_grads(module: Any, weights: list[Any]) -> list[Tensor] | None:
    """The buffers of `fuse_wgrad_accumulation`; None without it, and where nothing is differentiated."""
    if not module.fuse_wgrad_accumulation or not torch.is_grad_enabled():
        return None
    found = [getattr(weight, "main_grad", None) for weight in weights]
    if any(buffer is None for buffer in found):
        raise ValueError(
            f"{type(module).__name__}: fuse_wgrad_accumulation needs weight.main_grad on every weight; set it to a "
            "float32 tensor of the weight's shape"
        )
    return found  # type: ignore[return-value]
