"""Records of served loads, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from flashkernel.lab.engine_options import options_of

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ServeRecord:
    """One load served once by one implementation. Times are in milliseconds, by percentile ("p50", "p90", "p99")."""

    op: ClassVar[str] = "serve"
    model: str
    load: str
    # "first" or "second": how often the load was served since the start. A field of a dataclass cannot be named `pass`.
    pass_name: str
    implementation: str  # "engine", "vllm", or the address of a server
    kind: str  # "backend" (ours) or "baseline"
    dtype: str
    requests: int
    rate: float | None  # requests per second of Poisson arrivals; None: all at once
    seconds: float
    out_tokens: int
    out_tokens_per_s: float
    requests_per_s: float
    failed: int = 0  # requests without all of their tokens
    ttft_ms: Mapping[str, float] | None = None  # time to first token
    itl_ms: Mapping[str, float] | None = None  # time between tokens
    e2e_ms: Mapping[str, float] | None = None
    goodput: float | None = None  # share of requests within the limits
    limits_ms: Mapping[str, float] | None = None  # of ttft and itl (a request's 99th percentile)
    start_s: float | None = None  # from the construction of the engine to its first request
    compiled_at_start: int | None = None  # kernels; above 0 the caches on disk were cold
    compiled_in_service: int | None = None
    version: str | None = None  # of a baseline
    date: str | None = None  # when a baseline was measured
    source: str | None = None  # where a baseline's figures are from: the address of a server, or a file
    error: str | None = None
    quantization: str | None = None  # of the weights, as `LLM` takes it; None: as they are
    kv_cache_dtype: str | None = None  # None: `dtype`
    num_speculative_tokens: int | None = None  # drafted by prompt look-up; None: off
    enforce_eager: bool | None = None  # without CUDA graphs
    accepted: float | None = None  # share of the drafted tokens that were kept
    host_busy: float | None = None  # share of the steps' time that the host did not wait for the GPU; near 1: the bound

    @property
    def case(self) -> str:
        arrivals = "" if self.rate is None else f" {self.rate:g}/s"
        return f"{self.model} {self.load}{arrivals} {self.pass_name}"

    @property
    def runner(self) -> str:
        """The implementation with its options: "engine (int4)"."""
        return options_of(self).named(self.implementation)

    @property
    def key(self) -> tuple[str, str, str]:
        """A later record with the same key replaces this one."""
        return self.op, f"{self.case} {self.runner}", self.dtype

    @property
    def comparable(self) -> bool:
        """True if every request got all of its tokens."""
        return self.error is None and self.failed == 0

    @property
    def caches(self) -> str:
        """How the caches of compiled kernels were at the start: "cold" or "warm"; "" if nobody knows."""
        return "" if self.compiled_at_start is None else "cold" if self.compiled_at_start else "warm"

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if value is not None or name == "rate"}
        return {("pass" if name == "pass_name" else name): value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServeRecord:
        return cls(**{("pass_name" if name == "pass" else name): value for name, value in values.items()})


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles of seconds, in milliseconds; None without values.

    Example:
        >>> percentiles([0.001, 0.002, 0.003])
        {'p50': 2.0, 'p90': 3.0, 'p99': 3.0}
    """
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{share}": 1e3 * ordered[min(len(ordered) - 1, math.ceil(share / 100 * len(ordered)) - 1)]
        for share in PERCENTILES
    }


