"""Decoding and paged prefill in CUDA C++, on the CPU under the emulator: what the generated matrix does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_emulator import emulated, unavailable
from in_turn import in_turn
from torch import Tensor
from unwritten_cache import unwritten_cache

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import compare, verify
from flashkernel.core.dispatch import explain
from flashkernel.core.op import Case
from flashkernel.ops.decode import cuda as kernels
from flashkernel.ops.decode.cuda.configs import PREFILL, SPLIT, PrefillConfig, SplitConfig
from flashkernel.ops.decode.spec import DECODE_ATTENTION, PAGED_ATTENTION, _axes, _packed

needs_emulator = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
ARCHS = (75, 80)
builds = pytest.mark.parametrize("arch", ARCHS)
T4 = devices.KNOWN["t4"]


@contextmanager
def built(arch: int, monkeypatch: pytest.MonkeyPatch, sms: int = 3) -> Iterator[None]:
    """The emulator as a GPU of few SMs."""
    with monkeypatch.context() as patch, emulated(arch if arch < 80 else None):
        patch.setitem(devices.KNOWN, "a100", replace(devices.KNOWN["a100"], sms=sms))
        yield


def _config(arch: int, warps: int = 4, keys: int = 16, stages: int = 2, programs: int = 2) -> SplitConfig:
    return SplitConfig(warps, keys, 1 if arch < 80 else stages, programs)


LONG = {
    "paged": Case("paged", _axes(3, 1, (8, 2), 64, 900, 16, lengths=(900, 0, 613)), {"return_lse": True},
                  present=("page_table",)),
    "wide-heads": Case("wide-heads", _axes(2, 1, (4, 2), 256, 600, 16, least=1), present=("page_table",)),
    "wide-int8": Case("wide-int8", _axes(2, 1, (4, 2), (256, 192), 600, 64, least=1, levels=127),
                      present=("page_table", "k_scale", "v_scale"), dtype_of={"k": torch.int8, "v": torch.int8}),
    "rows": Case("rows", _axes(2, 5, (16, 2), 128, 700, 32, least=5), {"return_lse": True}, present=("page_table",)),
    "rows-fp8": Case("rows-fp8", _axes(1, 3, (14, 2), 64, 700, 16, least=5, levels=15),
                     present=("page_table", "k_scale", "v_scale"),
                     dtype_of={"k": torch.float8_e4m3fn, "v": torch.float8_e4m3fn}),
    "window": Case("window", _axes(3, 2, (4, 2), 64, 2100, 16, lengths=(2000, 3, 2100)),
                   {"window": 900, "sink_tokens": 37, "return_lse": True}, present=("page_table", "sinks")),
    "negative-scale": Case("negative-scale", _axes(1, 1, (4, 2), 64, 600), {"scale": -0.2, "softcap": 1.5}),
    "prefix": Case("prefix", _axes(3, 1, (4, 2), 64, 800, 16, shared=320, lengths=(700, 330, 800)),
                   {"prefix_length": 320}, present=("page_table",)),
    "many-sequences": Case("many-sequences", _axes(200, 1, (2, 1), 64, 560, 16, least=0), present=("page_table",)),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("name, arch", in_turn(LONG, ARCHS))
def test_split_over_few_and_many_programs(name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges end inside work tiles and at their ends; some programs idle, some take several work tiles."""
    few = _config(arch, programs=1 if LONG[name].axes["head_dim"] == 256 else 2)
    for sms, config in ((3, few), (41, _config(arch, 2, 32, 3, 1)))[: 2 if name in ("paged", "window") else 1]:
        with built(arch, monkeypatch, sms), tune.override(SPLIT, config):
            reports = list(verify(DECODE_ATTENTION, LONG[name], torch.float16, "cuda"))
        assert reports
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@needs_emulator
def test_whole_work_tiles_leave_nothing_to_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many equal work tiles as programs: each program finishes one."""
    case = Case("whole", _axes(3, 1, (8, 2), 64, 640), {"return_lse": True})
    inputs = DECODE_ATTENTION.make_inputs(case, torch.float16, "cpu")
    expected = fk.decode_attention(**inputs, backend="torch")
    with built(80, monkeypatch), tune.override(SPLIT, _config(80)):
        monkeypatch.setattr(kernels, "_kernel", _without_combine(kernels._kernel))
        found = fk.decode_attention(**inputs, backend="cuda")
    report = compare("whole", found, expected, tolerance=DECODE_ATTENTION.tolerance)
    assert report.ok, report.message


def _without_combine(kernel: Any) -> Any:
    class Nothing:
        def launch(self, *args: Any) -> None:
            pass

    return lambda name, *parameters: Nothing() if name == "decode_combine" else kernel(name, *parameters)


PREFILLS = {
    "long": Case("long", _packed(150, (0, 7, 150), (8, 2), 64, 700, 16, lengths=(300, 700)), {"return_lse": True}),
    "wide-heads": Case("wide-heads", _packed(40, (0, 40), (4, 2), 256, 200, 32, lengths=(150,))),
    "groups-of-seventy": Case("groups-of-seventy", _packed(9, (0, 3, 9), (70, 1), 64, 100, 16, lengths=(40, 100))),
    "window": Case("window", _packed(140, (0, 40, 140), (4, 2), 128, 800, 16, lengths=(500, 800)),
                   {"window": 130, "sink_tokens": 20, "return_lse": True}, present=("sinks",)),
    "int8": Case("int8", _packed(70, (0, 70), (4, 2), 128, 300, 64, lengths=(300,), levels=127),
                 present=("k_scale", "v_scale"), dtype_of={"k": torch.int8, "v": torch.int8}),
    "many-sequences": Case("many-sequences", _packed(150, tuple(range(151)), (2, 1), 64, 48, 16, least=0)),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("name, arch", in_turn(PREFILLS, ARCHS))
def test_prefill_of_several_tiles(name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with built(arch, monkeypatch):
        reports = list(verify(PAGED_ATTENTION, PREFILLS[name], torch.float16, "cuda"))
        assert reports
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)
        if name == "long":
            with tune.override(PREFILL, PrefillConfig(2, 32)):
                reports = list(verify(PAGED_ATTENTION, PREFILLS[name], torch.float16, "cuda"))
            assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@needs_emulator
@builds
@pytest.mark.parametrize("window, sink_tokens", [(None, 0), (20, 0), (570, 5)])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_uninitialized_memory_does_not_show(
    page: int, window: int | None, sink_tokens: int, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, lengths, whole, holes, table = unwritten_cache(page, window, sink_tokens, [3, 190, 640, 0], 640)
    options: dict[str, Any] = {"window": window, "sink_tokens": sink_tokens}
    expected = fk.decode_attention(q, *whole, lengths, **options, backend="torch")
    with built(arch, monkeypatch), tune.override(SPLIT, _config(arch)):
        found = fk.decode_attention(q, *holes, lengths, table, **options, backend="cuda")
        assert bool(found.isfinite().all())
        report = compare("holes", found, expected, tolerance=DECODE_ATTENTION.tolerance)
        assert report.ok, report.message
        if table is not None:  # the same queries, packed
            starts = torch.arange(0, 10, 2, dtype=torch.int32)
            packed = fk.paged_attention(q.flatten(0, 1), *holes, starts, lengths, table, **options, backend="cuda")
            report = compare("holes", packed.view_as(expected), expected, tolerance=PAGED_ATTENTION.tolerance)
            assert report.ok, report.message


@needs_emulator
@builds
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_byte_of_a_quantized_cache(stored: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key the output is its value: all 256, NaN included."""
    v = torch.arange(256, dtype=torch.uint8).view(stored).view(1, 1, 4, 64)
    k = torch.zeros(1, 1, 4, 64, dtype=stored)
    scale = torch.full((1, 1, 4), 0.5)
    q, lengths = torch.randn(1, 1, 4, 64).half(), torch.ones(1, dtype=torch.int32)
    with built(arch, monkeypatch):
        found = fk.decode_attention(q, k, v, lengths, k_scale=scale, v_scale=scale, backend="cuda")
    torch.testing.assert_close(found[:, 0], (v.float() * 0.5).half()[:, 0], rtol=0, atol=0, equal_nan=True)


