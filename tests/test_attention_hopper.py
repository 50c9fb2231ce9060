"""The Hopper attention kernels on the CPU: barriers, addresses and arithmetic under an emulator of Gluon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_hopper import check_case, emulated, served_cases
from in_turn import in_turn

from flashkernel.blocks.mask import Mask, causal, custom, documents, sink_tokens, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import compare, verify
from flashkernel.core.dispatch import explain
from flashkernel.core.launch import collect_launches, launch
from flashkernel.core.op import Case
from flashkernel.ops.attention import attention, hopper
from flashkernel.ops.attention.hopper.backward_configs import (
    BACKWARD,
    WIDE_BACKWARD,
    BackwardConfig,
    WideBackwardConfig,
)
from flashkernel.ops.attention.hopper.block_ranges import block_ranges
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, Forward
from flashkernel.ops.attention.hopper.tile_scheduler import TileGrid, tile_costs, tile_schedule
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, OutputGradients
from flashkernel.ops.attention.spec import ATTENTION
from flashkernel.ops.attention.workload import axes_of


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch):
        yield


@pytest.mark.parametrize("case", served_cases(ATTENTION), ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    check_case(ATTENTION, case)


def _documents() -> Mask:
    return causal() & documents((torch.arange(256) // 50).to(torch.int32).repeat(2, 1))


LONGER = {
    "plain": Case("plain", axes_of(1, (130, 200), 2, 64)),
    "causal-64": Case("causal-64", axes_of(2, 330, (2, 1), 64), {"mask": causal(), "return_lse": True}),
    "causal-128": Case("causal-128", axes_of(1, 300, (2, 1), 128), {"mask": causal()}),
    "gpt-oss": Case("gpt-oss", axes_of(1, 300, (8, 1), 64), {"mask": causal() & window(128)}, present=("sinks",)),
    "streaming": Case("streaming", axes_of(1, 450, 1, 64), {"mask": (window(100) | sink_tokens(4)) & causal()}),
    "late-queries": Case("late-queries", axes_of(1, (300, 150), 2, 64), {"mask": causal(), "return_lse": True}),
    "documents": Case("documents", axes_of(2, 256, 2, 64), {"mask": _documents()}),
    "a-head-sees-nothing": Case(
        "a-head-sees-nothing", axes_of(1, 150, (4, 2), 64), {"mask": custom(lambda b, h, q, k: (h % 2 == 1) & (k <= q))}
    ),
    "heads-differ": Case(
        "heads-differ",
        axes_of(2, 333, (4, 2), 64),
        {"mask": custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0))},
    ),
    "softcap": Case("softcap", axes_of(1, 130, 2, 128), {"mask": causal(), "softcap": 2.0}),
    "negative-scale": Case("negative-scale", axes_of(1, 130, 2, 64), {"scale": -0.1}),
    "narrow-values": Case("narrow-values", axes_of(1, 140, (4, 2), (128, 64)), {"mask": causal()}),
}


@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str) -> None:
    check_case(ATTENTION, LONGER[name])


def test_a_sink_that_is_none_beside_rows_that_see_nothing() -> None:
    """A logit of -inf is no sink, and a row without any column has an lse of -inf and no output."""
    q, k = (torch.randn(1, length, 2, 64, dtype=torch.float16) for length in (90, 40))
    sinks = torch.tensor([float("-inf"), 0.5], dtype=torch.float16)
    wide = [x.double() for x in (q, k, k)]
    o, lse = attention(q, k, k, sinks=sinks, mask=causal(), backend="hopper", return_lse=True)
    expected, lse_expected = attention(
        *wide, sinks=sinks.double(), mask=causal(), backend="reference", return_lse=True
    )  # fmt: skip
    for name, mine, exact in (("output", o, expected), ("lse", lse, lse_expected)):
        report = compare(name, mine, exact, tolerance=ATTENTION.tolerance, input_dtype=torch.float16)
        assert report.ok, report.message
    assert (lse[0, 0, :50] == float("-inf")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["heads-differ", "a-head-sees-nothing"])
def test_heads_that_differ_on_a_gpu(name: str) -> None:
    """The emulator runs the source; what the compiler makes of loops inside loops shows on a GPU alone."""
    reports = verify(ATTENTION, LONGER[name], torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, (16, 8)], ids=["each", "shared"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_several_work_tiles_per_program_on_a_gpu(masked: bool, heads: Any, head_dim: int) -> None:
    """With 320 tiles of keys, every program takes two or three, one after another."""
    case = Case("work-tiles", axes_of(8, 600, heads, head_dim), {"mask": causal()} if masked else {})
    reports = verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


WIDER = {
    "causal": Case("causal", axes_of(1, 150, 1, 256), {"mask": causal(), "return_lse": True}),
    "full": Case("full", axes_of(2, (130, 200), (2, 1), 256)),
    "window": Case("window", axes_of(1, 330, 2, 256), {"mask": causal() & window(70)}),
    "sinks": Case("sinks", axes_of(1, 140, (4, 1), 256), {"mask": causal() & window(64)}, present=("sinks",)),
    "softcap": Case("softcap", axes_of(1, 130, 2, 256), {"mask": causal(), "softcap": 2.0}),
    "negative-scale": Case("negative-scale", axes_of(1, 70, 2, 256), {"scale": -0.1}),
    "late-queries": Case("late-queries", axes_of(1, (300, 150), 2, 256), {"mask": causal()}),
    "documents": Case("documents", axes_of(2, 256, 1, 256), {"mask": _documents()}),
    "heads-differ": Case(
        "heads-differ",
        axes_of(2, 200, (4, 2), 256),
        {"mask": custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0))},
    ),
    "narrow-values": Case("narrow-values", axes_of(1, 150, (4, 2), (192, 128)), {"mask": causal()}),
    "narrow-keys": Case("narrow-keys", axes_of(1, (100, 140), 2, (64, 256)), {"mask": causal()}),
    "odd": Case("odd", axes_of(1, (1, 77), 2, (136, 200)), {"softcap": 3.0}),
}


@pytest.mark.parametrize("name", WIDER)
def test_wide_heads(name: str) -> None:
    check_case(ATTENTION, WIDER[name])


@pytest.mark.parametrize("mask", ["few", "window", "full"])
@pytest.mark.parametrize(
    "dims, config",
    [(256, WideBackwardConfig(2)), ((192, 128), WideBackwardConfig(3)), ((192, 128), WideBackwardConfig(2))],
    ids=str,
)
def test_many_work_tiles_of_wide_heads_in_a_program(dims: Any, config: WideBackwardConfig, mask: str) -> None:
    """Work tiles one after another, of many blocks of queries, of one, and of none."""
    masks = {"few": _few_see(), "window": causal() & window(64), "full": None}
    options = {} if masks[mask] is None else {"mask": masks[mask]}
    with tune.override(WIDE_BACKWARD, config):
        check_case(ATTENTION, Case("work-tiles", axes_of(1, (200, 530), (4, 2), dims), options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WIDER if name != "documents"])  # whose table is on the CPU
def test_wide_heads_on_a_gpu(name: str) -> None:
    reports = verify(ATTENTION, WIDER[name], torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, (8, 4)], ids=["each", "shared"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_several_work_tiles_of_wide_heads_a_program_on_a_gpu(masked: bool, heads: Any) -> None:
    """With 320 tiles of keys, every program takes two or three, one after another."""
    case = Case("work-tiles", axes_of(8, 600, heads, 256), {"mask": causal()} if masked else {})
    reports = verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


CONFIGS = [
    (Forward(2, 128, 2, 1, 240, overlap=True), BackwardConfig(64, 2, False, False)),
    (Forward(3, 64, 4, 2, 160, overlap=True), BackwardConfig(64, 3, True, True)),
    (Forward(3, 128, 3, 1, 160), BackwardConfig(128, 2, False, True)),
    (Forward(3, 128, 3, 1, 160, overlap=True), BackwardConfig(64, 2, False, True)),
    (Forward(2, 128, 4, 1, 240), BackwardConfig(128, 3, False, False, kv_stages=1)),
    (Forward(4, 64, 5, 1, 112, overlap=True), BackwardConfig(128, 2, False, True, kv_stages=1)),
    (Forward(3, 64, 4, 2, 160, overlap=True), BackwardConfig(128, 2, False, True, dq_mode="tma_reduce")),
    (Forward(2, 128, 4, 1, 240), BackwardConfig(64, 3, True, True, dq_mode="dq_warpgroup")),
]


@pytest.mark.parametrize("forward, backward", CONFIGS, ids=str)
def test_every_kind_of_config(forward: Forward, backward: BackwardConfig) -> None:
    case = Case("config", axes_of(1, (310, 290), (4, 2), 64), {"mask": causal() & window(150)})
    with tune.override(FORWARD, forward), tune.override(BACKWARD, backward):
        check_case(ATTENTION, case)


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed: int) -> None:
    chance = random.Random(seed)
    masks = [None, causal(), causal() & window(90), window(50, 40), (window(60) | sink_tokens(3)) & causal()]
    mask = chance.choice(masks)
    lengths = (chance.randint(1, 300), chance.randint(8, 300))
    check_case(
        ATTENTION,
        Case("random", axes_of(1, lengths, (4, 2), chance.choice([64, 128])), {} if mask is None else {"mask": mask}),
    )


def _far_apart() -> Mask:
    """Neighboring consumers see keys far apart: they skip many K blocks."""
    return custom(lambda b, h, q, k: ((q // 64) % 2 == 0) & (k < 70) | ((q // 64) % 2 == 1) & (k > 500) & (k < 640))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("mask", [_far_apart(), causal() & window(64), ~window(300)], ids=["far", "window", "outside"])
def test_many_short_work_tiles(mask: Mask, stages: int, overlap: bool) -> None:
    """Work tiles of few K blocks, one after another in a program, with and without skipped blocks between them."""
    case = Case("tiles", axes_of(2, (520, 660), 2, 64), {"mask": mask, "return_lse": True}, gradients=False)
    with tune.override(FORWARD, Forward(2, 64, stages, 1, 240, overlap)):
        check_case(ATTENTION, case)


def _few_see() -> Mask:
    """Keys that no query sees, or those of one tile only, beside others that all see; heads differ."""
    return custom(lambda b, h, q, k: (k < 128) & (h < 3) | (k >= 256) & (k < 384) & (q < 40) | (k >= 500))


MANY_TILES = [
    BackwardConfig(64, 2, False, True, kv_stages=1),
    BackwardConfig(64, 2, False, True),
    BackwardConfig(64, 3, False, False, kv_stages=1),
    BackwardConfig(64, 3, False, False),
    BackwardConfig(128, 2, False, False),
    BackwardConfig(128, 2, False, True),
    BackwardConfig(128, 2, False, True, dq_mode="tma_reduce"),
    BackwardConfig(128, 2, False, True, kv_stages=1, dq_mode="tma_reduce"),
    BackwardConfig(64, 3, True, True, dq_mode="dq_warpgroup"),
    BackwardConfig(64, 2, False, False, kv_stages=1, dq_mode="dq_warpgroup"),
]


@pytest.mark.parametrize("config, seen", in_turn(MANY_TILES, ["few", "window", "full"]))
def test_many_tiles_of_keys_in_a_program(config: BackwardConfig, seen: str) -> None:
    """Work tiles one after another (10 in 3 programs), of many blocks of queries, of fewer than stages, of none."""
    mask = {"few": _few_see(), "window": causal() & window(64), "full": None}[seen]
    case = Case("work-tiles", axes_of(1, (260, 530), (4, 2), 64), {} if mask is None else {"mask": mask})
    with tune.override(BACKWARD, config):
        check_case(ATTENTION, case)


@pytest.mark.parametrize(
    "config, reason",
    [
        (BackwardConfig(64, 2, True, True, dq_mode="dq_warpgroup"), "heads at most 64 wide"),
        (BackwardConfig(64, 2, True, True, dq_mode="tma_reduce"), "blocks of 128 queries"),
        (BackwardConfig(64, 2, True, True, dq_mode="third"), "one of atomic, tma_reduce, dq_warpgroup, dq_kernel, not"),
    ],
    ids=["dq_warpgroup", "tma_reduce", "unknown"],
)
def test_invalid_backward_configs(config: BackwardConfig, reason: str) -> None:
    shape = {"head_dim": 128, "value_dim": 128}
    assert reason in str(BACKWARD.valid(config, devices.KNOWN["h200"], shape))


def test_backward_programs_are_persistent_if_lengths_are_known() -> None:
    """Persistent programs, one per SM; if the mask has tables, one program for each of the 8 work tiles."""
    q, k = (torch.zeros(2, 256, heads, 64, dtype=torch.float16) for heads in (4, 2))
    lse = torch.zeros(2, 4, 256)
    for mask, programs in ((None, 3), (causal(), 3), (_documents(), 8)):
        params = AttentionParams(mask, 1.0, 0.0, None, 0.0, 0)
        with pytest.MonkeyPatch.context() as patch, collect_launches() as launches:
            patch.setattr(hopper.backward_launch, "launch", launch)
            hopper.backward(OutputGradients(q, lse, q, None), AttentionInputs(q, k, k, None, None, None), params, False)
        kernel = next(each for each in launches if each.name == "attention_backward")
        assert kernel.grid == (programs,)
        schedule = kernel.args[kernel.kernel.arg_names.index("tables")].schedule
        assert (schedule[..., 0] >= 0).sum() == 8


@pytest.mark.parametrize("pad_front", [False, True])
@pytest.mark.parametrize("seqlen_k", [230, 288, 330])
@pytest.mark.parametrize(
    "mask", [None, causal(), causal() & window(70), ~window(100), custom(lambda b, h, q, k: k < 0)]
)
def test_block_ranges_cover_what_is_visible(mask: Mask | None, seqlen_k: int, pad_front: bool) -> None:
    """Every visible (query, key) lies in a K block that its consumer visits and its producer loads."""
    block_m, block_n, consumers, seqlen_q = 16, 32, 3, 200
    shape = (1, 1, seqlen_q, seqlen_k, block_m, block_n, consumers, torch.device("cpu"))
    found = block_ranges(mask, *shape, pad_front=pad_front)
    padding = (-seqlen_q // block_m) % consumers if pad_front else 0
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if mask is not None:
        visible = mask.visible(1, 1, seqlen_q, seqlen_k)[0, 0]
    for work_tile in range(found.load_counts.shape[2]):
        loads = found.loads[0, 0, work_tile, : found.load_counts[0, 0, work_tile], :2].tolist()
        loaded = [block for first, end in loads for block in range(first, end)]
        for consumer in range(consumers):
            before, visits, after = found.counts[0, 0, work_tile, consumer].tolist()
            assert before + visits + after == len(loaded)
            visited = [
                (block, masked)
                for first, end, masked in found.ranges[0, 0, work_tile, consumer].tolist()
                for block in range(first, end)
            ]
            assert [block for block, _ in visited] == loaded[before : before + visits]
            assert len(set(loaded)) == len(loaded)
            first_query = (work_tile * consumers + consumer - padding) * block_m
            assert first_query >= 0 or visits == 0
            rows = visible[max(first_query, 0) : max(first_query + block_m, 0)]
            unmasked = {block for block, masked in visited if not masked}
            for block in range(-(-seqlen_k // block_n)):
                part = rows[:, block * block_n : (block + 1) * block_n]
                assert not part.any() or block in dict(visited)
                assert block not in unmasked or (bool(part.all()) and part.shape[1] == block_n)


def test_padding_in_front_shortens_the_longest_consumers() -> None:
    """4096 queries are 64 blocks, 22 work tiles of three consumers: two consumers without queries cost no K blocks."""
    visited = []
    for pad_front in (False, True):
        shape = (4096, 4096, 64, 64, 3, torch.device("cpu"))
        found = block_ranges(causal(), 1, 1, *shape, pad_front=pad_front)
        visited.append(int(found.counts[..., 1].amax(-1).sum()))
    assert visited == [757, 715]


def _tile_numbers(schedule: torch.Tensor, grid: TileGrid) -> torch.Tensor:
    """Work tiles as head * tiles_per_head + tile, and -1 after the last."""
    tile, b, h = schedule.unbind(-1)
    number = (b * grid.heads_per_batch + h // grid.pack_gqa) * grid.tiles_per_head + tile
    return torch.where(tile < 0, -1, number).int()


def _makespan(mask: Mask | None, batch: int, heads: int, seqlen: int, config: Forward, head_group: int) -> float:
    """The longest program's work over the mean, on 132 SMs; every work tile must be taken once."""
    shape = (seqlen, seqlen, config.block_m, config.block_n, config.num_consumers)
    found = block_ranges(mask, batch, heads, *shape, torch.device("cpu"))
    packed = heads // config.pack_gqa
    grid = TileGrid(batch * packed, found.load_counts.shape[2], packed, config.pack_gqa, head_group)
    table = _tile_numbers(tile_schedule(mask, found, grid, 132, shape), grid)
    taken = table[table >= 0]
    assert torch.equal(taken.sort().values, torch.arange(grid.batch_heads * grid.tiles_per_head, dtype=torch.int32))
    assert (table[:, -1] == -1).all()
    assert not ((table[:, :-1] < 0) & (table[:, 1:] >= 0)).any(), "a work tile after the end"
    costs = torch.from_numpy(tile_costs(found, grid)).flatten()
    work = torch.where(table >= 0, costs[table.clamp(min=0).long()], 0.0).sum(1)
    return (work.max() / work.mean()).item()


