"""The container: what the Dockerfile, the compose file and their script promise, without building an image."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashkernel.cli import app
from flashkernel.core import env

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text() if (ROOT / "Dockerfile").exists() else ""
pytestmark = pytest.mark.skipif(not DOCKERFILE, reason="the source tree is not here")
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)


def _of(kind: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == kind]


def test_the_image_runs_the_script_that_ci_runs() -> None:
    assert any("tools/install_server.sh system" in step for step in _of("RUN"))
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^server:.*\n\tsh tools/install_server.sh build/server$", makefile, re.MULTILINE)
    assert "make server" in (ROOT / ".ci/run").read_text().splitlines()
    subprocess.run(["sh", "-n", str(ROOT / "tools/install_server.sh")], check=True)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for step in _of("COPY"):
        for source in step.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in allowed, source


def test_lint_rules_of_images() -> None:
    """The rules of hadolint that matter here: a fixed base, no root, the exec form, no lists of packages left."""
    (base,) = _of("FROM")
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", base), "a tag"
    assert not base.endswith(":latest")
    assert INSTRUCTIONS.index(("USER", "1000")) < [name for name, _ in INSTRUCTIONS].index("ENTRYPOINT")
    for kind in ("ENTRYPOINT", "CMD"):
        assert all(step.startswith("[") for step in _of(kind))
    assert len(_of("ENTRYPOINT")) == len(_of("HEALTHCHECK")) == 1
    script = (ROOT / "tools/install_server.sh").read_text()
    assert "--no-install-recommends" in script
    assert "rm -rf /var/lib/apt/lists/*" in script
    assert "set -eu" in script


def test_the_entry_point_takes_its_options() -> None:
    words = re.findall(r'"([^"]+)"', _of("ENTRYPOINT")[0])
    shown = CliRunner().invoke(app, [*words[1:2], "--help"], env={"COLUMNS": "200"}).output
    assert all(word in shown for word in words if word.startswith("--"))
    assert f"EXPOSE {words[-1]}" in DOCKERFILE
    assert "FLASHKERNEL_CACHE_DIR" in str(_of("ENV"))
    assert "FLASHKERNEL_CACHE_DIR" in (env.__doc__ or "")


def test_the_compose_file_names_what_there_is() -> None:
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["flashkernel"]
    assert service["ports"] == ["127.0.0.1:8000:8000"], "not open to other machines unless asked for"
    assert service["stop_grace_period"] == "40s"  # above `serve --grace` and the last answers
    assert "--max-num-seqs" in service["command"]
