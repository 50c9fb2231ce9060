"""What the table cannot say of attention: torch as a witness, masks with tables, memory, wrong inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_attention import assert_agrees, by_backend, by_fast_backend, make_inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashkernel as fk
from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import (
    Mask,
    Table,
    block_sparse,
    causal,
    column_intervals,
    custom,
    documents,
    prefix,
    window,
)
from flashkernel.core import device as devices
from flashkernel.core.check import execute, verify
from flashkernel.core.op import Case
from flashkernel.ops.attention import attention, spec, tiled
from flashkernel.ops.attention import torch as native
from flashkernel.ops.attention.params import AttentionParams


@by_backend
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_agrees_with_torch(backend: str, is_causal: bool, kv_heads: int) -> None:
    inputs = make_inputs(kv_heads=kv_heads)
    rows, columns, values = (x.double().transpose(1, 2) for x in inputs.values())
    expected = F.scaled_dot_product_attention(rows, columns, values, is_causal=is_causal, enable_gqa=True)
    found = attention(**inputs, mask=causal() if is_causal else None, backend=backend)
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_two_rows_by_hand() -> None:
    q = torch.tensor([1.0, 2.0], dtype=torch.float64).view(1, 2, 1, 1)
    k = torch.tensor([0.5, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
    out, lse = attention(
        q, k, v, sinks=torch.tensor([0.25]), mask=causal(), scale=2.0, return_lse=True, backend="torch"
    )
    first = math.exp(1.0) / (math.exp(1.0) + math.exp(0.25))
    total = math.exp(2.0) + math.exp(-4.0) + math.exp(0.25)
    second = (3 * math.exp(2.0) + 5 * math.exp(-4.0)) / total
    assert out.flatten().tolist() == pytest.approx([3 * first, second])
    assert lse.flatten().tolist() == pytest.approx([math.log(math.exp(1.0) + math.exp(0.25)), math.log(total)])


@pytest.mark.parametrize("case", spec.ATTENTION.cases, ids=lambda case: case.name)
def test_every_case_in_small_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over tiles, where torch's operator would serve the call too, with several tiles both ways."""
    monkeypatch.setattr(tiled, "TILE", 8)
    monkeypatch.setattr(native, "_fused_can", lambda *_: False)
    reports = verify(spec.ATTENTION, case, torch.float32, "torch")
    assert all(report.ok for report in reports), [report.message for report in reports if not report.ok]


def _table_masks() -> dict[str, Mask]:
    ids = torch.tensor([[0] * 50 + [1] * 100 + [2] * 50, [0] * 130 + [1] * 70])
    layout = torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(3)) < 0.4
    start = torch.randint(0, 200, (2, 200), generator=torch.Generator().manual_seed(4))
    return {
        "documents": causal() & documents(ids),
        "prefix": prefix(torch.tensor([3, 140])) | causal(),
        "column_intervals": column_intervals(start, start + 60),
        "block_sparse": block_sparse(layout, 32),
        "table": custom(lambda b, h, q, k: Table(ids)[b, k] > 0),
    }


@by_fast_backend
@pytest.mark.parametrize("name", list(_table_masks()))
@pytest.mark.parametrize("return_lse", [False, True])  # the second is beyond torch's own operator
def test_masks_with_tables(name: str, backend: str, return_lse: bool) -> None:
    assert_agrees(make_inputs(2, 200, 200), {"mask": _table_masks()[name], "return_lse": return_lse}, backend)


def _tiled(mask: Mask, batch: int, heads: int, kv_heads: int, length: int) -> tiled.TiledAttention:
    params = AttentionParams(mask, 1.0, 0.0, None, 0.0, 0)
    return tiled.TiledAttention(batch, heads, kv_heads, length, length, params)


