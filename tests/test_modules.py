"""FusedLinear and FusedMLP: they compute what they replace, with its parameters and under its names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashkernel as fk


def _same(ours: nn.Module, theirs: nn.Module, x: Tensor, parameters: bool = True) -> None:
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        wanted = [leaf, *(module.parameters() if parameters else ())]
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for mine, expected in zip(*results):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_fused_linear_takes_over_a_layer() -> None:
    layer = nn.Linear(12, 7).eval()
    fused = fk.FusedLinear.from_linear(layer)
    assert fused.weight is layer.weight
    assert not fused.training
    assert isinstance(fused, nn.Linear), "adapters look for linear layers"
    _same(fused, layer, torch.randn(2, 3, 12))
    gated = fk.FusedLinear(12, 10, activation="geglu")
    assert gated(torch.randn(4, 12), residual=torch.randn(4, 5)).shape == (4, 5)
    assert "geglu" in repr(gated)
    with pytest.raises(TypeError, match="it must be a nn"):
        fk.FusedLinear.from_linear(nn.Sequential())  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["swiglu", "geglu_exact", "gelu_tanh", "squared_relu"])
def test_state_dicts_fit(activation: str) -> None:
    one, other = (fk.FusedMLP(8, 12, bias=True, activation=activation) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(one(x), other(x))
    assert torch.equal(copy.deepcopy(one)(x), one(x))
    assert ("gate_proj.weight" in one.state_dict()) == (activation in ("swiglu", "geglu_exact"))


def _mlps() -> dict[str, nn.Module]:
    transformers = pytest.importorskip("transformers")
    models = transformers.models
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    gpt2 = transformers.GPT2Config(n_embd=32, n_head=4, resid_pdrop=0.0)
    return {
        "llama": models.llama.modeling_llama.LlamaMLP(transformers.LlamaConfig(**sizes, mlp_bias=True)),
        "qwen3": models.qwen3.modeling_qwen3.Qwen3MLP(transformers.Qwen3Config(**sizes)),
        "gemma": models.gemma.modeling_gemma.GemmaMLP(transformers.GemmaConfig(**sizes)),
        "phi3": models.phi3.modeling_phi3.Phi3MLP(transformers.Phi3Config(**sizes, pad_token_id=0)),
        "gpt2": models.gpt2.modeling_gpt2.GPT2MLP(48, gpt2),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi3", "gpt2"])
def test_fused_mlp_takes_over_those_of_transformers(name: str) -> None:
    theirs = _mlps()[name]
    ours = fk.FusedMLP.from_mlp(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert {id(one) for one in ours.parameters()} == {id(one) for one in theirs.parameters()}
    _same(ours, theirs, torch.randn(2, 5, 32))
    x = torch.randn(70, 32)
    torch.testing.assert_close(ours(x, residual=x), theirs(x) + x, rtol=1e-5, atol=1e-5)


def test_a_wrapped_layer_is_called() -> None:
    """As LoRA wraps one: the MLP calls its layers, and the adapter gets its gradient."""

    class Adapter(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer, self.down = layer.requires_grad_(False), nn.Linear(layer.in_features, 2, bias=False)
            self.up = nn.Linear(2, layer.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.up(self.down(x))

    for name in ("llama", "gpt2"):
        theirs: Any = _mlps()[name]
        ours: Any = fk.FusedMLP.from_mlp(theirs)
        if name == "llama":
            ours.up_proj = theirs.up_proj = Adapter(theirs.up_proj)
        else:
            ours.c_fc.register_forward_hook(lambda module, args, y: 2 * y)
        _same(ours, theirs, torch.randn(3, 32), parameters=False)
    ours = fk.FusedMLP.from_mlp(_mlps()["llama"])
    ours.gate_proj = Adapter(ours.gate_proj)
    ours(torch.randn(3, 32)).sum().backward()
    assert ours.gate_proj.up.weight.grad is not None


def test_gradients_into_main_grad() -> None:
    layer, reference = (fk.FusedMLP(16, 24, fuse_wgrad_accumulation=fused) for fused in (True, False))
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(5, 16)
    with pytest.raises(ValueError, match="main_grad on every weight"):
        layer(x)
    with torch.no_grad():
        layer(x)
    for weight in layer.parameters():
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    for module in (layer, layer, reference):
        module(x).sum().backward()
    for mine, theirs in zip(layer.parameters(), reference.parameters()):
        assert mine.grad is None
        torch.testing.assert_close(mine.main_grad, 2 * theirs.grad)  # type: ignore[attr-defined]


def test_what_is_no_mlp() -> None:
    with pytest.raises(TypeError, match="has none of the layers gate_proj, up_proj, down_proj"):
        fk.FusedMLP.from_mlp(nn.Linear(2, 2))
    odd = _mlps()["llama"]
    odd.act_fn = nn.Tanh()
    with pytest.raises(TypeError, match="the activation Tanh"):
        fk.FusedMLP.from_mlp(odd)
    with pytest.raises(ValueError, match="activation is 'swish'"):
        fk.FusedMLP(4, 8, activation="swish")
