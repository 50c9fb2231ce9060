"""Random calls drawn from the declarations, and the command that runs them in worker processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkernel.core.check import verify
from flashkernel.core.op import LAYOUTS, lay_out
from flashkernel.core.random_case import GROUP, describe, draw
from flashkernel.core.worker_pool import WorkerPool
from flashkernel.lab.random_calls import Call, run_one, schedule
from flashkernel.ops import registry

OPS = list(registry().values())
CPU_PARTS, CPU_CALLS = 4, 100
GPU_PARTS, GPU_CALLS = 12, 192


def _check(config: pytest.Config, sizes: str, calls: int, part: int, parts: int, device: str) -> None:
    batches = list(schedule(OPS, config.getoption("--random-seed"), sizes, calls))
    outcomes = [run_one(call, torch.device(device)) for batch in batches[part::parts] for call in batch]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    assert not failed, "\n".join(f"{one.case}\n  {one.failures}\n  {one.command}" for one in failed)
    assert any("triton" in outcome.checked for outcome in outcomes)


@pytest.mark.parametrize("part", range(CPU_PARTS))
def test_random_calls(part: int, pytestconfig: pytest.Config) -> None:
    _check(pytestconfig, "small", CPU_CALLS, part, CPU_PARTS, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(GPU_PARTS))
def test_random_calls_on_a_gpu(part: int, pytestconfig: pytest.Config) -> None:
    _check(pytestconfig, "large", GPU_CALLS, part, GPU_PARTS, "cuda")


def test_repeated_calls_are_replayed(repeated: list[Any]) -> None:
    """And a replay that is wrong is a failure that says how to repeat it."""
    call = Call("silu", 3, "small", repeats=4)
    assert run_one(call, torch.device("cpu"), ["triton"]).status == "passed"
    assert repeated
    for recording in repeated:
        recording.run = lambda tensors: torch.zeros_like(tensors[0])
    outcome = run_one(call, torch.device("cpu"), ["triton"])
    assert outcome.failures["triton"].startswith("call 1: ")
    assert "--repeats 4 --backend triton silu" in outcome.command


def test_more_draws_do_not_concern_outputs_that_are_right() -> None:
    """Integers have no limit that another draw could widen: moe_route's are exact, its weights too far off."""
    op = registry()["moe_route"]

    def off(**given: Any) -> Any:
        experts, weights, *rest = op.plain(**given)
        return experts, 1.5 * weights, *rest

    reports = verify(op, op.cases[0], torch.float32, off, gradients=False, draws=3)
    assert [report.name for report in reports if not report.ok] == ["output1"]


def test_a_schedule_has_every_operator_and_as_many_calls_as_asked_for() -> None:
    for sizes in ("small", "large"):
        calls = [call for batch in schedule(OPS, 7, sizes, 400) for call in batch]
        assert len(calls) == len(set(calls)) == 400
        assert {call.op for call in calls} == {op.name for op in OPS}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_draw_repeats_and_neighbors_share_their_kernels(op: Any) -> None:
    one, again = (draw(op, 11, "small") for _ in range(2))
    assert describe(*one) == describe(*again)
    inputs = [op.make_inputs(case, dtype, seed=11, draw_on="cpu") for case, dtype in (one, again)]
    for name, value in inputs[0].items():
        assert value.stride() == inputs[1][name].stride()
        torch.testing.assert_close(value, inputs[1][name], rtol=0, atol=0, equal_nan=True)
    group = [draw(op, seed, "large") for seed in range(GROUP)]
    assert len({(dtype, case.present, tuple(case.layout_of.items())) for case, dtype in group}) == 1


def test_draws_reach_what_attention_has() -> None:
    texts = " ".join(describe(*draw(registry()["attention"], seed, "small")) for seed in range(400))
    wanted = (
        "causal", "window(", "sink_tokens", "prefix", "documents", "block_sparse", "column_intervals", "table[q, k]",
        "(q - k) // 4", "(q - k) % 5", "~", " & ", " | ", "softcap", "scale=", "return_lse", "dropout", "score=",
        "+bias", "+sinks", "+alibi_slopes", "bias_queries=1", "bias_keys=1", "hidden=", "forward only", "queries=0",
        *(f"k:{layout}" for layout in LAYOUTS if layout != "contiguous"),
    )  # fmt: skip
    assert [text for text in wanted if text not in texts] == []
    cases = [draw(registry()["attention"], seed, "small")[0].axes for seed in range(100)]
    assert any(axes["head_dim"] != axes["value_dim"] for axes in cases)
    assert any(axes["queries"] != axes["keys"] for axes in cases)
    assert any(axes["heads"] != axes["kv_heads"] for axes in cases)


