"""Mixture of experts: routers against independent formulas, bad input, balance, utilization, modules, determinism."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core.launch import collect_launches
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.triton import few_tokens

BACKENDS = ("torch", "triton")
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def _layer(experts: int, hidden: int = 16, inner: int = 12, bias: bool = False, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights = draw(experts, 2 * inner, hidden), draw(experts, hidden, inner)
    return (*weights, draw(experts, 2 * inner), draw(experts, hidden)) if bias else weights


@by_backend
def test_softmax_router_is_mixtrals_and_gpt_osss(backend: str) -> None:
    logits = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    routing = fk.moe_route(logits, fk.Router("softmax", 3), backend=backend)
    top, experts = torch.topk(logits, 3)
    assert torch.equal(routing.experts.long(), experts)
    torch.testing.assert_close(routing.weights, torch.softmax(top, 1))
    plain = fk.moe_route(logits, fk.Router("softmax", 3, normalize=False, scale=2.0), backend=backend)
    torch.testing.assert_close(plain.weights, 2 * torch.softmax(logits, 1).gather(1, experts))


@by_backend
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_group_limited_routers_are_deepseeks(version: str, backend: str) -> None:
    """The experts and weights of Transformers' own routers."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(25, 16, generator=generator), torch.randn(16, 16, generator=generator)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_attention_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    if version == "v2":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

        config = transformers.DeepseekV2Config(**sizes, topk_method="group_limited_greedy")
        gate = modeling.DeepseekV2TopkRouter(config)
        router, bias = fk.Router("softmax", 4, normalize=False, scale=2.5, groups=4, top_groups=2), None
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling3

        gate = modeling3.DeepseekV3TopkRouter(transformers.DeepseekV3Config(**sizes, norm_topk_prob=True))
        bias = 0.1 * torch.randn(16, generator=generator)
        gate.e_score_correction_bias.copy_(bias)
        router = fk.Router("sigmoid", 4, scale=2.5, groups=4, top_groups=2)
    with torch.no_grad():
        gate.weight.copy_(weight)
    expected_weights, expected = gate(x)[-2:]
    routing = fk.moe_route(x @ weight.T, router, bias=bias, backend=backend)
    order = expected.argsort(1)
    mine = routing.experts.long().argsort(1)
    assert torch.equal(routing.experts.long().gather(1, mine), expected.gather(1, order))
    torch.testing.assert_close(
        routing.weights.gather(1, mine), expected_weights.gather(1, order).float(), atol=1e-5, rtol=1e-5
    )


@by_backend
def test_dynamic_router_takes_as_many_as_reach_the_mass(backend: str) -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25], [0.4, 0.35, 0.15, 0.1]]))
    routing = fk.moe_route(logits, fk.Router("dynamic", 3, mass=0.65, normalize=False), backend=backend)
    assert routing.experts.tolist() == [[0, -1, -1], [0, 1, 2], [0, 1, -1]]
    torch.testing.assert_close(routing.weights[0], torch.tensor([0.7, 0.0, 0.0]))
    assert routing.offsets.tolist() == [0, 3, 5, 6, 6]
    at_least = fk.moe_route(logits, fk.Router("dynamic", 3, mass=0.65, min_k=2), backend=backend)
    assert at_least.experts.tolist() == [[0, 1, -1], [0, 1, 2], [0, 1, -1]]


@by_backend
def test_expert_choice_loads_are_equal(backend: str) -> None:
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
    routing = fk.moe_route(logits, fk.Router("expert_choice", 2), backend=backend)
    assert routing.counts.tolist() == [10] * 8
    p = torch.softmax(logits, 1)
    for expert in range(8):
        chosen = set(routing.tokens[10 * expert : 10 * expert + 10].tolist())
        assert chosen == set(p[:, expert].topk(10).indices.tolist())


@by_backend
@pytest.mark.parametrize("kind", ["random", "hash"])
def test_random_and_hash_depend_on_ids_alone(kind: str, backend: str) -> None:
    ids = torch.tensor([7, 7, 3, 9]) if kind == "hash" else None
    routings = [
        fk.moe_route(torch.randn(4, 16), fk.Router(kind, 2, seed=3), token_ids=ids, backend=backend) for _ in range(2)
    ]
    assert torch.equal(routings[0].experts, routings[1].experts)
    if kind == "hash":
        assert routings[0].experts[0].tolist() == routings[0].experts[1].tolist()
    many = fk.moe_route(torch.zeros(2000, 8), fk.Router("random", 1), backend="torch")
    assert many.counts.min() > 200
    other = fk.moe_route(torch.zeros(2000, 8), fk.Router("random", 1, seed=1), backend="torch")
    assert not torch.equal(many.experts, other.experts)


