"""Profiles: ncu's table, the rule of what bounds a kernel, the profiled process, and its failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashkernel.core import cuda, roofline
from flashkernel.core.device import KNOWN
from flashkernel.core.op import Case
from flashkernel.lab import (
    builds,
    profile_counters,
    profile_session,
    profile_tables,
    profile_targets,
    profile_worker,
    selection,
)
from flashkernel.lab.bench import BenchOptions, bench
from flashkernel.lab.profile_records import KernelProfile, ProfileRecord, merged
from flashkernel.lab.profile_session import Outcome
from flashkernel.lab.profile_worker import Target, label
from flashkernel.ops.norm.spec import RMS_NORM

CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings("test machine", 4.0, {"float32": 50.0, "bfloat16": 800.0, "float16": 800.0})
RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {  # metric -> (unit, value)
    profile_counters.DRAM_BYTES: ("byte", "268,435,456"),
    profile_counters.DRAM: ("%", "91.20"),
    profile_counters.DURATION: ("ns", "66,400"),
    profile_counters.REGISTERS: ("register/thread", "32"),
    profile_counters.SHARED_DYNAMIC: ("byte/block", "49,152"),
    profile_counters.SHARED_STATIC: ("byte/block", "16"),
    profile_counters.L2: ("%", "48.01"),
    profile_counters.THEORETICAL: ("%", "100"),
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": ("%", "21.5"),
    TENSOR: ("%", "0"),
    profile_counters.SM: ("%", "30.5"),
    profile_counters.ACHIEVED: ("%", "87.25"),
    STALLED.format("barrier"): ("inst", "0.10"),
    STALLED.format("long_scoreboard"): ("inst", "31.25"),
    STALLED.format("selected"): ("inst", "1"),
    STALLED.format("short_scoreboard"): ("inst", "n/a"),
    STALLED.format("wait"): ("inst", "2.5"),
    STALLED.format("not_selected"): ("inst", "0.75"),
}


def table(*rows: tuple[str, str, dict[str, str]], units: bool = True, columns: Any = None) -> str:
    """ncu's log: its messages, then the raw page of (kernel name, NVTX label, changed values)."""
    columns = COLUMNS if columns is None else columns
    fixed = ("ID", "Process ID", "Process Name", "Host Name", RANGE, "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC")  # fmt: skip

    def line(values: Any) -> str:
        return ",".join('"' + str(value).replace('"', '""') + '"' for value in values)

    lines = ["==PROF== Connected to process 4711 (/usr/bin/python3.12)",
             '==PROF== Profiling "row_kernel" - 0: 0%....50%....100% - 12 passes',
             "==PROF== Disconnected from process 4711", line([*fixed, *columns])]  # fmt: skip
    if units:
        lines.append(line([*[""] * len(fixed), *(unit for unit, _ in columns.values())]))
    for index, (name, nvtx, changed) in enumerate(rows):
        ranges = f'4711  "<default domain>:{nvtx}:none:none:none:none:none:none" ' if nvtx else ""
        values = [changed.get(metric, value) for metric, (_, value) in columns.items()]
        head = [index, 4711, "python3.12", "127.0.0.1", ranges, name, 1, 7, "(256, 1, 1)", "(132, 4, 1)", 0, "9.0"]
        lines.append(line([*head, *values]))
    return "\n".join(lines) + "\n"


