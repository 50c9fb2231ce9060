"""Calibration and perplexity of every architecture that the engine knows, against Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.transformer import PROJECTIONS
from flashkernel.quantization import Scheme, perplexity, quantize_model

pytest.importorskip("transformers")
import tiny_models

MIXTURES = ("gpt_oss", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_perplexity_and_folding(name: str, tmp_path: Path) -> None:
    """Perplexity is Transformers' own, and stays so when factors are folded into norms and rows."""
    theirs = tiny_models.save(name, tmp_path)
    model = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    tokens = torch.tensor(tiny_models.prompts((40, 40)))
    with torch.no_grad():
        expected = float(theirs(tokens, labels=tokens).loss.exp())
    assert perplexity(model, tokens).value == pytest.approx(expected, rel=2e-4)
    for method, scheme in (("awq", Scheme("int8", -1)), ("smoothquant", Scheme("int8", -1, True, torch.int8))):
        quantized, errors = quantize_model(model, tokens, method, scheme)
        calibrated = ("qkv_proj", "o_proj") if name in MIXTURES else PROJECTIONS
        assert [(one.layer, one.projection) for one in errors] == [(i, one) for i in (0, 1) for one in calibrated]
        assert max(one.after for one in errors) < 0.03
        assert perplexity(quantized, tokens).value == pytest.approx(expected, rel=0.1)
