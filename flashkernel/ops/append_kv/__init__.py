"""Writing new keys and values into pages."""

from flashkernel.ops.append_kv.api import append_kv

__all__ = ["append_kv"]
