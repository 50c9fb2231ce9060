"""Attention over packed sequences."""

from flashkernel.ops.attention.varlen.api import attention_varlen

__all__ = ["attention_varlen"]
