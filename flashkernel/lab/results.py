"""Records of measurements, and the JSON files that keep them.

`<folder>/<op>.json` is one object: device, versions, commit, date and command of the latest run, its measured ceilings,
and the records. A run replaces the records of each (case, dtype) that it finished and keeps the others; `earlier`
describes the runs those came from. The file is replaced atomically after every case. The schema is in README.md.
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
from typing import TYPE_CHECKING, Any, ClassVar

from flashkernel.lab.engine_options import options_of
from flashkernel.lab.profile_records import Measured, ProfileRecord
from flashkernel.lab.serve_records import ServeRecord

if TYPE_CHECKING:
    from flashkernel.core.roofline import Ceilings

STATISTICS = ("p50", "mean", "std", "min", "max", "p95", "p99")
CUDA_RESOURCES = "cuda_resources.json"  # no measurements (lab/cuda_resources.py)
QUALITY = "quality.json"  # perplexities, of no GPU (lab/quality.py)
MOE_STUDY = "moe_study.json"  # losses by router (lab/moe_study.py)
OTHERS = {  # what has no records of speed, and who shows it
    CUDA_RESOURCES: "the blocks of results:cuda_resources in the docs show it",
    QUALITY: "flashkernel tables and flashkernel plot show it",
    MOE_STUDY: "flashkernel tables shows it",
}
ARCHIVE = "archive"  # the folder of superseded measurements
PROFILES = "profiles"  # the folder of profiles, a file for each implementation
HEADER = ("device", "versions", "commit", "date", "command", "ceilings")


@dataclass(frozen=True)
class Record(Measured):
    """One implementation timed on one case in one direction. A quantity that was not measured is None."""

    kind: str  # "backend" (ours) or "baseline"
    correct: bool  # the check passed in this run; if not, the times are not compared
    ms: Mapping[str, float] | None = None  # milliseconds, by the names of STATISTICS
    tflops: float | None = None  # achieved, TFLOP/s
    tbs: float | None = None  # achieved, TB/s
    roof: float | None = None  # least possible time / measured time; 1.0 is the roof
    bound: str | None = None  # the roof that bounds the case: "memory" or "compute"
    peak_bytes: int | None = None  # beyond what was allocated before the call
    mode: str | None = None  # how it was timed: "events", "graph", "cpu", "host" or "steps"
    note: str | None = None
    error: str | None = None
    host_us: float | None = None  # mode "host": us until the call returned
    limit_us: float | None = None  # mode "host": the limit that host_us should keep

    @property
    def key(self) -> tuple[str, str, str]:
        """A later record with the same key replaces this one."""
        return self.op, self.case, self.dtype

    @property
    def p50(self) -> float | None:
        return None if self.ms is None else self.ms["p50"]

    @property
    def comparable(self) -> bool:
        """True if its speed may be compared: it was timed, and was correct in the same run."""
        return self.correct and self.ms is not None and self.error is None

    def as_dict(self) -> dict[str, Any]:
        return _as_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        axes = {axis: tuple(size) if isinstance(size, list) else size for axis, size in values["axes"].items()}
        return cls(**{**values, "axes": axes})


@dataclass(frozen=True)
class GenerationRecord:
    """One runner timed on one model and batch. A quantity that was not measured is None."""

    op: ClassVar[str] = "e2e"
    model: str
    implementation: str
    kind: str  # "backend" (ours) or "baseline"
    dtype: str
    batch: int
    prompt: int  # tokens of each prompt
    new: int  # tokens generated after each
    correct: bool | None  # checked tokens are the argmax of Transformers' logits, up to rounding; None: not checked
    ttft_ms: float | None = None  # time until every sequence has its first token
    ms_per_token: float | None = None  # one decoding step, in which every sequence gets a token
    tokens_per_s: float | None = None  # of the whole batch, while decoding
    floor: float | None = None  # time to read weights and KV cache at copy bandwidth / ms_per_token
    peak_bytes: int | None = None  # weights, KV cache and activations
    joules_per_token: float | None = None  # per generated token; includes the prompt's energy
    note: str | None = None
    error: str | None = None
    quantization: str | None = None  # of the engine, as `LLM` takes it; None: the weights as they are
    kv_cache_dtype: str | None = None  # None: `dtype`
    num_speculative_tokens: int | None = None  # drafted by prompt look-up; None: off
    enforce_eager: bool | None = None  # without CUDA graphs; on a CPU, each operator through dispatch
    accepted: float | None = None  # share of the drafted tokens that were kept
    period: int | None = None  # tokens after which a prompt repeats itself

    @property
    def case(self) -> str:
        return f"{self.model}-batch{self.batch}"

    @property
    def runner(self) -> str:
        """The implementation with the engine's options: "engine (int4)"."""
        return options_of(self).named(self.implementation)

    @property
    def key(self) -> tuple[str, str, str]:
        """A later record with the same key replaces this one: runners take minutes, so each is replaced alone."""
        repeats = "" if self.period is None else f" every {self.period}"
        return self.op, f"{self.case} {self.prompt}+{self.new}{repeats} {self.runner}", self.dtype

    @property
    def comparable(self) -> bool:
        """True if its speed may be compared: it was timed, and was correct in the same run."""
        return bool(self.correct) and self.ms_per_token is not None and self.error is None

    @property
    def failed(self) -> bool:
        """True if it could not run or generated wrong tokens."""
        return self.error is not None or self.correct is False

    def as_dict(self) -> dict[str, Any]:
        return _as_dict(self)


