"""The Hopper decoding kernel on the CPU: barriers, addresses and arithmetic under an emulator of Gluon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import compiled
from emulated_hopper import H200, check_case, emulated, served_cases
from sass import stack_traffic
from unwritten_cache import unwritten_cache

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import compare
from flashkernel.core.dispatch import explain
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Case
from flashkernel.lab.selection import shapes_only
from flashkernel.ops.decode import hopper
from flashkernel.ops.decode.configs import HOPPER, HopperConfig
from flashkernel.ops.decode.spec import DECODE_ATTENTION, _axes

SMALL = HopperConfig(32, 2, 1)


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper):
        yield


def _check(case: Case, config: HopperConfig = SMALL) -> None:
    with tune.override(HOPPER, config):
        check_case(DECODE_ATTENTION, case)


@pytest.mark.parametrize("case", served_cases(DECODE_ATTENTION), ids=lambda case: case.name)
def test_the_matrix(case: Case) -> None:
    _check(case)


LONGER = {
    "contiguous": Case("contiguous", _axes(2, 1, (8, 2), 128, 300, lengths=(300, 131)), {"return_lse": True}),
    "alone": Case("alone", _axes(1, 1, (4, 2), 64, 900), {"return_lse": True}),
    "heads-alone": Case("heads-alone", _axes(2, 1, (3, 3), 64, 200, least=1)),
    "groups-of-eight": Case("groups-of-eight", _axes(2, 1, (16, 2), 64, 333, least=1)),
    "verify": Case("verify", _axes(2, 4, (8, 2), 64, 260, lengths=(260, 3)), {"return_lse": True}),
    "uneven": Case("uneven", _axes(7, 1, (8, 2), 64, 400, lengths=(400, 0, 1, 64, 65, 0, 333)), {"return_lse": True}),
    "paged-16": Case("paged-16", _axes(3, 1, (8, 2), 128, 400, 16, lengths=(0, 399, 129)), present=("page_table",)),
    "paged-64": Case("paged-64", _axes(3, 2, (4, 2), 64, 400, 64, lengths=(400, 70, 1)), present=("page_table",)),
    "paged-256": Case("paged-256", _axes(2, 1, (4, 2), 64, 700, 256, lengths=(700, 257)), present=("page_table",)),
    "window": Case("window", _axes(3, 2, (4, 2), 64, 500, lengths=(500, 7, 170)), {"window": 150}),
    "paged-window": Case("paged-window", _axes(3, 2, (4, 2), 64, 512, 16, lengths=(500, 7, 170)),
                         {"window": 150, "sink_tokens": 37, "return_lse": True}, present=("page_table", "sinks")),
    "softcap": Case("softcap", _axes(2, 1, (4, 2), 64, 200, least=1), {"softcap": 1.5}),
    "negative-scale": Case("negative-scale", _axes(2, 1, (4, 2), 64, 200, least=1), {"scale": -0.2}),
    "wide-heads": Case("wide-heads", _axes(2, 1, (8, 2), 256, 150, 16, least=1), present=("page_table",)),
    "many-sequences": Case("many-sequences", _axes(40, 1, (2, 1), 64, 70, 16, least=0), present=("page_table",)),
}  # fmt: skip


@pytest.mark.parametrize("config", [SMALL, HopperConfig(64, 3, 2), HopperConfig(128, 2, 1)], ids=str)
@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str, config: HopperConfig) -> None:
    wide = LONGER[name].axes["head_dim"] == 256
    _check(LONGER[name], HopperConfig(32, config.num_stages, 1) if wide else config)


@pytest.mark.parametrize("page", [0, 16])
def test_one_sequence_in_many_parts(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than a unit has tiles; some units in one program, some in several, some programs idle."""
    for sms in (7, 23):
        with devices.pretend(replace(H200, sms=sms)):
            given = ("page_table",) if page else ()
            _check(Case("alone", _axes(1, 1, (8, 2), 64, 320, page), {"return_lse": True}, present=given))