def _verdict(**changes: Any) -> tuple[str | None, str | None]:
    """(chosen, why not cuda) of a call on a T4."""
    given: dict[str, Any] = {
        "q": torch.zeros(2, 1, 32, 128).half(), "k": torch.zeros(64, 16, 8, 128).half(),
        "lengths": torch.ones(2, dtype=torch.int32), "page_table": torch.zeros(2, 8, dtype=torch.int32), **changes,
    }  # fmt: skip
    with devices.pretend(T4):
        answer = explain(fk.decode_attention, **{"v": given["k"], **given})
    return answer.chosen, next(verdict.reason for verdict in answer.verdicts if verdict.backend == "cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q": torch.zeros(2, 1, 12, 64).half(), "k": torch.zeros(64, 16, 12, 64).half()},  # GPT-2
        {"q": torch.zeros(2, 4, 64, 64).half(), "k": torch.zeros(64, 256, 8, 64).half(), "window": 128,
         "sinks": torch.zeros(64)},  # gpt-oss, verifying a draft
        {"k": torch.zeros(64, 16, 8, 128, dtype=torch.int8), "k_scale": torch.ones(64, 16, 8),
         "v_scale": torch.ones(64, 16, 8)},
        {"prefix_length": 32},
        {"page_table": None, "k": torch.zeros(2, 100, 8, 128).half()},
    ],
)  # fmt: skip
def test_serves_a_t4(changes: dict[str, Any]) -> None:
    assert _verdict(**changes) == ("cuda", None)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"q": torch.zeros(2, 1, 8, 512).half(), "k": torch.zeros(64, 16, 2, 512).half()}, "at most 256"),
        ({"q": torch.zeros(2, 1, 8, 68).half(), "k": torch.zeros(64, 16, 2, 68).half()}, "multiple of 16 bytes"),
        ({"q": torch.zeros(2, 1, 8, 64), "k": torch.zeros(64, 16, 2, 64)}, "not in float32"),
        ({"q": torch.zeros(2, 1, 8, 64).bfloat16(), "k": torch.zeros(64, 16, 2, 64).bfloat16()}, "needs sm_80"),
        ({"k": torch.zeros(64, 16, 8, 132).half()[..., :128]}, "multiples of 16 bytes"),
    ],
)  # fmt: skip
def test_declines_with_a_reason(changes: dict[str, Any], why: str) -> None:
    chosen, reason = _verdict(**changes)
    assert chosen == "torch"
    assert why in str(reason)


def test_prefill_serves_a_t4() -> None:
    q, pages = torch.zeros(30, 32, 128).half(), torch.zeros(64, 16, 8, 128).half()
    starts, lengths = torch.tensor([0, 10, 30], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    table: Tensor = torch.zeros(2, 8, dtype=torch.int32)
    with devices.pretend(T4):
        answer = explain(fk.paged_attention, q, pages, pages, starts, lengths, table)
    assert answer.chosen == "cuda"


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 120])
def test_every_width_has_a_config_that_fits(arch: int) -> None:
    """Shared memory of what dispatch selects, for every width and cache."""
    gpu = next((one for one in devices.KNOWN.values() if one.arch == arch), replace(devices.KNOWN["l4"], arch=arch))
    for dim in (64, 128, 256):
        for size in (1, 2):
            for rows in (16, 32) if arch >= 80 else (16,):
                shape = {"dim": dim, "block_m": rows, "cache_bytes": size}
                assert SPLIT.valid(SPLIT.heuristic(gpu, shape), gpu, shape) is None
            shape = {"dim": dim, "cache_bytes": size}
            assert PREFILL.valid(PREFILL.heuristic(gpu, shape), gpu, shape) is None
