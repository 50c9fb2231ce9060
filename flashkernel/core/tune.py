"""Launch configs: a heuristic, a validity rule, and an opt-in search whose result is kept on disk.

Each kernel has a frozen dataclass of launch parameters and a `Tunable`. Launchers call `pick`, which returns the config
of an `override`, else the one that an earlier `search` found for the shape's bucket, else the heuristic's. `search`
times every valid config of the search space.

Results live in `<cache>/tune/<gpu>-<hash of GPU and versions>/<tunable>.json`, by shape bucket. A file that cannot be
read, or was written for another GPU or other versions, is ignored with a warning. Writers merge their entries under a
file lock and replace the file in one step: readers see a complete file, and concurrent writers lose nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from flashkernel.core import build_counter, env, files, replay_switch
from flashkernel.core import device as devices
from flashkernel.core.device import Device
from flashkernel.core.timing import Timing, measure

SCHEMA = 1
MAX_RECENT = 4096  # exact shapes whose configs are kept
MARGIN = 0.02  # a config replaces the heuristic's if it is faster by this share; less is noise

Shape = Mapping[str, Any]  # axis or property name -> size or name
Calls = Callable[[], Any] | Sequence[Callable[[], Any]]


def power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def head_block(width: int) -> int:
    """`width` padded to a power of two of at least 64, the elements of a swizzle in shared memory."""
    return max(64, power_of_2(width))


def ceil_div(value: int, by: int) -> int:
    """`value / by` rounded up; Triton's own `cdiv` costs microseconds on the host."""
    return -(-value // by)


@dataclass(frozen=True, eq=False)
class Tunable:
    """The launch choices of one kernel.

    Attributes:
        name: Names the file of search results.
        config: A frozen dataclass of plain values.
        heuristic: Given (device, shape): the default config.
        space: Given (device, shape): the configs that a search times.
        valid: Given (config, device, shape): None, or the reason why the config cannot be used.
        bucket: Given the shape: a key; shapes with equal keys share a config. It has all that the other functions
            read from the shape.
    """

    name: str
    config: type
    heuristic: Callable[[Device, Shape], Any]
    space: Callable[[Device, Shape], Iterable[Any]]
    valid: Callable[[Any, Device, Shape], str | None]
    bucket: Callable[[Shape], tuple[Any, ...]]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"tunable name {self.name!r} must be letters, digits, '_' and '-': it names a file")


# Process-wide, not a context variable: a backward pass runs on autograd's own thread and must see the override too.
_overrides: dict[str, Any] = {}
_picked: dict[tuple[Tunable, Device, tuple[Any, ...]], Any] = {}
_collectors: list[dict[tuple[Tunable, tuple[Any, ...]], Shape]] = []
_recent: dict[tuple[Any, ...], Any] = {}  # by exact shape: faster than computing the bucket
_loaded: dict[Path, dict[str, Any]] = {}
_warned: set[Path] = set()
# One number, which core/native reads from memory: incremented whenever `pick` may return another config.
generation = array("q", [0])


def pick(tunable: Tunable, device: Device, shape: Shape) -> Any:
    """The config for a launch. Costs a dictionary lookup after the first call with a shape.

    Args:
        tunable: The kernel's launch choices.
        device: Properties of the device (`device.properties`).
        shape: Sizes and names that the tunable's functions read.

    Returns:
        An instance of `tunable.config`.
    """
    if _collectors:
        for picks in _collectors:
            picks.setdefault((tunable, tunable.bucket(shape)), dict(shape))
    if _overrides and tunable.name in _overrides:
        return _overridden(tunable, device, shape)
    exact = (tunable, device, *shape.values())
    config = _recent.get(exact)
    if config is None:
        key = (tunable, device, tunable.bucket(shape))
        config = _picked.get(key)
        if config is None:
            config = _picked[key] = _decide(tunable, device, shape)
        if len(_recent) >= MAX_RECENT:
            _recent.clear()
        _recent[exact] = config
    return config


@contextmanager
def collect_picks() -> Iterator[dict[tuple[Tunable, tuple[Any, ...]], Shape]]:
    """Collect the arguments of every `pick` inside, {(tunable, bucket): shape}, to run `search` on them."""
    picks: dict[tuple[Tunable, tuple[Any, ...]], Shape] = {}
    _collectors.append(picks)
    try:
        with replay_switch.suspended():
            yield picks
    finally:
        _collectors[:] = [other for other in _collectors if other is not picks]


@contextmanager
def override(tunable: Tunable | str, config: Any) -> Iterator[None]:
    """Let `pick` return `config` inside, for ablations and tests; it raises ValueError if the config is not valid."""
    if isinstance(tunable, Tunable) and not isinstance(config, tunable.config):
        raise TypeError(f"{tunable.name}: override takes a {tunable.config.__name__}, not {config!r}")
    name = tunable.name if isinstance(tunable, Tunable) else tunable
    had, before = name in _overrides, _overrides.get(name)
    _overrides[name] = config
    try:
        with replay_switch.suspended():
            yield
    finally:
        if had:
            _overrides[name] = before
        else:
            del _overrides[name]


def overridden() -> tuple[Any, ...]:
    """The configs of the `override`s in force: what a cache keys on whose entries depend on launch configs."""
    return tuple(_overrides.values()) if _overrides else ()


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
    """Time every valid config of the search space, keep the fastest on disk and return it.

    Args:
        tunable: The kernel's launch choices.
        device: Properties of the device.
        shape: The shape to tune; the result holds for its bucket.
        run: Given a config: a call to time, or a rotation of calls over several input sets (see timing.measure). A
            config whose call raises is skipped.
        warmup: Calls before the timing, for each config.
        repeats: Samples for each config.
        budget_s: Seconds for each config.
        report: Called with each config and its timing, or the reason why it has none.
    """
    if devices.pretending():
        raise ValueError(f"{tunable.name}: cannot search for {device.name}, which is not here; leave pretend() first")
    build_counter.note("tuned")
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


def clear_cache() -> None:
    """Forget all picked configs and read the files of search results again."""
    _picked.clear()
    _loaded.clear()
    _warned.clear()
    _changed()


def _changed() -> None:
    _recent.clear()
    generation[0] += 1


def cache_path(tunable: Tunable, device: Device) -> Path:
    """The file that holds this kernel's search results."""
    stamp = repr((device.name, sorted(_versions().items())))
    folder = f"{devices.slug(device)}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    return env.cache_dir() / "tune" / folder / f"{tunable.name}.json"


def _versions() -> dict[str, str]:
    """The versions that the speed of a config depends on."""
    known = devices.versions()
    return {name: known.get(name, "") for name in ("torch", "triton", "cuda", "flashkernel")}


def _overridden(tunable: Tunable, device: Device, shape: Shape) -> Any:
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
    """The timing of a config, or the reason why it has none."""
    reason = tunable.valid(config, device, shape)
    if reason is not None:
        return reason
    try:
        return measure(run(config), device=device.kind, warmup=warmup, repeats=repeats, budget_s=budget_s)
    except Exception as error:  # out of registers or shared memory, a compile error: the config is skipped
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
    """The header of a file; a file with another one is ignored."""
    return {"schema": SCHEMA, "tunable": tunable.name, "device": device.name, "versions": _versions()}


def _read(path: Path, tunable: Tunable, device: Device) -> dict[str, Any]:
    """Entries by bucket; none, with a warning, where the file is not valid."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        # NotADirectoryError: the cache folder cannot exist; `_save` warns about that.
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
