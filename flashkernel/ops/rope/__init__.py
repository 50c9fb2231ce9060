"""Rotary position embedding."""

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.ops.rope.api import rope

__all__ = ["Frequencies", "rope"]
