"""Peak memory of a part of a run on the host, by the resident set that Linux counts; None on other systems."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets VmHWM to the resident set of now


class HostPeak:
    """How far the resident set rises above what it is when this is made.

    Memory that was freed before is given back to the system first, so that it does not hide what comes.

    Example:
        >>> peak = HostPeak()
        >>> block = bytearray(50_000_000)
        >>> del block
        >>> rise = peak.bytes()
        >>> rise is None or rise > 40_000_000
        True
    """

    def __init__(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            self._before = None
        else:
            self._before = _resident("VmRSS")

    def bytes(self) -> int | None:
        """The rise until now; None where the system does not say."""
        highest = _resident("VmHWM")
        return None if self._before is None or highest is None else max(0, highest - self._before)


def _resident(name: str) -> int | None:
    """A line of /proc/self/status in bytes; None where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else 1024 * int(found)