def test_calls_whose_gradients_vanish_are_forward_only() -> None:
    """Where all packed keys, or all values, are the same: rounding cannot be measured against a gradient of 0."""
    cases = [draw(registry()["attention_varlen"], seed, "small")[0] for seed in range(200)]
    alike = ["expanded" in (case.layout_of.get("k"), case.layout_of.get("v")) for case in cases]
    assert any(alike)
    assert not any(case.gradients for case, vanish in zip(cases, alike) if vanish)
    assert any(case.gradients for case in cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_layouts_keep_values(layout: str, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 4, 5), (3, 5), (4,), (), (0, 3), (3, 0)):
        values = torch.randint(0, 2, shape).to(dtype)
        found = lay_out(values, layout)
        expands = layout == "expanded" and len(shape) > 1 and dtype.is_floating_point
        expected = values[:1].expand(shape) if expands else values
        assert torch.equal(found.float(), expected.float())


def _task(word: str) -> str:
    if word == "die":
        os._exit(3)
    return word.upper()


@pytest.mark.skipif(torch.cuda.is_available(), reason="once is enough")
def test_a_pool_outlives_its_workers() -> None:
    """The rest of a batch goes to a fresh one."""
    found = list(WorkerPool(_task, (), 1, 60.0).run(iter([["a", "die", "b"]])))
    assert found == [("a", "A", ""), ("die", None, "its process died: exit code 3"), ("b", "B", "")]


# Run as the command itself: a worker imports the main script again, so all of them have the wrong functions.
BROKEN = """
import os, pathlib, time
from flashkernel.ops.activation import torch as activations

right = activations.silu
activations.silu = lambda x: right(x) + 0.5


def relu(x):
    os._exit(7)


def squared_relu(x):
    pathlib.Path({mark!r}).write_text(str(os.getpid()))
    time.sleep(600)


activations.relu, activations.squared_relu = relu, squared_relu
if __name__ == "__main__":
    from flashkernel.cli import app

    app(prog_name="flashkernel")
"""


@pytest.fixture
def broken(tmp_path: Path) -> list[str]:
    """The command with a silu that is wrong, a relu that dies and a squared_relu that hangs."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(mark=str(tmp_path / "hung")))
    return [sys.executable, str(script)]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": root, "TRITON_INTERPRET": "0"}


def test_what_is_wrong_dies_or_hangs_is_told_with_the_command_that_repeats_it(broken: list[str]) -> None:
    check = "check --random --device cpu --calls 4 --seed 3 --workers 2 --timeout 8 gelu silu relu squared_relu"
    done = subprocess.run(
        [*broken, *check.split()], env=_environment(), capture_output=True, text=True, timeout=280
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if "repeat:" in line]
    commands = {line.split()[-1]: line.removeprefix("repeat: ") for line in lines}
    assert set(commands) == {"silu", "relu", "squared_relu"}
    assert "its process died: exit code 7" in done.stderr
    assert "no answer within 8 s" in done.stderr
    assert re.search(r"gelu\s+│ 1 ", done.stdout)
    words = shlex.split(commands["silu"])
    assert words[0] == "flashkernel"
    again = subprocess.run([*broken, *words[1:]], env=_environment(), capture_output=True, text=True, timeout=280)
    assert again.returncode == 1
    assert "output: error 5.0" in again.stderr
    assert commands["silu"] in again.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
def test_a_run_that_is_stopped_tells_what_it_found_and_leaves_no_process(
    broken: list[str], tmp_path: Path, sent: signal.Signals
) -> None:
    check = "check --random --device cpu --seconds 100 --seed 3 --workers 2 silu squared_relu"
    process = subprocess.Popen(
        [*broken, *check.split()], env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    mark, end = tmp_path / "hung", time.monotonic() + 200
    while not (mark.exists() and mark.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)  # silu's calls
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does: to all of them
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_options_that_do_not_belong_together_are_refused() -> None:
    from typer.testing import CliRunner

    from flashkernel.cli import app

    assert "belong to --random" in CliRunner().invoke(app, ["check", "--calls", "3"]).output
    assert "leave --case" in CliRunner().invoke(app, ["check", "--random", "--case", "plain"]).output
