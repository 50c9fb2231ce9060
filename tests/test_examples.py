"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_gpt_oss_fine_tuning(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("finetune_gpt_oss", EXAMPLES / "finetune_gpt_oss.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    runs = example.main(["--tiny", "--steps", "6", "--length", "64", "--out", str(tmp_path / "loss.png")])
    assert runs["fkernel"].losses == pytest.approx(runs["eager"].losses, abs=1e-4)
    assert runs["fkernel"].losses[-1] < runs["fkernel"].losses[0]
    assert (tmp_path / "loss.png").stat().st_size > 1000
