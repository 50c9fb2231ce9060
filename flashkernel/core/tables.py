"""Stub until merged."""

_pinned: list = []


def pin(tensors):
    _pinned.extend(tensors)
