"""Options made inside a compiled function: masks, score functions, frequencies, gates, scopes; one graph, no breaks.

Nothing may rest on what was made before, outside: what is known of expressions is forgotten before each test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks import expression, frequencies, mask_type
from flashkernel.blocks.epilogue import Activation, Gate
from flashkernel.core import dispatch

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(1, 16, heads, 16, generator=GENERATOR) for heads in (4, 2, 2))
X, ROW = torch.randn(4, 32, generator=GENERATOR), torch.ones(32)
MATRIX = torch.randn(8, 32, generator=GENERATOR)
IDS, LENGTHS = torch.arange(16) // 5, torch.tensor([0, 5, 16], dtype=torch.int32)
PAGES = torch.randn(1, 16, 2, 16, generator=GENERATOR)
LENGTH, TABLE = torch.tensor([16], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
TARGET = torch.arange(4)
kernels = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expression, "_traced", {})
    monkeypatch.setattr(frequencies, "_graph_constants", {})
    for cached in (expression._recalled, mask_type._recalled):
        cached.cache_clear()
    torch._dynamo.reset()
    yield
    for cached in (expression._recalled, mask_type._recalled):
        cached.cache_clear()


def _compiled_once(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> None:
    """One graph that gives what eager mode gives, and serves a second call."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = compiled(*args)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again = compiled(*args)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "the second call was compiled anew"
    torch.testing.assert_close(found, function(*args))
    torch.testing.assert_close(again, found, rtol=0, atol=0)


MASKS: dict[str, Callable[[], fk.Mask]] = {
    "composed": lambda: (fk.window(4) | fk.sink_tokens(2)) & fk.causal() & fk.window(3, 2),
    "inverted": lambda: (fk.causal() & fk.window(3)).logical_not(),
    "documents": lambda: fk.causal() & fk.documents(IDS) & fk.documents(IDS[None], IDS[None]),
    "prefix": lambda: fk.prefix(3) | fk.prefix(torch.tensor([4])) | fk.causal(),
    "tables": lambda: fk.block_sparse(torch.ones(2, 2, dtype=torch.bool), 8) & fk.column_intervals(IDS, IDS + 2),
    "tensor": lambda: fk.tensor_mask(torch.ones(16, 16, dtype=torch.bool).tril()),
    "custom": lambda: fk.custom(lambda b, h, q, k: (k <= q) & (fk.Table(IDS)[q] == fk.Table(IDS)[k]).logical_not()),
}


@kernels
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, backend: str) -> None:
    _compiled_once(lambda q, k, v: fk.attention(q, k, v, mask=MASKS[name](), backend=backend), Q, K, V)


