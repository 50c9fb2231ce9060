"""Launch configs: an analytical default, a validity rule, and an opt-in search whose result is kept on disk.

A room describes each kernel's launch by a frozen dataclass and a `Tunable`. Launchers call `pick`: a scoped override
comes first, then what a search found before, then the heuristic. `search` times every valid config of the space.

Results live in `<cache>/tune/<gpu>-<hash of GPU and versions>/<tunable>.json`, by shape bucket. A file that cannot be
read, or was written for another GPU or other versions, is ignored with a warning. Writers merge under a lock and
replace the file in one step, so that readers never see half of it and several processes lose nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from flashkernel.core import device as devices
from flashkernel.core import env, files, state
from flashkernel.core.device import Device
from flashkernel.core.timing import Timing, measure

SCHEMA = 1
MOST_RECENT = 4096
MARGIN = 0.02  # a config must beat the heuristic by this share to replace it: less is noise

Shape = Mapping[str, Any]  # axis or property name -> size or name
Calls = Callable[[], Any] | Sequence[Callable[[], Any]]


def power_of_2(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def head_block(width: int) -> int:
    """Elements of a head in shared memory, where a swizzle spans 64: the loads fill up with zeros."""
    return max(64, power_of_2(width))


def ceil_div(value: int, by: int) -> int:
    """`value / by` rounded up; Triton's own `cdiv` costs microseconds on the host."""
    return -(-value // by)


@dataclass(frozen=True, eq=False)
class Tunable:
    """One kernel's launch choices. What `heuristic`, `space` and `valid` look at must be part of the bucket."""

    name: str
    config: type  # a frozen dataclass of plain values
    heuristic: Callable[[Device, Shape], Any]
    space: Callable[[Device, Shape], Iterable[Any]]
    valid: Callable[[Any, Device, Shape], str | None]  # the reason why a config cannot be used, or None
    bucket: Callable[[Shape], tuple[Any, ...]]  # shapes that share a config

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"tunable name {self.name!r} must be letters, digits, '_' and '-': it names a file")


# Process-wide, not per context: a backward pass runs on autograd's own thread and must see the override as well.
_overrides: dict[str, Any] = {}
_picked: dict[tuple[Tunable, Device, tuple[Any, ...]], Any] = {}
_watchers: list[dict[tuple[Tunable, tuple[Any, ...]], Shape]] = []
_recent: dict[tuple[Any, ...], Any] = {}  # by exact shape, in front of the buckets, which take longer to work out
_loaded: dict[Path, dict[str, Any]] = {}
_warned: set[Path] = set()
generation = 0  # changes where the answers may have


def pick(tunable: Tunable, device: Device, shape: Shape) -> Any:
    """The config for a launch; after the first call of a bucket this is a dictionary lookup."""
    if _watchers:
        for seen in _watchers:
            seen.setdefault((tunable, tunable.bucket(shape)), dict(shape))
    if _overrides and tunable.name in _overrides:
        return _overriding(tunable, device, shape)
    exact = (tunable, device, *shape.values())
    config = _recent.get(exact)
    if config is None:
        key = (tunable, device, tunable.bucket(shape))
        config = _picked.get(key)
        if config is None:
            config = _picked[key] = _decide(tunable, device, shape)
        if len(_recent) >= MOST_RECENT:
            _recent.clear()
        _recent[exact] = config
    return config


@contextmanager
def watching() -> Iterator[dict[tuple[Tunable, tuple[Any, ...]], Shape]]:
    """Collect what `pick` is asked for inside: {(tunable, bucket): shape}, for whoever wants to search those."""
    seen: dict[tuple[Tunable, tuple[Any, ...]], Shape] = {}
    _watchers.append(seen)
    try:
        with state.suspended():
            yield seen
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not seen]


@contextmanager
def override(tunable: Tunable | str, config: Any) -> Iterator[None]:
    """Launch with `config` inside, for ablations and tests; a config the kernel cannot use raises at the launch."""
    if isinstance(tunable, Tunable) and not isinstance(config, tunable.config):
        raise TypeError(f"{tunable.name}: override takes a {tunable.config.__name__}, not {config!r}")
    name = tunable.name if isinstance(tunable, Tunable) else tunable
    had, before = name in _overrides, _overrides.get(name)
    _overrides[name] = config
    try:
        with state.suspended():
            yield
    finally:
        if had:
            _overrides[name] = before
        else:
            del _overrides[name]


def search(
    tunable: Tunable,
    device: Device,
    shape: Shape,
    run: Callable[[Any], Calls],
    *,
    warmup: int = 20,
    repeats: int = 200,
    budget_s: float = 0.25,
    report: Callable[[Any, Timing | str], None] | None = None,
) -> Any:
    """Time every valid config of the space with `run(config)`, keep the fastest on disk and return it.

    `run` gives a call, or a rotation of calls over several input sets (see timing.measure). A config whose call raises
    is passed over; `report` hears each config with its timing, or with the reason why it has none.
    """
    if devices.pretending():
        raise ValueError(f"{tunable.name}: cannot search for {device.name}, which is not here; leave pretend() first")
    heuristic = tunable.heuristic(device, shape)
    times: dict[Any, float] = {}
    for config in dict.fromkeys([heuristic, *tunable.space(device, shape)]):
        outcome = _attempt(tunable, device, shape, config, run, warmup, repeats, budget_s)
        if isinstance(outcome, Timing):
            times[config] = outcome.p50
        if report is not None:
            report(config, outcome)
    if not times:
        raise RuntimeError(f"{tunable.name}: no config could run on {device.name} for {dict(shape)}")
    best = min(times, key=lambda config: times[config])
    if heuristic in times and times[best] > times[heuristic] * (1 - MARGIN):
        best = heuristic
    entry = {"config": asdict(best), "ms": times[best], "heuristic_ms": times.get(heuristic), "tried": len(times)}
    bucket = tunable.bucket(shape)
    _save(tunable, device, _key(bucket), entry)
    _picked[tunable, device, bucket] = best
    _changed()
    return best