@pytest.mark.parametrize("name", list(_table_masks()))
def test_tiles_hold_what_is_visible(name: str) -> None:
    """No visible pair lies outside the visited tiles, nor a hidden one in a tile that is not masked."""
    mask = _table_masks()[name] & window(40)
    call = _tiled(mask, 2, 4, 2, 200)
    visible = mask.visible(2, 4, 200, 200).expand(2, 4, 200, 200)
    visited = torch.zeros_like(visible)
    for tile in (tile for tiles in call.visible_tiles(torch.device("cpu")) for tile in tiles):
        pairs = (slice(None), slice(None), slice(tile.first, tile.last), slice(tile.start, tile.stop))
        visited[pairs] = True
        assert tile.masked or visible[pairs].all()
    assert not (visible & ~visited).any()


def test_empty_tiles_are_skipped() -> None:
    rows = _tiled(causal() & window(100), 1, 1, 1, 1024).visible_tiles(torch.device("cpu"))
    assert [len(tiles) for tiles in rows] == [1] + [2] * 7
    unmasked = _tiled(causal(), 1, 1, 1, 1024).visible_tiles(torch.device("cpu"))
    assert [[tile.masked for tile in tiles] for tiles in unmasked] == [[False] * row + [True] for row in range(8)]


@by_backend
def test_lse_is_the_log_of_the_sum(backend: str) -> None:
    inputs = make_inputs(kv_heads=4)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs["q"].double(), inputs["k"].double()) / 4
    hidden = ~causal().visible(2, 4, 20, 20)
    _, lse = attention(**inputs, mask=causal(), return_lse=True, backend=backend)
    assert lse.dtype == torch.float32
    expected = torch.logsumexp(scores.masked_fill(hidden, -math.inf), -1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


@by_backend
def test_gradient_through_lse_alone(backend: str) -> None:
    inputs = {name: value.requires_grad_() for name, value in make_inputs(kv_heads=4).items()}
    weights = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(5))
    _, lse = attention(**inputs, return_lse=True, backend=backend)
    found = torch.autograd.grad((lse * weights).sum(), list(inputs.values()), allow_unused=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs["q"], inputs["k"]) / 4
    expected = torch.autograd.grad((torch.logsumexp(scores, -1) * weights).sum(), [inputs["q"], inputs["k"]])
    for mine, exact in zip(found, expected):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)
    assert found[2] is None or not found[2].any()


@by_backend
def test_a_sink_is_a_column_without_a_value(backend: str) -> None:
    inputs, sinks = make_inputs(kv_heads=4), torch.tensor([0.5, -1.0, 3.0, 0.0])
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs["q"], inputs["k"]) / 4
    column = sinks.view(1, 4, 1, 1).expand(2, 4, 20, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, inputs["v"])
    torch.testing.assert_close(attention(**inputs, sinks=sinks, backend=backend), expected, rtol=1e-4, atol=1e-5)