@by_backend
def test_bad_logits(backend: str) -> None:
    """A NaN gives valid experts and NaN weights for its token alone; equal logits give the first experts."""
    logits = torch.randn(3, 6)
    logits[1, 2] = math.nan
    logits[2] = math.nan
    routing = fk.moe_route(logits, fk.Router("softmax", 3), backend=backend)
    assert routing.weights[0].isfinite().all()
    assert routing.weights[1:].isnan().all()
    assert routing.experts[2].tolist() == [0, 1, 2]
    assert 2 not in routing.experts[1].tolist()
    assert routing.offsets[-1] == 9
    masked = fk.moe_route(torch.tensor([[1.0, -math.inf, 0.0, -math.inf]]), fk.Router("softmax", 2), backend=backend)
    assert masked.experts.tolist() == [[0, 2]]
    nothing = torch.tensor([[-math.inf] * 3, [-math.inf, 0.5, -math.inf]])
    for kind, expected in (("softmax", [[math.nan] * 2, [1.0, 0.0]]), ("sigmoid", [[0.0] * 2, [1.0, 0.0]])):
        found = fk.moe_route(nothing, fk.Router(kind, 2), backend=backend)
        assert found.experts.tolist() == [[0, 1], [1, 0]]
        torch.testing.assert_close(found.weights, torch.tensor(expected), equal_nan=True)
    equal = fk.moe_route(torch.zeros(2, 6), fk.Router("sigmoid", 2), backend=backend)
    assert equal.experts.tolist() == [[0, 1]] * 2


def test_fields_of_a_router_have_types() -> None:
    """A `normalize` of 1 was True on one backend and False on another."""
    router = fk.Router("softmax", np.int64(2), normalize=np.bool_(False), scale=np.float32(2))  # type: ignore[arg-type]
    assert router == fk.Router("softmax", 2, normalize=False, scale=2.0)
    assert fk.Router.parse(router.text) == router
    wrong: list[dict[str, Any]] = [
        {"k": 2.5}, {"k": "2"}, {"k": True}, {"normalize": 1}, {"seed": 1.5}, {"capacity": 2.0}, {"mass": "all"},
    ]  # fmt: skip
    for options in wrong:
        (name,) = options
        with pytest.raises(TypeError, match=f"Router: {name} is"):
            fk.Router(**options)


@by_backend
@pytest.mark.parametrize("tokens", [3, 80])
def test_slots_without_a_row_are_ignored(tokens: int, backend: str) -> None:
    """Whatever their weights are, and whatever the rows of others hold: results and gradients are finite."""
    experts = torch.arange(2 * tokens).view(tokens, 2) % 4
    experts[1, 1], experts[2] = -1, 9
    weights = torch.rand(tokens, 2)
    weights[1, 1] = weights[2] = math.nan
    inputs = [torch.randn(tokens, 16), *_layer(4, bias=True), weights]
    x, gate_up, down, gate_up_bias, down_bias, weights = [one.requires_grad_() for one in inputs]
    routing = fk.moe_sort(experts, weights, num_experts=4, backend=backend)
    y = fk.moe_experts(x, routing, gate_up, down, gate_up_bias, down_bias, backend=backend)
    assert bool((y[2] == 0).all())
    found = torch.autograd.grad(y.square().sum(), (x, gate_up, down, gate_up_bias, down_bias, weights))
    assert all(one.isfinite().all() for one in found)
    assert bool((found[-1][2] == 0).all())

    values = [one.detach().double().requires_grad_() for one in (x, gate_up, down, gate_up_bias, down_bias)]
    wide, up, out, up_bias, out_bias = values
    rows = []
    for token in range(tokens):
        total = torch.zeros(16, dtype=torch.float64)
        for slot in range(2):
            expert = int(experts[token, slot])
            if 0 <= expert < 4:
                gate, value = (up[expert] @ wide[token] + up_bias[expert]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * value
                total = total + weights[token, slot].item() * (out[expert] @ hidden + out_bias[expert])
        rows.append(total)
    expected = torch.stack(rows)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), values)):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@by_backend
