"""Every Python block of every README and guide runs as it stands; without a GPU, "cuda" is read as "cpu".

Blocks that are a whole file, whose first line is a comment with its path, are tested in test_docs.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "README.md", *(ROOT / "flashkernel").rglob("README.md"), *(ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = "# flashkernel/"
NEEDS_A_SERVER = "OpenAI("


def _blocks(page: Path) -> list[str]:
    """The blocks as plain code: of a session what stands behind the prompts."""
    found = []
    for text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if text.startswith(FILE):
            continue
        lines = text.splitlines()
        if any(line.startswith(">>> ") for line in lines):
            lines = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        found.append("\n".join(lines))
    return found


def _run(code: str, names: dict[str, Any], page: Path) -> None:
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"')
    exec(compile(code, str(page), "exec"), names)


with_code = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if _blocks(page)]


@pytest.mark.parametrize("page", with_code)
def test_blocks_leave_nothing_out(page: Path) -> None:
    for code in _blocks(page):
        gaps = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant) and node.value is ...]
        assert not gaps, f"line {gaps[0].lineno} of a block has an ellipsis in place of code"


@pytest.mark.parametrize("page", with_code)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks go on from one another. Models that would be fetched are tiny ones from disk."""
    blocks = _blocks(page)
    if any("LLM(" in code or "from_pretrained" in code for code in blocks):
        _fetch_tiny_models(tmp_path, monkeypatch)
    names: dict[str, Any] = {"__name__": "snippet"}
    for code in blocks:
        if NEEDS_A_SERVER in code:
            _run_with_server(code, names, page)
        else:
            _run(code, names, page)


def _fetch_tiny_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from flashkernel.engine import hub

    tiny_models.save("llama", folder)
    monkeypatch.setattr(hub, "default_model", lambda: folder)
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        real = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda name, real=real: real(folder))


def _run_with_server(code: str, names: dict[str, Any], page: Path) -> None:
    """What a client does, against a server of the model that the page made before."""
    pytest.importorskip("openai")
    pytest.importorskip("starlette")
    from running_server import serve

    with serve(names["llm"], served_model_name="smollm2") as running:
        _run(code.replace("http://127.0.0.1:8000/v1", running.url), names, page)
