"""quantize, dequantize, and the passes that end in a quantization: rms_norm_quantize and glu_quantize."""

from flashkernel.ops.quant.api import dequantize, glu_quantize, quantize, rms_norm_quantize

__all__ = ["dequantize", "glu_quantize", "quantize", "rms_norm_quantize"]