def test_a_bad_row_does_not_reach_tokens_that_were_dropped(backend: str) -> None:
    """x of the first token is NaN; the third one finds no room, and its routing weights have no gradient."""
    x, logits = torch.randn(3, 16), torch.zeros(3, 4).requires_grad_()
    x[0] = math.nan
    routing = fk.moe_route(logits, fk.Router("softmax", 1, normalize=False, capacity=2), backend=backend)
    y = fk.moe_experts(x, routing, *_layer(4), backend=backend)
    (found,) = torch.autograd.grad(y[1:].sum(), logits)
    assert found[1:].isfinite().all()
    assert bool((found[2] == 0).all())


def test_wrong_routers_and_arguments() -> None:
    logits = torch.randn(4, 8)
    with pytest.raises(ValueError, match="k is 9 and a token cannot have more than 8 experts; lower k"):
        fk.moe_route(logits, fk.Router("softmax", 9))
    with pytest.raises(ValueError, match="cannot have more than the 4 experts of 2 groups"):
        fk.moe_route(logits, fk.Router("softmax", 5, groups=4, top_groups=2))
    with pytest.raises(ValueError, match="8 experts do not divide into 3 groups"):
        fk.moe_route(logits, fk.Router("softmax", 2, groups=3, top_groups=2))
    with pytest.raises(ValueError, match="kind is 'best'; it must be one of"):
        fk.Router("best")
    with pytest.raises(ValueError, match="has no groups"):
        fk.Router("dynamic", groups=2)
    with pytest.raises(ValueError, match="capacity is 0"):
        fk.Router(capacity=0)
    for factor in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"capacity_factor is {factor}; it must be above 0 and finite"):
            fk.MoE(8, 8, 2, capacity_factor=factor)
    with pytest.raises(ValueError, match=r"capacity is 3 and capacity_factor 1\.5; give one of them"):
        fk.Router(capacity=3, capacity_factor=1.5)
    with pytest.raises(ValueError, match=r"bias is torch\.float32"):
        fk.moe_route(logits, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="chooses without a bias"):
        fk.moe_route(logits, fk.Router("random"), bias=torch.zeros(8))
    with pytest.raises(ValueError, match=r"logits are torch\.int64"):
        fk.moe_route(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weights are torch\.float32"):
        fk.moe_sort(torch.zeros(2, 2, dtype=torch.int64), torch.ones(3, 2), num_experts=4)
    routing = fk.moe_route(logits)
    with pytest.raises(ValueError, match="the routing is of 4 tokens and 8 experts; x has 5 tokens"):
        fk.moe_experts(torch.randn(5, 16), routing, *_layer(8))
    with pytest.raises(ValueError, match="they must be"):
        fk.moe_experts(torch.randn(4, 16), routing, *reversed(_layer(8)))
    with pytest.raises(ValueError, match="gate_up_bias is"):
        fk.moe_experts(torch.randn(4, 16), routing, *_layer(8), torch.zeros(8, 3))
    with pytest.raises(ValueError, match="MoE: k is 3 and a token cannot have more than 2 experts"):
        fk.MoE(8, 8, 2, fk.Router("softmax", 3))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("6 experts do not divide into 4 groups", {"router": fk.Router("softmax", 2, groups=4, top_groups=2)}),
        ("packed is 'quarters'", {"packed": "quarters"}),
        ("activation is 'tanh'", {"activation": "tanh"}),
        ("activation is None", {"activation": None}),
        ("balance_rate is -1", {"router": fk.Router("sigmoid"), "balance_rate": -1}),
        ("balance_rate is for a 'sigmoid' router", {"balance_rate": 0.1}),
    ],
)
def test_a_module_is_refused_when_it_is_made(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"MoE: {message}"):
        fk.MoE(8, 8, 6, **options)


def test_balance_of_another_routing_is_refused() -> None:
    routing = fk.moe_route(torch.randn(6, 4))
    for kind in ("switch", "cv", "z"):
        for shape in ((6, 8), (6, 2), (5, 4)):
            with pytest.raises(ValueError, match="the routing is of 6 tokens and 4 experts; logits are of"):
                fk.moe_balance_loss(torch.randn(shape), routing, kind)
    with pytest.raises(ValueError, match="logits are"):
        fk.moe_balance_loss(torch.randn(2, 3, 4), routing)
    with pytest.raises(ValueError, match="bias is"):
        fk.moe_balance_bias(torch.zeros(3), routing)
    with pytest.raises(ValueError, match="bias is"):
        fk.moe_balance_bias(torch.zeros(4, dtype=torch.int64), routing)
    with pytest.raises(ValueError, match="rate is nan"):
        fk.moe_balance_bias(torch.zeros(4), routing, math.nan)


