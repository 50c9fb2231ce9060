"""The rules of the house: what a declaration must hold, who may import whom, what a room must contain."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashkernel
from flashkernel.core.op import LAYOUTS, Case, Op, resolve
from flashkernel.ops import registry

ROOT = Path(flashkernel.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
ROOMS = sorted(path.parent for path in (ROOT / "ops").glob("*/__init__.py"))
OPS = list(registry().values())
by_name = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
by_room = pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)

# package -> packages of the project it may import
MAY_IMPORT = {
    "core": {"core"},
    "blocks": {"core", "blocks"},
    "ops": {"core", "blocks", "ops"},
    "kvcache": {"core", "blocks", "ops", "kvcache"},
    "lab": {"core", "ops", "lab", "engine", "hf"},
    "compat": {"core", "blocks", "ops", "compat"},
    "hf": {"core", "blocks", "ops", "compat", "hf"},
    "engine": {"core", "kvcache", "engine"},  # operators by the package's own public names
}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flashkernel"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("flashkernel"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_house(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    for name in _imports(path):
        target = name.split(".")
        if len(parts) > 1 and parts[0] in MAY_IMPORT and len(target) > 2:
            assert target[1] in MAY_IMPORT[parts[0]], f"{parts[0]} must not import {name}"
        if parts[0] == "ops" and len(parts) > 2 and target[1:2] == ["ops"]:
            assert target[2] == parts[1], f"room {parts[1]} must not import {name}: rooms do not see each other"
        if parts[0] in ("kvcache", "lab", "compat", "hf") and target[1:2] == ["ops"] and len(target) > 3:
            public = importlib.import_module(".".join(target[:3]))
            assert target[3] in public.__all__, f"{parts[0]} sees rooms through their public names only, not {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_names_no_operator_and_env_is_read_in_one_file(path: Path) -> None:
    text = path.read_text()
    if path.relative_to(ROOT).parts[0] == "core":
        named = [op.name for op in OPS if re.search(rf"[\"']{op.name}[\"']", text)]
        assert not named, f"core names the operators {named}"
    if path.name != "env.py":
        assert "os.environ" not in text, "environment variables are read in core/env.py only"
        assert "os.getenv" not in text, "environment variables are read in core/env.py only"


@by_room
def test_a_room_is_complete(room: Path) -> None:
    for name in ("spec.py", "reference.py", "api.py", "README.md", "configs.py"):
        assert (room / name).exists(), f"room {room.name} has no {name}"
    names = {op.name for op in OPS if op.function.startswith(f"flashkernel.ops.{room.name}.")}
    assert names, f"room {room.name} declares no operator"
    for name in names:
        assert callable(getattr(flashkernel, name)), f"flashkernel.{name} is not exported"


@by_name
def test_a_declaration_is_whole(op: Op) -> None:
    assert op.summary
    assert op.cases, "no test cases"
    assert op.benches, "no benchmark cases"
    assert len({case.name for case in op.cases}) == len(op.cases), "two test cases share a name"
    assert len({case.name for case in op.benches}) == len(op.benches), "two benchmark cases share a name"
    names = [backend.name for backend in op.backends]
    assert len(set(names)) == len(names)
    assert {"torch", "reference"} <= set(names)
    for backend in op.backends:
        assert backend.name in ("reference", "torch", "triton", "hopper", "cuda")
        if backend.name in ("reference", "torch"):
            assert backend.composite
            assert callable(backend.run)
    assert resolve(op.reference).__doc__ or op.plain.__doc__


@by_name
def test_cases_and_costs_fit_the_inputs(op: Op) -> None:
    for case in (*op.cases, *op.benches):
        assert case.layout in LAYOUTS
        assert set(case.present) <= {name for name, spec in op.inputs.items() if spec.optional}
        assert all(size >= 0 for shape in _shapes(op, case) for size in shape)
    for case in op.benches:
        for direction, cost in op.cost(case, case.dtypes[0]).items():
            assert direction in ("fwd", "bwd", "fwd+bwd")
            assert cost.flops > 0
            assert cost.bytes > 0


@by_name
def test_cases_cover_what_every_operator_owes(op: Op) -> None:
    shapes = [shape for case in op.cases for shape in _shapes(op, case)]
    assert any(0 in shape for shape in shapes), "no empty input"
    assert {case.layout for case in op.cases} >= {"padded", "transposed"}, "no strided inputs"
    dtypes = {dtype for case in op.cases for dtype in case.dtypes}
    assert dtypes >= {torch.float32, torch.float16, torch.bfloat16}
    assert any(size % 2 for shape in shapes for size in shape if size > 1), "no odd size"


def _shapes(op: Op, case: Case) -> list[tuple[int, ...]]:
    given = [spec for name, spec in op.inputs.items() if not spec.optional or name in case.present]
    return [spec.shape(case.axes) for spec in given]


def test_public_names_have_docstrings() -> None:
    for name in flashkernel.__all__:
        value = getattr(flashkernel, name)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"flashkernel.{name} has no docstring"
