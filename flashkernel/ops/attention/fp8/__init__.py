"""FP8 attention and the quantization of its inputs."""

from flashkernel.ops.attention.fp8.api import attention_fp8
from flashkernel.ops.attention.fp8.quantize import quantize_fp8

__all__ = ["attention_fp8", "quantize_fp8"]
