"""GPU energy of a block of code: from the driver's counter, else from sampled power; None where neither exists."""

from __future__ import annotations

import shutil
import subprocess
import time
from types import TracebackType

import torch

from flashkernel.core.device import energy_joules

SAMPLE_MS = 50
_QUERY = ["--query-gpu=power.draw", "--format=csv,noheader,nounits"]


class EnergyMeter:
    """`with EnergyMeter(device) as meter:` sets `meter.joules` to the energy of the block, or to None."""

    joules: float | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: float | None = None
        self._sampler: subprocess.Popen[str] | None = None

    def __enter__(self) -> EnergyMeter:
        self._before = energy_joules(self.device)
        program = shutil.which("nvidia-smi") if self.device.type == "cuda" and self._before is None else None
        if program is not None:
            uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
            which = [] if uuid is None else [f"--id=GPU-{uuid}"]
            command = [program, *which, *_QUERY, f"--loop-ms={SAMPLE_MS}"]
            self._sampler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        if self._sampler is not None:
            self._sampler.terminate()
            text, _ = self._sampler.communicate()
            self.joules = energy_of(text, seconds)
        elif self._before is not None:
            after = energy_joules(self.device)
            self.joules = None if after is None else after - self._before


def energy_of(samples: str, seconds: float) -> float | None:
    """Joules: `seconds` times the mean of the watts that `nvidia-smi` printed, one per line; None without any.

    Example:
        >>> energy_of("100.0\\n300.0\\n", seconds=0.5)
        100.0
    """
    watts = []
    for line in samples.splitlines():
        try:
            watts.append(float(line))
        except ValueError:  # "[N/A]", or a line that was cut
            continue
    return sum(watts) / len(watts) * seconds if watts else None
