"""Quantization of models: rounding to nearest, GPTQ, AWQ and SmoothQuant, and the perplexity of what they give."""

from flashkernel.quantization.calibration import LayerError, Method, quantize_model
from flashkernel.quantization.evaluation import (
    CALIBRATION_TEXT,
    EVALUATION_TEXT,
    Perplexity,
    perplexity,
    shipped_text,
    windows,
)
from flashkernel.quantization.layer_pass import KV_CACHES
from flashkernel.quantization.scheme import Scheme

__all__ = [
    "CALIBRATION_TEXT",
    "EVALUATION_TEXT",
    "KV_CACHES",
    "LayerError",
    "Method",
    "Perplexity",
    "Scheme",
    "perplexity",
    "quantize_model",
    "shipped_text",
    "windows",
]
