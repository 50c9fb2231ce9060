"""Small random models of every family, patched and as Transformers made them, and their gradients compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

import test_hf  # noqa: E402

import flashkernel.hf as hf  # noqa: E402
from flashkernel.hf import forwards  # noqa: E402

SIZES = test_hf.SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **test_hf.MODELS,
    "qwen2": ("Qwen2", {name: size for name, size in SIZES.items() if name != "head_dim"}),
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**test_hf.MODELS["gemma2"][1], "final_logit_softcapping": 3.0}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
}
by_family = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator runs, also those that a CPU leaves to Transformers."""
    monkeypatch.setattr(forwards, "_keeps_own_code", lambda x: False)


def model(name: str, **changes: Any) -> Any:
    """A model with eager attention whose norms, biases and sinks are as random as its matrices."""
    prefix, options = MODELS[name]
    config = getattr(transformers, "Gemma3TextConfig" if name == "gemma3" else f"{prefix}Config")
    build = getattr(transformers, f"{prefix}LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM")
    made = build._from_config(config(**{**options, **changes}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, parameter in made.named_parameters():
            center = 0.0 if parameter.ndim > 1 or "bias" in label or "gemma" in name else 1.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """(as Transformers made it, patched)."""
    theirs, ours = model(name, **changes), model(name, **changes)
    hf.patch(ours)
    return theirs, ours


def gradients_match(theirs: Any, ours: Any, inputs: dict[str, Any], tolerance: float = 1e-5) -> None:
    expected, expected_gradients = test_hf.loss_and_gradients(theirs, inputs)
    loss, gradients = test_hf.loss_and_gradients(ours, inputs)
    torch.testing.assert_close(loss.to(expected.dtype), expected, atol=tolerance, rtol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    test_hf.gradients_agree(gradients, expected_gradients, tolerance)
