"""The examples run, and show what they say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_gpt_oss_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("finetune_gpt_oss")
    runs = example.main(["--tiny", "--steps", "6", "--length", "64", "--out", str(tmp_path / "loss.png")])
    assert runs["fkernel"].losses == pytest.approx(runs["eager"].losses, abs=1e-4)
    assert runs["fkernel"].losses[-1] < runs["fkernel"].losses[0]
    assert (tmp_path / "loss.png").stat().st_size > 1000
