"""The versions of triton that are allowed, pinned and tried, and what is done differently for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashkernel.core import device as devices
from flashkernel.core import versions
from flashkernel.ops.attention.configs import BACKWARD_KEYS, AttentionConfig
from flashkernel.ops.attention.fp8.configs import HOPPER
from flashkernel.ops.attention.hopper.backward_configs import BACKWARD

ROOT = Path(__file__).parent.parent
H200 = devices.KNOWN["h200"]
SHAPE = {
    "seqlen_q": 4096, "seqlen_k": 4096, "max_visible_keys": 4096,
    "mean_visible_keys": 4096, "head_dim": 128, "value_dim": 128, "bytes": 2, "group_size": 1,
    "fixed_max": 1, "masked": 1, "has_tables": 0, "out_bytes": 2, "block_scales": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    versions.compile_options.cache_clear()
    yield
    versions.compile_options.cache_clear()


def _installed(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None) -> None:
    for name in ("core.versions", *(f"ops.attention.{package}configs" for package in ("", "hopper.backward_", "fp8."))):
        monkeypatch.setattr(f"flashkernel.{name}.triton_version", lambda: version)


def test_no_untried_version_is_allowed() -> None:
    allowed = re.search(r'"(triton>=[^;"]*)', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert allowed is not None
    assert pinned is not None
    first, last = (version.split(".") for version in (versions.TESTED_TRITON[0], versions.TESTED_TRITON[-1]))
    assert allowed[1] == f"triton>={first[0]}.{first[1]},<{last[0]}.{int(last[1]) + 1}"
    assert f"pip install '{allowed[1]}'" == versions.INSTALL_TRITON
    assert pinned[1] == versions.TESTED_TRITON[0]


@pytest.mark.parametrize(
    "version, arch, level", [((3, 6), 90, False), ((3, 9), 90, True), ((3, 9), 80, False), ((3, 9), 100, False)]
)
def test_ptxas_allocates_registers_as_by_default_on_hopper(
    version: tuple[int, int], arch: int, level: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, version)
    monkeypatch.delenv("PTXAS_OPTIONS", raising=False)
    expected = {"ptx_options": "--regAllocOptLevel=4"} if level else {}
    assert versions.compile_options(arch) == {"enable_fp_fusion": True, **expected}


def test_ptxas_options_of_the_user_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, (3, 9))
    monkeypatch.setenv("PTXAS_OPTIONS", "--verbose")
    assert versions.compile_options(90)["ptx_options"] == "--regAllocOptLevel=4 --verbose"


def test_tiles_that_would_spill_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, short = {**SHAPE, "head_dim": 64, "value_dim": 64}, {**SHAPE, "mean_visible_keys": 512}
    found = {}
    for version in ((3, 6), (3, 9)):
        _installed(monkeypatch, version)
        choices = (BACKWARD.heuristic(H200, narrow), BACKWARD.heuristic(H200, short))
        found[version] = (
            BACKWARD_KEYS.heuristic(H200, SHAPE), choices[0].dq_mode, choices[1].kv_stages,
            HOPPER.heuristic(H200, narrow).num_consumers,
        )  # fmt: skip
        assert all(BACKWARD.valid(choice, H200, shape) is None for choice, shape in zip(choices, (narrow, short)))
    assert found[(3, 6)] == (AttentionConfig(64, 64, 4, 2), "tma_reduce", 2, 3)
    assert found[(3, 9)] == (AttentionConfig(32, 64, 4, 2), "dq_warpgroup", 1, 2)
