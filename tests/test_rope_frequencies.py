"""Frequencies of rotary embeddings: formulas, Transformers' own, configs, wrong values."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from flashkernel.ops.rope import Frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GPT_OSS = {"factor": 32.0, "beta_fast": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def test_llama3_frequencies() -> None:
    """Llama-3.1-8B: high frequencies kept, low ones divided by 8, those between blended."""
    got = Frequencies.llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192).values
    assert got[0] == 1.0
    assert got[20] == pytest.approx(500000.0 ** (-40 / 128), rel=1e-6)
    assert got[63] == pytest.approx(500000.0 ** (-126 / 128) / 8, rel=1e-6)
    golden = {
        29: 2.1665706e-3,
        30: 1.3718937e-3,
        31: 8.5675146e-4,
        33: 3.1269365e-4,
        34: 1.7850779e-4,
        35: 9.5562122e-5,
    }
    for index, value in golden.items():
        assert got[index] == pytest.approx(value, rel=2e-6)


def test_yarn_frequencies() -> None:
    """gpt-oss: theta 150000, 32 times the context of 4096, ramp not truncated; and DeepSeek's two mscales."""
    frequencies = Frequencies.yarn(64, 150000.0, 32.0, 4096, truncate=False)
    assert frequencies.scaling == pytest.approx(0.1 * math.log(32) + 1)
    golden = {
        0: 1.0,
        5: 0.15532298,
        8: 0.05081327,
        9: 0.031705696,
        12: 6.7949593e-3,
        17: 1.2931869e-4,
        20: 1.8188337e-5,
    }
    for index, value in golden.items():
        assert frequencies.values[index] == pytest.approx(value, rel=2e-6)
    assert Frequencies.yarn(64, 1e4, 40.0, 4096, mscale=1.0, mscale_all_dim=1.0).scaling == 1.0
    assert Frequencies.yarn(64, 1e4, 40.0, 4096, attention_factor=0.7).scaling == 0.7


def test_linear_frequencies() -> None:
    got = Frequencies.linear(128, 10000.0, 4.0).values
    assert got[0] == 0.25
    assert got[63] == pytest.approx(10000.0 ** (-126 / 128) / 4, rel=1e-6)


CONFIGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "rope_theta": 150000.0, **GPT_OSS},
    "yarn-deepseek": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                      "original_max_position_embeddings": 4096},
    "yarn-no-ramp": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 1.0, "beta_slow": 1.0,
                     "original_max_position_embeddings": 2048, "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_match_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=1024, num_attention_heads=8, max_position_embeddings=131072, rope_parameters=dict(CONFIGS[name])
    )
    if CONFIGS[name]["rope_type"] == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        inverse, scaling = module.compute_default_rope_parameters(config)
    else:
        inverse, scaling = ROPE_INIT_FUNCTIONS[CONFIGS[name]["rope_type"]](config, "cpu")
    got = Frequencies.from_hf(config)
    torch.testing.assert_close(got.inverse(), inverse, rtol=1e-6, atol=0)
    assert got.scaling == pytest.approx(scaling)


def test_from_hf_reads_both_generations_of_configs() -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 131072}
    new = SimpleNamespace(**sizes, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    old = SimpleNamespace(**sizes, rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    expected = Frequencies.llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192)
    assert Frequencies.from_hf(new) == Frequencies.from_hf(old) == Frequencies.from_hf(vars(old)) == expected
    assert hash(Frequencies.from_hf(new)) == hash(expected)
    plain = {"head_dim": 64, "rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.25}
    assert Frequencies.from_hf(plain) == Frequencies.plain(16, 1e6)
    layered = {"head_dim": 32, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}  # fmt: skip
    assert Frequencies.from_hf(layered, "sliding_attention") == Frequencies.plain(32, 1e4)
    assert Frequencies.from_hf(layered, "full_attention") == Frequencies.linear(32, 1e6, 8.0)
    with pytest.raises(ValueError, match="this model has full_attention, sliding_attention; say layer_type"):
        Frequencies.from_hf(layered)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Frequencies(()), "at least one finite value"),
        (lambda: Frequencies((1.0, float("inf"))), "finite"),
        (lambda: Frequencies.plain(7), "7 dims cannot be rotated in pairs"),
        (lambda: Frequencies.linear(8, -1.0, 2.0), "theta is -1.0"),
        (lambda: Frequencies.llama3(8, 1e4, 8.0, 4.0, 4.0, 8192), "must be above low_freq_factor"),
        (lambda: Frequencies.from_hf({"hidden_size": 64}), "no head_dim"),
        (lambda: Frequencies.from_hf({"head_dim": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
         "rope type 'dynamic' is not known; there are default, linear, llama3, yarn"),
        (lambda: Frequencies.from_hf({"head_dim": 64, "rope_scaling": {"type": "llama3"}}),
         "'llama3' needs factor, low_freq_factor, high_freq_factor, original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_wrong_frequencies(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
