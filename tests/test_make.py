"""The Makefile's runs of compute-sanitizer: which there are, that each checks something, and that one can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashkernel.core.device import KNOWN
from flashkernel.lab import builds, selection
from flashkernel.ops import registry

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists() or shutil.which("make") is None, reason="the source tree or make is not here"
)
TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")
SANITIZER = """#!/bin/sh
echo "$FLASHKERNEL_CUDA_ARCH|$*" >> {log}
case "$FLASHKERNEL_CUDA_ARCH $*" in *"75"*"racecheck"*" sum "*) exit {code};; esac
"""


def sanitize(folder: Path, *variables: str, code: int = 0) -> tuple[int, list[str]]:
    """`make sanitize-cuda` with a stand-in for compute-sanitizer; its exit code, and what the stand-in was given."""
    tool, log = folder / "compute-sanitizer", folder / "log"
    tool.write_text(SANITIZER.format(log=log, code=code))
    tool.chmod(0o755)
    log.write_text("")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["make", "-s", "sanitize-cuda", "PYTHON=python", *variables]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path, "MAKEFLAGS": ""}, capture_output=True)
    return done.returncode, log.read_text().splitlines()


def test_every_tool_runs_over_every_operator_for_both_architectures(tmp_path: Path) -> None:
    code, lines = sanitize(tmp_path)
    assert code == 0
    found: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        arch, _, command = line.partition("|")
        tool, op, cases = re.search(r"--tool (\w+) python -m flashkernel check (\w+) (.*)", command).groups()  # type: ignore[union-attr]
        assert (" --expected-on cpu" in cases) is (tool == "initcheck")
        found[arch, tool, op] = re.findall(r"--case (\S+)", cases)
    operators = {op for _, _, op in found}
    assert found.keys() == {(arch, tool, op) for arch in ("", "75") for tool in TOOLS for op in operators}
    # mean is a sum, and mlp calls the kernels of linear.
    with_kernels = {op.name for op in registry().values() if any(one.name == builds.CUDA for one in op.backends)}
    assert operators == with_kernels - {"mean", "mlp"}
    for (arch, _, name), cases in found.items():
        (op,) = selection.operators([name])
        chosen = selection.cases([op], cases, lambda op: op.cases)[name]
        assert {case.name for case in chosen} == set(cases), "each is the name of a case"
        build = builds.CUDA if arch == "" else f"cuda_sm{arch}"
        for case in chosen:
            assert selection.declined(op, case, torch.float16, KNOWN["h200"], build) is None, (name, case.name)


def test_parts_and_failures(tmp_path: Path) -> None:
    part = ("SANITIZE_ARCHS=75", "SANITIZE_TOOLS=racecheck synccheck", "SANITIZE_OPS=sum rope")
    code, lines = sanitize(tmp_path, *part)
    assert (code, len(lines)) == (0, 4)
    code, lines = sanitize(tmp_path, *part, code=9)
    assert code != 0
    assert len(lines) == 4, "a finding does not keep the other runs from their turn"