def forget() -> None:
    """Drop what was picked and read, so that the files are read again."""
    _picked.clear()
    _loaded.clear()
    _warned.clear()
    _changed()


def _changed() -> None:
    global generation
    _recent.clear()
    generation += 1


def cache_path(tunable: Tunable, device: Device) -> Path:
    """The file that holds this kernel's search results."""
    stamp = repr((device.name, sorted(_versions().items())))
    folder = f"{devices.slug(device)}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    return env.cache_dir() / "tune" / folder / f"{tunable.name}.json"


def _versions() -> dict[str, str]:
    """What a config's speed depends on."""
    known = devices.versions()
    return {name: known.get(name, "") for name in ("torch", "triton", "cuda", "flashkernel")}


def _overriding(tunable: Tunable, device: Device, shape: Shape) -> Any:
    config = _overrides[tunable.name]
    if not isinstance(config, tunable.config):
        raise TypeError(f"{tunable.name}: override takes a {tunable.config.__name__}, not {config!r}")
    reason = tunable.valid(config, device, shape)
    if reason is not None:
        raise ValueError(f"{tunable.name}: {config} cannot be used on {device.name} for {dict(shape)}: {reason}")
    return config


def _decide(tunable: Tunable, device: Device, shape: Shape) -> Any:
    path = cache_path(tunable, device)
    if path not in _loaded:
        _loaded[path] = _read(path, tunable, device)
    entry = _loaded[path].get(_key(tunable.bucket(shape)))
    if entry is not None:
        try:
            config = _decode(tunable, entry)
            reason = tunable.valid(config, device, shape)
        except (TypeError, ValueError) as error:
            reason = str(error)
        if reason is None:
            return config
        warnings.warn(f"{path}: ignored the config for {dict(shape)}: {reason}", stacklevel=3)
    return tunable.heuristic(device, shape)


def _attempt(
    tunable: Tunable,
    device: Device,
    shape: Shape,
    config: Any,
    run: Callable[[Any], Calls],
    warmup: int,
    repeats: int,
    budget_s: float,
) -> Timing | str:
    """The config's timing, or the reason why it has none."""
    reason = tunable.valid(config, device, shape)
    if reason is not None:
        return reason
    try:
        return measure(run(config), device=device.kind, warmup=warmup, repeats=repeats, budget_s=budget_s)
    except Exception as error:  # out of registers or shared memory, a compiler's refusal: a config to pass over
        return f"{type(error).__name__}: {error}"


def _key(bucket: tuple[Any, ...]) -> str:
    return json.dumps(bucket)


def _decode(tunable: Tunable, entry: Any) -> Any:
    """The config of a cache entry; ValueError where it does not fit the dataclass."""
    values = entry.get("config") if isinstance(entry, dict) else None
    names = {field.name for field in fields(tunable.config)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"expected the fields {sorted(names)}, found {values!r}")
    hints = get_type_hints(tunable.config)
    for name, value in values.items():
        plain = hints[name] if hints[name] in (int, float, str, bool) else None
        if plain is not None and type(value) is not plain and not (plain is float and type(value) is int):
            raise ValueError(f"{name} is {value!r}, expected {plain.__name__}")
    return tunable.config(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _stamp(tunable: Tunable, device: Device) -> dict[str, Any]:
    """What a file must say to be ours."""
    return {"schema": SCHEMA, "tunable": tunable.name, "device": device.name, "versions": _versions()}


def _read(path: Path, tunable: Tunable, device: Device) -> dict[str, Any]:
    """Entries by bucket; none, with a warning, where the file is not one of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        # NotADirectoryError: the cache folder cannot exist at all; saving says so, if it comes to that.
        if not isinstance(error, NotADirectoryError):
            warnings.warn(f"{path}: ignored, it cannot be read as JSON ({error})", stacklevel=4)
        return {}
    if not isinstance(found, dict) or not isinstance(found.get("entries"), dict):
        warnings.warn(f"{path}: ignored, it is not a table of launch configs", stacklevel=4)
        return {}
    for name, expected in _stamp(tunable, device).items():
        if found.get(name) != expected:
            text = f"{path}: ignored, its {name} is {found.get(name)!r} and this is {expected!r}"
            warnings.warn(text, stacklevel=4)
            return {}
    return found["entries"]


def _save(tunable: Tunable, device: Device, key: str, entry: dict[str, Any]) -> None:
    """Merge one entry into the file; a folder that cannot be written is warned about once."""
    path = cache_path(tunable, device)
    try:
        with files.locked(path.with_suffix(".lock")):
            entries = {**_read(path, tunable, device), key: entry}
            text = json.dumps({**_stamp(tunable, device), "entries": entries}, indent=1, sort_keys=True)
            files.write_whole(path, text)
    except OSError as error:
        entries = {**_loaded.get(path, {}), key: entry}
        if path.parent not in _warned:
            _warned.add(path.parent)
            text = f"{path}: cannot be written, so tuned configs last for this process only ({error})"
            warnings.warn(text, stacklevel=3)
    _loaded[path] = entries
