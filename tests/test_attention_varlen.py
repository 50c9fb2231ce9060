"""Attention over packed sequences: the tile schedule, and the Hopper kernels under an emulator of Gluon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gluon_emulator
import pytest
import torch

import flashkernel as fk
from flashkernel.core import derived, tune
from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.op import Case
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.hopper import varlen_schedule
from flashkernel.ops.attention.hopper.backward_configs import BACKWARD, BackwardConfig
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, Forward
from flashkernel.ops.attention.hopper.varlen_layout import Grid, TileShape, VarlenLayout, VarlenShape
from flashkernel.ops.attention.hopper.varlen_schedule import make_schedule
from flashkernel.ops.attention.varlen import library
from flashkernel.ops.attention.varlen.params import NO_LIMIT, schedule_size
from flashkernel.ops.attention.varlen.spec import ATTENTION_VARLEN, _axes


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    for launcher in (hopper.forward_launch, hopper.backward_launch, varlen_schedule):
        monkeypatch.setattr(launcher, "launch", gluon_emulator.launch)
    with devices.pretend(replace(devices.KNOWN["h200"], sms=3)):
        yield


def _check(case: Case, dtype: torch.dtype = torch.float16) -> None:
    reports = verify(ATTENTION_VARLEN, case, dtype, "hopper", "cpu")
    failures = [report.message for report in reports if not report.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", ATTENTION_VARLEN.cases, ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    _check(case)


_CAUSAL = {"causal": True}
LONGER = {
    "d128": Case("d128", _axes((150, 1, 70, 0, 97), (4, 2), 128, behind=9), {**_CAUSAL, "return_lse": True}),
    "d64": Case("d64", _axes((190, 33, 130), 2, 64), _CAUSAL),
    "full": Case("full", _axes((130, 200), (2, 1), 64, (90, 210)), {"return_lse": True}, present=("cu_seqlens_k",)),
    "chunks": Case("chunks", _axes((40, 1, 70), (4, 1), 64, (240, 150, 70)), _CAUSAL, present=("cu_seqlens_k",)),
    "gpt-oss": Case("gpt-oss", _axes((170, 20, 90), (8, 1), 64), {"window": 64}, present=("sinks",)),
    "d256": Case("d256", _axes((100, 70), 2, 256), {**_CAUSAL, "return_lse": True}),
    "wide-keys": Case("wide-keys", _axes((70, 30), (2, 1), (192, 128)), _CAUSAL),
    "many-short": Case("many-short", _axes((1, 3, 17, 64, 5, 65) * 3, (2, 1), 64), {**_CAUSAL, "softcap": 2.0}),
}


@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str) -> None:
    _check(LONGER[name])


def test_optimistic_softmax() -> None:
    """In bfloat16 the row max is that of a work tile's first K block; queries without a key are computed again."""
    _check(Case("bf16", _axes((150, 20), (4, 2), 64, (60, 90)), _CAUSAL, present=("cu_seqlens_k",)), torch.bfloat16)


@pytest.mark.parametrize(
    "forward, backward",
    [
        (Forward(2, 128, 2, 1, 240, overlap=True), BackwardConfig(64, 2, False, False)),
        (Forward(3, 64, 4, 2, 160), BackwardConfig(128, 2, False, True, kv_stages=1, dq_mode="tma_reduce")),
        (Forward(4, 64, 5, 1, 112, overlap=True), BackwardConfig(128, 2, False, True)),
        (Forward(2, 64, 4, 2, 240), BackwardConfig(64, 3, True, True, dq_mode="dq_warpgroup")),
    ],
    ids=str,
)
def test_every_kind_of_config(forward: Forward, backward: BackwardConfig) -> None:
    case = Case("config", _axes((130, 7, 0, 200, 65), (4, 2), 64), {"causal": True, "window": 90, "return_lse": True})
    with tune.override(FORWARD, forward), tune.override(BACKWARD, backward):
        _check(case)