class TestCounters:
    def test_a_kernel(self) -> None:
        (row,) = profile_counters.parse(table(("void row_kernel<float, (int)4>(const float *, int)", "", {})))
        kernel = row.kernel
        assert kernel.name == "row_kernel<float, (int)4>"
        assert kernel.duration_us == pytest.approx(66.4)
        assert (kernel.grid, kernel.block, kernel.registers) == ("132x4", "256", 32)
        assert (kernel.shared_static, kernel.shared_dynamic) == (16, 49152)
        assert (kernel.achieved_occupancy, kernel.theoretical_occupancy) == (87.25, 100.0)
        assert (kernel.dram_pct, kernel.l2_pct, kernel.sm_pct, kernel.tensor_pct) == (91.2, 48.01, 30.5, 0.0)
        assert kernel.dram_bytes == 268435456.0
        assert kernel.stalls == {"long_scoreboard": 31.25, "wait": 2.5, "not_selected": 0.75}
        assert next(iter(kernel.stalls)) == "long_scoreboard"

    def test_other_units_are_scaled(self) -> None:
        columns = {
            **COLUMNS,
            profile_counters.DURATION: ("us", "66.4"),
            profile_counters.DRAM_BYTES: ("Mbyte", "268.4"),
            profile_counters.SHARED_DYNAMIC: ("Kbyte/block", "49.152"),
        }
        (row,) = profile_counters.parse(table(("k", "", {}), columns=columns))
        assert row.kernel.duration_us == pytest.approx(66.4)
        assert row.kernel.dram_bytes == pytest.approx(268.4e6)
        assert row.kernel.shared_dynamic == 49152

    def test_without_a_line_of_units_values_are_in_base_units(self) -> None:
        (row,) = profile_counters.parse(table(("k", "", {}), units=False))
        assert row.kernel.duration_us == pytest.approx(66.4)

    def test_missing_metrics_are_none(self) -> None:
        columns = {profile_counters.DURATION: ("ns", "1000"), profile_counters.DRAM: ("%", "nan")}
        (row,) = profile_counters.parse(table(("k", "", {}), columns=columns))
        assert row.kernel == KernelProfile("k", 1, 1.0, "132x4", "256")
        assert row.kernel.limiter is None

    def test_no_table_gives_the_errors(self) -> None:
        text = "==PROF== Connected to process 1\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
        with pytest.raises(profile_counters.CounterError, match="ERR_NVGPUCTRPERM"):
            profile_counters.parse(text)
        with pytest.raises(profile_counters.CounterError, match="no table"):
            profile_counters.parse("")

    def test_kernels_belong_to_their_ranges(self) -> None:
        labels = [label(1, "fwd"), label(1, "fwd+bwd"), label(11, "fwd")]
        text = table(*((f"k{index}", name, {}) for index, name in enumerate(labels)), ("outside", "", {}))
        found = profile_counters.by_range(profile_counters.parse(text), labels)
        assert [[kernel.name for kernel in found[name]] for name in labels] == [["k0"], ["k1"], ["k2"]]

    def test_one_range_needs_no_label(self) -> None:
        rows = profile_counters.parse(table(("a", "", {}), ("b", "", {})))
        assert len(profile_counters.by_range(rows, [label(0, "fwd")])[label(0, "fwd")]) == 2

    def test_metrics_by_architecture(self) -> None:
        assert any("gmma" in name for name in profile_counters.metrics(90))
        assert not any("gmma" in name for name in profile_counters.metrics(75))
        assert not any(f"stalled_{profile_counters.NOT_A_STALL}_" in name for name in profile_counters.metrics(90))


def kernel(name: str = "k", us: float = 10.0, **values: Any) -> KernelProfile:
    return KernelProfile(name, 1, us, "132", "256", **values)