@kernels
def test_numbers_that_the_tracer_holds_as_symbols(backend: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, width: int, factor: float) -> Tensor:
        score = fk.score_function(lambda s, b, h, q, k: s * factor)
        seen = fk.causal() & fk.window(width) & fk.window(q.shape[1] // 2)
        q, k = fk.rope(q, k, frequencies=fk.Frequencies.plain(16, 1000 * factor), backend=backend)
        return fk.attention(q, k, v, mask=seen, score=score, backend=backend)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for width, factor, keys in ((4, 0.3, 16), (5, 0.7, 12)):
        given = Q[:, :keys], K[:, :keys], V[:, :keys], width, factor
        torch.testing.assert_close(compiled(*given), layer(*given))


@kernels
def test_score_functions(backend: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        of_head = fk.Table(slopes)
        traced = fk.score_function(lambda s, b, h, q, k: s - of_head[h] * fk.where(k < 3, 1.0, 0.0))
        plain = fk.attention(q, k, v, score=lambda s, b, h, q, k: s * 0.5, backend=backend)
        return plain, fk.attention(q, k, v, score=traced, backend=backend)

    _compiled_once(layer, Q, K, V, torch.rand(4))


RULES: dict[str, Callable[[], fk.Frequencies]] = {
    "plain": lambda: fk.Frequencies.plain(16),
    "linear": lambda: fk.Frequencies.linear(16, 1e4, 2.0),
    "llama3": lambda: fk.Frequencies.llama3(16, 5e5, 8.0, 1.0, 4.0, 8192),
    "yarn": lambda: fk.Frequencies.yarn(16, 1e4, 4.0, 4096),
    "values": lambda: fk.Frequencies((1.0, 0.5, 0.25), 1.5),
    "hf": lambda: fk.Frequencies.from_hf({"head_dim": 16, "rope_theta": 500.0}),
}


@kernels
@pytest.mark.parametrize("rule", RULES)
def test_frequencies(rule: str, backend: str) -> None:
    _compiled_once(lambda q, k: fk.rope(q, k, frequencies=RULES[rule](), backend=backend), Q, K)


def _added(total: torch.Tensor) -> torch.Tensor:
    return fk.matmul(X, MATRIX.T, residual=total, out=total, backend="triton")


def _gradient_in_place(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fk.matmul_dact(X, MATRIX.T, z, activation="swiglu", dz_out=z, backend="triton")


def _quantized_linear(format_: str, group: str) -> Tensor:
    weight = fk.Weight.quantize(MATRIX, format_, group)
    return fk.quantized_linear(X, weight.data, weight.scales, layout=weight.layout, backend="triton")


def _experts(x: Tensor) -> tuple[Tensor, ...]:
    """A mixture of experts with all its parts made inside."""
    routing: fk.Routing = fk.moe_route(x, fk.Router("softmax", 2), backend="triton")
    again = fk.moe_sort(routing.experts, routing.weights, num_experts=x.shape[1], backend="triton")
    gate_up, down = MATRIX.expand(32, 8, 32), MATRIX[:4].T.expand(32, 32, 4)
    y = fk.moe_experts(x, again, gate_up, down, backend="triton")
    return y, fk.moe_balance_loss(x, routing), fk.moe_balance_bias(ROW, routing, 0.1)


LINEAR, MLP = fk.FusedLinear(32, 8, activation="geglu"), fk.FusedMLP(32, 16)
MOE = fk.MoE(32, 16, num_experts=4, router=fk.Router("softmax", 2))
CALLS: dict[str, Callable[[], Any]] = {
    "varlen": lambda: fk.attention_varlen(Q[0], K[0], V[0], LENGTHS, causal=True, window=4, backend="triton"),
    "rotary": lambda: fk.rotary_attention(Q, K, V, torch.ones(16, 8), torch.zeros(16, 8), causal=True),
    "fp8": lambda: fk.attention_fp8(
        *[part for pair in zip(*(fk.quantize_fp8(x, rotate=True) for x in (Q, K, V))) for part in pair],
        mask=fk.causal(),
    ),
    "decode": lambda: fk.decode_attention(Q[:, :1], K, V, LENGTH, window=4, sink_tokens=1, backend="triton"),
    "paged": lambda: fk.paged_attention(Q[0], PAGES, PAGES, LENGTHS[::2], LENGTH, TABLE, backend="triton"),
    "append_kv": lambda: fk.append_kv(
        K[0], V[0], PAGES.clone(), PAGES.clone(), torch.arange(16), q=Q[0], positions=torch.arange(16),
        frequencies=fk.Frequencies.plain(16), backend="triton",
    ),
    "linear": lambda: fk.linear(X, MATRIX, activation=Gate("gpt_oss", 1.5, 3.0), scale=2.0, backend="triton"),
    "linear_split": lambda: fk.linear(X, MATRIX, activation=Activation("gelu"), splits=(3, 5), backend="triton"),
    "linear_fp8": lambda: fk.linear(X, fk.Weight.quantize(MATRIX, "fp8", "row"), backend="triton"),
    "quantize": lambda: fk.dequantize(
        *fk.quantize(X, torch.int8, "row", backend="triton"), dtype=X.dtype, backend="triton"
    ),
    "norm_quantize": lambda: fk.rms_norm_quantize(X, X[0], dtype=torch.int8, backend="triton"),
    "glu_quantize": lambda: fk.glu_quantize(X, X, dtype=torch.int8, backend="triton"),
    "mlp": lambda: fk.mlp(X, MATRIX, MATRIX[:, :4], activation="swiglu", backend="triton"),
    "modules": lambda: (LINEAR(X), MLP(X)),
    "matmul": lambda: fk.matmul(X, MATRIX.T, bias=ROW[:8], activation="gelu", scale=2.0, backend="triton"),
    "matmul_gated": lambda: fk.matmul(
        X, MATRIX.T, activation=Gate("gpt_oss", 1.5, 3.0), packed="interleaved", return_preactivation=True,
        backend="triton",
    ),
    "matmul_added": lambda: _added(X @ MATRIX.T),
    "matmul_dact": lambda: fk.matmul_dact(X, MATRIX.T, X[:, :16], activation="swiglu", backend="triton"),
    "matmul_dact_in_place": lambda: _gradient_in_place(X[:, :16].clone()),
    "grouped_matmul": lambda: fk.grouped_matmul(
        X, MATRIX.T.expand(2, 32, 8), LENGTHS.clamp(max=4), scatter=torch.arange(3, -1, -1), backend="triton"
    ),
    "grouped_weight_gradient": lambda: fk.grouped_weight_gradient(X, X, LENGTHS.clamp(max=4), backend="triton"),
    "quantized_linear": lambda: _quantized_linear("int4", "1x32"),
    "moe": lambda: _experts(X),
    "moe_module": lambda: MOE(X),
    "sample": lambda: fk.sample(X, TARGET, TARGET, temperature=ROW[:4], top_k=TARGET.int(), backend="triton"),
    "norms": lambda: (fk.rms_norm(X, ROW, residual=X), fk.layer_norm(X, ROW, ROW)),
    "losses": lambda: (fk.cross_entropy(X, TARGET, softcap=3.0), fk.linear_cross_entropy(X, MATRIX, TARGET)),
    "activations": lambda: [
        fk.gelu(X), fk.silu(X), fk.relu(X), fk.squared_relu(X), fk.swiglu(X), fk.geglu(X), fk.reglu(X),
        fk.gpt_oss_glu(X),
    ],
    "reductions": lambda: [
        fk.sum(X), fk.mean(X), fk.max(X), fk.logsumexp(X), fk.softmax(X, scale=0.5), fk.weighted_sum(X, ROW),
        fk.argmax(X),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    with torch.no_grad():
        _compiled_once(CALLS[name])


def test_every_public_function_is_compiled_here() -> None:
    """Those in CALLS, and the masks, scopes and operators of the other tests; not what is read on the host."""
    here = Path(__file__).read_text(encoding="utf-8")
    missing = [name for name in fk.__all__ if f"fk.{name}" not in here]
    assert sorted(missing) == ["BackendError", "ExpertUsage", "Explanation", "explain"]


def test_scopes_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    decide = dispatch._decide

    def spy(*given: Any) -> Any:
        found = decide(*given)
        chosen.append(found.name)
        return found

    def layer(x: Tensor) -> Tensor:
        with fk.use_backend("reference"):
            y = fk.rms_norm(x, ROW)
            with fk.use_backend(rms_norm="triton"):
                y = fk.rms_norm(y, ROW)
            y = fk.rms_norm(y, ROW)
        return fk.rms_norm(y, ROW)

    monkeypatch.setattr(dispatch, "_decide", spy)
    monkeypatch.setattr(dispatch, "_choices", {})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = compiled(X)
    assert chosen == ["reference", "triton", "reference", "torch"]
    assert dispatch._traced_scopes == []
    torch.testing.assert_close(found, layer(X))

    def wrong(x: Tensor) -> Tensor:
        with fk.use_backend(rms_norms="triton"):
            return fk.rms_norm(x)

    with pytest.raises(Exception, match="there is no operator 'rms_norms'"):
        torch.compile(wrong, fullgraph=True, backend="aot_eager")(X)
    assert dispatch._traced_scopes == []
