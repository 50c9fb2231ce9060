"""The declaration of routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flashkernel.core import backends
from flashkernel.core.declare import Workload, declare
from flashkernel.core.op import FLOATS, Axes, Baseline, Case, Cost, Input, Tolerance, integers, normal
from flashkernel.core.random_case import Rng
from flashkernel.ops.moe.routing.router import KINDS, Router

_PACKAGE = "flashkernel.ops.moe.routing"


def _case(
    name: str, tokens: int, experts: int, router: Router, *present: str, layout: str = "contiguous",
    dtypes: tuple[torch.dtype, ...] = FLOATS[:1],
) -> Case:  # fmt: skip
    axes = {"tokens": tokens, "experts": experts}
    return Case(name, axes, {"router": router}, dtypes, present=present, layout=layout)


_CASES = (
    _case("softmax", 20, 8, Router("softmax", 2), dtypes=FLOATS),
    _case("softmax-probabilities", 20, 8, Router("softmax", 2, normalize=False, scale=1.5)),
    _case("one-token", 1, 32, Router("softmax", 4)),
    _case("odd", 37, 13, Router("softmax", 3)),
    _case("all-experts", 9, 5, Router("softmax", 5)),
    _case("one-expert", 9, 1, Router("softmax", 1)),
    _case("several-blocks", 140, 128, Router("softmax", 8)),
    _case("noisy", 33, 16, Router("softmax", 2), "noise", dtypes=FLOATS),
    _case("groups", 17, 20, Router("softmax", 3, normalize=False, groups=5, top_groups=2)),
    _case("sigmoid", 21, 16, Router("sigmoid", 4, normalize=False)),
    _case("deepseek", 21, 32, Router("sigmoid", 4, scale=2.5, groups=8, top_groups=3), "bias"),
    _case("dynamic", 30, 16, Router("dynamic", 6, mass=0.6)),
    _case("dynamic-bounds", 150, 33, Router("dynamic", 5, mass=0.3, min_k=2, normalize=False)),
    _case("capacity", 40, 8, Router("softmax", 2, capacity=7)),
    _case("capacity-blocks", 300, 64, Router("softmax", 4, capacity=9)),
    _case("random", 25, 12, Router("random", 3, seed=5)),
    _case("hash", 25, 12, Router("hash", 2), "token_ids"),
    _case("expert-choice", 40, 8, Router("expert_choice", 2)),
    _case("expert-choice-capacity", 37, 5, Router("expert_choice", 1, normalize=False, capacity=50)),
    _case("padded", 20, 24, Router("softmax", 4), "noise", layout="padded"),
    _case("transposed", 20, 24, Router("sigmoid", 4), "bias", layout="transposed"),
    _case("no-tokens", 0, 8, Router("softmax", 2)),
)


def _random_case(rng: Rng, case: Case) -> Case:
    """A router that fits the number of experts, and the inputs that it reads."""
    experts = rng.size(1, 300 if rng.large else 40)
    kind, k = rng.one(KINDS), rng.one((1, 2, 3, 4, 8))
    groups = rng.one((1, 1, 2, 4)) if kind in ("softmax", "sigmoid") else 1
    top_groups = rng.one((1, 2)) if groups > 1 else 1
    experts = -(-experts // groups) * groups
    router = Router(
        kind, min(k, experts // groups * top_groups), rng.maybe(), rng.one((1.0, 2.5)), groups, top_groups,
        rng.one((0.3, 0.8, 1.0)), 1, rng.call.randint(1, 30) if rng.maybe(0.3) else None, rng.call.randint(0, 99),
    )  # fmt: skip
    present = tuple(
        name for name in case.present
        if (name == "noise") or (name == "token_ids" and kind == "hash") or (name == "bias" and kind == "sigmoid")
    )  # fmt: skip
    return replace(case, axes={**case.axes, "experts": experts}, options={"router": router}, present=present)


def _bench(name: str, tokens: int, experts: int, router: Router, *present: str) -> Case:
    return replace(
        _case(f"{name}-{tokens}", tokens, experts, router, *present), dtypes=(torch.float32,), gradients=tokens > 64
    )


_BENCHES = tuple(
    _bench(name, tokens, experts, router, *present)
    for name, experts, router, present in (
        ("gpt-oss", 32, Router("softmax", 4), ()),
        ("qwen3-30b", 128, Router("softmax", 8), ()),
        ("deepseek-v3", 256, Router("sigmoid", 8, scale=2.5, groups=8, top_groups=4), ("bias",)),
    )
    for tokens in (1, 64, 4096, 16384)
)


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Logits are read once; experts, weights, positions and rows are written. The backward pass writes dlogits."""
    tokens, experts, k = case.axes["tokens"], case.axes["experts"], case.options["router"].k
    logits = tokens * experts
    return {
        "fwd": Cost(10.0 * logits, logits * dtype.itemsize + 16 * tokens * k + 8 * experts),
        "bwd": Cost(10.0 * logits, 2 * logits * dtype.itemsize + 8 * tokens * k),
    }


