"""The MLP of a transformer: up (and gate), activation, down."""

from flashkernel.ops.mlp.api import mlp

__all__ = ["mlp"]
