"""The Hopper attention kernels on the CPU: barriers, addresses and arithmetic under an emulator of Gluon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch

from flashkernel.blocks.mask import Mask, causal, custom, documents, sink_tokens, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import compare, verify
from flashkernel.core.dispatch import explain
from flashkernel.core.gluon import (
    TensorDescriptor,
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashkernel.core.launch import Launch, launch, recording
from flashkernel.core.op import Case
from flashkernel.ops.attention import attention, hopper
from flashkernel.ops.attention.hopper.configs import BACKWARD, FORWARD, WIDE, Backward, Forward, Wide
from flashkernel.ops.attention.hopper.order import Lines, lengths, order
from flashkernel.ops.attention.hopper.walks import walks
from flashkernel.ops.attention.spec import ATTENTION, _axes


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 multiprocessors, and others in Triton's interpreter."""
    if request.node.get_closest_marker("gpu"):
        yield
        return

    monkeypatch.setattr(hopper, "launch", gluon_emulator.launch)
    with devices.pretend(replace(devices.KNOWN["h200"], sms=3)):
        yield


def _check(case: Case) -> None:
    failures = [report.message for report in verify(ATTENTION, case, torch.float16, "hopper", "cpu") if not report.ok]
    assert not failures, "\n".join(failures)


def _served() -> list[Case]:
    with devices.pretend(devices.KNOWN["h200"]):
        hopper_backend = ATTENTION.backend("hopper")
        found = []
        for case in ATTENTION.cases:
            inputs = ATTENTION.make_inputs(case, torch.float16, "cpu")
            verdicts = explain(ATTENTION.call, **inputs, **case.options).verdicts
            if next(v.reason for v in verdicts if v.backend == hopper_backend.name) is None:
                found.append(case)
        return found


@pytest.mark.parametrize("case", _served(), ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    _check(case)


def _documents() -> Mask:
    return causal() & documents((torch.arange(256) // 50).to(torch.int32).repeat(2, 1))


LONGER = {
    "plain": Case("plain", _axes(1, (130, 200), 2, 64)),
    "causal-64": Case("causal-64", _axes(2, 330, (2, 1), 64), {"mask": causal(), "return_lse": True}),
    "causal-128": Case("causal-128", _axes(1, 300, (2, 1), 128), {"mask": causal()}),
    "gpt-oss": Case("gpt-oss", _axes(1, 300, (8, 1), 64), {"mask": causal() & window(128)}, present=("sinks",)),
    "streaming": Case("streaming", _axes(1, 450, 1, 64), {"mask": (window(100) | sink_tokens(4)) & causal()}),
    "late-queries": Case("late-queries", _axes(1, (300, 150), 2, 64), {"mask": causal(), "return_lse": True}),
    "documents": Case("documents", _axes(2, 256, 2, 64), {"mask": _documents()}),
    "a-head-sees-nothing": Case(
        "a-head-sees-nothing", _axes(1, 150, (4, 2), 64), {"mask": custom(lambda b, h, q, k: (h % 2 == 1) & (k <= q))}
    ),
    "heads-differ": Case(
        "heads-differ",
        _axes(2, 333, (4, 2), 64),
        {"mask": custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0))},
    ),
    "softcap": Case("softcap", _axes(1, 130, 2, 128), {"mask": causal(), "softcap": 2.0}),
    "negative-scale": Case("negative-scale", _axes(1, 130, 2, 64), {"scale": -0.1}),
    "narrow-values": Case("narrow-values", _axes(1, 140, (4, 2), (128, 64)), {"mask": causal()}),
}


@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str) -> None:
    _check(LONGER[name])


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
def test_several_items_a_program_on_a_gpu(masked: bool, heads: Any, head_dim: int) -> None:
    """With 320 tiles of keys, every program takes two or three, one after another."""
    case = Case("items", _axes(8, 600, heads, head_dim), {"mask": causal()} if masked else {})
    reports = verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


