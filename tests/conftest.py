"""Set-up of the three tiers: CPU (the default), compile (`-m compile`) and GPU (`-m gpu`).

Without a GPU, Triton kernels run under its interpreter, which must be switched on before triton is imported; the
compile tier needs the real compiler and therefore a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_GPU and not config.option.markexpr.startswith("compile"):
        os.environ["TRITON_INTERPRET"] = "1"
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache of tuned configs."""
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