def test_whole_units_leave_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many equal units as programs: each finishes one, and the combining kernel finds nothing to do."""
    case = Case("whole", _axes(3, 1, (8, 2), 64, 150), {"return_lse": True})
    inputs = DECODE_ATTENTION.make_inputs(case, torch.float16, "cpu")
    expected = fk.decode_attention(**inputs, backend="torch")
    started: list[str] = []
    emulated = hopper.launch

    def only_the_first(kernel: Any, *args: Any, **constants: Any) -> None:
        started.append(kernel.fn.__name__)
        if started[-1] == "decode_split_kv_hopper":
            emulated(kernel, *args, **constants)

    monkeypatch.setattr(hopper, "launch", only_the_first)
    with tune.override(HOPPER, HopperConfig(32, 3, 2)):
        found = fk.decode_attention(**inputs, backend="hopper")
    assert started == ["decode_split_kv_hopper", "decode_combine"]
    report = compare("whole", found, expected, tolerance=DECODE_ATTENTION.tolerance)
    assert report.ok, report.message


@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize("window, sink_tokens", [(None, 0), (20, 0), (70, 5)])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_what_was_never_written_does_not_show(page: int, window: int | None, sink_tokens: int, keys: int) -> None:
    counts = [3, 190, 256, 0]
    q, lengths, whole, holes, table = unwritten_cache(page, window, sink_tokens, counts, capacity=320)
    settings: dict[str, Any] = {"window": window, "sink_tokens": sink_tokens}
    expected = fk.decode_attention(q, *whole, lengths, **settings, backend="torch")
    with tune.override(HOPPER, HopperConfig(keys, 2, 2)):
        found = fk.decode_attention(q, *holes, lengths, table, **settings, backend="hopper")
    assert bool(found.isfinite().all())
    report = compare("holes", found, expected, tolerance=DECODE_ATTENTION.tolerance)
    assert report.ok, report.message


def _verdict(backend: str = "hopper", **changes: Any) -> tuple[str | None, str | None]:
    """(chosen, why not Hopper) of a call."""
    given: dict[str, Any] = {
        "q": torch.zeros(1, 1, 8, 64, dtype=torch.float16), "k": torch.zeros(1, 1024, 2, 64, dtype=torch.float16),
        "lengths": torch.ones(1, dtype=torch.int32), **changes,
    }  # fmt: skip
    answer = explain(fk.decode_attention, **{"v": given["k"], **given})
    return answer.chosen, next(verdict.reason for verdict in answer.verdicts if verdict.backend == backend)


def test_is_selected_for_long_caches_in_pages_and_serves_others_if_asked() -> None:
    paged = {
        "q": torch.zeros(1, 1, 8, 128, dtype=torch.float16), "k": torch.zeros(64, 16, 2, 128, dtype=torch.float16),
        "page_table": torch.arange(64, dtype=torch.int32)[None],
    }  # fmt: skip
    assert _verdict(**paged) == ("hopper", None)
    assert _verdict(**paged, window=513) == ("hopper", None)
    assert _verdict(**paged, window=128) == ("triton", None)
    assert _verdict() == ("triton", None)
    narrow = {"q": torch.zeros(1, 1, 8, 64, dtype=torch.float16), "k": torch.zeros(64, 16, 2, 64, dtype=torch.float16)}
    assert _verdict(**{**paged, **narrow}) == ("triton", None)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"prefix_length": 16}, "no shared prefix"),
        ({"q": torch.zeros(1, 17, 8, 64, dtype=torch.float16)}, "at most 64, not 68"),
        ({"v": torch.zeros(1, 1024, 2, 32, dtype=torch.float16)}, "equally wide"),
        ({"q": torch.zeros(1, 1, 8, 264).half(), "k": torch.zeros(1, 1024, 2, 264).half()}, "at most 256"),
        ({"q": torch.zeros(1, 1, 8, 64), "k": torch.zeros(1, 1024, 2, 64)}, "not in float32"),
        ({"k": torch.zeros(1, 1024, 2, 67, dtype=torch.float16)[..., :64]}, "multiples of 16 bytes"),
        ({"k": torch.zeros(1, 1024, 2, 64, dtype=torch.int8), "k_scale": torch.ones(1, 1024, 2),
          "v_scale": torch.ones(1, 1024, 2)}, "the queries' dtype, not int8"),
    ],
)  # fmt: skip
def test_declines_with_a_reason(changes: dict[str, Any], why: str) -> None:
    chosen, reason = _verdict(**changes)
    assert chosen == "triton"
    assert why in str(reason)


COMPILED = {
    "wide": (_axes(16, 1, (32, 8), 128, 8192), {}, HopperConfig(64, 7, 1)),
    "wide-128-keys": (_axes(16, 1, (32, 8), 128, 8192, 16), {}, HopperConfig(128, 3, 1)),
    "two-per-sm": (_axes(16, 1, (32, 8), 128, 8192, 16), {"window": 700, "softcap": 2.0}, HopperConfig(64, 3, 2)),
    "narrow-two": (_axes(64, 1, (64, 8), 64, 4096, 16), {"window": 700, "sink_tokens": 4}, HopperConfig(128, 3, 2)),
    "wider": (_axes(4, 4, (32, 8), 256, 8192, 16), {"window": 700, "sink_tokens": 4}, HopperConfig(32, 6, 1)),
    "many-sequences": (_axes(4096, 1, (8, 8), 64, 1024, 64), {}, HopperConfig(128, 6, 1)),
}  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_tile_copies_and_asynchronous_products(name: str) -> None:
    """Beside what test_compile.py derives from the benchmarks: every kind of config, and what it must fit into."""
    axes, options, config = COMPILED[name]
    case = Case(name, axes, options, present=("page_table",) if "max_pages" in axes else ())
    inputs = shapes_only(DECODE_ATTENTION, case, torch.bfloat16)
    with devices.pretend(H200), tune.override(HOPPER, config), collect_launches() as launches:
        fk.decode_attention(**inputs, **options, backend="hopper")
    machine = compiled(launches[0], 90)
    assert stack_traffic(machine.sass).stores == 0
    assert machine.stack <= 64
    assert config.programs_per_sm * (machine.shared + 1024) <= H200.shared_per_sm
    assert config.programs_per_sm * machine.registers * 256 <= H200.registers_per_sm
    assert "HGMMA" in machine.sass
    assert "UTMALDG.4D" in machine.sass
