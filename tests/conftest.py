"""Set-up of the three tiers: CPU (the default), compile (`-m compile`) and GPU (`-m gpu`).

Without a GPU, Triton kernels run under its interpreter, which must be switched on before triton is imported; the
compile tier needs the real compiler and therefore a process of its own.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import fast_interpreter
import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-seed", type=int, default=0, help="the first seed of the random calls")
    parser.addoption("--whole-matrix", action="store_true", help="emulate every case of every CUDA C++ kernel")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # workers share the cores: one thread each, and for what they start
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not HAS_GPU and not config.option.markexpr.startswith("compile"):
        os.environ["TRITON_INTERPRET"] = "1"
        fast_interpreter.install()
        from flashkernel.core.versions import triton_version

        if (triton_version() or (0, 0)) >= (3, 9):
            _mend_interpreter()


def _mend_interpreter() -> None:
    """Keep what triton 3.9's interpreter broadcasts from a scalar comparison a truth value: it makes an integer of it,
    and then refuses it as a mask. Compiled kernels are not concerned."""
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    broadcast = InterpreterBuilder.create_splat

    def create_splat(self: Any, type_: Any, value: Any) -> Any:
        made = broadcast(self, type_, value)
        return TensorHandle(made.data.astype(np.bool_), tl.int1) if type_.scalar == tl.int1 else made

    InterpreterBuilder.create_splat = create_splat


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The compile tier does not import files that have nothing for it."""
    if config.option.markexpr == "compile" and collection_path.suffix == ".py":
        return "mark.compile" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays until the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache of tuned configs."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share what they compile
        base = base.parent
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(base / "cache"))
