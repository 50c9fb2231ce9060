"""Stub until merged."""
_pinned = []
def pin(tensors): _pinned.extend(tensors)