@pytest.mark.parametrize("backend", ["hopper", "torch"])
def test_other_sequences_may_hold_anything(backend: str) -> None:
    """Tiles end with their sequence: NaN beside it, and behind the last one, reaches neither outputs nor gradients."""
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 30, 50])
    leaves = [torch.randn(60, 2, 64, dtype=torch.float16) for _ in range(3)]
    spoiled = [x.clone() for x in leaves]
    for x in spoiled:
        x[30:] = float("nan")
    found = []
    for tensors in (leaves, spoiled):
        q, k, v = (x.requires_grad_() for x in tensors)
        out = fk.attention_varlen(q, k, v, cu_seqlens, causal=True, backend=backend)
        gradients = torch.autograd.grad(out[:30].float().square().sum(), (q, k, v))
        found.append([out[:30], *(gradient[:30] for gradient in gradients)])
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_tokens_of_no_sequence_see_nothing() -> None:
    """Before the first one and behind the last; their lse is that of the sinks alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 16).requires_grad_() for _ in range(3))
    sinks, cu_seqlens = torch.randn(2), torch.tensor([2, 2, 6, 9])
    out, lse = fk.attention_varlen(q, k, v, cu_seqlens, sinks=sinks, return_lse=True, backend="torch")
    assert not out[:2].any()
    assert not out[9:].any()
    torch.testing.assert_close(lse[:, 9:], sinks[:, None].expand(2, 3))
    inside, inside_lse = fk.attention(q[None, 2:6], k[None, 2:6], v[None, 2:6], sinks=sinks, return_lse=True)
    torch.testing.assert_close(out[2:6], inside[0])
    torch.testing.assert_close(lse[:, 2:6], inside_lse[0])


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 13], [0, 7, 5, 12], [-1, 5, 12]])
def test_lengths_that_do_not_fit_are_refused_on_a_cpu(cu_seqlens: list[int]) -> None:
    q = torch.randn(12, 2, 16)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is \[.*must not decrease, or go beyond the 12 tokens of q"):
        fk.attention_varlen(q, q, q, torch.tensor(cu_seqlens), backend="torch")


def _visible(tile: TileShape, row: int, other: int, lengths: tuple[int, int], sides: tuple[int, int]) -> bool:
    query, key = (other, row) if tile.TRANSPOSED else (row, other)
    away = key - (query + lengths[1] - lengths[0])
    return query < lengths[0] and key < lengths[1] and -sides[0] <= away <= sides[1]


def _lists(table: torch.Tensor, grid: Grid) -> list[list[tuple[int, int]]]:
    """(record, head) of the work tiles of each program."""
    entries = table[: 2 * grid.num_programs * grid.max_work_tiles].view(grid.num_programs, -1, 2).tolist()
    lists = []
    for program in entries:
        number = next(index for index, (record, _) in enumerate(program) if record < 0)
        assert all(record == -1 for record, _ in program[number:])
        lists.append([(record, head) for record, head in program[:number]])
    return lists


def _check_table(
    tile: TileShape, table: torch.Tensor, grid: Grid, own: list[int], other: list[int], sides: tuple[int, int]
) -> None:
    """Every visible pair lies in a block that its consumer visits; unmasked blocks are visible throughout; each tile of
    each sequence and head is taken once."""
    num_tiles = sum(-(-length // tile.rows) for length in own)
    stride = 12 + 12 * tile.NUM_CONSUMERS
    places = [grid.records + place * stride for place in range(num_tiles)]
    heads = range(0, grid.num_groups * grid.head_group * grid.pack_gqa, grid.pack_gqa)
    taken = sorted(entry for program in _lists(table, grid) for entry in program)
    assert taken == [(place, head) for place in places for head in heads]
    seen: set[tuple[int, int]] = set()
    for place in places:
        record = table[place : place + stride].tolist()
        first, q_start, q_end, k_start, k_end, position, num_keys, _, begin, end = record[:10]
        start = k_start if tile.TRANSPOSED else q_start
        sequence = next(s for s in range(len(own)) if sum(own[:s]) == start and own[s] > 0)
        assert (sequence, first) not in seen
        seen.add((sequence, first))
        lengths = (q_end - q_start, k_end - k_start)
        assert lengths == ((other[sequence], own[sequence]) if tile.TRANSPOSED else (own[sequence], other[sequence]))
        shift = lengths[1] - lengths[0]
        assert position == (first - shift if tile.TRANSPOSED else first + shift)
        assert num_keys == (lengths[1] - first if tile.TRANSPOSED else lengths[1])
        loaded = list(range(begin, end))
        for w in range(tile.NUM_CONSUMERS):
            numbers = record[12 + 12 * w :]
            before, visits, after = numbers[9:12]
            assert before + visits + after == len(loaded)
            visited: dict[int, int] = {}
            for first_block, last_block, masked in zip(numbers[0:9:3], numbers[1:9:3], numbers[2:9:3]):
                if len(visited) < visits:
                    assert last_block > first_block
                    visited |= dict.fromkeys(range(first_block, last_block), masked)
            assert list(visited) == loaded[before : before + visits]
            low = first + w * tile.BLOCK
            rows = [row for row in range(low, low + tile.BLOCK) if low >= 0 and row < own[sequence]]
            for block in range(-(-other[sequence] // tile.VISITED)):
                columns = range(block * tile.VISITED, (block + 1) * tile.VISITED)
                part = [_visible(tile, row, column, lengths, sides) for row in rows for column in columns]
                assert not any(part) or block in visited
                assert visited.get(block, 1) or all(part)


def _make(layout: VarlenLayout, cu_q: torch.Tensor, cu_k: torch.Tensor, left: int, right: int) -> torch.Tensor:
    return make_schedule(cu_q, cu_k, layout, layout.size, True, left, right)


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_covers_what_is_visible(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.choice([1, 3, 9, 140])  # more than a program looks at together
    sizes = [0, 1, 3, 16, 17, 40] if count < 100 else [0, 1, 9]
    lengths_q = [chance.choice(sizes) for _ in range(count)]
    lengths_k = lengths_q if seed % 2 else [chance.choice(sizes) for _ in range(count)]
    behind = chance.choice([0, 5])
    left, right = chance.choice([(NO_LIMIT, NO_LIMIT), (NO_LIMIT, 0), (9, 0), (5, 7)])
    consumers = chance.choice([2, 3])
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    layout = VarlenLayout(
        VarlenShape(count, int(cu_q[-1]) + behind, int(cu_k[-1]) + behind),
        TileShape(8, 16, consumers, PAD_FRONT=consumers == 3), TileShape(16, 8, TRANSPOSED=True),
        chance.choice([2, 12, 18]), 6, 2, 7,
    )  # fmt: skip
    schedule = _make(layout, cu_q, cu_k, left, right)
    forward, backward = layout.forward_table(schedule), layout.backward_table(schedule)
    sides = (left, right)
    _check_table(layout.forward, forward, layout.forward_grid, [*lengths_q, behind], [*lengths_k, 0], sides)
    _check_table(layout.backward, backward, layout.backward_grid, [*lengths_k, behind], [*lengths_q, 0], sides)
    query_blocks = layout.query_blocks_table(schedule).view(-1, 2).tolist()
    rows = [row for first, number in query_blocks for row in range(first, first + number)]
    assert rows == list(range(layout.shape.tokens_q))


@pytest.mark.parametrize("heads", [8, 32])
def test_causal_work_tiles_come_longest_first_and_programs_have_equal_work(heads: int) -> None:
    lengths = [400, 31, 290, 170, 6, 250, 145, 110, 50]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(lengths)
    layout = VarlenLayout(
        VarlenShape(len(lengths), tokens, tokens), TileShape(8, 8, 2), TileShape(16, 8, TRANSPOSED=True), heads, heads,
        1, 40,
    )  # fmt: skip
    schedule = _make(layout, cu_seqlens, cu_seqlens, NO_LIMIT, 0)
    for tile, table, grid in (
        (layout.forward, layout.forward_table(schedule), layout.forward_grid),
        (layout.backward, layout.backward_table(schedule), layout.backward_grid),
    ):
        visited = {}
        for record, _ in (entry for program in _lists(table, grid) for entry in program):
            counts = [int(table[record + 12 + 12 * w + 10]) for w in range(tile.NUM_CONSUMERS)]
            visited[record] = max(counts)
        in_order = [visited[record] for record in sorted(visited)]
        assert max(later - earlier for earlier, later in pairwise(in_order)) <= 1  # blocks are coarser
        work = [sum(visited[record] + 1 for record, _ in program) for program in _lists(table, grid)]
        assert max(work) * len(work) / sum(work) < 1.05


@pytest.mark.parametrize("num_sequences, tokens", [(1, 1), (1, 5000), (300, 300), (2, 131072)])
@pytest.mark.parametrize("heads", [1, 8, 17, 64])
def test_the_schedule_has_room_for_every_config(num_sequences: int, tokens: int, heads: int) -> None:
    room = schedule_size(num_sequences, tokens, tokens, heads)
    for pack_gqa in (1, 2, 4, 8):
        if heads % pack_gqa == 0:
            for consumers in (2, 3, 4):
                for keys in (64, 128):
                    forward, backward = TileShape(64 // pack_gqa, 64, consumers), TileShape(keys, 64, TRANSPOSED=True)
                    shape = VarlenShape(num_sequences, tokens, tokens)
                    assert VarlenLayout(shape, forward, backward, heads, heads, pack_gqa, 132).size <= room


def _count_schedules(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    plain = library.schedule

    def counted(*args: Any) -> torch.Tensor:
        made.append(len(made))
        return plain(*args)

    monkeypatch.setattr(library, "schedule", counted)
    derived._entries.clear()
    return made


def test_layers_share_a_schedule_until_the_lengths_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _count_schedules(monkeypatch)
    q = torch.randn(40, 2, 64, dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 10, 40])

    def call(lengths: torch.Tensor, **options: Any) -> torch.Tensor:
        return fk.attention_varlen(q, q, q, lengths, causal=True, backend="hopper", **options)

    first = call(cu_seqlens)
    assert torch.equal(call(cu_seqlens), first)
    assert len(made) == 1
    call(cu_seqlens, window=5)
    assert len(made) == 2
    cu_seqlens[1] = 25
    changed = call(cu_seqlens)
    assert len(made) == 3
    wide = q.double()
    exact = fk.attention_varlen(wide, wide, wide, cu_seqlens, causal=True, backend="reference")
    torch.testing.assert_close(changed.double(), exact, rtol=0, atol=4e-3)
    assert torch.equal(call(torch.tensor([0, 25, 40])), changed)
    assert len(made) == 4
    monkeypatch.setattr(derived, "MAX_ENTRIES", 3)
    for length in range(1, 5):
        call(torch.tensor([0, length, 40]))
        assert len(derived._entries) <= 4
    with torch.inference_mode():  # such tensors do not count their writes
        lengths = torch.tensor([0, 10, 40])
    before = len(made)
    call(lengths)
    call(lengths)
    assert len(made) == before + 2


def test_sorted_documents_are_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mask of documents whose ids are sorted, the same kernels serve `attention`; else the portable ones do."""
    made = _count_schedules(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    ids = torch.tensor([[0] * 30 + [3] * 40, [1] * 65 + [2] * 5])
    sinks = torch.randn(4, dtype=torch.float16)
    found = []
    for backend, dtype in ((None, torch.float16), ("reference", torch.float64)):  # in 16 bits it is less exact
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = fk.attention(
            *leaves, sinks=sinks.to(dtype), causal=True, window=20, mask=fk.documents(ids), return_lse=True,
            backend=backend,
        )  # fmt: skip
        found.append([out, lse, *torch.autograd.grad(out.double().square().sum() + lse.sum(), leaves)])
    assert len(made) == 1
    for mine, expected in zip(*found):
        torch.testing.assert_close(mine.double(), expected.double(), rtol=0.01, atol=0.01)
    for mask, chosen in (
        (fk.documents(ids), "hopper"), (fk.documents(ids.flip(1)), "triton"),
        (fk.documents(ids, ids.clone()), "triton"), (fk.documents(ids) | fk.causal(), "triton"),
    ):  # fmt: skip
        answer = fk.explain(fk.attention, q, k, v, mask=mask)
        assert answer.chosen == chosen, str(answer)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int8, torch.int64])