@by_backend
@pytest.mark.parametrize("none", [False, True], ids=["no-sinks", "sinks-that-are-none"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_that_see_nothing(backend: str, return_lse: bool, none: bool) -> None:
    given = make_inputs(queries=20, keys=12) | ({"sinks": torch.full((4,), -math.inf)} if none else {})
    inputs = {name: value.requires_grad_() for name, value in given.items()}
    found = attention(**inputs, mask=causal(), return_lse=return_lse, backend=backend)
    out = found[0] if return_lse else found
    assert torch.equal(out[:, :8], torch.zeros_like(out[:, :8]))
    gradients = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert torch.equal(gradients[0][:, :8], torch.zeros_like(out[:, :8]))
    if return_lse:
        assert (found[1][..., :8] == -math.inf).all()
        assert torch.isfinite(found[1][..., 8:]).all()


@by_fast_backend
def test_a_bias_may_hide_whole_rows(backend: str) -> None:
    inputs = make_inputs()
    bias = torch.zeros(20, 20)
    bias[3] = -math.inf
    bias[5, 7:] = -math.inf
    hiding = custom(lambda b, h, q, k: Table(torch.isfinite(bias).int())[q, k] == 1)
    for more in ({}, {"return_lse": True}):
        found = attention(**inputs, bias=bias, backend=backend, **more)
        expected = attention(**inputs, mask=hiding, backend="reference", **more)
        for mine, exact in zip(found if more else [found], expected if more else [expected]):
            torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


@by_fast_backend
@pytest.mark.parametrize("shape", [(20, 24), (4, 1, 24), (2, 1, 20, 1), (1, 4, 1, 1), ()], ids=str)
def test_bias_broadcasts(shape: tuple[int, ...], backend: str) -> None:
    inputs = make_inputs(queries=20, keys=24)
    inputs["bias"] = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    for options in ({}, {"softcap": 3.0}):
        assert_agrees(inputs, options, backend)


@by_fast_backend
@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s * 2.0 - 0.25,
        lambda s, b, h, q, k: ex.where(q - k < 5, s, 0.5 * s) + 0.125 * b,
        lambda s, b, h, q, k: ex.minimum(s, 1.0) - ex.absolute(q - k) * 0.0625,
    ],
    ids=["linear", "branch", "clipped"],
)
def test_score_functions(score: Callable[..., Any], backend: str) -> None:
    assert_agrees(make_inputs(), {"score": score, "mask": causal()}, backend)


@by_fast_backend
def test_a_score_function_reads_its_closure(backend: str) -> None:
    """The same function with another number in its closure is another function."""
    inputs = make_inputs()
    for slope in (0.1, 0.7):
        assert_agrees(inputs, {"score": lambda s, b, h, q, k, slope=slope: s - slope * ex.absolute(q - k)}, backend)
        plain = attention(**inputs, score=lambda s, b, h, q, k: s - slope * ex.absolute(q - k), backend=backend)  # noqa: B023
        slopes = torch.full((4,), slope)
        torch.testing.assert_close(
            plain, attention(**inputs, alibi_slopes=slopes, backend="reference"), rtol=1e-4, atol=1e-5
        )


@by_fast_backend
def test_long_distances_do_not_multiply_the_error_of_delta(backend: str) -> None:
    """The gradient of ALiBi slopes in float32 is no worse than that of a softmax whose every score is in memory."""
    inputs = {**make_inputs(2, 48, 160, 2, 1, 64), "alibi_slopes": torch.tensor([0.02, 0.5])}
    inputs["v"] = inputs["v"] + 8  # a large delta, most of which cancels
    errors = {}
    exact = execute(attention, {name: x.double() for name, x in inputs.items()}, {"backend": "reference"}, [*inputs])
    for name in ("reference", backend):
        found = execute(attention, inputs, {"backend": name}, [*inputs])
        error = found.gradients["alibi_slopes"].double() - exact.gradients["alibi_slopes"]
        errors[name] = float(error.norm())
    assert errors[backend] <= 1.5 * errors["reference"]


def test_a_constant_score_averages_the_values() -> None:
    inputs = {name: value.requires_grad_() for name, value in make_inputs(kv_heads=4).items()}
    out = attention(**inputs, score=lambda s, b, h, q, k: 1.0, backend="torch")
    torch.testing.assert_close(out, inputs["v"].mean(1, keepdim=True).expand_as(out))
    gradients = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert not gradients[0].any()
    assert not gradients[1].any()
    torch.testing.assert_close(gradients[2], torch.ones_like(gradients[2]))


