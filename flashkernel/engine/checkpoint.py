"""Checkpoints: a folder that Transformers saved (config.json and safetensors), or a GGUF file.

A checkpoint has a configuration and tensors under Transformers' names, and a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from flashkernel import Weight
from flashkernel.engine.config import HFConfig, ModelError
from flashkernel.engine.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """A stored model."""

    @property
    def config(self) -> HFConfig:
        """The configuration, as Transformers writes it."""
        ...

    @property
    def names(self) -> Set[str]:
        """Names of the stored tensors."""
        ...

    def read(self, name: str) -> Tensor | Weight:
        """A tensor on the CPU, which may be a view of the file, or a `Weight`: GGUF's quantized matrices (out, in), and
        experts in MXFP4 (experts, out, in)."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is none."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the model at a path; ModelError if there is none or it cannot be read."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or folder")
    from flashkernel.engine.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


class SafetensorsCheckpoint:
    """config.json, one or several safetensors files, tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        values = read_json(path / "config.json", "a model's folder has one, beside its safetensors files")
        generation = path / "generation_config.json"
        if generation.exists():
            stop = read_json(generation, "").get("eos_token_id")
            values = {**values, "eos_token_id": values.get("eos_token_id") if stop is None else stop}
        older = path / "quantize_config.json"  # where AutoGPTQ's first files say how they are quantized
        if older.exists() and values.get("quantization_config") is None:
            values = {**values, "quantization_config": {"quant_method": "gptq", **read_json(older, "")}}
        self.config = HFConfig(values, str(path))
        self._files = tensor_files(path)
        self._open: dict[str, Any] = {}
        if any(name.startswith(("transformer.", "model.")) for name in self._files):
            self._stripped = ""
        else:  # GPT-2's first files were saved without their outermost name
            self._stripped = "transformer."

    @property
    def names(self) -> Set[str]:
        found = {self._stripped + name for name in self._files}
        packed = {name.removesuffix("_blocks") for name in found if name.endswith("_blocks")}
        return {name for name in found if not name.endswith(("_blocks", "_scales"))} | packed

    def read(self, name: str) -> Tensor | Weight:
        name = name.removeprefix(self._stripped)
        if name in self._files:
            return self._stored(name)
        for part in (name + "_blocks", name + "_scales"):
            if part not in self._files:
                raise ModelError(f"{self.path}: {part} is missing; the model is incomplete, get it again")
        try:
            return Weight.pack(self._stored(name + "_blocks"), self._stored(name + "_scales"), format="mxfp4")
        except ValueError as error:
            raise ModelError(f"{self.path}: {name}: {error}") from error

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.path)

    def _stored(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, "pt")
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path / file, error) from error


def tensor_files(path: Path) -> dict[str, str]:
    """File name of each tensor in a folder; ModelError if files are missing or damaged."""
    from safetensors import SafetensorError, safe_open

    index = path / _INDEX
    if index.exists():
        files = read_json(index, "").get("weight_map")
        if not isinstance(files, dict):
            raise ModelError(f"{index}: it has no weight_map; the file is damaged, get it again")
        wrong = [file for file in files.values() if not isinstance(file, str) or Path(file).name != file or not file]
        if wrong:
            raise ModelError(f"{index}: weight_map has {wrong[0]!r} where a file of the folder belongs; get it again")
        missing = sorted({file for file in files.values() if not (path / file).exists()})
        if missing:
            raise ModelError(f"{path}: {', '.join(missing)} of the model's files are missing; get them again")
        return files
    single = path / "model.safetensors"
    if not single.exists():
        others = ", ".join(sorted(file.name for file in path.glob("*.bin"))) or "no weights"
        raise ModelError(f"{path}: weights are read from model.safetensors or {_INDEX}; the folder has {others}")
    try:
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise _damaged(single, error) from error


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path}: the file is damaged or was cut short ({error}); get it again")


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file; ModelError if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {hint}") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: it cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: it must hold one JSON object, and holds a {type(found).__name__}")
    return found