@by_backend
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_batch_without_rows_has_gradients_of_zero(backend: str, tokens: int) -> None:
    """A process of a parallel training whose experts got nothing still takes part in the backward pass."""
    x, gate_up, down, *biases = (one.requires_grad_() for one in (torch.randn(tokens, 16), *_layer(4, bias=True)))
    weights = torch.rand(tokens, 2, requires_grad=True)
    unused = torch.full((tokens, 2), -1, dtype=torch.int32)
    routing = fk.moe_sort(unused, weights, num_experts=4, backend=backend)
    y = fk.moe_experts(x, routing, gate_up, down, *biases, backend=backend)
    assert y.shape == (tokens, 16)
    for gradient in torch.autograd.grad(y.sum(), (x, weights, gate_up, down, *biases)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@by_backend
def test_no_tokens_and_one_expert_for_all(backend: str) -> None:
    gate_up, down = _layer(4)
    empty = fk.moe_route(torch.empty(0, 4), backend=backend)
    assert empty.offsets.tolist() == [0] * 5
    assert fk.moe_experts(torch.empty(0, 16), empty, gate_up, down, backend=backend).shape == (0, 16)
    assert float(fk.moe_balance_loss(torch.empty(0, 4), empty)) == 0
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]]).expand(70, 4)
    routing = fk.moe_route(logits, fk.Router("softmax", 1), backend=backend)
    assert routing.counts.tolist() == [0, 70, 0, 0]
    x = torch.randn(70, 16)
    y = fk.moe_experts(x, routing, gate_up, down, backend=backend)
    torch.testing.assert_close(y, fk.mlp(x, gate_up[1], down[1]), atol=1e-4, rtol=1e-4)
    half = fk.moe_route(logits, fk.Router("softmax", 1, capacity=30), backend=backend)
    limited = fk.moe_experts(x, half, gate_up, down, backend=backend)
    torch.testing.assert_close(limited[:30], y[:30])
    assert bool((limited[30:] == 0).all())


def test_results_repeat_exactly_and_only_touched_experts_are_read() -> None:
    gate_up, down = _layer(6)
    x, logits = torch.randn(5, 16), torch.randn(5, 6)
    logits[:, 4:] = -20
    gate_up[4:] = math.nan
    routing = fk.moe_route(logits, backend="triton")
    first = fk.moe_experts(x, routing, gate_up, down, backend="triton")
    assert first.isfinite().all()
    assert torch.equal(first, fk.moe_experts(x, routing, gate_up, down, backend="triton"))


def test_launches_of_few_tokens_depend_on_shapes_alone() -> None:
    """Three launches, with grids that a CUDA graph can hold whatever the router chooses."""
    gate_up, down = _layer(6)
    grids = []
    for seed in range(2):
        routing = fk.moe_route(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)), backend="torch")
        with collect_launches() as launches:
            fk.moe_experts(torch.randn(5, 16), routing, gate_up, down, backend="triton")
        grids.append([(launch.name, launch.grid) for launch in launches])
    assert grids[0] == grids[1]
    assert [name for name, _ in grids[0]] == ["few_tokens_kernel", "few_tokens_kernel", "combine_kernel"]


@pytest.mark.parametrize("tokens", [3, 40])
def test_mxfp4_experts_whose_columns_lie_apart(tokens: int) -> None:
    """Experts quantized from a transposed view keep its strides."""
    gate_up, down, *_ = _layer(4, 64, 32, bias=False)
    packed = [fk.Weight.quantize(one, "mxfp4") for one in (gate_up, down)]
    apart = [fk.Weight.quantize(one.transpose(1, 2).contiguous().transpose(1, 2), "mxfp4") for one in (gate_up, down)]
    assert apart[0].data.stride(2) != 1
    x, routing = torch.randn(tokens, 64), fk.moe_route(torch.randn(tokens, 4), backend="triton")
    expected, found = (fk.moe_experts(x, routing, *weights, backend="triton") for weights in (packed, apart))
    torch.testing.assert_close(found, expected)


