"""`import flashkernel` imports next to nothing: what takes long to import waits until it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashkernel
from flashkernel.core.tracing import assume_constant_result

HEAVY = ("torch._dynamo", "torch._inductor", "triton", "sympy", "rich", "typer", "transformers", "cuda")
LAZY = ("flashkernel", "flashkernel.engine")
# What a process of the API does with a request before the engine's process gets it.
API_PROCESS = """
import pickle
from flashkernel.engine.server import api_server_process, protocol
from flashkernel.engine.server.engine_client import EngineRequest
from flashkernel.engine.server.responses import ResponsesRequest
body = b'{"model": "tiny", "input": "sea", "text": {"format": {"type": "json_object"}}}'
parsed = protocol.parse(ResponsesRequest, body)
pickle.loads(pickle.dumps(EngineRequest("request-1", [1, 2], parsed.sampling_params(), True)))
"""


def _imported(script: str) -> set[str]:
    """The modules that a script imports."""
    code = f"import sys\nbefore = set(sys.modules)\n{script}\nprint(*(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_import_brings_no_compiler_and_no_command_line() -> None:
    script = "import torch\nbefore = set(sys.modules)\nfrom flashkernel import *"
    assert not _imported(script) & set(HEAVY)


@pytest.mark.parametrize("script", ["import flashkernel", "import flashkernel.engine", API_PROCESS])
def test_what_computes_nothing_imports_no_torch(script: str) -> None:
    assert not _imported(script) & {*HEAVY, "torch", "numpy", "flashkernel.ops"}


def test_an_operator_imports_what_it_needs_alone() -> None:
    found = _imported("import flashkernel as fk\nfk.rms_norm")
    assert "flashkernel.ops.norm" in found
    assert not found & {"flashkernel.ops.attention", "flashkernel.ops.moe", "flashkernel.engine"}


@pytest.mark.parametrize("package", LAZY)
def test_the_lists_of_lazy_names_agree(package: str) -> None:
    """What type checkers see, what is imported on first use, and `__all__`."""
    module = importlib.import_module(package)
    (checked,) = [
        node
        for node in ast.parse(Path(str(module.__file__)).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    (call,) = [node for part in checked.orelse for node in ast.walk(part) if isinstance(node, ast.Call)]
    names = ast.literal_eval(call.args[1])
    assert {name: f"{package}.{one}" for one, given in names.items() for name in given} == imported
    assert sorted(imported) == sorted(module.__all__)
    for name, source in imported.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(source)), name)
        assert name in dir(module)


def test_names_that_a_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="module 'flashkernel' has no attribute 'attentoin'"):
        flashkernel.attentoin  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'attentoin' from 'flashkernel'"):
        from flashkernel import attentoin  # type: ignore[attr-defined]  # noqa: F401


def test_formats_of_weights_are_imported_in_any_order() -> None:
    assert "flashkernel.blocks.weight" in _imported("import flashkernel.blocks.weight_formats.grouped")


def test_the_mark_of_constant_results_is_torchs_own() -> None:
    def marked() -> None: ...

    def marked_by_torch() -> None: ...

    assert vars(assume_constant_result(marked)) == vars(torch.compiler.assume_constant_result(marked_by_torch)) != {}


def test_the_allocator_of_recordings_needs_no_dynamo() -> None:
    script = "import torch, sys; import torch._C._dynamo.guards; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