WIDER = {
    "causal": Case("causal", _axes(1, 150, 1, 256), {"mask": causal(), "return_lse": True}),
    "full": Case("full", _axes(2, (130, 200), (2, 1), 256)),
    "window": Case("window", _axes(1, 330, 2, 256), {"mask": causal() & window(70)}),
    "sinks": Case("sinks", _axes(1, 140, (4, 1), 256), {"mask": causal() & window(64)}, present=("sinks",)),
    "softcap": Case("softcap", _axes(1, 130, 2, 256), {"mask": causal(), "softcap": 2.0}),
    "negative-scale": Case("negative-scale", _axes(1, 70, 2, 256), {"scale": -0.1}),
    "late-queries": Case("late-queries", _axes(1, (300, 150), 2, 256), {"mask": causal()}),
    "documents": Case("documents", _axes(2, 256, 1, 256), {"mask": _documents()}),
    "heads-differ": Case(
        "heads-differ",
        _axes(2, 200, (4, 2), 256),
        {"mask": custom(lambda b, h, q, k: (k <= q + 2 * h) & ((q + k) % 3 > 0))},
    ),
    "narrow-values": Case("narrow-values", _axes(1, 150, (4, 2), (192, 128)), {"mask": causal()}),
    "narrow-keys": Case("narrow-keys", _axes(1, (100, 140), 2, (64, 256)), {"mask": causal()}),
    "odd": Case("odd", _axes(1, (1, 77), 2, (136, 200)), {"softcap": 3.0}),
}


@pytest.mark.parametrize("name", WIDER)
def test_wide_heads(name: str) -> None:
    _check(WIDER[name])


@pytest.mark.parametrize("mask", ["few", "window", "full"])
@pytest.mark.parametrize(
    "dims, config",
    [(256, Wide(2)), ((192, 128), Wide(3)), ((192, 128), Wide(2))],
    ids=str,
)
def test_many_items_of_wide_heads_in_a_program(dims: Any, config: Wide, mask: str) -> None:
    """Items one after another, of many steps, of one, and of none."""
    masks = {"few": _few_see(), "window": causal() & window(64), "full": None}
    options = {} if masks[mask] is None else {"mask": masks[mask]}
    with tune.override(WIDE, config):
        _check(Case("items", _axes(1, (200, 530), (4, 2), dims), options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WIDER if name != "documents"])  # whose table is on the CPU
def test_wide_heads_on_a_gpu(name: str) -> None:
    reports = verify(ATTENTION, WIDER[name], torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, (8, 4)], ids=["each", "shared"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_several_items_of_wide_heads_a_program_on_a_gpu(masked: bool, heads: Any) -> None:
    """With 320 tiles of keys, every program takes two or three, one after another."""
    case = Case("items", _axes(8, 600, heads, 256), {"mask": causal()} if masked else {})
    reports = verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


CONFIGS = [
    (Forward(2, 128, 2, 1, 240, overlap=True), Backward(64, 2, False, False)),
    (Forward(3, 64, 4, 2, 160, overlap=True), Backward(64, 3, True, True)),
    (Forward(3, 128, 3, 1, 160), Backward(128, 2, False, True)),
    (Forward(3, 128, 3, 1, 160, overlap=True), Backward(64, 2, False, True)),
    (Forward(2, 128, 4, 1, 240), Backward(128, 3, False, False, held=1)),
    (Forward(4, 64, 5, 1, 112, overlap=True), Backward(128, 2, False, True, held=1)),
    (Forward(3, 64, 4, 2, 160, overlap=True), Backward(128, 2, False, True, dq="sent")),
    (Forward(2, 128, 4, 1, 240), Backward(64, 3, True, True, dq="apart")),
]


@pytest.mark.parametrize("forward, backward", CONFIGS, ids=str)
def test_every_kind_of_config(forward: Forward, backward: Backward) -> None:
    case = Case("config", _axes(1, (310, 290), (4, 2), 64), {"mask": causal() & window(150)})
    with tune.override(FORWARD, forward), tune.override(BACKWARD, backward):
        _check(case)


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed: int) -> None:
    chance = random.Random(seed)
    masks = [None, causal(), causal() & window(90), window(50, 40), (window(60) | sink_tokens(3)) & causal()]
    mask = chance.choice(masks)
    lengths = (chance.randint(1, 300), chance.randint(8, 300))
    _check(Case("random", _axes(1, lengths, (4, 2), chance.choice([64, 128])), {} if mask is None else {"mask": mask}))


