"""Attention that rotates q and k as it loads them."""

from flashkernel.ops.attention.rotary.api import rotary_attention

__all__ = ["rotary_attention"]
