"""The archive of kernels that tools/precompile_gpu_tests.py makes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashkernel.core import compile_ahead

SOURCE = Path(__file__).parents[1] / "tools" / "precompile_gpu_tests.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("precompile_gpu_tests", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_archive_lists_its_kernels_where_they_will_lie(tool: ModuleType, tmp_path: Path) -> None:
    names = ("k.cubin", "k.json", "k.ttir")
    folder = tmp_path / "cache" / "KEY"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {name: str(folder / name) for name in names}}))
    tool.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    with tarfile.open(tmp_path / "kernels.tar.xz") as file:
        found = {member.name for member in file if member.isfile()}
        group = json.load(file.extractfile("kernels/cache/KEY/__grp__k.json"))["child_paths"]
    assert found == {f"kernels/cache/KEY/{name}" for name in ("k.cubin", "k.json", "__grp__k.json")} | {
        "kernels/site/sitecustomize.py"
    }
    assert group == {name: f"/tmp/kernels/cache/KEY/{name}" for name in ("k.cubin", "k.json")}
    assert not list(tmp_path.glob("*.partial"))


def test_the_hook_names_kernels_by_the_version_of_triton(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(tool.HOOK)
    code = "import triton, triton.runtime.cache as c; assert c.triton_key() == f'triton {triton.__version__}'"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)


def test_tensors_keep_their_place(tool: ModuleType) -> None:
    for x in (torch.empty(40)[3:33].view(5, 6).t(), torch.empty(0, 4), torch.empty(()), torch.empty(3, 1).expand(3, 9)):
        found = tool.meta(x)
        assert (found.shape, found.stride(), found.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
        assert found.device.type == "meta"


@pytest.mark.compile
def test_what_is_collected_compiles(tool: ModuleType) -> None:
    found = compile_ahead.distinct(islice(tool.launches("h200", 0), 3))
    assert found
    assert [one.failure for one in compile_ahead.compile_all(found, 90, 1, False)] == [""] * len(found)
