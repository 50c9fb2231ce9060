"""Reductions over the last dim: sum, mean, max, logsumexp, softmax and the weighted row sum."""

from flashkernel.ops.reduce.api import argmax, logsumexp, max, mean, softmax, sum, weighted_sum

__all__ = ["argmax", "logsumexp", "max", "mean", "softmax", "sum", "weighted_sum"]
