"""Attention over a cache of keys and values: decoding, and prefill through pages."""

from flashkernel.ops.decode.api import decode_attention, paged_attention

__all__ = ["decode_attention", "paged_attention"]