@pytest.mark.parametrize("seqlen, head_group", [(512, 137), (1024, 68), (4096, 17), (16384, 4)])
@pytest.mark.parametrize("config", [Forward(2, 128, 2, 1, 240), Forward(3, 128, 3, 1, 160)], ids=["d128", "d64"])
def test_programs_have_equal_work(seqlen: int, head_group: int, config: Forward) -> None:
    heads = 16 * (config.num_consumers - 1)
    assert _makespan(causal(), 16384 // seqlen, heads, seqlen, config, head_group) < 1.025


def test_windows_and_packed_heads_have_equal_work() -> None:
    assert _makespan(causal() & window(128), 1, 64, 16384, Forward(3, 64, 4, 8, 160), 40) < 1.02
    assert _makespan(causal(), 1, 32, 4096, Forward(2, 128, 2, 4, 240), 8) < 1.02


def test_key_tiles_of_heads_that_differ_have_equal_work() -> None:
    """The cost of a tile of keys is summed over the query heads of its kv head, and the longest are taken first."""
    mask = custom(lambda b, h, q, k: (k <= q) & ((h % 4 == 0) | (k < 200)))
    found = block_ranges(mask, 2, 16, 2048, 2048, 64, 128, 1, torch.device("cpu"), transposed=True)
    grid = TileGrid(2 * 4, 16, 4, 1, 8, transposed=True, group_size=4)
    costs = torch.from_numpy(tile_costs(found, grid))
    assert costs.shape == (8, 16)
    assert costs[0, 0] == 4 * 32 + 1  # all four heads see the first tile
    assert costs[0, 8] == 16 + 1  # and one the ninth
    table = _tile_numbers(tile_schedule(mask, found, grid, 5, (2048, 2048, 64)), grid)
    assert torch.equal(table[table >= 0].sort().values, torch.arange(8 * 16, dtype=torch.int32))
    work = torch.where(table >= 0, costs.flatten()[table.clamp(min=0).long()], 0.0)
    assert (work[:, :-1] >= work[:, 1:]).all()
    assert work.sum(1).max() / work.sum(1).mean() < 1.02


@pytest.mark.parametrize(
    "options, why",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"score": lambda s, b, h, q, k: s * 2}, "score function"),
    ],
)
def test_declines_with_a_reason(options: dict[str, Any], why: str) -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    answer = explain(attention, q, q, q, **options)
    assert answer.chosen == "triton"
    assert why in next(verdict.reason for verdict in answer.verdicts if verdict.backend == "hopper")