class _Largest(TorchDispatchMode):
    """The most elements that any tensor has that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return found


def test_memory_is_linear() -> None:
    """Nothing as large as the scores is made, forward or backward, nor anything that grows with their number."""

    def largest(length: int) -> int:
        inputs = make_inputs(1, length, length, heads=2, kv_heads=1)
        leaves = {name: value.requires_grad_() for name, value in inputs.items()}
        sinks, slopes = torch.zeros(2, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
        with _Largest() as mode:
            out = attention(
                **leaves, sinks=sinks, alibi_slopes=slopes, mask=causal() & window(300), dropout=0.1, backend="torch"
            )
            torch.autograd.grad(out.sum(), [*leaves.values(), sinks, slopes])
        return mode.elements

    short, long = largest(1024), largest(4096)
    assert long < 2 * 4096 * 4096 / 100
    assert long <= 4 * short


def test_torch_operator_is_used_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    inputs = make_inputs()
    attention(**inputs, backend="torch")
    attention(**inputs, mask=causal(), backend="torch")
    attention(**inputs, mask=causal() & window(4), backend="torch")
    assert [kwargs["is_causal"] for kwargs in seen] == [False, True, False]
    assert [kwargs["attn_mask"] is None for kwargs in seen] == [True, True, False]
    attention(**inputs, mask=custom(lambda b, h, q, k: k >= q, "causal"), backend="torch")
    assert not seen[-1]["is_causal"], "a mask is known by its expression, not by its name"
    for beyond in ({"softcap": 1.0}, {"dropout": 0.1}, {"return_lse": True}, {"sinks": torch.zeros(4)}):
        attention(**inputs, **beyond, backend="torch")
    assert len(seen) == 4
    monkeypatch.setattr(native, "DENSE_LIMIT", 20 * 20 - 1)
    attention(**inputs, mask=causal() & window(4), backend="torch")
    assert len(seen) == 4, "a mask too large for memory is applied tile by tile"


def test_visible_pairs_are_counted() -> None:
    for mask in (None, causal(), causal() & window(100), custom(lambda b, h, q, k: k < 40 * h + 7 * b)):
        for queries, keys in ((300, 300), (128, 257), (200, 64), (0, 5)):
            expected = 2 * 3 * queries * keys
            if mask is not None:
                expected = int(mask.visible(2, 3, queries, keys).expand(2, 3, queries, keys).sum())
            assert spec.visible_pairs(mask, 2, 3, queries, keys) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(2, 20, 12, 16), "k": torch.zeros(2, 20, 5, 16), "v": torch.zeros(2, 20, 5, 16)},
         "12 query heads cannot share 5 key/value heads; Hq must be a multiple of Hkv"),
        ({"q": torch.zeros(2, 20, 64)}, "q must be a float tensor"),
        ({"k": torch.zeros(2, 20, 2, 16, dtype=torch.int64)}, "k must be a float tensor"),
        ({"k": torch.zeros(2, 20, 2, 8)}, "q has head_dim 16 and k has 8"),
        ({"k": torch.zeros(3, 20, 2, 16)}, "k has a batch of 3 but q has one of 2"),
        ({"v": torch.zeros(2, 19, 2, 16)}, "every key needs its value"),
        ({"v": torch.zeros(2, 20, 2, 16, dtype=torch.float16)}, "v is torch.float16 on cpu but q is torch.float32"),
        ({"k": torch.zeros(2, 20, 2, 16, device="meta")}, "k is torch.float32 on meta but q is torch.float32 on cpu"),
        ({"bias": torch.zeros(3, 20)}, "does not broadcast"),
        ({"bias": torch.zeros(1, 1, 1, 20, 20)}, "does not broadcast"),
        ({"bias": torch.ones(20, 20, dtype=torch.bool)}, "a mask goes into mask="),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\); it must have one logit a head, \(4,\)"),
        ({"alibi_slopes": torch.zeros(3, 4)}, r"alibi_slopes has shape \(3, 4\)"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta but q is on cpu"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        (
            {"mask": documents(torch.zeros(20, dtype=torch.int32, device="meta"))},
            "a table of .* is on meta but q is on cpu",
        ),
    ],
)  # fmt: skip
def test_wrong_inputs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^attention: .*{message}"):
        attention(**{**make_inputs(), **change})


def test_wrong_kinds() -> None:
    inputs = make_inputs()
    with pytest.raises(TypeError, match="goes into bias="):
        attention(**inputs, mask=torch.ones(20, 20))
    with pytest.raises(TypeError, match=r"attention: mask is a function; .* flashkernel\.custom"):
        attention(**inputs, mask=lambda b, h, q, k: k <= q)
    with pytest.raises(TypeError, match="attention: score is a Tensor"):
        attention(**inputs, score=torch.zeros(20, 20))
    with pytest.raises(TypeError, match="cannot branch"):
        attention(**inputs, score=lambda s, b, h, q, k: s if q > k else -s)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("read", ["mask", "score", "seed"])
def test_what_the_backward_pass_reads_again_must_not_be_written_to(read: str, backend: str) -> None:
    """As torch's own operators refuse it: the gradients would be those of another call."""
    table, seed = torch.arange(12) // 5, torch.tensor(5)
    of = fk.Table(table)
    options: dict[str, Any] = {
        "mask": {"mask": fk.documents(table), "softcap": 2.0},
        "score": {"score": lambda s, b, h, q, k: s + 0.25 * of[k]},
        "seed": {"dropout": 0.3, "seed": seed},
    }[read]
    x = torch.randn(1, 12, 2, 16, requires_grad=True)
    out = fk.attention(x, x, x, backend=backend, **options)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    (seed if read == "seed" else table).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_varlen_is_attention_of_each_sequence(backend: str) -> None:
    lengths_q, lengths_k = [5, 1, 9], [5, 4, 12]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    q, k, v = torch.randn(18, 4, 16), torch.randn(21, 2, 16), torch.randn(21, 2, 16)  # three queries too many
    sinks = torch.randn(4)
    options = {"sinks": sinks, "return_lse": True, "backend": backend}
    out, lse = fk.attention_varlen(q, k, v, cu_q, cu_k, window=4, **options)
    assert out.shape == q.shape
    assert lse.shape == (4, 18)
    for n in range(3):
        rows, columns = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        alone, alone_lse = fk.attention(
            q[None, rows], k[None, columns], v[None, columns], mask=fk.causal() & fk.window(4), **options
        )
        torch.testing.assert_close(out[rows], alone[0])
        torch.testing.assert_close(lse[:, rows], alone_lse[0])
    assert not out[15:].any()
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        fk.attention_varlen(q, k, v, cu_q, cu_k[:-1])
    with pytest.raises(ValueError, match="window is 0"):
        fk.attention_varlen(q, k, v, cu_q, cu_k, window=0)


