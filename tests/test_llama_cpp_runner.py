"""The runner of llama.cpp: its calls in order, what it cannot do, and the package that may be missing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run

from flashkernel.engine.dummy_weights import tiny_transformer
from flashkernel.lab import results, runners
from flashkernel.lab.packages import MissingPackageError

RUNNER = runners.RUNNERS["llama_cpp"]


class Package(ModuleType):
    """A llama_cpp whose next token is the sum of all tokens so far, modulo the vocabulary."""

    llama_token = ctypes.c_int32

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.given: list[list[int]] = []
        self.logits = np.zeros(100, dtype=np.float32)
        self.options: dict[str, Any] = {}

    def Llama(self, path: str, **options: Any) -> Any:
        self.options = {"path": path, **options}
        made = ModuleType("llama")
        made.ctx, made.n_batch, made.n_vocab = self, 8, lambda: 100  # type: ignore[attr-defined]
        return made

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.given.clear()

    def llama_batch_get_one(self, tokens: Any, count: int) -> list[int]:
        return list(tokens)[:count]

    def llama_decode(self, context: Any, batch: list[int]) -> int:
        self.given.append(batch)
        return 0

    def llama_get_logits_ith(self, context: Any, index: int) -> Any:
        assert index == -1
        self.logits[:] = 0
        self.logits[sum(map(sum, self.given)) % 100] = 1
        return self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@pytest.fixture(name="package")
def package_fixture(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def test_prompts_in_chunks_then_token_by_token(package: Package) -> None:
    gguf = RUNNER.load(tiny_transformer(), Path("model.gguf"))
    generate = RUNNER.start(gguf, 1, 11, 4)
    for _ in range(2):  # the second run begins anew
        found = generate(torch.arange(11)[None], 4)
        assert found.tokens.tolist() == [[55, 10, 20, 40]]
        assert len(found.steps_s) == 3
        assert [len(batch) for batch in package.given] == [8, 3, 1, 1, 1]
    threads = torch.get_num_threads()
    assert package.options == {
        "path": "model.gguf", "n_ctx": 15, "n_threads": threads, "n_threads_batch": threads, "verbose": False,
    }  # fmt: skip


def test_what_it_cannot_do(package: Package) -> None:
    with pytest.raises(runners.UnsupportedError, match=r"reads GGUF files.*--model smollm2"):
        RUNNER.load(tiny_transformer(), None)
    with pytest.raises(runners.UnsupportedError, match="one sequence, not with 4; take --batch 1"):
        RUNNER.start(Path("model.gguf"), 4, 8, 8)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'flashkernel\[llama-cpp\]'"):
        RUNNER.load(tiny_transformer(), Path("model.gguf"))
    assert "llama_cpp" not in runners.DEFAULTS


def test_the_shipped_model_beside_it(package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both runners take one GGUF file in turns, and the dequantized model checks both: these tokens are wrong."""
    pytest.importorskip("transformers")
    import tiny_models

    from flashkernel.engine import hub

    tiny_models.save_gguf(tiny_models.build("llama", intermediate_size=96), tmp_path / "model.gguf", "Q4_1")
    monkeypatch.setattr(hub, "default_model", lambda: tmp_path / "model.gguf")
    chosen = ("--runner", "engine", "--runner", "llama_cpp", "--batch", "1", "--rounds", "2")
    sizes = ("--prompt", "12", "--new", "4", "--device", "cpu", "--save", str(tmp_path / "results"))
    run("e2e", "--model", "smollm2", *chosen, *sizes)
    saved = results.load(tmp_path / "results" / "e2e.json")
    engine, llama = saved["records"]
    assert (engine.implementation, llama.implementation) == ("engine", "llama_cpp")
    assert engine.comparable
    assert llama.tokens_per_s > 0
    assert llama.correct is False
    assert package.options["path"] == str(tmp_path / "model.gguf")