def test_gradients_of_a_frozen_quantized_layer() -> None:
    """Experts in MXFP4 have no gradient; x and the routing weights have those of the dequantized experts."""
    gate_up, down, *biases = _layer(4, 64, 32, bias=True)
    packed = [fk.Weight.quantize(one, "mxfp4") for one in (gate_up, down)]
    plain = [one.dequantize(torch.float32) for one in packed]
    results = []
    for weights, backend in ((plain, "torch"), (packed, "torch"), (packed, "triton")):
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
        routing = fk.moe_route(logits, backend=backend)
        y = fk.moe_experts(
            x, routing, *weights, *biases, activation="gpt_oss_glu", packed="interleaved", backend=backend
        )
        y.square().sum().backward()
        results.append((y.detach(), x.grad, logits.grad))
    for found in results[1:]:
        for one, expected in zip(found, results[0]):
            torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)


def test_backward_saves_what_goes_into_the_activation_alone() -> None:
    gate_up, down = _layer(4)
    x = torch.randn(100, 16).requires_grad_()
    routing = fk.moe_route(torch.randn(100, 4), fk.Router("softmax", 2), backend="triton")
    for recompute, expected in ((False, 200 * 24), (True, 0)):
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor, kept: dict[int, Tensor] = saved) -> Tensor:
            kept[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fk.moe_experts(x, routing, gate_up, down, recompute=recompute, backend="triton")
        given = {one.data_ptr() for one in (x, gate_up, down, *routing)}
        assert sum(one.numel() for address, one in saved.items() if address not in given) == expected


def test_a_kept_graph_gives_the_same_gradients_twice() -> None:
    gate_up, down = (one.requires_grad_() for one in _layer(4))
    x = torch.randn(20, 16).requires_grad_()
    routing = fk.moe_route(torch.randn(20, 4), backend="triton")
    y = fk.moe_experts(x, routing, gate_up, down, backend="triton").sum()
    first = torch.autograd.grad(y, (x, gate_up, down), retain_graph=True)
    second = torch.autograd.grad(y, (x, gate_up, down))
    for one, other in zip(first, second):
        assert torch.equal(one, other)


def test_balance_losses_against_formulas() -> None:
    logits = torch.randn(50, 6, dtype=torch.float32).requires_grad_()
    routing = fk.moe_route(logits, fk.Router("softmax", 2))
    p = torch.softmax(logits, 1)
    one_hot = torch.zeros(50, 6).scatter(1, routing.experts.long(), 1.0)
    switch = 6 * (one_hot.mean(0) / 2 * p.mean(0)).sum()
    torch.testing.assert_close(fk.moe_balance_loss(logits, routing, "switch"), switch)
    importance = torch.zeros(50, 6).scatter(1, routing.experts.long(), routing.weights).sum(0)
    cv = importance.var(correction=0) / importance.mean() ** 2
    torch.testing.assert_close(fk.moe_balance_loss(logits, routing, "cv"), cv)
    torch.testing.assert_close(fk.moe_balance_loss(logits, routing, "z"), logits.logsumexp(1).square().mean())
    for kind in ("switch", "cv", "z"):
        (gradient,) = torch.autograd.grad(fk.moe_balance_loss(logits, routing, kind), logits, retain_graph=True)
        assert gradient.abs().sum() > 0
    with pytest.raises(ValueError, match="kind is 'l2'"):
        fk.moe_balance_loss(logits, routing, "l2")


def test_the_bias_balances_loads() -> None:
    """With a fixed gate that prefers some experts, updates of the bias even the loads out."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 8, generator=generator) + torch.linspace(-2, 2, 8)
    bias, router = torch.zeros(8), fk.Router("sigmoid", 2)
    before = fk.moe_route(logits, router, bias=bias).counts
    for _ in range(300):
        fk.moe_balance_bias(bias, fk.moe_route(logits, router, bias=bias), 5e-3)
    after = fk.moe_route(logits, router, bias=bias).counts
    assert before.min() / before.max() < 0.1
    assert after.min() / after.max() > 0.7


def test_usage_is_gathered_and_drawn(tmp_path: Path) -> None:
    usage = fk.ExpertUsage(layers=2)
    for step in range(3):
        for layer in range(2):
            logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(step))
            usage.add(layer, fk.moe_route(logits, fk.Router("softmax", 1, capacity=6)))
    assert usage.loads.shape == (3, 2, 4)
    assert (usage.loads.sum(2) == 20).all()
    for name in ("min_over_max", "entropy", "dropped"):
        values = usage.statistic(name)
        assert values.shape == (3, 2)
        assert bool(((values >= 0) & (values <= 1)).all())
    share = usage.loads[0, 0] / 20
    expected = -(share * share.clamp(min=1e-9).log()).sum() / math.log(4)
    torch.testing.assert_close(usage.statistic("entropy")[0, 0], expected)
    with pytest.raises(ValueError, match="there is no statistic 'mean'"):
        usage.statistic("mean")
    none, one = fk.ExpertUsage(layers=1), fk.ExpertUsage(layers=1)
    none.add(0, fk.moe_route(torch.empty(0, 4)))
    one.add(0, fk.moe_route(torch.randn(5, 1), fk.Router("softmax", 1)))
    for edge in (none, one):
        assert [edge.statistic(name).item() for name in ("min_over_max", "entropy", "dropped")] == [1, 1, 0]
    with pytest.raises(ValueError, match="layer is 2; there are layers 0 to 1"):
        usage.add(2, fk.moe_route(logits))
    with pytest.raises(ValueError, match="the routing is of 3 experts, and those before of 4"):
        usage.add(0, fk.moe_route(torch.randn(2, 3)))
    usage.add(0, fk.moe_route(logits))
    with pytest.raises(ValueError, match=r"layers have \[4, 3\] steps"):
        usage.plot(tmp_path / "usage.png")
    usage.add(1, fk.moe_route(logits))
    with pytest.raises(ValueError, match="at least one"):
        fk.ExpertUsage(layers=2).loads  # noqa: B018
    pytest.importorskip("matplotlib")
    usage.plot(tmp_path / "usage.png")
    assert (tmp_path / "usage.png").stat().st_size > 1000
    for axes in usage._drawn("entropy").axes[:2]:
        assert all(float(tick).is_integer() for tick in (*axes.get_xticks(), *axes.get_yticks()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": fk.Router("sigmoid", 2), "balance_rate": 0.1},
        {"noisy": True},
        {"capacity_factor": 1.0},
        {"router": fk.Router("hash", 2)},
        {"router": fk.Router("expert_choice", 2)},
        {"bias": True, "activation": "gpt_oss_glu", "packed": "interleaved", "recompute": True},
        {"activation": "gelu"},
    ],
    ids=str,
)
def test_the_module_trains(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = fk.MoE(16, 12, 4, **options)
    x, ids = torch.randn(2, 9, 16), torch.randint(0, 50, (2, 9))
    y = layer(x, token_ids=ids)
    assert y.shape == x.shape
    (y.square().mean() + 0.01 * layer.balance_loss("cv")).backward()
    missing = [name for name, one in layer.named_parameters() if one.grad is None]
    assert missing == []
    if "balance_rate" in options:
        assert layer.balance_bias.abs().sum() > 0
    other = fk.MoE(16, 12, 4, **options)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.eval()(x, token_ids=ids), layer.eval()(x, token_ids=ids))


def test_a_module_is_copied_and_pickled_after_a_call() -> None:
    """As averages of weights over the steps are kept."""
    layer = fk.MoE(16, 12, 4)
    x = torch.randn(5, 16)
    y = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.routing is None
        torch.testing.assert_close(copied(x), y)
    assert layer.routing is not None
    with pytest.raises(ValueError, match=r"x is \(5, 15\); it must be \(..., 16\)"):
        layer(x[:, 1:])


def test_the_balance_bias_stays_in_float32() -> None:
    """In bfloat16 a step of 0.001 is lost beside 0.5."""
    layer = fk.MoE(16, 12, 4, fk.Router("sigmoid", 2), balance_rate=1e-3)
    layer.balance_bias.fill_(0.5)
    layer = layer.bfloat16()
    assert layer.gate.weight.dtype == torch.bfloat16
    assert layer.balance_bias.dtype == torch.float32
    assert "balance_bias" in layer.state_dict()
    layer(torch.randn(9, 16).bfloat16()).sum().backward()
    assert layer.routing is not None
    if layer.routing.counts.unique().numel() > 1:
        assert bool((layer.balance_bias != 0.5).any())
    assert layer.to("meta").balance_bias.device.type == "meta"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_choose_the_same_experts_again(use_reentrant: bool) -> None:
    """The bias moves after the second call, so far that tokens would choose others."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(fk.MoE(16, 12, 4, fk.Router("sigmoid", 2), balance_rate=0.5) for _ in range(2))
    others = copy.deepcopy(layers)
    for step in range(3):
        before = [layer.balance_bias.clone() for layer in layers]
        results = []
        for stack, call in (
            (layers, lambda layer, y: layer(y)),
            (others, partial(checkpoint, use_reentrant=use_reentrant)),
        ):
            x = torch.randn(9, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            stack.zero_grad()
            y = call(stack[1], call(stack[0], x))
            y.square().sum().backward()
            results.append((y.detach(), x.grad, *(parameter.grad for parameter in stack.parameters())))
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)
        for layer, other, bias in zip(layers, others, before):
            assert not torch.equal(layer.balance_bias, bias)
            assert torch.equal(layer.balance_bias, other.balance_bias)


def test_a_balance_loss_without_a_gradient_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = fk.MoE(16, 12, 4), torch.randn(5, 16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ValueError, match="balance_loss has no gradient"):
        layer.balance_loss()
    with torch.no_grad():
        assert layer.balance_loss() > 0
    checkpoint(layer, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(layer.balance_loss(), layer.gate.weight)
    assert gradient.abs().sum() > 0
    layer.eval()
    with torch.no_grad():
        layer(x)
    assert layer.balance_loss() > 0


def test_balance_losses_in_float64() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    for kind in ("switch", "cv", "z"):

        def loss(given: Tensor, kind: str = kind) -> Tensor:
            return fk.moe_balance_loss(given, fk.moe_route(given, fk.Router("softmax", 2, normalize=False)), kind)

        assert loss(logits).dtype == torch.float64
        assert torch.autograd.gradcheck(loss, (logits,))


def test_experts_interface_by_name() -> None:
    """Models of Transformers find the experts as "fkernel" and compute what their own do, gradients included."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    import flashkernel.hf  # noqa: F401

    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8,
        "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.DeepseekV2Config(**sizes)
    model = transformers.DeepseekV2ForCausalLM._from_config(config, attn_implementation="eager")
    tokens = torch.randint(1, 50, (2, 7))
    results = []
    for name in ("eager", "fkernel"):
        model.set_experts_implementation(name)
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        results.append((loss.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]))
    torch.testing.assert_close(results[1][0], results[0][0])
    for one, other in zip(results[1][1], results[0][1]):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["gpt_oss.GptOss", "mixtral.Mixtral", "qwen3_moe.Qwen3Moe", "deepseek_v3.DeepseekV3", "gemma4.Gemma4Text",
     "lfm2_moe.Lfm2Moe", "nemotron_h.NemotronH"],
)  # fmt: skip
def test_stacks_of_experts_of_transformers(name: str) -> None:
    """Gate and up in halves, interleaved or without a gate, stored (in, out) or (out, in): values and gradients."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    import flashkernel.hf

    flashkernel.hf.register()
    family, _, prefix = name.partition(".")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=16, intermediate_size=12, moe_intermediate_size=12, num_experts=4, num_local_experts=4,
        n_routed_experts=4,
    )  # fmt: skip
    module = getattr(modeling, f"{prefix}Experts")(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x, weights = torch.randn(9, 16, generator=generator), torch.rand(9, 2, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    results = []
    for implementation in ("eager", "fkernel"):
        config._experts_implementation = implementation
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *module.parameters()]
        y = module(inputs[0], chosen, inputs[1])
        results.append([y.detach(), *torch.autograd.grad(y.square().mean(), inputs)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_experts_whose_gate_no_kernel_computes_are_refused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

    import flashkernel.hf

    flashkernel.hf.register()
    config = transformers.MiniMaxM3VLTextConfig(
        hidden_size=16, intermediate_size=12, moe_intermediate_size=12, num_local_experts=4
    )
    config._experts_implementation = "fkernel"
    with pytest.raises(ValueError, match='MiniMaxM3VLExperts has an activation that no kernel computes; choose "gr'):
        MiniMaxM3VLExperts(config)(torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"router": fk.Router("sigmoid", 2, groups=2), "balance_rate": 0.01},
        {"router": fk.Router("dynamic", 3, mass=0.6)},
        {"router": fk.Router("expert_choice", 2), "capacity_factor": 1.0},
        {"router": fk.Router("hash", 2)},
        {"capacity_factor": 1.0, "bias": True},
    ],
    ids=str,
)
def test_a_module_is_compiled_in_one_graph_for_all_lengths(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = fk.MoE(16, 12, 4, **options)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for tokens in (6, 9, 13):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-4)


@by_backend
@pytest.mark.parametrize("tokens", [6, 70])
def test_capacity_as_a_factor(tokens: int, backend: str) -> None:
    logits = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(3))
    logits[:, 1] += 2
    found = fk.moe_route(logits, fk.Router("softmax", 2, capacity_factor=0.75), backend=backend)
    limit = math.ceil(0.75 * tokens * 2 / 4)
    assert found.offsets.diff().max() == limit
    for one, other in zip(found, fk.moe_route(logits, fk.Router("softmax", 2, capacity=limit), backend=backend)):
        assert torch.equal(one, other)
    chosen = fk.moe_route(logits, fk.Router("expert_choice", 2, capacity_factor=0.75), backend=backend)
    assert chosen.counts.tolist() == [limit] * 4


def test_compiled_in_one_graph() -> None:
    gate_up, down = (one.requires_grad_() for one in _layer(4))

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return fk.moe_experts(x, fk.moe_route(logits, backend="triton"), gate_up, down, backend="triton")

    x, logits = torch.randn(6, 16).requires_grad_(), torch.randn(6, 4).requires_grad_()
    expected = torch.autograd.grad(layer(x, logits).sum(), (x, logits, gate_up))
    found = torch.autograd.grad(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, logits).sum(), (x, logits, gate_up)
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


def test_few_tokens_are_served_by_their_kernels() -> None:
    gate_up, down = _layer(4, 64, 32)
    x, routing = torch.randn(4, 64), fk.moe_route(torch.randn(4, 4))
    assert few_tokens.serves(x, routing, Experts(gate_up, down))
    assert few_tokens.serves(x, routing, Experts(*[fk.Weight.quantize(one, "mxfp4") for one in (gate_up, down)]))
    assert not few_tokens.serves(x, routing, Experts(*[fk.Weight.quantize(one, "int8") for one in (gate_up, down)]))
    many = fk.moe_route(torch.randn(65, 4))
    assert not few_tokens.serves(torch.randn(65, 64), many, Experts(gate_up, down))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 200])
