"""Cross-entropy, and linear + cross-entropy without the logits."""

from flashkernel.ops.loss.api import cross_entropy, linear_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
