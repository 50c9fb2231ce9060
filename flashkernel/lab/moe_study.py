"""Results of `examples/moe_study.py`: losses and utilization by router, in `results/<device>/moe_study.json`."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashkernel.lab.results import MOE_STUDY, describe_run, replace_text

LAST = 10  # steps that figures are the mean of


def save(
    folder: Path,
    device: str,
    sizes: Mapping[str, int],
    routers: Sequence[Mapping[str, Any]],
    arguments: Sequence[str],
    commit: str | None = None,
) -> Path:
    """Writes a study into a results folder; returns the file.

    Args:
        folder: Such as results/cpu.
        device: Name of the device that trained.
        sizes: Of the model and of a batch, with "steps".
        routers: For each: "router", "losses" (one for each step), "min_over_max", "entropy", "dropped", and
            "ms_per_step" if the speed of such a model means something.
        arguments: The command line behind the script's name.
        commit: To record, where there is no git checkout.
    """
    header = {
        **describe_run(device, {}, commit),
        "command": shlex.join(["python", "examples/moe_study.py", *arguments]),
    }
    del header["ceilings"]
    head = json.dumps({**header, "sizes": dict(sizes)}, indent=1)
    lines = ",\n".join("  " + json.dumps(dict(one)) for one in routers)
    path = folder / MOE_STUDY
    replace_text(path, f'{head[:-2]},\n "routers": [\n{lines}\n ]\n}}\n')
    return path


def load(path: Path) -> dict[str, Any]:
    """The contents of a study's file; ValueError if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "device": found["device"], "sizes": found["sizes"], "routers": list(found["routers"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a study of routers ({type(error).__name__}: {error}); move it away") from error


def digest(routers: Sequence[Mapping[str, Any]]) -> str:
    """A short hash of the losses, which the picture in the docs names."""
    return hashlib.sha256(json.dumps([[one["router"], one["losses"]] for one in routers]).encode()).hexdigest()[:16]


def block(results: Path) -> str | None:
    """What `<!-- results:moe_study -->` holds; None if no device has a study."""
    parts = []
    for path in sorted(results.glob(f"*/{MOE_STUDY}")):
        found = load(path)
        sizes = found["sizes"]
        what = (
            f"{sizes['layers']} layers, {sizes['experts']} experts of which a token has {sizes['k']}, {sizes['steps']} "
            f"steps of {sizes['batch']} x {sizes['length']} tokens; means of the last {LAST} steps"
        )
        where = path.relative_to(results.parent).as_posix()
        parts.append(f"{found['device']}, torch {found['versions']['torch']}; {what}; from `{where}`.\n\n"
                     f"{markdown(found['routers'])}")  # fmt: skip
    return "\n\n".join(parts) or None


def markdown(routers: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table of loss and utilization."""
    lines = [
        "| router | loss | smallest over largest load | entropy of loads | dropped |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in routers:
        loss = sum(one["losses"][-LAST:]) / len(one["losses"][-LAST:])
        usage = f"{one['min_over_max']:.2f} | {one['entropy']:.2f} | {one['dropped']:.1%}"
        lines.append(f"| {one['router']} | {loss:.3f} | {usage} |")
    return "\n".join(lines)