def test_a_cuda_graph_follows_the_router(tokens: int) -> None:
    """A captured layer sends other tokens to other experts when it is replayed."""
    gate_up, down, *biases = (one.to("cuda", torch.bfloat16) for one in _layer(8, 64, 64, bias=True))
    x, logits = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16), torch.randn(tokens, 8, device="cuda")

    def layer() -> Tensor:
        return fk.moe_experts(x, fk.moe_route(logits), gate_up, down, *biases)

    layer()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    logits.copy_(torch.randn(tokens, 8))
    graph.replay()
    assert torch.equal(y, layer())


@pytest.mark.compile
@pytest.mark.parametrize("arch, gpu", [(80, "a100"), (90, "h200")])
def test_mxfp4_kernels_compile_without_spills(arch: int, gpu: str) -> None:
    """gpt-oss's layer for 16 tokens, and its experts dequantized; benchmarks have plain weights alone."""
    from compiled import compiled

    from flashkernel.core import device as devices
    from flashkernel.ops.moe.triton.dequantize import dense

    def packed(rows: int, columns: int) -> fk.Weight:
        data = torch.empty((32, rows, columns // 2), dtype=torch.uint8, device="meta")
        return fk.Weight(data, torch.empty_like(data[..., : columns // 32]), None, "mxfp4", (1, 32))

    with devices.pretend(devices.KNOWN[gpu]), collect_launches() as launches:
        index = torch.empty((16, 4), dtype=torch.int32, device="meta")
        counts = torch.empty(33, dtype=torch.int32, device="meta")
        routing = fk.Routing(index, index.float(), index, index.flatten(), counts, counts[1:])
        experts = Experts(packed(5760, 2880), packed(2880, 2880), activation="gpt_oss_glu", packed="interleaved")
        few_tokens.forward(torch.empty((16, 2880), dtype=torch.bfloat16, device="meta"), routing, experts)
        dense(packed(64, 2880), torch.bfloat16)
    assert [launch.name for launch in launches][2:] == ["combine_kernel", "dequantize_kernel"]
    for launch in launches:
        assert compiled(launch, arch).stack == 0, launch.name


def test_a_router_is_a_router() -> None:
    with pytest.raises(TypeError, match=r"MoE: router is 2; it must be a flashkernel.Router"):
        fk.MoE(16, 12, 4, 2)  # type: ignore[arg-type]
