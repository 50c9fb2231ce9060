"""The state of an interrupted calibration on disk: layers that are done, and the hidden states after the last one.

Every file is written under another name and renamed, and `state.json` is written last: an interruption at any time
leaves the state after some layer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from flashkernel import Weight
from flashkernel.core.files import write_whole
from flashkernel.engine.config import ModelError
from flashkernel.engine.transformer import LayerWeights

_STATE = "state.json"
STATE_SUFFIX = ".calibration"  # of the folder beside the model that is made


class CalibrationState:
    """A folder with the state of one quantization.

    Args:
        folder: Where it is; it is made if it does not exist.
        fingerprint: What was asked for (model, method, scheme, text): a state of another one is refused.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        self.errors: list[dict[str, Any]] = []
        self.layers_done = 0
        file = folder / _STATE
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
                self.layers_done, self.errors = int(found["layers_done"]), list(found["errors"])
                other = found["fingerprint"] != fingerprint
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise ModelError(f"{file}: it cannot be read ({error}); delete {folder} and start again") from error
            if other:
                raise ModelError(
                    f"{folder}: it has the state of another quantization (another model, method, scheme or text); "
                    "delete it to start again, or choose another folder"
                )

    def layers(self) -> list[LayerWeights]:
        """The layers that are done."""
        return [self._layer(index) for index in range(self.layers_done)]

    def hidden(self) -> Tensor:
        """The hidden states after the last of them."""
        return _load(self.folder / f"hidden-{self.layers_done}.safetensors")[0]["hidden"]

    def save(self, layer: LayerWeights, hidden: Tensor, errors: list[dict[str, Any]]) -> None:
        """Adds a layer, the hidden states after it and its errors; ModelError if the disk does not take them."""
        index = self.layers_done
        try:
            _save(self.folder / f"layer-{index}.safetensors", *_tensors(layer))
            _save(self.folder / f"hidden-{index + 1}.safetensors", {"hidden": hidden.cpu().contiguous()}, {})
            state = {
                "fingerprint": self.fingerprint, "layers_done": index + 1, "errors": [*self.errors, *errors],
            }  # fmt: skip
            write_whole(self.folder / _STATE, json.dumps(state))
        except OSError as error:
            raise ModelError(
                f"{self.folder}: the state after layer {index} cannot be written ({error}); free space and run the "
                f"same command again: it goes on with layer {index}"
            ) from error
        self.layers_done, self.errors = index + 1, state["errors"]  # type: ignore[assignment]
        (self.folder / f"hidden-{index}.safetensors").unlink(missing_ok=True)

    def _layer(self, index: int) -> LayerWeights:
        tensors, layouts = _load(self.folder / f"layer-{index}.safetensors")
        found: dict[str, Any] = {}
        for one in fields(LayerWeights):
            parts = [tensors[f"{one.name}.{place}"] for place in range(3) if f"{one.name}.{place}" in tensors]
            if one.name in layouts:
                found[one.name] = Weight.from_tensors(parts, layouts[one.name])
            else:
                found[one.name] = tensors.get(one.name)
        return LayerWeights(**found)


def remove_state(folder: Path) -> None:
    """Deletes the files of a state, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for file in (*folder.glob("layer-*.safetensors"), *folder.glob("hidden-*.safetensors")):
        file.unlink()
    (folder / _STATE).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _tensors(layer: LayerWeights) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a layer by name, and the layouts of its quantized weights."""
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, str] = {}
    for name, value in vars(layer).items():
        if isinstance(value, Weight):
            layouts[name] = value.layout
            tensors |= {f"{name}.{place}": part.cpu().contiguous() for place, part in enumerate(value.tensors)}
        elif value is not None:
            tensors[name] = value.cpu().contiguous()
    return tensors, layouts


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_suffix(".tmp")
    try:
        save_file(dict(tensors), temporary, metadata)
        os.replace(temporary, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: it cannot be read ({error}); delete {path.parent} and start again") from error
