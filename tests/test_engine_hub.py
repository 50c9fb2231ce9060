"""Models by the name of their Hugging Face repository, without the network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: E402

from flashkernel.engine import LLM, ModelError, SamplingParams, hub  # noqa: E402

NAME = "owner/tiny-model"


class Hub:
    """Stands in for the Hugging Face Hub and its local cache; `calls` are downloads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cached, self.error, self.calls = folder, False, None, list[dict[str, Any]]()

    def snapshot_download(self, repository: str, local_files_only: bool = False, **options: Any) -> str:
        assert repository == NAME
        if not local_files_only:
            self.calls.append(options)
            if self.error is not None:
                raise self.error
            self.cached = True
        if not self.cached:
            raise LocalEntryNotFoundError("not in the cache")
        return str(self.folder)


@pytest.fixture(name="repository")
def repository_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    tiny_models.save("llama", tmp_path)
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return made


def _load(**options: Any) -> LLM:
    return LLM(NAME, device="cpu", kv_cache_tokens=64, **options)


def test_a_cached_repository_is_used_without_asking(repository: Hub) -> None:
    repository.cached = True
    assert len(_load().generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    assert _load(download=True).name == NAME
    assert repository.calls == []


def test_nothing_is_downloaded_unless_asked_for(repository: Hub) -> None:
    with pytest.raises(ModelError) as error:
        _load()
    for part in (f"`hf download {NAME}`", f'LLM("{NAME}", download=True)', "path of a folder or GGUF file"):
        assert part in str(error.value)
    assert repository.calls == []


def test_a_download_says_so_and_takes_what_is_needed(repository: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert _load(download=True).config.num_layers == 2
    assert f"Downloading {NAME} from the Hugging Face Hub" in capsys.readouterr().err
    (options,) = repository.calls
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    assert options["ignore_patterns"] == ["*/*"], "other formats of the weights lie in folders"


def test_a_part_of_a_repository_is_completed(repository: Hub) -> None:
    """A download that was interrupted leaves a snapshot without its weights."""
    repository.cached = True
    weights = repository.folder / "model.safetensors"
    weights.rename(repository.folder / "elsewhere")
    with pytest.raises(ModelError, match="not on this machine"):
        _load()
    download = repository.snapshot_download

    def complete(*values: Any, **options: Any) -> str:
        if not options.get("local_files_only"):
            (repository.folder / "elsewhere").rename(weights)
        return download(*values, **options)

    huggingface_hub.snapshot_download = complete  # the fixture restores it
    assert _load(download=True).config.num_layers == 2


def test_offline_and_failed_downloads(repository: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.error = OSError("no route to the hub\nand more")
    with pytest.raises(ModelError, match=r"could not be downloaded \(no route to the hub\).*hf auth login"):
        _load(download=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        _load(download=True)
    assert len(repository.calls) == 1


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=f"pip install huggingface_hub.*hf download {NAME}"):
        hub.resolve(NAME, download=True)


def test_local_paths_come_first(repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert hub.resolve(NAME) == Path(NAME)
    for wrong in ("owner/name/more", "/no/such/place", "model.gguf"):
        with pytest.raises(ModelError, match="no such model here"):
            hub.resolve(wrong)
    assert repository.calls == []
