"""Set-up of the three tiers: CPU (the default), compile (`-m compile`) and GPU (`-m gpu`).

What runs where, so that `make test` is short on two cores:

- The generated matrix (test_matrix.py): every case of every operator in all dtypes for the torch backend and CUDA C++,
  in one of its dtypes in turn for Triton and Hopper kernels; on a GPU their first case in all.
- The emulators: every CUDA C++ test for one architecture in turn (sm_75 or sm_80), every config of Hopper attention's
  backward pass with one mask in turn. `--whole-matrix` has the products.
- torch.compile (test_citizenship.py): on the CPU every case once, with dynamic shapes for the kernels of the first; on
  a GPU every case with static shapes, the first with dynamic ones too.
- The compile tier: `make compile-test` has every input and option of a kernel in some benchmark case,
  `make compile-test-configs` the sizes, tiles and combinations beside them, `make compile-test-cuda` CUDA C++ for every
  architecture. CI runs all three.

Without a GPU, Triton kernels run under its interpreter, which must be switched on before triton is imported; the
compile tier needs the real compiler and therefore a process of its own.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fast_interpreter
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
_RUN = pytest.StashKey[int]()  # tests that this process has run
LONGEST_RUN = 6  # tests of one function that a worker runs one after another
COMPILE_ALONE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.compile\b", re.MULTILINE)
FREEZE_EVERY = 200  # tests in a process: imports, compiled functions and caches that they leave behind


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-seed", type=int, default=0, help="the first seed of the random calls")
    parser.addoption("--whole-matrix", action="store_true", help="every case in every build and dtype, on the CPU too")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """No tier imports files that have nothing for it."""
    mark = {"compile": "mark.compile", "every_arch": "mark.compile", "gpu": "mark.gpu"}
    tier = config.option.markexpr.partition(" ")[0]
    if not collection_path.match("test_*.py"):
        return None
    if config.option.markexpr == "not gpu and not compile":
        return COMPILE_ALONE.search(collection_path.read_text()) is not None or None
    return (tier in mark and mark[tier] not in collection_path.read_text()) or None


def _longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order in which every worker begins with its share of the long tests.

    xdist gives each worker a run of neighbors; a test of a minute that begins last keeps the others waiting. Tests of
    one function often run the same kernel: some neighbors stay together, so that one worker compiles it and not all.
    """
    ranks = {"test_random_calls": 0, "test_citizenship": 1, "test_matrix": 3}
    alone = ("test_random_calls", "test_citizenship", "test_matrix")  # neighbors there have kernels of their own
    runs: list[list[pytest.Item]] = []
    for item in sorted(items, key=lambda item: ranks.get(item.path.stem, 2)):
        same = runs and _function(runs[-1][0]) == _function(item) and item.path.stem not in alone
        if same and len(runs[-1]) < LONGEST_RUN:
            runs[-1].append(item)
        else:
            runs.append([item])
    return [item for worker in range(workers) for run in runs[worker::workers] for item in run]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(trylast=True)  # of what -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole-matrix"):
        left_out = [item for item in items if item.get_closest_marker("whole_matrix")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("whole_matrix")]
    if HAS_GPU and config.option.markexpr.startswith("gpu"):
        items[:] = _longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    _freeze()
    gc.set_threshold(20_000, 20, 20)


def _freeze() -> None:
    """What is alive now stays until the end: the garbage collector, which takes a third of the time without this, need
    not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Numbers that a file draws as it is imported are the same each time."""
    if isinstance(collector, pytest.Module):
        _seed()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Numbers that a test draws are the same each time, whatever ran before it in its process."""
    _seed()


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """End a worker whose CUDA context a failed test has broken: xdist starts another, and the tests after it are judged
    by themselves. Reports are sent when a phase ends, before this. Memory that torch keeps for later is the other
    workers' where it is much."""
    failed = item.session.testsfailed
    outcome = yield
    if HAS_GPU and "PYTEST_XDIST_WORKER" in os.environ and item.session.testsfailed > failed:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
    if HAS_GPU and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()
    item.session.stash[_RUN] = count = item.session.stash.get(_RUN, 0) + 1
    if count % FREEZE_EVERY == 0:
        _freeze()
    return outcome


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache of tuned configs."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share what they compile
        base = base.parent
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(base / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny Llama."""
    import tiny_models

    path = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", path)
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    """A model with room for everything, whose answers others are held against."""
    from flashkernel.engine import LLM

    return LLM(folder, device="cpu", kv_cache_tokens=4096, block_size=16)


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether a step is launched before the tokens of the one before are read, as on a GPU."""
    return request.param


@pytest.fixture(
    params=[pytest.param(("-mavx2", "-mfma", "-mf16c"), id="avx2"), pytest.param((), id="portable")],
)
def older_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C++ kernels are compiled for an older CPU than this one, into a folder of the test's own."""
    from flashkernel.core import cpp

    if request.param and "avx2" not in cpp._cpu():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp, "_FLAGS", ("-O1", *request.param, "-std=c++17", "-fPIC", "-w"))
    monkeypatch.setattr(cpp, "library", cpp.library.__wrapped__)


@pytest.fixture
def recorded_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A call is recorded the second time its key is seen, and replayed from the third on."""
    from flashkernel.core import replay

    monkeypatch.setattr(replay, "RECORD_AFTER", 1)
    for calls in replay._caches:
        calls.clear()
    yield
    for calls in replay._caches:  # some tests replace what was recorded
        calls.clear()


@pytest.fixture
def in_cpp(recorded_soon: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The C++ extension, which replays calls from the fourth on."""
    from flashkernel.core import cpp, replay
    from flashkernel.core.native import build

    if reason := cpp.can_compile():
        pytest.skip(reason)
    build.build()
    monkeypatch.setenv("FLASHKERNEL_REPLAY", "cpp")
    monkeypatch.setattr(replay, "_extension", build.load())
    yield build.load()
    for calls in replay._caches:
        calls.clear()
        calls.native = None


@pytest.fixture
def repeated(recorded_soon: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recordings that were replayed, in order."""
    from flashkernel.core.recording import Recording

    runs: list[Any] = []
    monkeypatch.setattr(Recording, "hooked", lambda self: runs.append(self))  # called before each replay
    return runs