class TestRule:
    @pytest.mark.parametrize(
        ("dram", "l2", "sm", "tensor", "expected"),
        [
            (91.0, 40.0, 30.0, 0.0, "memory"),
            (20.0, 75.0, 30.0, None, "memory"),  # L2 counts as memory
            (30.0, 40.0, 85.0, 20.0, "compute"),
            (30.0, 40.0, 50.0, 78.0, "compute"),  # the tensor pipe counts as compute
            (75.0, 40.0, 70.0, None, "memory"),
            (70.0, 40.0, 70.0, None, "memory"),  # a tie
            (59.9, 40.0, 59.9, None, "latency"),
            (60.0, 40.0, 10.0, None, "memory"),
            (None, None, 70.0, 10.0, None),  # half of the counters say nothing
            (70.0, 10.0, None, None, None),
        ],
    )
    def test_limiter(self, dram: Any, l2: Any, sm: Any, tensor: Any, expected: str | None) -> None:
        assert kernel(dram_pct=dram, l2_pct=l2, sm_pct=sm, tensor_pct=tensor).limiter == expected

    def test_meaning(self) -> None:
        assert kernel(dram_pct=91.2, l2_pct=40.0, sm_pct=3.0).meaning == "bound by memory: DRAM at 91% of peak"
        busy = kernel(dram_pct=9.0, l2_pct=40.0, sm_pct=70.0, tensor_pct=80.0)
        assert busy.meaning == "bound by compute: tensor pipe at 80% of peak"
        slow = kernel(dram_pct=9.0, l2_pct=4.0, sm_pct=7.0, stalls={"long_scoreboard": 9.0, "wait": 2.0})
        assert slow.meaning == (
            "bound by latency: DRAM 9%, L2 4%, SM 7%; warps wait mostly for loads from global or local memory"
        )
        assert kernel().meaning.startswith("no counters")

    def test_launches_of_one_kernel_are_merged(self) -> None:
        long = kernel(us=30.0, dram_pct=80.0, dram_bytes=100.0, stalls={"wait": 1.0})
        short = kernel(us=10.0, dram_pct=40.0, dram_bytes=20.0, stalls={"wait": 3.0, "barrier": 4.0})
        both, other = merged([long, kernel("other"), short])
        assert (both.launches, both.duration_us, both.dram_pct, both.dram_bytes) == (2, 40.0, 70.0, 120.0)
        assert both.stalls == {"wait": 1.5, "barrier": 1.0}
        assert other.name == "other"

    def test_records_survive_json(self) -> None:
        record = ProfileRecord(
            "rms_norm", "small", {"rows": (8, 2)}, "float16", "fwd", "cuda_sm75", "ncu",
            (kernel(dram_pct=91.2, l2_pct=40.0, sm_pct=3.0, stalls={"wait": 1.0}),), 0.01, 1.0, 2.0, 0.5, 3.0, 4.0, 0.9,
            "memory",
        )  # fmt: skip
        values = json.loads(json.dumps(record.as_dict()))
        assert values["meaning"] == "bound by memory: DRAM at 91% of peak"
        assert ProfileRecord.from_dict(values) == record


