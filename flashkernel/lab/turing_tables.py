"""Tables about Turing, generated from results: the success criteria of the kernels for a T4, and their speed-ups.

Each criterion is a threshold and the figures that it is held against; without figures it reads "not measured".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashkernel.lab import profile_targets
from flashkernel.lab.results import GenerationRecord, Record
from flashkernel.lab.suites import EAGER, MAX_AUTOTUNE

SUITE = "turing"
BUILD = "cuda_sm75"
KERNELS = {  # operator -> the kernel's name in the tables
    "attention": "tiled FlashAttention",
    "linear": "GeLU + linear",
    "rope": "RoPE",
    "decode_attention": "paged KV cache",
    "sum": "parallel reduction",
}
SPEEDUP, GENERATION = 1.5, 1.1  # thresholds: times eager, times the tokens/s of Transformers
NOT_MEASURED = "not measured"

Files = Mapping[str, Mapping[str, Any]]


def success(files: Files, profiles: Files) -> str:
    """The success criteria in markdown.

    Args:
        files: results files by name, as `results.load_folder` returns them.
        profiles: files of profiles by implementation.
    """
    records = _records(files)
    rows = [
        (
            "all kernels are correct in float16",
            "error below 1e-3 where the exact value is at most 1",
            *_correct(records),
        ),
        ("tiled FlashAttention runs at n = 4096", "no out of memory", *_long(records)),
        ("at least one kernel is faster than eager", f"over {SPEEDUP}x", *_faster(records)),
        ("profiles by Nsight Compute for every kernel", "all kernels", *_profiled(profiles)),
        ("generation is faster", f"over {GENERATION:.0%} of the tokens/s", *_generation(files)),
    ]
    lines = ["| criterion | threshold | figures | met |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def speedups(files: Files) -> str | None:
    """Speed-ups over eager and max-autotune of each kernel of the suite in markdown; None without figures."""
    records = _records(files)
    if not records:
        return None
    lines = [
        "| kernel | dtype | implementation | cases | over eager: least, median, most "
        "| over max-autotune: median (cases) |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for op, kernel in KERNELS.items():
        ours = [record for record in records if record.op == op and record.kind == "backend"]
        for dtype, name in dict.fromkeys((record.dtype, record.implementation) for record in ours):
            chosen = [record for record in ours if (record.dtype, record.implementation) == (dtype, name)]
            over = sorted(_ratios(records, chosen, EAGER))
            tuned = sorted(_ratios(records, chosen, MAX_AUTOTUNE.name))
            spread = (
                ", ".join(f"{value:.2f}x" for value in (over[0], _median(over), over[-1])) if over else NOT_MEASURED
            )
            best = f"{_median(tuned):.2f}x ({len(tuned)})" if tuned else NOT_MEASURED
            timed = sum(record.comparable for record in chosen)
            lines.append(f"| {kernel} | {dtype} | {name} | {timed} of {len(chosen)} | {spread} | {best} |")
    return "\n".join(lines)


def _records(files: Files) -> list[Record]:
    return list(files[SUITE]["records"]) if SUITE in files else []


def _median(ordered: Sequence[float]) -> float:
    return ordered[(len(ordered) - 1) // 2]


def _ratios(records: Iterable[Record], ours: Sequence[Record], baseline: str) -> list[float]:
    """The time of a baseline divided by ours, for each of our records that both were timed and correct on."""
    theirs = {
        (record.op, record.case, record.dtype, record.direction): record.p50
        for record in records
        if record.implementation == baseline and record.comparable
    }
    found = []
    for record in ours:
        other = theirs.get((record.op, record.case, record.dtype, record.direction))
        if other is not None and record.comparable and record.p50:
            found.append(other / record.p50)
    return found


def _best(records: Sequence[Record], op: str) -> list[Record]:
    """The records of a kernel as a T4 executes it; where the build has none, of the other implementations."""
    ours = [record for record in records if record.op == op and record.kind == "backend"]
    return [record for record in ours if record.implementation == BUILD] or ours


def _verdict(met: bool) -> str:
    return "yes" if met else "no"


def _correct(records: Sequence[Record]) -> tuple[str, str]:
    half = [record for record in records if record.kind == "backend" and record.dtype == "float16"]
    if not half:
        return NOT_MEASURED, NOT_MEASURED
    right = sum(record.correct for record in half)
    missing = [kernel for op, kernel in KERNELS.items() if all(record.op != op for record in half)]
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"{right} of {len(half)} runs correct{without}", _verdict(right == len(half) and not missing)


def _long(records: Sequence[Record]) -> tuple[str, str]:
    chosen = [record for record in _best(records, "attention") if record.axes["queries"] == 4096]
    if not chosen:
        return NOT_MEASURED, NOT_MEASURED
    most = max(chosen, key=lambda record: (record.axes["batch"], record.axes["head_dim"]))
    if most.error is not None:
        return f"{most.implementation}: {most.error}", "no"
    memory = "" if most.peak_bytes is None else f", {most.peak_bytes / 1e6:.0f} MB beyond its inputs"
    eager = [record for record in records if record.implementation == EAGER and record.op == "attention"
             and (record.case, record.dtype) == (most.case, most.dtype)]  # fmt: skip
    theirs = next((record.peak_bytes for record in eager if record.peak_bytes is not None), None)
    beside = "" if theirs is None else f" (eager: {theirs / 1e6:.0f} MB)"
    return f"batch {most.axes['batch']}, {most.implementation}{memory}{beside}", _verdict(
        all(record.error is None for record in chosen)
    )


def _faster(records: Sequence[Record]) -> tuple[str, str]:
    best: dict[str, tuple[float, str]] = {}
    for op, kernel in KERNELS.items():
        ratios = [
            (ratio, record.implementation)
            for record in _best(records, op)
            for ratio in _ratios(records, [record], EAGER)
        ]
        if ratios:
            best[kernel] = max(ratios)
    if not best:
        return NOT_MEASURED, NOT_MEASURED
    figures = ", ".join(f"{kernel} up to {ratio:.1f}x ({name})" for kernel, (ratio, name) in best.items())
    return figures, _verdict(max(best.values())[0] > SPEEDUP)


def _profiled(profiles: Files) -> tuple[str, str]:
    found = {profile_targets.pass_of(record) for record in profile_targets.profiled(profiles.values())}
    if not found:
        return NOT_MEASURED, NOT_MEASURED
    wanted = profile_targets.passes(next(iter(profiles.values()))["device"])
    figures = f"{len(wanted & found)} of {len(wanted)}: forward and backward of each operator on each backend"
    return figures, _verdict(wanted <= found)


def _generation(files: Files) -> tuple[str, str]:
    """tokens/s of our runners over Transformers with SDPA, by results file: least and most over models and batches."""
    parts, met = [], False
    for name, file in files.items():
        records = [
            one
            for one in file["records"]
            if isinstance(one, GenerationRecord)
            and one.comparable
            and one.runner == one.implementation
            and one.period is None
        ]
        base = {(one.model, one.batch, one.dtype): one.tokens_per_s for one in records if one.kind == "baseline"}
        for runner in dict.fromkeys(one.implementation for one in records if one.kind == "backend"):
            ratios = [
                one.tokens_per_s / theirs
                for one in records
                if one.implementation == runner
                and one.tokens_per_s
                and (theirs := base.get((one.model, one.batch, one.dtype)))
            ]
            if ratios:
                parts.append(f"{runner} {min(ratios):.2f}x to {max(ratios):.2f}x (`{name}.json`)")
                met = met or min(ratios) > GENERATION
    return ("; ".join(parts), _verdict(met)) if parts else (NOT_MEASURED, NOT_MEASURED)
