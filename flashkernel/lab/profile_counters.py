"""Nsight Compute's counters: which metrics are read, and the CSV text that `ncu --csv --page raw` prints."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashkernel.lab.profile_records import MEANINGS, KernelProfile, top_stalls

DURATION = "gpu__time_duration.sum"
DRAM_BYTES = "dram__bytes.sum"
SHARED_STATIC, SHARED_DYNAMIC = "launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"
REGISTERS = "launch__registers_per_thread"
ACHIEVED, THEORETICAL = "sm__warps_active.avg.pct_of_peak_sustained_active", "sm__maximum_warps_per_active_cycle_pct"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
# The parts of SM throughput; the tensor pipe's name differs by architecture, so it is found among them.
SM_PARTS = f"breakdown:{SM}"
TENSOR = re.compile(r"^sm__.*pipe_tensor.*pct_of_peak_sustained")
STALL = re.compile(r"^smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio$")
HOPPER_STALLS = ("gmma",)  # reasons that older architectures do not have
NOT_A_STALL = "selected"

# Units of a raw page. `--print-units base` gives the base units; others are scaled, should a version ignore it.
_MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6,
                 "second": 1e6}  # fmt: skip
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_UNKNOWN = ("", "n/a", "nan", "inf", "-inf", "no data")


class CounterError(ValueError):
    """ncu's output has no table of kernels; the message says what it printed instead."""


@dataclass(frozen=True)
class Row:
    """A kernel launch of the raw page: its profile, and the text of all its NVTX ranges."""

    kernel: KernelProfile
    ranges: str


def metrics(arch: int) -> list[str]:
    """The metrics to read on `sm_<arch>`: about a dozen passes over each kernel, where `--set full` takes forty."""
    stalls = [name for name in MEANINGS if arch >= 90 or name not in HOPPER_STALLS]
    return [
        DURATION, DRAM_BYTES, REGISTERS, SHARED_STATIC, SHARED_DYNAMIC, ACHIEVED, THEORETICAL, DRAM, L2, SM, SM_PARTS,
        *(f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in stalls),
    ]  # fmt: skip


def parse(text: str) -> list[Row]:
    """The kernel launches in the output of `ncu --csv --page raw`, in launch order.

    Lines before the table (ncu's own messages) are skipped. The second line of the table has the units. A metric that
    is missing or "n/a" gives None.

    Args:
        text: what ncu wrote to its log file.

    Returns:
        A row for each launch; CounterError if there is no table.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.lstrip("\ufeff").startswith('"ID"')), None)
    if start is None:
        raise CounterError(messages(text) or "ncu printed no table of kernels")
    table = list(csv.reader(line for line in lines[start:] if line.startswith(('"', "\ufeff"))))
    head = table[0]
    cells = [dict(zip(head, row)) for row in table[1:]]
    units = cells[0] if cells and not cells[0].get("ID") else {}
    return [_row(values, units) for values in cells if values.get("ID", "").isdigit()]


def messages(text: str) -> str:
    """ncu's errors, or where there are none its warnings, in one line."""
    for mark in ("==ERROR==", "==WARNING=="):
        found = dict.fromkeys(line[len(mark) :].strip() for line in text.splitlines() if line.startswith(mark))
        if found:
            return " ".join(found)[:500]
    return ""


def short_name(name: str) -> str:
    """A kernel's name without its parameters and return type.

    Example:
        >>> short_name("void row_sum<float, (int)4>(const float *, float *, int)")
        'row_sum<float, (int)4>'
    """
    name = name.strip().removeprefix("void ")
    if name.endswith(")"):
        depth = 0
        for index in range(len(name) - 1, 0, -1):
            depth += {")": 1, "(": -1}.get(name[index], 0)
            if depth == 0:
                name = name[:index]
                break
    return name if len(name) <= 120 else f"{name[:117]}..."


def _row(values: Mapping[str, str], units: Mapping[str, str]) -> Row:
    def number(name: str) -> float | None:
        return _number(values.get(name))

    duration = _scaled(number(DURATION), units.get(DURATION, ""), _MICROSECONDS)
    stalls = {found[1]: number(name) for name in values if (found := STALL.match(name)) and found[1] != NOT_A_STALL}
    tensor = [value for name in values if TENSOR.match(name) and (value := number(name)) is not None]
    kernel = KernelProfile(
        short_name(values.get("Kernel Name", "")),
        1,
        0.0 if duration is None else duration,
        _sizes(values.get("Grid Size")),
        _sizes(values.get("Block Size")),
        _whole(number(REGISTERS)),
        _whole(_scaled(number(SHARED_STATIC), units.get(SHARED_STATIC, ""), _BYTES)),
        _whole(_scaled(number(SHARED_DYNAMIC), units.get(SHARED_DYNAMIC, ""), _BYTES)),
        number(ACHIEVED),
        number(THEORETICAL),
        number(DRAM),
        number(L2),
        number(SM),
        max(tensor, default=None),
        _scaled(number(DRAM_BYTES), units.get(DRAM_BYTES, ""), _BYTES),
        top_stalls(stalls) or None,
    )
    ranges = " ".join(text for name, text in values.items() if "_Range" in name and text)
    return Row(kernel, ranges)


def _number(text: str | None) -> float | None:
    text = (text or "").strip().replace(",", "").rstrip("%").strip()
    if text.lower() in _UNKNOWN:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _scaled(value: float | None, unit: str, scales: Mapping[str, float]) -> float | None:
    """The value in microseconds or bytes; without a known unit, in the base unit (ns, bytes)."""
    base = min(scales.values())
    return None if value is None else value * scales.get(unit.strip().split("/")[0], base)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _sizes(text: str | None) -> str | None:
    """ "132x2" for "(132, 2, 1)": trailing ones are left out."""
    sizes = re.findall(r"\d+", text or "")
    while len(sizes) > 1 and sizes[-1] == "1":
        sizes.pop()
    return "x".join(sizes) or None


def by_range(rows: Sequence[Row], labels: Sequence[str]) -> dict[str, list[KernelProfile]]:
    """The kernels of each labeled NVTX range. With one label, rows without any range belong to it."""
    found: dict[str, list[KernelProfile]] = {label: [] for label in labels}
    for row in rows:
        label = next((one for one in labels if one in row.ranges), None)
        if label is None and len(labels) == 1 and not row.ranges:
            label = labels[0]
        if label is not None:
            found[label].append(row.kernel)
    return found
