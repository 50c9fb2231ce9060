"""A mixture of experts as a module: gate, router and experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashkernel.blocks.epilogue import activation_width, check_activation
from flashkernel.blocks.gate_up import PACKINGS
from flashkernel.ops.moe import Router, Routing, moe_balance_bias, moe_balance_loss, moe_experts, moe_route


class MoE(nn.Module):
    """A mixture of experts in the place of a transformer's MLP: a module over `moe_route` and `moe_experts`.

    Its experts have the names and shapes of those in Transformers: gate_up_proj (experts, 2 * intermediate, hidden) and
    down_proj (experts, hidden, intermediate). After a call, `routing` and `logits` are those of its tokens.

    Args:
        hidden_size: Columns of x and of the output.
        intermediate_size: Width between an expert's products.
        num_experts: How many experts there are.
        router: How tokens choose; softmax over the two largest unless given.
        activation: As in `flashkernel.moe_experts`.
        packed: As in `flashkernel.moe_experts`.
        bias: Whether experts have biases.
        noisy: Adds noise to the logits in training, with a learned scale for each expert (noisy top-k gating).
        balance_rate: Above 0, a "sigmoid" router gets a bias that moves by so much with every backward pass in
            training, toward equal loads (`moe_balance_bias`).
        capacity_factor: As in `Router`, in the place of the router's own.
        recompute: As in `flashkernel.moe_experts`.
        backend: Of the experts, as in `flashkernel.moe_experts`.
        device: Of the parameters.
        dtype: Of the parameters.

    Example:
        >>> import torch, flashkernel as fk
        >>> layer = fk.MoE(16, 24, num_experts=4, router=fk.Router("softmax", 2))
        >>> y = layer(torch.randn(2, 5, 16))
        >>> (y.sum() + 0.01 * layer.balance_loss("switch")).backward()
        >>> y.shape, layer.routing.experts.shape
        (torch.Size([2, 5, 16]), torch.Size([10, 2]))
        >>> list(layer.state_dict())
        ['gate_up_proj', 'down_proj', 'gate.weight']
    """

    balance_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        router: Router | None = None,
        *,
        activation: str = "swiglu",
        packed: str = "halves",
        bias: bool = False,
        noisy: bool = False,
        balance_rate: float = 0.0,
        capacity_factor: float | None = None,
        recompute: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(router, (Router, type(None))):
            raise TypeError(f"MoE: router is {router!r}; it must be a flashkernel.Router, such as Router('softmax', 2)")
        self.router = Router() if router is None else router
        if capacity_factor is not None:
            self.router = replace(self.router, capacity=None, capacity_factor=capacity_factor)
        reason = self.router.declines(num_experts)
        if reason is not None:
            raise ValueError(f"MoE: {reason}")
        check_activation("MoE", activation)
        if activation is None:
            raise ValueError("MoE: activation is None; experts have one between their products")
        if packed not in PACKINGS:
            raise ValueError(f"MoE: packed is {packed!r}; it must be 'halves' or 'interleaved'")
        if balance_rate and self.router.kind != "sigmoid":
            raise ValueError(f"MoE: balance_rate is for a 'sigmoid' router; this one is {self.router.kind!r}")
        if not 0 <= balance_rate < math.inf:
            raise ValueError(f"MoE: balance_rate is {balance_rate}; it must be a finite number, 0 or above")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        wide = intermediate_size * activation_width(activation)
        self.num_experts, self.activation, self.packed = num_experts, activation, packed
        self.balance_rate = balance_rate
        self.recompute, self.backend = recompute, backend
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, **where)
        self.noise = nn.Linear(hidden_size, num_experts, bias=False, **where) if noisy else None
        self.gate_up_proj = nn.Parameter(torch.empty((num_experts, wide, hidden_size), **where))
        self.down_proj = nn.Parameter(torch.empty((num_experts, hidden_size, intermediate_size), **where))
        self.gate_up_proj_bias = nn.Parameter(torch.empty((num_experts, wide), **where)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty((num_experts, hidden_size), **where)) if bias else None
        balance = torch.empty(num_experts, device=device) if balance_rate else None
        self.register_buffer("balance_bias", balance)
        self.routing: Routing | None = None
        self.logits: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as `nn.Linear` does; biases and the noise's scale begin at 0."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -1 / math.sqrt(max(1, weight.shape[2])), 1 / math.sqrt(max(1, weight.shape[2])))
        for zero in (self.gate_up_proj_bias, self.down_proj_bias, self.balance_bias):
            if isinstance(zero, Tensor):
                nn.init.zeros_(zero)
        self.gate.reset_parameters()
        if self.noise is not None:
            nn.init.zeros_(self.noise.weight)

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The weighted sum of each token's experts; x is (..., hidden). `token_ids` (...) is what "hash" routes by.

        Args:
            x: (..., hidden).
            token_ids: Integers (...), what the "hash" router routes by; other routers do not read them.
        """
        if x.ndim == 0 or x.shape[-1] != self.gate.in_features:
            raise ValueError(f"MoE: x is {tuple(x.shape)}; it must be (..., {self.gate.in_features})")
        flat = x.reshape(-1, x.shape[-1])
        self.logits = self.gate(flat).float()
        noise = None
        if self.noise is not None and self.training:
            noise = F.softplus(self.noise(flat).float()) * torch.randn_like(self.logits)
        bias = self.balance_bias
        ids = None if token_ids is None or self.router.kind != "hash" else token_ids.reshape(-1)
        self.routing = moe_route(self.logits, self.router, bias=bias, noise=noise, token_ids=ids)
        if bias is not None and self.training and torch.is_grad_enabled():
            self._balance(self.logits, self.routing, bias)
        y = moe_experts(
            flat, self.routing, self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias,
            activation=self.activation, packed=self.packed, recompute=self.recompute, backend=self.backend,
        )  # fmt: skip
        return y.view(x.shape)

    def _balance(self, logits: Tensor, routing: Routing, bias: Tensor) -> None:
        """Moves the bias once the backward pass has come to the router.

        Activation checkpointing calls the layer again in the backward pass, and must find the same bias: with another
        one, tokens would choose other experts. A frozen router has no such pass.
        """
        if torch.compiler.is_compiling() or not logits.requires_grad:
            moe_balance_bias(bias, routing, self.balance_rate)
            return

        def move(gradient: Tensor) -> None:
            moe_balance_bias(bias, routing, self.balance_rate)

        logits.register_hook(move)

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles: without the last call's routing and logits, which belong to its autograd graph."""
        return {**self.__dict__, "routing": None, "logits": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """As of every module, but the balance bias stays in float32: half precision rounds its small steps away."""
        before = self.balance_bias
        super()._apply(fn, recurse)
        after = self.balance_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.balance_bias = before.to(after.device)
        return self

    def balance_loss(self, kind: str = "switch") -> Tensor:
        """`moe_balance_loss` of the last call.

        Args:
            kind: "switch", "cv" or "z".
        """
        if self.logits is None or self.routing is None:
            raise ValueError("MoE: balance_loss is of the last call, and there was none")
        wanted = self.training and torch.is_grad_enabled() and self.gate.weight.requires_grad
        if wanted and not self.logits.requires_grad:
            raise ValueError(
                "MoE: balance_loss has no gradient, since the last call was under no_grad, as in a checkpoint with "
                "use_reentrant=True; call the layer with gradients (use_reentrant=False), or balance_loss under no_grad"
            )
        return moe_balance_loss(self.logits, self.routing, kind)

    def extra_repr(self) -> str:
        """Experts and router."""
        return f"num_experts={self.num_experts}, router={self.router}, activation={self.activation!r}"