@pytest.mark.parametrize(
    ("gpu", "dtype", "options", "chosen"),
    [
        ("h200", torch.bfloat16, {"mask": causal()}, "hopper"),
        ("h200", torch.bfloat16, {"mask": causal() & documents(torch.zeros(64, dtype=torch.int32))}, "hopper"),
        ("h200", torch.bfloat16, {"mask": causal() & documents(-torch.arange(64, dtype=torch.int32))}, "triton"),
        ("h200", torch.bfloat16, {"deterministic": True}, "hopper"),  # without gradients
        ("h200", torch.float32, {}, "triton"),
        ("a100", torch.bfloat16, {}, "triton"),
        ("t4", torch.float16, {}, "cuda"),
    ],
)
def test_what_each_gpu_is_given(gpu: str, dtype: torch.dtype, options: dict[str, Any], chosen: str) -> None:
    q = torch.empty(1, 64, 2, 64, dtype=dtype)
    with devices.pretend(devices.KNOWN[gpu]):
        answer = fk.explain(fk.attention, q, q, q, **options)
        assert answer.chosen == chosen, str(answer)
        if chosen == "triton" and options.get("mask") is not None:  # it can be asked for all the same
            assert fk.explain(fk.attention, q, q, q, **options, backend="hopper").chosen == "hopper"
