"""`import flashkernel` stays close to `import torch`: what takes long to import waits until it is needed."""

from __future__ import annotations

import subprocess
import sys

import torch

from flashkernel.core.tracing import assume_constant_result

HEAVY = ("torch._dynamo", "torch._inductor", "triton", "sympy", "rich", "typer", "transformers", "cuda")


def test_import_brings_no_compiler_and_no_command_line() -> None:
    script = f"""
import sys
import torch
before = set(sys.modules)
import flashkernel
print(*[name for name in {HEAVY!r} if name in set(sys.modules) - before])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_the_mark_of_constant_results_is_torchs_own() -> None:
    def marked() -> None: ...

    def marked_by_torch() -> None: ...

    assert vars(assume_constant_result(marked)) == vars(torch.compiler.assume_constant_result(marked_by_torch)) != {}


def test_the_allocator_of_recordings_needs_no_dynamo() -> None:
    script = "import torch, sys; import torch._C._dynamo.guards; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