class TestTargets:
    def test_the_median_by_work_is_representative(self) -> None:
        cases = [
            Case(name, {"rows": rows, "width": 4096}, present=("weight",), dtypes=(torch.bfloat16,))
            for name, rows in (("tiny", 16), ("huge", 10**6), ("a", 16384), ("c", 65536), ("b", 32768))
        ]
        order = [case.name for case in profile_targets.by_preference(RMS_NORM, cases, torch.bfloat16)]
        assert order == ["b", "a", "c", "huge", "tiny"]
        assert [case.name for case in profile_targets.by_preference(RMS_NORM, cases[:1], torch.bfloat16)] == ["tiny"]

    def test_every_kernel_backend_of_an_h200_has_a_target(self) -> None:
        ops, notes = selection.operators(["sum", "attention"]), list[str]()
        found = list(profile_targets.select(ops, None, None, None, KNOWN["h200"], notes.append))
        assert {(target.op, target.implementation) for target in found} >= {
            ("sum", "triton"), ("sum", "cuda"), ("attention", "triton"), ("attention", "hopper"),
        }  # fmt: skip
        assert all(target.dtype == "bfloat16" for target in found)
        assert not notes

    def test_every_pass_of_an_operator_on_a_backend_has_a_target_on_an_h200(self) -> None:
        """Else no run could complete the committed profiles; cases that are timed as a whole step have no forward."""
        ops, notes = selection.operators(None), list[str]()
        found = list(profile_targets.select(ops, None, None, None, KNOWN["h200"], notes.append))
        assert not notes
        made = [(target, direction) for target in found for direction in target.directions()]
        assert {
            (target.op, target.implementation, "fwd" if direction == "fwd" else "bwd") for target, direction in made
        } == profile_targets.passes("NVIDIA H200")
        pairs = {
            (op.name, one.name) for op in ops for one in op.backends if one.name in profile_targets.KERNEL_BACKENDS
        }
        assert {(target.op, target.implementation) for target in found} == pairs
        with pytest.raises(ValueError, match="NVIDIA Abacus is no known GPU"):
            profile_targets.passes("NVIDIA Abacus")
        assert all("fwd" in target.directions() for target in found)
        few = [target for target in found if (target.op, target.implementation) == ("moe_experts", "triton")]
        assert [len(target.directions()) for target in few] == [1, 2], "the case that is profiled has no gradients"

    def test_missing_targets(self) -> None:
        targets = [Target(op, case, "float16", "cuda") for op, case in
                   (("sum", "16384x4096"), ("sum", "4096x16384"), ("mean", "16384x4096"))]  # fmt: skip
        record = ProfileRecord("sum", "16384x4096", {}, "bfloat16", "fwd", "cuda", "ncu", (kernel(),))
        elsewhere, by_torch = replace(record, implementation="triton"), replace(record, op="mean", tool="torch")
        file = {"records": [record, elsewhere, by_torch]}
        done = profile_targets.profiled([file])
        assert profile_targets.missing(targets, done) == targets[2:]
        assert profile_targets.missing(targets, done, "case") == targets[1:]
        assert profile_targets.missing(targets, done, "case", "dtype") == targets
        assert not profile_targets.missing(targets, profile_targets.profiled([file], ("ncu", "torch")))
        backward = [replace(one, direction="bwd") for one in done]
        forward_alone = [Target("max", "16384x4096", "float16", "cuda")]
        assert profile_targets.missing(forward_alone, [replace(record, op="max")]) == forward_alone
        assert not profile_targets.missing(forward_alone, [replace(one, op="max") for one in (record, *backward)])
        failed = {"records": [record, replace(record, direction="bwd", kernels=(), error="no")]}
        assert profile_targets.missing(targets, profile_targets.profiled([failed])) == targets

    def test_turing_and_its_build_have_no_bfloat16(self) -> None:
        ops, notes = selection.operators(["sum", "attention"]), list[str]()
        (built,) = profile_targets.select(ops[:1], None, ["cuda_sm75"], None, KNOWN["h200"])
        assert (built.implementation, built.dtype) == ("cuda_sm75", "float16")
        on_t4 = list(profile_targets.select(ops, None, ["triton", "hopper"], None, KNOWN["t4"], notes.append))
        assert [(target.op, target.dtype) for target in on_t4] == [("sum", "float16")]
        assert any("hopper left out: it needs a Hopper GPU" in note for note in notes)

    def test_globs_select_all_matching_cases(self) -> None:
        (op,) = selection.operators(["sum"])
        found = profile_targets.select([op], ["decode-*"], ["triton"], [torch.float16], KNOWN["h200"])
        assert [(target.case, target.dtype) for target in found] == [
            ("decode-16x4096", "float16"),
            ("decode-16x128256", "float16"),
        ]

    def test_a_record_has_its_point_on_the_roofline(self) -> None:
        target = Target("sum", "16384x4096", "bfloat16", "triton")
        op, case, dtype = target.resolve()
        cost = op.cost(case, dtype)["fwd"]
        outcome = Outcome({"fwd": (kernel(us=40.0), kernel("second", us=10.0))})
        (record,) = profile_targets.records(target, outcome, "ncu", CEILINGS)
        assert record.ms == pytest.approx(0.05)
        assert record.tbs == pytest.approx(cost.bytes / 50e-6 / 1e12)
        assert record.roof == pytest.approx(cost.bytes / 4e12 / 50e-6)
        assert record.intensity == pytest.approx(cost.flops / cost.bytes)
        assert (record.bound, record.flops, record.bytes) == ("memory", cost.flops, cost.bytes)
        assert record.main is not None
        assert record.main.name == "k"

    def test_failures_are_records(self) -> None:
        target = Target("max", "16384x4096", "bfloat16", "triton")
        lost, missing = Outcome({"fwd": (kernel(),)}, "RuntimeError: no"), Outcome({"fwd": ()})
        found = profile_targets.records(target, lost, "ncu", CEILINGS)
        assert [(one.direction, one.error) for one in found] == [("fwd", None), ("bwd", "RuntimeError: no")]
        (empty,) = profile_targets.records(target, missing, "ncu", CEILINGS)
        assert empty.meaning == "failed: the profiler reported no kernel"


