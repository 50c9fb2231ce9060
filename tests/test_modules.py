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


def test_a_linear_layer_that_is_more_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    hooked, patched = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_full_backward_hook(lambda module, given, taken: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    coded = nn.Linear(4, 4)
    coded.weight = nn.Parameter(coded.weight.to(torch.float8_e4m3fn), requires_grad=False)
    for layer, message in (
        (Doubled(4, 4), "a Doubled with a forward of its own"),
        (torch.nn.utils.weight_norm(nn.Linear(4, 4)), "with hooks"),
        (hooked, "with hooks"),
        (patched, "a forward of its own"),
        (fk.FusedLinear(4, 4, activation="silu"), "with an activation"),
        (nn.LazyLinear(4), "UninitializedParameter|hooks"),
        (coded, "Parameter in torch.float8_e4m3fn"),
    ):
        with pytest.raises(TypeError, match=message):
            fk.FusedLinear.from_linear(layer)
    with pytest.raises(ValueError, match="FusedLinear: activation is 'swish'"):
        fk.FusedLinear.from_linear(nn.Linear(4, 4), activation="swish")
    with pytest.raises(ValueError, match="5 outputs do not divide"):
        fk.FusedLinear(4, 5, activation="swiglu")
    with pytest.raises(ValueError, match="packed is 'quarters'"):
        fk.FusedLinear(4, 4, activation="swiglu", packed="quarters")


class _Gated(nn.Module):
    """An MLP with a part of its own in its forward."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 10 if wrong == "sizes" else 12)
        self.down_proj = nn.Linear(14 if wrong == "down" else 12, 8)
        self.act_fn, self.wrong = nn.SiLU(), wrong
        if wrong == "norm":
            self.norm = nn.LayerNorm(12)
        if wrong == "factor":
            self.factor = nn.Parameter(torch.ones(1))
        if wrong == "dtype":
            self.down_proj.half()
        if wrong == "hooks":
            self.act_fn.register_forward_hook(lambda module, given, y: 2 * y)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x))
        if self.wrong == "sparse":  # as Gemma 3n's
            gate = torch.relu(gate - gate.mean(-1, keepdim=True))
        return self.down_proj(gate * self.up_proj(x))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sizes", "their sizes do not fit"), ("down", "their sizes do not fit"), ("norm", "also has norm"),
        ("factor", "also has factor"), ("dtype", "of one float dtype on one device"), ("hooks", "hooks .act_fn."),
        ("sparse", "computes something else than swiglu"),
    ],
)  # fmt: skip
def test_an_mlp_that_is_another_is_refused(wrong: str, message: str) -> None:
    fk.FusedMLP.from_mlp(_Gated())
    with pytest.raises((TypeError, ValueError), match=message):
        fk.FusedMLP.from_mlp(_Gated(wrong))


def test_the_activation_given_fits_the_layers() -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'; with gate_proj and up_proj it must be one of swiglu"):
        fk.FusedMLP.from_mlp(_Gated(), activation="gelu")
    with pytest.raises(TypeError, match="computes something else than geglu"):
        fk.FusedMLP.from_mlp(_Gated(), activation="geglu")
    with pytest.raises(ValueError, match="with c_fc it must be one of gelu"):
        fk.FusedMLP.from_mlp(_mlps()["gpt2"], activation="swiglu")
    layer: Any = _Gated()
    del layer.act_fn
    layer.act_fn = lambda x: torch.nn.functional.silu(x)  # a function of its own says nothing of itself
    with pytest.raises(TypeError, match="name the one it stands for"):
        fk.FusedMLP.from_mlp(layer)
    _same(fk.FusedMLP.from_mlp(layer, activation="swiglu"), layer, torch.randn(3, 8))


def test_the_check_leaves_the_module_as_it_was() -> None:
    layer = _mlps()["gpt2"].train()
    layer.dropout.eval()  # type: ignore[union-attr,operator]
    state = torch.get_rng_state()
    ours = fk.FusedMLP.from_mlp(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.training
    assert not layer.dropout.training  # type: ignore[union-attr]
    assert ours.dropout is layer.dropout
    half = _mlps()["llama"].bfloat16()
    fk.FusedMLP.from_mlp(half)
    fk.FusedMLP.from_mlp(_mlps()["qwen3"].to("meta"))
    unset = _Gated()
    torch.nn.init.constant_(unset.up_proj.weight, torch.nan)  # to be loaded later
    fk.FusedMLP.from_mlp(unset)


def test_hooks_of_gradients_are_called() -> None:
    ours: Any = fk.FusedMLP.from_mlp(_mlps()["llama"])
    seen: list[int] = []
    ours.up_proj.register_full_backward_hook(lambda module, given, taken: seen.append(1))
    ours(torch.randn(3, 32, requires_grad=True)).sum().backward()
    assert seen == [1]
