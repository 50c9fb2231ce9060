"""Records of benchmarks: the files of results, and the tables that are made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashkernel.core.roofline import Ceilings
from flashkernel.lab import results, tables
from flashkernel.lab.results import Record, ResultsFile

HEADER = {
    "device": "somewhere",
    "versions": {"torch": "2.0", "triton": "3.6.0"},
    "commit": "abc",
    "date": "2026-01-01T00:00:00+00:00",
    "command": "flashkernel bench",
    "ceilings": Ceilings("somewhere", 0.01, {"float32": 0.1, "bfloat16": 0.1}).as_dict(),
}


def record(**changes: Any) -> Record:
    ms = dict.fromkeys(results.STATISTICS, 2.0)
    base = Record(
        "rms_norm", "small", {"rows": 8}, "float32", "fwd", "triton", "backend", True, ms, 0.5, 0.25, 0.5, "memory"
    )
    return replace(base, **changes)


def timed(name: str, ms: float, **changes: Any) -> Record:
    kind = "backend" if name in ("triton", "torch") else "baseline"
    return record(implementation=name, kind=kind, ms=dict.fromkeys(results.STATISTICS, ms), **changes)


class TestResultsFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "h200" / "rms_norm.json"
        ResultsFile(path, HEADER).add([record(axes={"rows": (2, 4)}, error="no")])
        found = results.load(path)
        assert found["device"] == "somewhere"
        assert found["records"] == [record(axes={"rows": (2, 4)}, error="no")]
        raw = json.loads(path.read_text())
        assert list(raw) == [*results.HEADER, "records"]
        assert "note" not in raw["records"][0]

    def test_a_case_is_replaced_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        first = ResultsFile(path, HEADER)
        first.add([timed("triton", 1.0), timed("eager", 2.0)])
        first.add([timed("triton", 3.0, case="other")])
        second = ResultsFile(path, {**HEADER, "commit": "def"})
        second.add([timed("triton", 0.5)])
        found = results.load(path)
        assert [(one.case, one.implementation, one.p50) for one in found["records"]] == [
            ("other", "triton", 3.0),
            ("small", "triton", 0.5),
        ]
        assert found["commit"] == "def"
        assert [(run["commit"], run["cases"]) for run in found["earlier"]] == [("abc", [["other", "float32"]])]

    def test_dtypes_are_cases_of_their_own(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        ResultsFile(path, HEADER).add([record(), record(dtype="bfloat16")])
        ResultsFile(path, HEADER).add([record(dtype="bfloat16", roof=0.75)])
        assert {one.dtype: one.roof for one in results.load(path)["records"]} == {"float32": 0.5, "bfloat16": 0.75}

    def test_earlier_runs_vanish_with_their_last_case(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        for commit, cases in (("a", ("small", "other")), ("b", ("small",)), ("c", ("other",)), ("d", ("small",))):
            file = ResultsFile(path, {**HEADER, "commit": commit})
            for case in cases:
                file.add([record(case=case)])
        found = results.load(path)
        assert (found["commit"], [run["commit"] for run in found["earlier"]]) == ("d", ["c"])

    def test_another_device_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        ResultsFile(path, HEADER).add([record()])
        with pytest.raises(ValueError, match="holds measurements of somewhere and this is elsewhere"):
            ResultsFile(path, {**HEADER, "device": "elsewhere"})

    def test_a_file_that_is_none_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        path.write_text("{not json")
        with pytest.raises(ValueError, match="is not a results file"):
            ResultsFile(path, HEADER)
        assert path.read_text() == "{not json"

    def test_a_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "rms_norm.json"
        file = ResultsFile(path, HEADER)
        file.add([record()])
        before = path.read_text()
        with pytest.raises(ValueError, match="JSON"):
            file.add([record(case="other", roof=float("nan"))])
        assert path.read_text() == before
        assert list(tmp_path.iterdir()) == [path]


class TestTables:
    def test_best_and_ratio_count_right_records_only(self) -> None:
        (row,) = tables.rows([timed("triton", 2.0), timed("liger", 3.0), timed("eager", 1.0, correct=False)])
        assert row.fastest == "triton"
        assert row.ratio() == pytest.approx(1.5)

    def test_ours_is_the_backend_that_dispatch_picks(self) -> None:
        (row,) = tables.rows([timed("triton", 2.0), timed("torch", 1.0), timed("eager", 3.0)])
        assert row.ratio() == pytest.approx(1.5)

    def test_no_ratio_for_a_wrong_backend(self) -> None:
        (row,) = tables.rows([timed("triton", 2.0, correct=False), timed("eager", 3.0)])
        assert row.ratio() is None
        assert row.fastest == "eager"

    def test_memory_instead_of_times(self) -> None:
        ours, theirs = (
            replace(timed("triton", 2.0), peak_bytes=10**9),
            replace(timed("eager", 3.0), peak_bytes=4 * 10**9),
        )
        assert "| 1 | 4 | 4.00x |" in tables.markdown([ours, theirs], tables.MEMORY)
        block = tables.BLOCK.search("<!-- results:attention long-* memory -->\n<!-- /results -->")
        assert block is not None
        assert block["glob"] == "long-*"
        assert block["memory"]

    def test_markdown(self) -> None:
        text = tables.markdown(
            [
                timed("eager", 4.0),
                timed("triton", 2.0),
                timed("liger", 1.0, correct=False),
                timed("fa4", 1.0, error="no"),
            ]
        )
        assert text.splitlines() == [
            "| case | dtype | direction | triton | eager | liger | fa4 | vs best baseline |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
            "| small | float32 | fwd | **2 (50%)** | 4 (50%) | 1 wrong | failed | 2.00x |",
        ]

    def test_line(self) -> None:
        records = [timed("triton", 2.0), timed("triton", 3.0, direction="bwd"), timed("eager", 4.0)]
        assert tables.line(records) == (
            "rms_norm small float32: fwd triton 2 ms (50% of roof), eager 4 ms (50% of roof); "
            "bwd triton 3 ms (50% of roof)"
        )

    def test_failure_messages(self) -> None:
        assert tables.failure_messages(
            [timed("triton", 1.0), timed("eager", 1.0, correct=False, note="output: off")]
        ) == ["rms_norm small float32 fwd eager: wrong: output: off"]

    @pytest.mark.parametrize(
        "value, text", [(0.004123, "0.00412"), (41.23, "41.2"), (4123.4, "4123"), (0.0004, "0.000400")]
    )
    def test_milliseconds(self, value: float, text: str) -> None:
        assert tables.milliseconds(value) == text

    def test_blocks(self, tmp_path: Path) -> None:
        ResultsFile(tmp_path / "h200" / "rms_norm.json", HEADER).add([timed("triton", 2.0), timed("eager", 4.0)])
        ResultsFile(tmp_path / "h200" / "rms_norm.json", HEADER).add([timed("triton", 7.0, case="other")])
        text = "a\n<!-- results:rms_norm s* -->\nold\n<!-- /results -->\nb\n<!-- results:rope -->\n<!-- /results -->\n"
        fresh = tables.regenerate(text, tmp_path)
        assert "**2 (50%)**" in fresh
        assert "| other |" not in fresh
        assert "results/h200/rms_norm.json" in fresh
        assert "old" not in fresh
        assert tables.UNMEASURED in fresh
        assert fresh.startswith("a\n")
        assert tables.regenerate(fresh, tmp_path) == fresh