class TestBuilds:
    def test_a_build_is_a_backend_compiled_for_an_older_architecture(self) -> None:
        assert cuda.virtual_arch() is None
        with builds.build("cuda_sm75"):
            assert cuda.virtual_arch() == 75
        with builds.build("triton"):
            assert cuda.virtual_arch() is None

    def test_the_backward_sees_the_architecture(self) -> None:
        seen = []

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                seen.append(cuda.virtual_arch())
                return grad

        with builds.build("cuda_sm75"):
            Probe.apply(torch.ones(2, requires_grad=True)).sum().backward()
        assert seen == [75]

    def test_a_build_is_checked_and_timed_inside_its_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (op,), seen = selection.operators(["max"]), set[int | None]()

        def call(x: torch.Tensor, backend: str) -> torch.Tensor:
            if backend == "cuda":
                seen.add(cuda.virtual_arch())
            return op.plain(x)

        monkeypatch.setitem(op.__dict__, "call", call)
        answer = SimpleNamespace(chosen="torch", verdicts=())
        monkeypatch.setattr(selection, "explain_case", lambda *args: answer)
        monkeypatch.setattr(selection, "declined", lambda *args: None)
        options = BenchOptions(CPU, CEILINGS, implementations=["cuda_sm75"], budget_s=0.01)
        case = Case("small", {"rows": 4, "width": 8}, dtypes=(torch.float32,))
        found = list(bench(op, case, torch.float32, options))
        assert [(one.implementation, one.kind, one.direction, one.correct) for one in found] == [
            ("cuda_sm75", "backend", "fwd", True),
            ("cuda_sm75", "backend", "bwd", True),
        ]
        assert seen == {75}
        assert cuda.virtual_arch() is None

    def test_names_are_known_where_an_operator_has_the_backend(self) -> None:
        ops = selection.operators(["sum", "rms_norm"])
        assert selection.implementations(ops, ["cuda_sm75"]) == ["cuda_sm75"]
        reason = selection.declined(ops[0], ops[0].benches[0], torch.bfloat16, KNOWN["h200"], "cuda_sm75")
        assert reason is not None
        assert "sm_75" in reason
        assert selection.declined(ops[0], ops[0].benches[0], torch.float16, KNOWN["h200"], "cuda_sm75") is None


# A stand-in for ncu: it gives each target the outcome that the target's case is named after.
FAKE_NCU = """#!{python}
import json, os, signal, sys, time
log, work, status = sys.argv[sys.argv.index("--log-file") + 1], *sys.argv[-2:]
rows, stop = [], os.path.join(os.path.dirname(work), "stop")
for index, target in json.load(open(work))["targets"]:
    if os.path.exists(stop):
        break
    with open(status, "a") as out:
        out.write(json.dumps({{"pid": os.getpid()}}) + chr(10) + json.dumps({{"start": index}}) + chr(10))
    if target["case"] == "dies":
        rows.append("==ERROR== The application returned an error code (139)." + chr(10))
        open(log, "w").write({table!r} + "".join(rows))
        sys.exit(1)
    if target["case"] == "hangs":
        time.sleep(60)
    if target["case"] == "interrupts":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.5)
    with open(status, "a") as out:
        out.write(json.dumps({{"done": index, "kernels": {{"fwd": []}}, "error": None}}) + chr(10))
    rows.append({row!r}.replace("LABEL", "flashkernel.%d.fwd;" % index))
open(log, "w").write({table!r} + "".join(rows))
"""


@pytest.fixture(name="fake_ncu")
def fake_ncu_fixture(tmp_path: Path) -> Callable[..., list[tuple[str, Outcome]]]:
    text = table(("row_kernel", "LABEL", {}))
    head, row = text.rsplit("\n", 2)[0] + "\n", text.rsplit("\n", 2)[1] + "\n"
    script = tmp_path / "ncu"
    script.write_text(FAKE_NCU.format(python=sys.executable, table=head, row=row))
    script.chmod(0o755)

    def run(*cases: str) -> list[tuple[str, Outcome]]:
        targets = [Target("sum", case, "bfloat16", "triton") for case in cases]
        found: list[tuple[str, Outcome]] = []
        try:
            for target, outcome in profile_session.run(targets, CPU, 90, str(script)):
                found.append((target.case, outcome))
        except KeyboardInterrupt:
            found.append(("interrupted", Outcome()))
        return found

    return run


