"""The lab: benchmark records, the selection of cases, checks, doctor, tuning and energy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkernel.core.device import KNOWN
from flashkernel.core.op import Baseline, Case, Input, Op
from flashkernel.core.roofline import Ceilings
from flashkernel.lab import checks, doctor, results, selection
from flashkernel.lab.bench import BenchOptions, bench, directions_of
from flashkernel.lab.results import Record
from flashkernel.ops import registry
from flashkernel.ops.norm.spec import RMS_NORM

CPU = torch.device("cpu")
CEILINGS = Ceilings("somewhere", 0.01, {"float32": 0.1, "bfloat16": 0.1})
SMALL = Case("small", {"rows": 8, "width": 16}, present=("weight",), dtypes=(torch.float32,))
OTHER = replace(SMALL, name="other", axes={"rows": 4, "width": 16})


def right(op: Op, case: Case) -> Callable[..., Any]:
    return op.plain


def wrong(op: Op, case: Case) -> Callable[..., Any]:
    return lambda x, weight: op.plain(x, weight) * 1.5


def wrong_backward(op: Op, case: Case) -> Callable[..., Any]:
    """The right values, with gradients that miss what the norm itself contributes."""
    return lambda x, weight: x * (op.plain(x, weight) / x).detach() + 0 * weight.sum()


def crashing(op: Op, case: Case) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the kernel fell over\nat great length")

    return run


def exhausting(op: Op, case: Case) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("asked for 1 PiB")

    return run


def absent(op: Op, case: Case) -> Callable[..., Any]:
    raise ImportError("No module named 'peer'")


def declining(op: Op, case: Case) -> Callable[..., Any]:
    raise ValueError("it wants a bias")


def bound(op: Op, case: Case) -> Callable[..., Any]:
    """Options bound when the function is made, so that it takes none."""
    return lambda x, weight: op.plain(x, weight, **case.options)


def forward(op: Op, case: Case) -> Callable[..., Any]:
    """Right, but without gradients."""
    return lambda x, weight: op.plain(x.detach(), weight.detach())


def norm(*baselines: str, benches: tuple[Case, ...] = (SMALL, OTHER)) -> Op:
    made = tuple(Baseline(name, f"{__name__}:{name}") for name in baselines)
    return replace(RMS_NORM, baselines=made, benches=benches)


def measure(op: Op, case: Case = SMALL, **changes: Any) -> tuple[list[Record], list[str]]:
    notes: list[str] = []
    options = BenchOptions(CPU, CEILINGS, budget_s=0.01, on_note=notes.append, **changes)
    return list(bench(op, case, torch.float32, options)), notes


class TestBench:
    def test_records(self) -> None:
        records, _ = measure(norm("right"))
        assert [(one.implementation, one.direction, one.kind) for one in records] == [
            ("torch", "fwd", "backend"),
            ("torch", "bwd", "backend"),
            ("right", "fwd", "baseline"),
            ("right", "bwd", "baseline"),
        ]
        for one in records:
            assert one.comparable
            assert one.ms is not None
            assert set(one.ms) == set(results.STATISTICS)
            assert one.ms["min"] <= one.ms["p50"] <= one.ms["max"]
            assert one.mode == "cpu"
            assert one.bound == "memory"
            seconds = one.ms["p50"] / 1e3
            assert one.tbs == pytest.approx(RMS_NORM.cost(SMALL, torch.float32)[one.direction].bytes / seconds / 1e12)
        assert records[0].axes == {"rows": 8, "width": 16}

    def test_wrong_implementation_is_flagged(self) -> None:
        records, _ = measure(norm("wrong"), implementations=["wrong"])
        assert [(one.direction, one.correct, one.comparable) for one in records] == [
            ("fwd", False, False),
            ("bwd", False, False),
        ]
        assert "output: error" in str(records[0].note)
        assert records[0].ms is not None

    def test_wrong_gradient_leaves_the_forward_right(self) -> None:
        records, _ = measure(norm("wrong_backward"), implementations=["wrong_backward"])
        assert [(one.direction, one.correct) for one in records] == [("fwd", True), ("bwd", False)]
        assert str(records[1].note).startswith("d")

    def test_crash_and_exhaustion_are_records(self) -> None:
        records, _ = measure(norm("crashing", "exhausting", "right"), directions=["fwd"])
        found = {one.implementation: one for one in records}
        assert found["crashing"].error == "RuntimeError: the kernel fell over at great length"
        assert found["exhausting"].error == "out of memory: asked for 1 PiB"
        assert found["right"].comparable
        assert found["crashing"].ms is None
        assert not found["crashing"].comparable

    def test_absent_and_declining_peers_are_notes(self) -> None:
        records, notes = measure(norm("absent", "declining"))
        assert {one.implementation for one in records} == {"torch"}
        assert any("absent left out: it is not installed" in note for note in notes)
        assert any("declining left out: it wants a bias" in note for note in notes)

    def test_reference_and_interpreter_only_when_asked_for(self) -> None:
        records, _ = measure(norm(), directions=["fwd"], implementations=["reference"])
        assert [one.implementation for one in records] == ["reference"]

    def test_backend_asked_for_that_cannot_serve_is_a_note(self) -> None:
        wide = replace(SMALL, axes={"rows": 1, "width": 70000})
        records, notes = measure(norm(), wide, implementations=["triton"])
        assert records == []
        assert any("triton left out" in note for note in notes)

    def test_baseline_with_bound_options(self) -> None:
        records, _ = measure(norm("bound"), replace(SMALL, options={"eps": 1e-2}), implementations=["bound"])
        assert all(one.comparable for one in records)
        assert len(records) == 2

    def test_a_peer_without_a_backward_pass_is_timed_forward(self) -> None:
        op = replace(norm(), baselines=(Baseline("forward", f"{__name__}:forward", forward_only=True),))
        records, _ = measure(op, implementations=["forward"])
        assert [(one.direction, one.comparable) for one in records] == [("fwd", True)]
        records, notes = measure(op, implementations=["forward"], directions=["bwd"])
        assert records == []
        assert any("forward left out: it has no backward pass" in note for note in notes)

    def test_whole_step_stands_for_the_backward(self) -> None:
        def cost(case: Case, dtype: torch.dtype) -> Any:
            found = RMS_NORM.cost(case, dtype)
            return {**found, "fwd+bwd": found["bwd"]}

        op = replace(norm(), cost=cost)
        assert directions_of(op, SMALL, torch.float32) == ["fwd", "fwd+bwd"]
        records, _ = measure(op)
        assert [one.direction for one in records if one.comparable] == ["fwd", "fwd+bwd"]

    def test_no_backward_without_gradients(self) -> None:
        assert directions_of(RMS_NORM, replace(SMALL, gradients=False), torch.float32) == ["fwd"]

    def test_the_check_uses_its_own_axes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        made = RMS_NORM.plain

        def watching(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return made(x, weight)

        monkeypatch.setitem(globals(), "right", lambda op, case: watching)
        from flashkernel.core.op import resolve

        resolve.cache_clear()
        measure(norm("right"), replace(SMALL, check_axes={"rows": 2}), implementations=["right"], directions=["fwd"])
        resolve.cache_clear()
        assert seen[0] == 2
        assert seen[-1] == 8


class TestSelection:
    def test_scaling_shrinks_rows_first(self) -> None:
        case = Case("16384x4096", {"rows": 16384, "width": 4096}, present=("weight",), check_axes={"rows": 4096})
        small = selection.scaled(RMS_NORM, case, 2**20)
        assert small.axes == {"rows": 128, "width": 4096}
        assert small.name == "16384x4096~128x4096"
        assert small.check_axes == {}
        assert selection.scaled(RMS_NORM, SMALL, 2**20) is SMALL

    def test_scaling_keeps_sizes_that_belong_together(self) -> None:
        case = Case("grid", {"rows": (64, 512), "width": 512}, present=("weight", "residual"))
        small = selection.scaled(RMS_NORM, case, 2**14)
        assert selection.explain_case(RMS_NORM, small, torch.float32, KNOWN["h200"]).chosen == "triton"
        inputs = selection.shapes_only(RMS_NORM, small, torch.float32)
        assert sum(value.numel() for value in inputs.values()) <= 2**14

    @pytest.mark.parametrize("op", registry().values(), ids=registry())
    def test_benchmarks_of_every_operator_are_scaled(self, op: Op) -> None:
        """To sizes that the operator takes, with axes that follow from others: scales, packing, experts of a token."""
        kinds = {re.sub(r"\d+", "", case.name): case for case in op.benches}  # those of one kind differ in their sizes
        for case in kinds.values():
            small = selection.scaled(op, case, 2**16)
            for one in (small, small.at(**small.check_axes)):
                inputs = selection.shapes_only(op, one, torch.float32)
                assert sum(value.numel() for value in inputs.values()) <= 2**16, one.name
                assert selection.explain_case(op, one, torch.float32, KNOWN["h200"]).verdicts
            kept = {axis for axis, value in case.axes.items() if isinstance(value, (str, bool, float))}
            assert all(small.axes[axis] == case.axes[axis] for axis in kept)
            assert all(cost.bytes > 0 for cost in op.cost(small, torch.float32).values())

    def test_scales_follow_the_sizes(self) -> None:
        matmul = registry()["matmul"]
        case = next(case for case in matmul.benches if case.name == "fp8-block-4096x4096x4096")
        changed = selection.with_axes(case, ["m=300", "k=260"], matmul)
        assert changed.axes["a_scales"] == (300, 3)
        assert changed.axes["b_scales"] == (3, 32)
        assert selection.explain_case(matmul, changed, torch.bfloat16, KNOWN["h200"]).chosen == "hopper"

    def test_sizes_of_16_stay_multiples_of_it(self) -> None:
        """torch._grouped_mm, among others, takes no rows that start between 16 bytes."""
        grouped = registry()["grouped_matmul"]
        small = selection.scaled(grouped, grouped.benches[0], 2**16)
        assert [small.axes[axis] % 16 for axis in ("n", "k")] == [0, 0]
        assert small.name == "32x65536x2880x2880~64x32x32x32"

    def test_more_slots_than_experts_are_no_case(self) -> None:
        experts = registry()["moe_experts"]
        with pytest.raises(ValueError, match="4 slots of a token for 3 experts"):
            selection.shapes_only(experts, experts.benches[0].at(num_experts=3, slots=4), torch.float32)

    def test_scaling_merges_equals(self) -> None:
        cases = [Case(f"{rows}", {"rows": rows, "width": 64}) for rows in (2**12, 2**16, 8)]
        assert [case.axes["rows"] for case in selection.scaled_once(RMS_NORM, cases, 2**16)] == [1024, 8]

    def test_shapes_only_allocates_nothing(self) -> None:
        huge = Case("huge", {"rows": 2**20, "width": 2**20}, present=("weight",), layout="padded")
        inputs = selection.shapes_only(RMS_NORM, huge, torch.bfloat16)
        assert inputs["x"].device.type == "meta"
        assert inputs["x"].dtype == torch.bfloat16
        assert inputs["x"].stride() == (2**20 + 3, 1)

    def test_integer_inputs_keep_their_dtype(self) -> None:
        from flashkernel.core.op import integers

        op = replace(RMS_NORM, inputs={"target": Input(("rows",), draw=integers("width", marker=-100))})
        assert selection.shapes_only(op, SMALL, torch.float16)["target"].dtype == torch.int64

    def test_axes(self) -> None:
        assert selection.with_axes(SMALL, ["rows=2x3", "width=5"], RMS_NORM).axes == {"rows": (2, 3), "width": 5}
        attention = registry()["attention"]
        for settings, dims in ((["head_dim=96"], (96, 96)), (["value_dim=32", "head_dim=96"], (96, 32))):
            axes = selection.with_axes(attention.cases[0], settings, attention).axes
            assert (axes["head_dim"], axes["value_dim"]) == dims
        with pytest.raises(selection.UnknownNameError, match="no axis 'depth'; it has rows, width"):
            selection.with_axes(SMALL, ["depth=1"], RMS_NORM)
        with pytest.raises(selection.UnknownNameError, match="no size for axis rows"):
            selection.with_axes(SMALL, ["rows=many"], RMS_NORM)


class TestChecks:
    def test_a_wrong_backend_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (task,) = checks.tasks(RMS_NORM, [SMALL], None, ["torch"], CPU)
        assert isinstance(task, checks.Task)
        assert checks.run(task, CPU).status == "passed"
        backend = RMS_NORM.backend("torch")
        monkeypatch.setitem(backend.__dict__, "run", lambda *args, **kwargs: RMS_NORM.plain(*args, **kwargs) + 1)
        outcome = checks.run(task, CPU)
        assert outcome.status == "failed"
        assert "output: error" in outcome.message

    def test_an_exception_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no such instruction")

        monkeypatch.setitem(RMS_NORM.backend("torch").__dict__, "run", broken)
        (task,) = checks.tasks(RMS_NORM, [SMALL], None, ["torch"], CPU)
        assert checks.run(task, CPU).message == "RuntimeError: no such instruction"

    def test_a_backend_asked_for_declines_aloud(self) -> None:
        wide = replace(SMALL, axes={"rows": 1, "width": 70000})
        (outcome,) = checks.tasks(RMS_NORM, [wide], None, ["triton"], CPU)
        assert isinstance(outcome, checks.Outcome)
        assert outcome.status == "declined"

    def test_interpreted_bfloat16_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        found = list(checks.tasks(RMS_NORM, [SMALL], [torch.bfloat16, torch.float32], None, CPU))
        assert [str(task) for task in found] == [
            "rms_norm small bfloat16 torch",
            "rms_norm small float32 triton",
            "rms_norm small float32 torch",
        ]


class TestDoctor:
    def test_without_torch_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise ImportError(f"No module named {name!r}")

        monkeypatch.setattr(doctor.importlib, "import_module", missing)
        *_, last = doctor.diagnose()
        assert (last.name, last.status, last.advice) == ("torch", "broken", "pip install torch")

    @pytest.mark.parametrize("version, status", [("3.6.0", "ok"), ("3.9.0+git1", "ok"), ("3.10.0", "missing")])
    def test_says_which_triton_was_tried(self, version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "_version", lambda name: version)
        found = next(one for one in doctor.diagnose() if one.name == "triton")
        assert found.status == status
        assert "3.6.0 and 3.9.0" in found.detail
        assert bool(found.advice) == (status == "missing")

    def test_a_cache_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
        found = {one.name: one for one in doctor._set_up()}
        assert found["cache folder"].status == "missing"
        assert "FLASHKERNEL_CACHE_DIR" in found["cache folder"].advice


def test_tuning_searches_what_a_call_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kernel of a call and its backward is searched, and what was found is used from then on."""
    from flashkernel.core import tune
    from flashkernel.lab.tuning import tune_case
    from flashkernel.ops import registry

    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
    tune.clear_cache()
    op = registry()["rms_norm"]
    case = next(case for case in op.cases if case.name == "weight")
    search = tune.search  # over empty spaces, that is the default alone: the interpreter is slow
    monkeypatch.setattr(
        tune, "search", lambda tunable, *args, **kwargs: search(replace(tunable, space=lambda *_: []), *args, **kwargs)
    )
    found = list(tune_case(op, case, torch.float32, torch.device("cpu"), backend="triton"))
    assert [result.kernel for result in found] == ["norm_forward", "norm_backward", "norm_column_sum"]
    assert all(result.ms > 0 for result in found)
    assert sorted(path.stem for path in tmp_path.rglob("*.json")) == sorted(result.kernel for result in found)
    tune.clear_cache()


