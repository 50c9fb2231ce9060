"""Runs the profiled process, under Nsight Compute or by itself, and reads what it leaves.

One process profiles several targets, because starting one takes seconds; but not all, because ncu writes its counters
when the process ends, and a run that is killed loses those. If a kernel ends a process, another one goes on with the
targets behind. Ctrl-C ends it after the target at hand, and what was profiled until then is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from flashkernel.lab import profile_counters
from flashkernel.lab.profile_records import KernelProfile, merged
from flashkernel.lab.profile_worker import STOP, Target, label, write_work

NCU = "ncu"
SESSION_TARGETS = 6  # of one process
TARGET_TIMEOUT_S = 180.0  # for one target, including the start of its process
REPORT_TIMEOUT_S = 120.0  # for ncu to write its table after the profiled process has ended
POLL_S = 0.1


class ToolError(RuntimeError):
    """The profiler cannot run here; the message has its own words."""


@dataclass
class Outcome:
    """What was profiled of a target: kernels by direction, or the error."""

    kernels: dict[str, tuple[KernelProfile, ...]] = field(default_factory=dict)
    error: str | None = None


@dataclass
class _Status:
    """How far the profiled process came, from its status file."""

    pid: int | None = None
    started: int | None = None
    finished: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def running(self) -> int | None:
        return self.started if self.started not in self.finished else None


def find_ncu() -> str | None:
    """The path of Nsight Compute's command line, or None."""
    return shutil.which(NCU)


def ncu_command(ncu: str, arch: int, log: Path, application: Sequence[str]) -> list[str]:
    """The command that profiles an application's ranges.

    Clocks are left as they are, and caches are flushed before every pass: the benchmarks' L2 is cold, too.
    """
    return [
        ncu, "--profile-from-start", "off", "--target-processes", "application-only", "--replay-mode", "kernel",
        "--clock-control", "none", "--cache-control", "all", "--nvtx", "--metrics",
        ",".join(profile_counters.metrics(arch)), "--csv", "--page", "raw", "--print-units", "base",
        "--log-file", str(log), *application,
    ]  # fmt: skip


def run(
    targets: Sequence[Target],
    device: torch.device,
    arch: int,
    ncu: str | None,
    on_start: Callable[[Target], None] = lambda target: None,
) -> Iterator[tuple[Target, Outcome]]:
    """Profiles targets; yields each with its outcome, those of one process together.

    Args:
        targets: what to profile.
        device: where they run.
        arch: of the GPU, 90 for sm_90.
        ncu: the path of Nsight Compute; None: torch's profiler.
        on_start: called with each target as it starts.

    Raises:
        ToolError: the tool does not start.
        KeyboardInterrupt: after what was profiled has been yielded.
    """
    pending = dict(enumerate(targets))
    while pending:
        with tempfile.TemporaryDirectory(prefix="flashkernel-profile-") as folder:
            batch = dict(islice(pending.items(), SESSION_TARGETS))
            session = _Session(Path(folder), batch, device, arch, ncu, lambda index: on_start(targets[index]))
            interrupted = session.wait()
            outcomes = session.outcomes()
        if not outcomes and not interrupted:
            raise ToolError(session.error or "the profiled process ended before its first case")
        for index, outcome in outcomes.items():
            yield pending.pop(index), outcome
        if interrupted:
            raise KeyboardInterrupt


class _Session:
    """One process and its files."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[int, Target],
        device: torch.device,
        arch: int,
        ncu: str | None,
        on_start: Callable[[int], None],
    ) -> None:
        self.folder, self.targets, self.ncu, self.on_start = folder, targets, ncu, on_start
        self.status, self.status_file = _Status(), folder / "status.jsonl"
        self.log, self.output = folder / "ncu.log", folder / "output.txt"
        self.read, self.error = 0, ""
        write_work(folder / "work.json", "torch" if ncu is None else "ncu", device, targets)
        files = (str(folder / "work.json"), str(self.status_file))
        application = [sys.executable, "-m", "flashkernel.lab.profile_worker", *files]
        command = application if ncu is None else ncu_command(ncu, arch, self.log, application)
        with self.output.open("w") as output:
            # A session of its own, so that the terminal's Ctrl-C reaches the parent alone.
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self) -> bool:
        """Waits for the process, or ends it when a target takes too long; True if Ctrl-C was pressed."""
        interrupted, deadline = False, time.monotonic() + TARGET_TIMEOUT_S
        while self.process.poll() is None:
            try:
                if self._read_status():
                    deadline = time.monotonic() + TARGET_TIMEOUT_S
                if time.monotonic() > deadline:
                    self.error = f"no answer within {TARGET_TIMEOUT_S:.0f} s: its process was killed"
                    self._end()
                    break
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if interrupted:
                    self._end()
                    break
                interrupted = True
                (self.folder / STOP).touch()
        self._read_status()
        return interrupted

    def _read_status(self) -> bool:
        """Reads new lines of the status file; True if there are any."""
        if not self.status_file.exists():
            return False
        lines = self.status_file.read_text(encoding="utf-8").splitlines(keepends=True)
        complete = [line for line in lines if line.endswith("\n")]
        new, self.read = complete[self.read :], len(complete)
        for line in new:
            values = json.loads(line)
            if "pid" in values:
                self.status.pid = values["pid"]
            elif "start" in values:
                self.status.started = values["start"]
                self.on_start(values["start"])
            else:
                self.status.finished[values["done"]] = values
        return bool(new)

    def _end(self) -> None:
        """Kills the profiled process; ncu then reports what it has, unless it hangs as well."""
        with suppress(ProcessLookupError):
            if self.status.pid is not None:
                os.kill(self.status.pid, signal.SIGKILL)
        try:
            self.process.wait(REPORT_TIMEOUT_S if self.status.pid is not None else POLL_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcomes(self) -> dict[int, Outcome]:
        """By index, what the process profiled, and the target at which it ended, if it did not finish that one."""
        found = {index: Outcome(error=values["error"]) for index, values in self.status.finished.items()}
        if self.ncu is None:
            for index, values in self.status.finished.items():
                found[index].kernels = {
                    direction: merged([KernelProfile(one["name"], 1, one["duration_us"]) for one in kernels])
                    for direction, kernels in values["kernels"].items()
                }
        elif found:
            self._read_counters(found)
        lost = self.status.running
        if lost is not None:
            found[lost] = Outcome(error=self.error or f"its process died: {self._last_message()}")
        elif not found:
            self.error = self.error or self._last_message()
        return found

    def _read_counters(self, found: Mapping[int, Outcome]) -> None:
        """Fills in the kernels that ncu reported; ToolError where it reported none at all."""
        labels = {
            label(index, direction): (index, direction)
            for index, values in self.status.finished.items()
            for direction in values["kernels"]
        }
        if not labels:
            return
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        try:
            rows = profile_counters.parse(text)
        except profile_counters.CounterError as error:
            raise ToolError(str(error)) from error
        grouped = profile_counters.by_range(rows, list(labels))
        for name, (index, direction) in labels.items():
            found[index].kernels[direction] = merged(grouped[name])
        if rows and not any(grouped.values()):
            raise ToolError(f"ncu reported {len(rows)} kernels, none of them in an NVTX range")

    def _last_message(self) -> str:
        """What ncu or the process printed last."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (self.log, self.output)
                 if path.exists()]  # fmt: skip
        for text in texts:
            if message := profile_counters.messages(text):
                return message
        lines = [line for text in texts for line in text.splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"exit code {self.process.returncode}"
