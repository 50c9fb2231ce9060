"""RMSNorm and LayerNorm."""

from flashkernel.ops.norm.api import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
