"""sample: one token of each row of logits."""

from flashkernel.ops.sampling.api import sample

__all__ = ["sample"]
