"""Builds the wheel into a folder and checks that it holds the package, all of it, and nothing else.

Usage: python tools/check_wheel.py FOLDER
"""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED, NAMES = (".py", ".cu", ".cuh", ".cpp", ".h", ".txt"), ("README.md", "py.typed")
EXTRAS = {"all", "cuda", "docs", "grammar", "hf", "lint", "llama-cpp", "plot", "serve", "test"}


def build(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)  # setuptools would ship what an earlier build left there
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "-w", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT], check=True)
    (wheel,) = folder.glob("flashkernel-*.whl")
    return wheel


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel, in words."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
    info = metadata_name.rsplit("/", 1)[0]
    sources = (path for path in (ROOT / "flashkernel").rglob("*") if path.suffix in SHIPPED or path.name in NAMES)
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    shipped = {name for name in names if not name.startswith(f"{info}/")}
    found = [f"{name} does not belong into the wheel" for name in sorted(shipped - wanted)]
    found += [f"{name} is missing" for name in sorted(wanted - shipped)]
    found += [] if f"{info}/licenses/LICENSE" in names else ["the license is missing"]
    found += [f"the metadata have no {field}" for field in ("License-Expression", "Keywords", "Classifier", "Summary")
              if not metadata[field]]  # fmt: skip
    extras = set(metadata.get_all("Provides-Extra", []))
    return found + ([f"the extras are {sorted(extras)}, not {sorted(EXTRAS)}"] if extras != EXTRAS else [])


if __name__ == "__main__":
    built = build(Path(sys.argv[1]))
    wrong = problems(built)
    print(f"{built.name}: " + ("; ".join(wrong) or "complete"))
    sys.exit(bool(wrong))