MOE_ROUTE = declare(
    _PACKAGE,
    "moe_route",
    "experts, weights and sorted rows of each token, from the logits of a gate",
    backward="route_backward",
    inputs={
        "logits": Input(("tokens", "experts"), draw=normal(2.0)),
        "bias": Input(("experts",), torch.float32, normal(0.1), grad=False, optional=True),
        "noise": Input(("tokens", "experts"), draw=normal(0.5), optional=True),
        "token_ids": Input(("tokens",), torch.int64, integers(1000), grad=False, optional=True),
    },
    kernels=(backends.triton(f"{_PACKAGE}.triton"),),
    workload=Workload(_CASES, _BENCHES, _cost),
    tolerance=Tolerance(floor32=8.0),
    ranges={"tokens": (0, 70, 1), "experts": (40, 80, 40)},  # what groups and k of all cases fit
    random_case=_random_case,
    random_share=2,
    baselines=(Baseline("eager", f"{_PACKAGE}.baselines:eager", forward_only=True),),
)


def _distinct(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    """Different experts for each token; one more than there are stands for a slot that is not used."""
    keys = torch.rand((shape[0], axes["num_experts"] + 1), generator=generator, device=generator.device)
    return keys.argsort(1)[:, : shape[1]]


def _sort_case(name: str, tokens: int, experts: int, slots: int, layout: str = "contiguous", **options: int) -> Case:
    axes = {"tokens": tokens, "num_experts": experts, "slots": slots}
    dtypes = FLOATS if name == "plain" else FLOATS[:1]
    return Case(name, axes, {"num_experts": experts, **options}, dtypes, layout=layout)


def _random_sort(rng: Rng, case: Case) -> Case:
    options = {"num_experts": case.axes["num_experts"]}
    if rng.maybe(0.3):
        options["capacity"] = rng.call.randint(1, 30)
    slots = min(rng.one((1, 2, 4)), case.axes["num_experts"])
    return replace(case, axes={**case.axes, "slots": slots}, options=options)


def _sort_cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    slots = case.axes["tokens"] * case.axes["slots"]
    return {"fwd": Cost(1.0 * slots, 20 * slots + 8 * case.axes["num_experts"])}


MOE_SORT = declare(
    _PACKAGE,
    "moe_sort",
    "rows sorted by expert, of experts that are given",
    inputs={
        "experts": Input(("tokens", "slots"), torch.int64, _distinct, grad=False),
        "weights": Input(("tokens", "slots")),
    },
    kernels=(backends.triton(f"{_PACKAGE}.triton"),),
    backward=None,
    cases=(
        _sort_case("plain", 40, 8, 2),
        _sort_case("one-token", 1, 32, 4),
        _sort_case("odd", 37, 13, 3),
        _sort_case("several-blocks", 140, 128, 8),
        _sort_case("capacity", 300, 64, 4, capacity=9),
        _sort_case("padded", 40, 8, 2, layout="padded"),
        _sort_case("transposed", 40, 8, 2, layout="transposed"),
        _sort_case("no-tokens", 0, 8, 2),
    ),
    benches=tuple(_sort_case(f"gpt-oss-{tokens}", tokens, 32, 4) for tokens in (16, 16384)),
    cost=_sort_cost,
    ranges={"tokens": (0, 70, 1), "num_experts": (1, 40, 1)},
    random_case=_random_sort,
)