def test_ids_of_any_dtype_that_come_back_are_not_sorted(dtype: torch.dtype) -> None:
    """Differences of unsigned ids are never negative."""
    q = torch.randn(1, 6, 2, 64, dtype=torch.float16)
    back, sorted_ids = (torch.tensor(ids).to(dtype) for ids in ([1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]))
    assert fk.explain(fk.attention, q, q, q, mask=fk.documents(back)).chosen == "triton"
    assert fk.explain(fk.attention, q, q, q, mask=fk.documents(sorted_ids)).chosen == "hopper"


@pytest.mark.parametrize("shape", [(5,), (9,), (1, 9), (3, 5), (2, 7)])
def test_reads_outside_of_the_ids_give_zero(shape: tuple[int, ...]) -> None:
    """A mask that is written by hand needs no size of a call."""
    torch.manual_seed(0)
    ids = fk.Table((torch.arange(shape[-1]) // 3 - 7).expand(shape).contiguous())
    of = (lambda b, i: ids[i]) if len(shape) == 1 else (lambda b, i: ids[b, i])
    mask = fk.custom(lambda b, h, q, k: of(b, q) == of(b, k))
    q, k, v = (torch.randn(2, 7, 2, 64, dtype=torch.float16) for _ in range(3))
    assert fk.explain(fk.attention, q, k, v, mask=mask).chosen == "hopper"
    wanted = fk.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    torch.testing.assert_close(fk.attention(q, k, v, mask=mask).double(), wanted, rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"mask": fk.window(3)}, "no mask beside causal and window"),
        ({"dropout": 0.1}, "no dropout"),
        ({"bias": torch.zeros(1, 1, 1, 40)}, "no bias"),
    ],
    ids=["mask", "dropout", "bias"],
)
def test_hopper_declines_with_a_reason(options: dict[str, Any], why: str) -> None:
    q = torch.zeros(40, 2, 64, dtype=torch.float16)
    answer = fk.explain(fk.attention_varlen, q, q, q, torch.tensor([0, 40]), **options)
    assert answer.chosen == "triton"
    assert why in next(str(verdict.reason) for verdict in answer.verdicts if verdict.backend == "hopper")


