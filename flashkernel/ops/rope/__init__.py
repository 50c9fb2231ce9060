"""Rotary position embedding."""

from flashkernel.ops.rope.api import rope
from flashkernel.ops.rope.frequencies import Frequencies

__all__ = ["Frequencies", "rope"]