def _far_apart() -> Mask:
    """Neighbouring rows of queries that see keys far apart: warpgroups hand back many tiles at once."""
    return custom(lambda b, h, q, k: ((q // 64) % 2 == 0) & (k < 70) | ((q // 64) % 2 == 1) & (k > 500) & (k < 640))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("mask", [_far_apart(), causal() & window(64), ~window(300)], ids=["far", "window", "outside"])
def test_many_items_in_a_walk(mask: Mask, stages: int, overlap: bool) -> None:
    """Items of few tiles, one after another in a program, with and without tiles to hand back between them."""
    case = Case("items", _axes(2, (520, 660), 2, 64), {"mask": mask, "return_lse": True}, gradients=False)
    with tune.override(FORWARD, Forward(2, 64, stages, 1, 240, overlap)):
        _check(case)


def _few_see() -> Mask:
    """Keys that no query sees, or those of one tile only, beside others that all see; heads differ."""
    return custom(lambda b, h, q, k: (k < 128) & (h < 3) | (k >= 256) & (k < 384) & (q < 40) | (k >= 500))


@pytest.mark.parametrize(
    "config",
    [
        Backward(64, 2, False, True, held=1),
        Backward(64, 2, False, True),
        Backward(64, 3, False, False, held=1),
        Backward(64, 3, False, False),
        Backward(128, 2, False, False),
        Backward(128, 2, False, True),
        Backward(128, 2, False, True, dq="sent"),
        Backward(128, 2, False, True, held=1, dq="sent"),
        Backward(64, 3, True, True, dq="apart"),
        Backward(64, 2, False, False, held=1, dq="apart"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [_few_see(), causal() & window(64), None], ids=["few", "window", "full"])
def test_many_items_of_keys_in_a_program(mask: Mask | None, config: Backward) -> None:
    """Items one after another (10 in 3 programs), of many steps, of fewer than there are stages, and of none."""
    case = Case("items", _axes(1, (260, 530), (4, 2), 64), {} if mask is None else {"mask": mask})
    with tune.override(BACKWARD, config):
        _check(case)


@pytest.mark.parametrize(
    "config, reason",
    [
        (Backward(64, 2, True, True, dq="apart"), "heads at most 64 wide"),
        (Backward(64, 2, True, True, dq="sent"), "tiles of 128 queries"),
        (Backward(64, 2, True, True, dq="part"), "one of halves, sent, apart, not part"),
    ],
    ids=["apart", "sent", "unknown"],
)
def test_configs_that_cannot_be(config: Backward, reason: str) -> None:
    shape = {"head_dim": 128, "value_dim": 128}
    assert reason in str(BACKWARD.valid(config, devices.KNOWN["h200"], shape))


def test_backward_programs_stay_where_lengths_are_known() -> None:
    """As many programs as multiprocessors; where tables decide what is seen, one for each of the 8 items."""
    q, k = (torch.zeros(2, 256, heads, 64, dtype=torch.float16) for heads in (4, 2))
    lse = torch.zeros(2, 4, 256)
    for mask, programs in ((None, 3), (causal(), 3), (_documents(), 8)):
        problem = hopper.Problem(mask, 1.0, 0.0, None, 0.0, 0)
        with pytest.MonkeyPatch.context() as patch, recording() as launches:
            patch.setattr(hopper, "launch", launch)
            hopper.backward(q, None, q, k, k, None, None, None, q, lse, problem, False)
        kernel = next(each for each in launches if each.name == "attention_backward")
        assert kernel.grid == (programs,)
        items = kernel.args[kernel.kernel.arg_names.index("orders")]
        assert (items[..., 0] >= 0).sum() == 8


@pytest.mark.parametrize("spare_first", [False, True])
@pytest.mark.parametrize("keys", [230, 288, 330])
@pytest.mark.parametrize(
    "mask", [None, causal(), causal() & window(70), ~window(100), custom(lambda b, h, q, k: k < 0)]
)
def test_walks_cover_what_is_visible(mask: Mask | None, keys: int, spare_first: bool) -> None:
    """Every visible pair lies in a tile that its warpgroup walks over and its program loads."""
    rows, columns, groups, queries = 16, 32, 3, 200
    found = walks(mask, 1, 1, queries, keys, rows, columns, groups, torch.device("cpu"), spare_first=spare_first)
    spare = (-queries // rows) % groups if spare_first else 0
    seen = torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask.visible(1, 1, queries, keys)[0, 0]
    for program in range(found.counts.shape[2]):
        runs = found.loads[0, 0, program, : found.counts[0, 0, program], :2].tolist()
        loaded = [tile for begin, end in runs for tile in range(begin, end)]
        for group in range(groups):
            lead, own, trail = found.plans[0, 0, program, group].tolist()
            assert lead + own + trail == len(loaded)
            walked = [
                (tile, masked)
                for begin, end, masked in found.runs[0, 0, program, group].tolist()
                for tile in range(begin, end)
            ]
            assert [tile for tile, _ in walked] == loaded[lead : lead + own]
            assert len(set(loaded)) == len(loaded)
            first = (program * groups + group - spare) * rows
            assert first >= 0 or own == 0
            block = seen[max(first, 0) : max(first + rows, 0)]
            full = {tile for tile, masked in walked if not masked}
            for tile in range(-(-keys // columns)):
                part = block[:, tile * columns : (tile + 1) * columns]
                assert not part.any() or tile in dict(walked)
                assert tile not in full or (bool(part.all()) and part.shape[1] == columns)


def test_the_shortest_walk_is_short_of_rows() -> None:
    """4096 queries are 64 parts, for 22 tiles of three warpgroups each: the two without any save a walk to the end."""
    tiles = []
    for spare_first in (False, True):
        shape = (4096, 4096, 64, 64, 3, torch.device("cpu"))
        found = walks(causal(), 1, 1, *shape, spare_first=spare_first)
        tiles.append(int(found.plans[..., 1].amax(-1).sum()))
    assert tiles == [757, 715]


def _numbers(items: torch.Tensor, lines: Lines) -> torch.Tensor:
    """Items as line * tiles + tile, and -1 after the last."""
    tile, b, h = items.unbind(-1)
    return torch.where(tile < 0, -1, (b * lines.per_batch + h // lines.pack) * lines.tiles + tile).int()


def _makespan(mask: Mask | None, batch: int, heads: int, length: int, config: Forward, together: int) -> float:
    """The longest program's work over the mean, on 132 multiprocessors; every item must be taken once."""
    found = walks(mask, batch, heads, length, length, config.rows, config.columns, config.groups, torch.device("cpu"))
    lines = Lines(batch * heads // config.pack, found.counts.shape[2], heads // config.pack, config.pack, together)
    shape = (length, config.rows, config.columns, config.groups)
    table = _numbers(order(mask, found, lines, 132, shape), lines)
    taken = table[table >= 0]
    assert torch.equal(taken.sort().values, torch.arange(lines.count * lines.tiles, dtype=torch.int32))
    assert (table[:, -1] == -1).all()
    assert not ((table[:, :-1] < 0) & (table[:, 1:] >= 0)).any(), "an item after the end"
    costs = torch.from_numpy(lengths(found, lines)).flatten()
    work = torch.where(table >= 0, costs[table.clamp(min=0).long()], 0.0).sum(1)
    return (work.max() / work.mean()).item()


@pytest.mark.parametrize("length, together", [(512, 137), (1024, 68), (4096, 17), (16384, 4)])
@pytest.mark.parametrize("config", [Forward(2, 128, 2, 1, 240), Forward(3, 128, 3, 1, 160)], ids=["d128", "d64"])
def test_programs_have_equal_work(length: int, together: int, config: Forward) -> None:
    assert _makespan(causal(), 16384 // length, 16 * (config.groups - 1), length, config, together) < 1.025


def test_windows_and_packed_heads_have_equal_work() -> None:
    assert _makespan(causal() & window(128), 1, 64, 16384, Forward(3, 64, 4, 8, 160), 40) < 1.02
    assert _makespan(causal(), 1, 32, 4096, Forward(2, 128, 2, 4, 240), 8) < 1.02


def test_keys_of_heads_that_differ_have_equal_work() -> None:
    """The lengths of a tile of keys are summed over the heads that share it, and the longest are taken first."""
    mask = custom(lambda b, h, q, k: (k <= q) & ((h % 4 == 0) | (k < 200)))
    found = walks(mask, 2, 16, 2048, 2048, 128, 64, 1, torch.device("cpu"), turned=True)
    lines = Lines(2 * 4, 16, 4, 1, 8, turned=True, group=4)
    costs = torch.from_numpy(lengths(found, lines))
    assert costs.shape == (8, 16)
    assert costs[0, 0] == 4 * 32 + 1  # all four heads see the first tile
    assert costs[0, 8] == 16 + 1  # and one the ninth
    table = _numbers(order(mask, found, lines, 5, (2048, 2048, 64)), lines)
    assert torch.equal(table[table >= 0].sort().values, torch.arange(8 * 16, dtype=torch.int32))
    work = torch.where(table >= 0, costs.flatten()[table.clamp(min=0).long()], 0.0)
    assert (work[:, :-1] >= work[:, 1:]).all()
    assert work.sum(1).max() / work.sum(1).mean() < 1.02


@pytest.mark.parametrize(
    "options, why",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"deterministic": True}, "atomics"),
        ({"score": lambda s, b, h, q, k: s * 2}, "score function"),
    ],
)
def test_declines_with_a_reason(options: dict[str, Any], why: str) -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    answer = explain(attention, q, q, q, **options)
    assert answer.chosen == "triton"
    assert why in next(verdict.reason for verdict in answer.verdicts if verdict.backend == "hopper")


def test_the_emulator_finds_what_is_wrong_with_barriers() -> None:
    machine = gluon_emulator.Machine(0, 1, random.Random(0))
    gluon_emulator._local.machine = machine
    barrier = gluon_emulator.Barrier()
    gluon_emulator._init(barrier, 2)
    gluon_emulator._arrive(barrier)
    with pytest.raises(gluon_emulator.Deadlock):
        gluon_emulator._wait(barrier, 0)
    machine.failure = None
    gluon_emulator._arrive(barrier)
    gluon_emulator._wait(barrier, 0)
    with pytest.raises(AssertionError, match="more often"):
        gluon_emulator._arrive(barrier, count=3)


@gluon.jit
def _load_two(x, tile, full, empty):
    for step in range(2):
        mbarrier.wait(empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(full.index(0), x.block_type.nbytes)
        load_tile(x, [step * 64, 0], full.index(0), tile)


@gluon.jit
def _square_two(out, tile, full, empty, EARLY: gl.constexpr):
    for step in range(2):
        mbarrier.wait(full.index(0), step & 1)
        nothing = gl.zeros([64, 64], gl.float32, None)
        later = warpgroup_mma(tile, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if EARLY:
            mbarrier.arrive(empty.index(0), count=1)
        product = warpgroup_mma_wait(0, deps=[later])
        if not EARLY:
            mbarrier.arrive(empty.index(0), count=1)
        gl.store(out + step, gl.sum(gl.sum(product, 1), 0))


@gluon.jit
def _square_kernel(out, x, EARLY: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize([(_square_two, (out, tile, full, empty, EARLY)), (_load_two, (x, tile, full, empty))], [1], [24])


@pytest.mark.parametrize("early", [False, True])
def test_the_emulator_finds_a_buffer_handed_back_too_early(early: bool) -> None:
    """A product reads its operands until it is awaited: a buffer given up before that may be overwritten."""
    x = torch.randn(128, 64).to(torch.float16)
    described = TensorDescriptor(x, [128, 64], [64, 1], [64, 64], gl.NVMMASharedLayout(128, 16))
    expected = torch.stack([(part @ part.T).sum() for part in x.float().split(64)])
    right = []
    for seed in range(10):
        out = torch.zeros(2)
        gluon_emulator.run(Launch(_square_kernel, (1,), (out, described), {"EARLY": early}), seed=seed)
        right.append(torch.allclose(out, expected, rtol=1e-3))
    assert all(right) != early