def test_wrong_arguments() -> None:
    q, cu_seqlens = torch.zeros(7, 2, 16), torch.tensor([0, 7])
    with pytest.raises(ValueError, match=r"q has shape \(1, 7, 2, 16\)"):
        fk.attention_varlen(q[None], q, q, cu_seqlens)
    with pytest.raises(ValueError, match=r"q has head_dim 16 and k has 8"):
        fk.attention_varlen(q, q[..., :8], q, cu_seqlens)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is torch\.float32"):
        fk.attention_varlen(q, q, q, cu_seqlens.float())
    with pytest.raises(ValueError, match="sinks is"):
        fk.attention_varlen(q, q, q, cu_seqlens, sinks=torch.zeros(3))
    for pair in ((1, 2, 3), (-1, 0), (1.0, 2)):
        with pytest.raises(ValueError, match=r"a pair is \(left, right\)"):
            fk.attention_varlen(q, q, q, cu_seqlens, window=pair)
    with pytest.raises(TypeError, match="no argument 'causl'"):
        fk.attention_varlen(q, q, q, cu_seqlens, causl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "chunks", "gpt-oss", "wide-keys", "many-short"])
def test_several_tiles_on_a_gpu(name: str) -> None:
    reports = verify(ATTENTION_VARLEN, LONGER[name], torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, _CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim, heads", [(64, 10), (64, (16, 8)), (128, (16, 4)), (256, 10)], ids=str)
def test_many_work_tiles_on_a_gpu(options: dict[str, Any], head_dim: int, heads: Any) -> None:
    """Programs take several work tiles each, one after another."""
    case = Case("work-tiles", _axes((700, 33, 0, 1, 512, 390, 64) * 2, heads, head_dim, behind=40), options)
    reports = verify(ATTENTION_VARLEN, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
def test_lengths_change_between_replays_of_a_cuda_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(600, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn_like(q)
    cu_seqlens = torch.tensor([0, 100, 350, 600], device="cuda", dtype=torch.int32)

    def step() -> list[torch.Tensor]:
        out = fk.attention_varlen(q, k, v, cu_seqlens, causal=True, backend="hopper")
        return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 100, 350, 600], [0, 1, 599, 600], [0, 0, 600, 600], [0, 300, 310, 320]):
        cu_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for replayed, eager in zip(captured, step()):
            torch.testing.assert_close(replayed, eager, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_under_torch_compile_on_a_gpu() -> None:
    """One graph, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 2, 64, dtype=torch.float16, device="cuda", requires_grad=True) for _ in range(3))

    def two_layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        hidden = fk.attention_varlen(q, k, v, cu_seqlens, causal=True, backend="hopper")
        return fk.attention_varlen(hidden, k, v, cu_seqlens, causal=True, backend="hopper")

    compiled = torch.compile(two_layers, fullgraph=True, backend="aot_eager")
    for lengths in ([0, 10, 40], [0, 33, 40]):
        found = []
        for function in (two_layers, compiled):
            out = function(q, k, v, torch.tensor(lengths, device="cuda"))
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        for eager, graph in zip(*found):
            torch.testing.assert_close(eager, graph, rtol=0.02, atol=0.02)
