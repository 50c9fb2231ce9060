"""Measurements as records, and the files that keep them.

`<folder>/<op>.json` is one object: the device, the versions, the commit, the date and the command of the latest run,
its measured ceilings, and the records. A run replaces the records of each (case, dtype) it has finished and leaves the
others; `earlier` then describes the runs those came from. The file is replaced in one step after every case.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

STATISTICS = ("p50", "mean", "std", "min", "max", "p95", "p99")
HEADER = ("device", "versions", "commit", "date", "command", "ceilings")


@dataclass(frozen=True)
class Record:
    """One implementation timed on one case, in one direction. What could not be measured is None."""

    op: str
    case: str
    axes: Mapping[str, Any]
    dtype: str
    direction: str  # "fwd", "bwd" or "fwd+bwd"
    implementation: str
    kind: str  # "backend" (ours) or "baseline"
    correct: bool  # the check passed in this run; without it the times claim nothing
    ms: Mapping[str, float] | None = None
    tflops: float | None = None
    tbs: float | None = None
    roof: float | None = None  # share of the measured roof
    bound: str | None = None  # "memory" or "compute"
    peak_bytes: int | None = None  # above what was allocated before the call
    mode: str | None = None  # how it was timed: "events", "graph", "cpu" or "host"
    note: str | None = None
    error: str | None = None
    host_us: float | None = None  # mode "host": microseconds until the call returned
    limit_us: float | None = None  # and what it should be at most

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later record replaces this one by."""
        return self.op, self.case, self.dtype

    @property
    def p50(self) -> float | None:
        return None if self.ms is None else self.ms["p50"]

    @property
    def counts(self) -> bool:
        """Whether its speed may be compared: timed, and right in the same run."""
        return self.correct and self.ms is not None and self.error is None

    def as_dict(self) -> dict[str, Any]:
        return _as_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        axes = {axis: tuple(size) if isinstance(size, list) else size for axis, size in values["axes"].items()}
        return cls(**{**values, "axes": axes})


@dataclass(frozen=True)
class Generation:
    """One way to generate text, timed on one model and batch. What could not be measured is None."""

    op: ClassVar[str] = "e2e"
    model: str
    implementation: str
    kind: str  # "backend" (ours) or "baseline"
    dtype: str
    batch: int
    prompt: int  # tokens of each prompt
    new: int  # tokens generated after each
    correct: bool  # every token that was looked at is the likeliest one by Transformers' logits, or as good as it
    ttft_ms: float | None = None  # until every sequence has its first token
    ms_per_token: float | None = None  # a step in which every sequence gets one
    tokens_per_s: float | None = None  # of the batch, while decoding
    floor: float | None = None  # least time to read weights and cache, as a share of ms_per_token
    peak_bytes: int | None = None  # weights, cache and all else
    joules_per_token: float | None = None  # of a token generated, its share of the prompt included
    note: str | None = None
    error: str | None = None

    @property
    def case(self) -> str:
        return f"{self.model}-batch{self.batch}"

    @property
    def key(self) -> tuple[str, str, str]:
        """A contender may take minutes to start, so each is replaced alone."""
        return self.op, f"{self.case} {self.prompt}+{self.new} {self.implementation}", self.dtype

    @property
    def counts(self) -> bool:
        """Whether its speed may be compared: timed, and right in the same run."""
        return self.correct and self.ms_per_token is not None and self.error is None

    def as_dict(self) -> dict[str, Any]:
        return _as_dict(self)


AnyRecord = Record | Generation
_OPTIONAL = ("note", "error", "host_us", "limit_us")  # left out of files where there is none


def _as_dict(record: AnyRecord) -> dict[str, Any]:
    values = asdict(record)
    return {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}


def _from_dict(values: Mapping[str, Any]) -> AnyRecord:
    return Generation(**values) if "model" in values else Record.from_dict(values)


def describe_run(device_name: str, ceilings: Mapping[str, Any], commit: str | None = None) -> dict[str, Any]:
    """The header of a results file: what was run, on what, with which versions."""
    from flashkernel.core.device import versions

    return {
        "device": device_name,
        "versions": versions(),
        "commit": commit or _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["flashkernel", *sys.argv[1:]]),
        "ceilings": _rounded(dict(ceilings)),
    }


class ResultsFile:
    """A results file that a run adds its finished cases to."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = dict(header)
        self.before = load(path) if path.exists() else None
        self.mine: list[AnyRecord] = []
        if self.before is not None and self.before["device"] != header["device"]:
            raise ValueError(
                f"{path} holds measurements of {self.before['device']} and this is {header['device']}; "
                "save to another folder"
            )

    def add(self, records: Sequence[AnyRecord]) -> None:
        """Keep a finished case: its records replace all earlier ones with their keys."""
        new = {record.key for record in records}
        self.mine = [record for record in self.mine if record.key not in new] + list(records)
        write(self.path, self.merged())

    def merged(self) -> dict[str, Any]:
        if self.before is None:
            return {**self.header, "records": self.mine}
        measured = {record.key for record in self.mine}
        kept = [record for record in self.before["records"] if record.key not in measured]
        earlier = _earlier(self.before, {record.key for record in kept})
        return {**self.header, **({"earlier": earlier} if earlier else {}), "records": kept + self.mine}


def load(path: Path) -> dict[str, Any]:
    """A results file, its records as `Record`s; ValueError where it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            **{name: found[name] for name in HEADER},
            **found,
            "records": [_from_dict(r) for r in found["records"]],
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a results file ({type(error).__name__}: {error}); move it away") from error


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a results file, a line for each record, so that others see the old one or the new one, never a part."""
    head = json.dumps({name: value for name, value in content.items() if name != "records"}, indent=1)
    lines = ",\n".join("  " + json.dumps(_rounded(record.as_dict()), allow_nan=False) for record in content["records"])
    replace_text(path, f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n')


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp gives 0600
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def load_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """The results files of a folder by operator; those of whole models are under "e2e"."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.json"))}


def _earlier(before: Mapping[str, Any], kept: set[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The runs that records kept from a file came from, each with its cases."""
    runs = [dict(run) for run in before.get("earlier", ())]
    claimed = {tuple(case) for run in runs for case in run["cases"]}
    latest = dict.fromkeys(record.key[1:] for record in before["records"])
    own = {name: before[name] for name in HEADER if name != "device"}
    runs.append({**own, "cases": [list(case) for case in latest if case not in claimed]})
    left = {key[1:] for key in kept}
    for run in runs:
        run["cases"] = [case for case in run["cases"] if tuple(case) in left]
    return [run for run in runs if run["cases"]]


def _commit() -> str:
    """The commit of the source tree, with "-dirty" where it has changes; "unknown" outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            return "unknown"  # installed, or inside somebody else's checkout
        commit = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", ".", ":!results")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if changed.strip() else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout


def _rounded(value: Any) -> Any:
    """The same with floats at six significant digits: more is noise, and makes diffs unreadable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