class TestSession:
    def test_several_targets_in_one_process(self, fake_ncu: Any) -> None:
        found = fake_ncu("a", "b")
        assert [case for case, _ in found] == ["a", "b"]
        for _, outcome in found:
            assert outcome.error is None
            assert [one.name for one in outcome.kernels["fwd"]] == ["row_kernel"]

    def test_a_crash_costs_one_target(self, fake_ncu: Any) -> None:
        found = dict(fake_ncu("a", "dies", "b"))
        assert found["a"].kernels["fwd"]
        assert found["b"].kernels["fwd"]
        assert "error code (139)" in str(found["dies"].error)

    def test_a_hang_costs_one_target(self, fake_ncu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profile_session, "TARGET_TIMEOUT_S", 1.0)
        found = dict(fake_ncu("hangs", "b"))
        assert "no answer within" in str(found["hangs"].error)
        assert found["b"].kernels["fwd"]

    def test_an_interrupt_keeps_what_was_profiled(self, fake_ncu: Any) -> None:
        found = fake_ncu("a", "interrupts", "never")
        assert [case for case, _ in found] == ["a", "interrupts", "interrupted"]
        assert found[0][1].kernels["fwd"]

    def test_outcomes_are_given_as_each_process_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that is killed loses the targets of one process only."""
        monkeypatch.setattr(profile_session, "SESSION_TARGETS", 2)
        script, started = tmp_path / "ncu", list[str]()
        text = table(("row_kernel", "LABEL", {}))
        head, row = text.rsplit("\n", 2)[0] + "\n", text.rsplit("\n", 2)[1] + "\n"
        script.write_text(FAKE_NCU.format(python=sys.executable, table=head, row=row))
        script.chmod(0o755)
        targets = [Target("sum", case, "bfloat16", "triton") for case in "abcde"]
        found = profile_session.run(targets, CPU, 90, str(script), lambda target: started.append(target.case))
        before = [(target.case, "".join(started)) for target, _ in found]
        assert before == [("a", "ab"), ("b", "ab"), ("c", "abcd"), ("d", "abcd"), ("e", "abcde")]

    def test_a_tool_that_does_not_start_is_an_error(self, tmp_path: Path) -> None:
        script = tmp_path / "ncu"
        script.write_text("#!/bin/sh\necho '==ERROR== no driver'\nexit 1\n")
        script.chmod(0o755)
        targets = [Target("sum", "a", "bfloat16", "triton")]
        with pytest.raises(profile_session.ToolError, match="no driver"):
            list(profile_session.run(targets, CPU, 90, str(script)))

    def test_the_command(self) -> None:
        command = profile_session.ncu_command("ncu", 90, Path("log"), ["python", "-m", "worker"])
        assert command[-3:] == ["python", "-m", "worker"]
        assert command[command.index("--profile-from-start") + 1] == "off"
        assert command[command.index("--clock-control") + 1] == "none"

    def test_the_worker_by_torchs_profiler(self, tmp_path: Path) -> None:
        work, status = tmp_path / "work.json", tmp_path / "status.jsonl"
        targets = {0: Target("max", "plain", "float32", "torch"), 1: Target("max", "plain", "float32", "hopper")}
        profile_worker.write_work(work, "torch", CPU, targets)
        assert profile_worker.main(work, status) == 0
        lines = [json.loads(line) for line in status.read_text().splitlines()]
        assert [next(iter(line)) for line in lines] == ["pid", "start", "done", "start", "done"]
        assert set(lines[2]["kernels"]) == {"fwd", "bwd"}
        assert all(one["duration_us"] >= 0 for one in lines[2]["kernels"]["fwd"])
        assert "hopper" in lines[4]["error"]

    def test_a_warm_up_reports_errors(self) -> None:
        assert profile_worker.warm_up("cpu", Target("max", "plain", "float32", "torch")).error == ""
        assert "hopper" in profile_worker.warm_up("cpu", Target("max", "plain", "float32", "hopper")).error


def test_the_table_of_the_docs() -> None:
    main = kernel("a|b", 30.0, dram_pct=91.2, l2_pct=40.0, sm_pct=3.0, registers=32, shared_static=1024)
    record = ProfileRecord("sum", "c", {}, "float16", "fwd", "cuda_sm75", "ncu", (kernel(), main), roof=0.9)
    failed = replace(record, kernels=(), error="no")
    head, rule, row, bad = profile_tables.markdown([record, failed]).splitlines()
    assert head.count("|") == rule.count("|") == row.replace("\\|", "").count("|") == bad.count("|")
    assert "`a\\|b` and 1 more" in row
    assert row.endswith("| memory |")
    assert "failed: no" in bad