def line(record: ServeRecord) -> str:
    """A record in one line."""
    if record.error is not None:
        return f"{record.case} {record.runner}: {record.error}"
    parts = [f"{record.out_tokens_per_s:,.0f} tokens/s", f"{record.requests_per_s:.1f} requests/s"]
    for name, values in (("first token", record.ttft_ms), ("next token", record.itl_ms), ("whole", record.e2e_ms)):
        if values is not None:
            parts.append(f"{name} {values['p50']:.1f} / {values['p90']:.1f} / {values['p99']:.1f} ms")
    if record.goodput is not None:
        parts.append(f"goodput {100 * record.goodput:.0f}%")
    if record.compiled_at_start:
        parts.append(f"caches cold at the start ({record.compiled_at_start} kernels compiled)")
    if record.accepted is not None:
        parts.append(f"{100 * record.accepted:.0f}% of drafts accepted")
    if record.host_busy is not None:
        parts.append(f"host busy {100 * record.host_busy:.0f}% of the steps")
    if record.compiled_in_service:
        parts.append(f"{record.compiled_in_service} compiled in service")
    if record.failed:
        parts.append(f"{record.failed} failed")
    return f"{record.case} {record.runner}: {'; '.join(parts)}"


def ratio(record: ServeRecord, records: Sequence[ServeRecord]) -> str:
    """How a record of ours is beside the best baseline of the same load, arrivals, pass and formats; "" without one.

    Tokens/s, ours over theirs, where all came at once. At a rate both keep up or neither does, so it is the p99 of the
    first and the next token, theirs over ours. Above 1 ours is better.
    """
    same = ("model", "load", "rate", "pass_name", "quantization", "kv_cache_dtype")
    theirs = [
        one
        for one in records
        if one.kind == "baseline"
        and one.comparable
        and all(getattr(one, name) == getattr(record, name) for name in same)
    ]
    if record.kind == "baseline" or not record.comparable or not theirs:
        return ""
    if record.rate is None:
        return f"{record.out_tokens_per_s / max(one.out_tokens_per_s for one in theirs):.2f}x"
    found = []
    for name, field in (("first", "ttft_ms"), ("next", "itl_ms")):
        ours, others = getattr(record, field), [getattr(one, field) for one in theirs if getattr(one, field)]
        if ours and others and ours["p99"]:
            found.append(f"{name} {min(one['p99'] for one in others) / ours['p99']:.2f}x")
    return ", ".join(found)


def table(records: Sequence[ServeRecord]) -> str:
    """Records as a Markdown table: those of one load, its arrivals and pass stand together."""
    knows_host = any(one.host_busy is not None for one in records)  # else the column is left out
    rows = [
        "| model | load | arrivals | pass | implementation | tokens/s | first token, ms | next token, ms | goodput "
        f"{'| host busy ' if knows_host else ''}| start, s | caches | vs best baseline |",
        f"{'| --- ' * 5}{'| ---: ' * (5 if knows_host else 4)}| ---: | --- | ---: |",
    ]
    places = {key: place for place, key in enumerate(dict.fromkeys(_together(one) for one in records))}
    for one in sorted(records, key=lambda one: (places[_together(one)], one.kind == "baseline")):
        first, after = (
            "" if values is None else " / ".join(f"{values[f'p{share}']:.1f}" for share in PERCENTILES)
            for values in (one.ttft_ms, one.itl_ms)
        )
        arrivals = "at once" if one.rate is None else f"{one.rate:g}/s"
        start = "" if one.start_s is None else f"{one.start_s:.0f}"
        good = "" if one.goodput is None else f"{100 * one.goodput:.0f}%"
        busy = "" if one.host_busy is None else f"{100 * one.host_busy:.0f}%"
        host = f"| {busy} " if knows_host else ""
        speed = f"{one.out_tokens_per_s:,.0f}" if one.comparable else one.error or f"{one.failed} failed"
        who = options_of(one).named(
            one.implementation if one.version is None else f"{one.implementation} {one.version}"
        )
        rows.append(
            f"| {one.model} | {one.load} | {arrivals} | {one.pass_name} | {who} "
            f"| {speed} | {first} | {after} | {good} {host}| {start} | {one.caches} | {ratio(one, records)} |"
        )
    return "\n".join(rows)


def _together(one: ServeRecord) -> tuple[Any, ...]:
    return one.model, one.load, one.rate, one.pass_name