AnyRecord = Record | GenerationRecord
SavedRecord = Record | GenerationRecord | ProfileRecord | ServeRecord
_OPTIONAL = (  # left out of files where there is none
    "note", "error", "host_us", "limit_us", "quantization", "kv_cache_dtype", "num_speculative_tokens", "enforce_eager",
    "accepted", "period",
)  # fmt: skip


def _as_dict(record: AnyRecord) -> dict[str, Any]:
    values = asdict(record)
    return {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}


def _from_dict(values: Mapping[str, Any]) -> SavedRecord:
    if "kernels" in values:
        return ProfileRecord.from_dict(values)
    if "load" in values:
        return ServeRecord.from_dict(values)
    return GenerationRecord(**values) if "model" in values else Record.from_dict(values)


def describe_run(device_name: str, ceilings: Mapping[str, Any], commit: str | None = None) -> dict[str, Any]:
    """The header of a results file: device, versions, commit, date, command, ceilings."""
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
        self.mine: list[SavedRecord] = []
        self._can_be_written()
        if self.before is not None and self.before["device"] != header["device"]:
            raise ValueError(
                f"{path} holds measurements of {self.before['device']} and this is {header['device']}; "
                "save to another folder"
            )

    def _can_be_written(self) -> None:
        """OSError before anything is measured, which may take hours, rather than after it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path.parent, os.W_OK):
            raise PermissionError(f"{self.path.parent} cannot be written to; save to another folder")

    @classmethod
    def in_folder(cls, folder: Path | None, name: str, ceilings: Ceilings, commit: str | None) -> ResultsFile | None:
        """The file `<folder>/<name>.json` for a run on the device of `ceilings`; None without a folder."""
        if folder is None:
            return None
        return cls(folder / f"{name}.json", describe_run(ceilings.device, ceilings.as_dict(), commit))

    def add(self, records: Sequence[SavedRecord]) -> None:
        """Writes a finished case: its records replace all earlier ones with the same keys."""
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


def finished(path: Path, header: Mapping[str, Any]) -> dict[tuple[str, str, str], set[str]]:
    """By record key, the implementations that a run of the same commit and versions has measured; {} without a file."""
    if not path.exists():
        return {}
    found = load(path)
    earlier = found.get("earlier", ())
    claimed = {tuple(case): run for run in earlier for case in run["cases"]}
    done: dict[tuple[str, str, str], set[str]] = {}
    for record in found["records"]:
        run = claimed.get(record.key[1:], found)
        if all(run[name] == header[name] for name in ("commit", "versions")):
            done.setdefault(record.key, set()).add(record.implementation)
    return done


def timed(folder: Path) -> dict[tuple[str, str, str], set[str]]:
    """By record key, the implementations with a time that may be compared, ours among them; of suites' files too."""
    found: dict[tuple[str, str, str], set[str]] = {}
    ours = set()
    for record in (one for file in load_folder(folder).values() for one in file["records"]):
        if isinstance(record, Record) and record.mode != "host" and record.comparable:
            found.setdefault(record.key, set()).add(record.implementation)
            if record.kind == "backend":
                ours.add(record.key)
    return {key: names for key, names in found.items() if key in ours}


def load(path: Path) -> dict[str, Any]:
    """The contents of a results file, its records as dataclasses; ValueError if it is not one."""
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
    """Writes a results file atomically, with one line for each record."""
    head = json.dumps({name: value for name, value in content.items() if name != "records"}, indent=1)
    lines = ",\n".join("  " + json.dumps(_rounded(record.as_dict()), allow_nan=False) for record in content["records"])
    replace_text(path, f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n')


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
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
    """The results files of a folder by operator ("e2e": whole models); files in its subfolders are not read."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.json")) if path.name not in OTHERS}


def find(path: Path, required: bool = True) -> dict[str, dict[str, Any]]:
    """Current results at a path, by name: "rms_norm", or "h200/rms_norm" where `path` holds a folder for each device.

    A folder named "archive" keeps superseded measurements; it is read only if `path` names it or a file in it. Profiles
    are read by `load_folder` alone.

    Args:
        path: a results file, a device's folder, or a folder of such folders.
        required: whether a folder without results is an error.

    Raises:
        ValueError: There are no times; the message says what shows the file, or what makes some.
    """
    if path.name in OTHERS:
        raise ValueError(f"{path} holds no times; {OTHERS[path.name]}")
    found = {path.stem: load(path)} if path.is_file() else load_folder(path)
    if any(isinstance(record, ProfileRecord) for file in found.values() for record in file["records"]):
        device = path.parent.parent if path.is_file() else path.parent
        raise ValueError(f"{path} holds profiles; flashkernel profile --show {device} prints them")
    if path.is_file():
        return found
    for folder in sorted(
        folder for folder in path.glob("*/") if folder.is_dir() and folder.name not in (ARCHIVE, PROFILES)
    ):
        found.update({f"{folder.name}/{name}": file for name, file in load_folder(folder).items()})
    if not found and required:
        raise ValueError(f"{path} holds no results; flashkernel bench --save {path} makes some")
    return found


def _earlier(before: Mapping[str, Any], kept: set[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The headers of the runs that the kept records came from, each with its cases."""
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
    """The same values with floats at six significant digits; further digits are noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
