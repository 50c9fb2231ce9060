"""Generated parts of the docs that are made of several results files: `<!-- report:turing_success -->`.

`flashkernel tables --write` regenerates the text between such a line and `<!-- /report -->`, for each GPU that has a
folder in `results/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashkernel.lab import (
    estimates,
    first_use_tables,
    host_tables,
    profile_tables,
    profile_targets,
    results,
    turing_tables,
)

BLOCK = re.compile(r"(<!-- report:(?P<name>\w+) -->\n).*?(<!-- /report -->)", re.DOTALL)
UNMEASURED = "_Not measured yet._"

Files = Mapping[str, Mapping[str, Any]]


def _success(files: Files, profiles: Files) -> str | None:
    of_the_suite = bool(profiles) or turing_tables.speedups(files) is not None  # not a CPU's generation alone
    return turing_tables.success(files, profiles) if of_the_suite else None


def _speedups(files: Files, profiles: Files) -> str | None:
    return turing_tables.speedups(files)


def _cuda_launches(files: Files, profiles: Files) -> str | None:
    return host_tables.launch_markdown(files[host_tables.OP]["records"]) if host_tables.OP in files else None


def _first_use(files: Files, profiles: Files) -> str | None:
    return first_use_tables.markdown(files[first_use_tables.OP]["records"]) if first_use_tables.OP in files else None


def _profiles(files: Files, profiles: Files) -> str | None:
    records = [record for file in profiles.values() for record in file["records"]]
    order = {name: index for index, name in enumerate(dict.fromkeys(record.op for record in records))}
    records.sort(key=lambda record: order[record.op])
    return f"{profile_tables.markdown(records)}\n\n{profile_tables.CAPTION}." if records else None


def _profiles_missing(files: Files, profiles: Files) -> str | None:
    if not profiles:
        return None
    done = {profile_targets.pass_of(record) for record in profile_targets.profiled(profiles.values())}
    left = sorted(profile_targets.passes(next(iter(profiles.values()))["device"]) - done)
    if not left:
        return "None is missing."
    lines = ["| backend | forward passes without a profile | backward |", "| --- | --- | --- |"]
    for name in sorted({backend for _, backend, _ in left}):
        cells = [", ".join(op for op, backend, kind in left if (backend, kind) == (name, wanted))
                 for wanted in ("fwd", "bwd")]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _t4(files: Files, profiles: Files) -> str | None:
    found = estimates.representative(estimates.estimates(files, "t4"))
    return estimates.markdown(found) if found else None


# name -> (what its figures are, the table made of a GPU's results files and profiles)
REPORTS: dict[str, tuple[str, Callable[[Files, Files], str | None]]] = {
    "turing_success": ("Measured on one {device}", _success),
    "turing_speedups": ("Measured on one {device}", _speedups),
    "t4_estimates": ("Estimated for a Tesla T4 from measurements on one {device}", _t4),
    "cuda_launches": ("Measured on one {device}", _cuda_launches),
    "first_use": ("Compiled for {device}", _first_use),
    "profiles": ("Profiled on one {device}", _profiles),
    "profiles_missing": ("Not yet profiled on one {device}", _profiles_missing),
}


def regenerate(text: str, folder: Path, measured: Mapping[str, Files]) -> str:
    """The document with its report blocks regenerated.

    Args:
        text: the document.
        folder: `results/`, whose subfolders have the profiles.
        measured: by GPU its results files, as `results.load_folder` returns them.
    """

    def renew(found: re.Match[str]) -> str:
        if found["name"] not in REPORTS:
            raise ValueError(f"there is no report {found['name']!r}; there are: {', '.join(REPORTS)}")
        intro, report = REPORTS[found["name"]]
        parts = []
        for gpu, files in measured.items():
            profiles = results.load_folder(folder / gpu / results.PROFILES)
            made = report(files, profiles)
            if made is not None:
                device = next((file["device"] for file in (*files.values(), *profiles.values())), gpu)
                parts.append(f"{intro.format(device=device)}; from `results/{gpu}/`.\n\n{made}")
        return found[1] + ("\n\n".join(parts) or UNMEASURED) + "\n" + found[3]

    return BLOCK.sub(renew, text)