def test_tune_needs_a_gpu() -> None:
    from typer.testing import CliRunner

    from flashkernel.cli import app

    result = CliRunner().invoke(app, ["tune", "rms_norm", "--device", "cpu"])
    assert result.exit_code == 1
    assert "this machine has no GPU" in result.output


def test_energy_by_sampled_power() -> None:
    from flashkernel.lab.energy import EnergyMeter, energy_of

    assert energy_of("100.0\n[N/A]\n300.0\n2", 0.5) == pytest.approx((100 + 300 + 2) / 3 * 0.5)
    assert energy_of("", 1.0) is None
    with EnergyMeter(torch.device("cpu")) as meter:
        pass
    assert meter.joules is None


def test_hf_equivalent_of_an_unsupported_architecture() -> None:
    pytest.importorskip("transformers")
    from flashkernel.core.shapes import Model
    from flashkernel.engine.dummy_weights import dummy_transformer
    from flashkernel.lab.hf_equivalent import build_hf_equivalent

    model = dummy_transformer(Model(32, 64, 4, 2, 8, 1, 64), "cpu", torch.float32, tie_word_embeddings=False)
    assert not build_hf_equivalent(model).config.tie_word_embeddings
    model.config = replace(model.config, architecture="mixtral")
    with pytest.raises(ValueError, match="mixtral models are not supported"):
        build_hf_equivalent(model)


def test_the_hf_equivalent_of_a_quantized_model_has_its_weights_dequantized() -> None:
    """What `flashkernel demo` times beside a GGUF model."""
    pytest.importorskip("transformers")
    from flashkernel.core.shapes import Model
    from flashkernel.engine.dummy_weights import dummy_transformer
    from flashkernel.lab.hf_equivalent import build_hf_equivalent

    shape = Model(hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=96)
    model = dummy_transformer(shape, "cpu", torch.float32, max_position_embeddings=64).quantized("int8")
    layer = build_hf_equivalent(model).model.layers[1]
    qkv, down = model.layers[1].qkv_proj, model.layers[1].down_proj
    found = torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
    assert torch.equal(found, qkv.dequantize(torch.float32))
    assert torch.equal(layer.mlp.down_proj.weight, down.dequantize(torch.float32))
