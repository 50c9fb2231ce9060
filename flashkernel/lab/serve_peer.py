"""Another engine's script of loads, run before our own: what it writes to its standard output, as it comes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from flashkernel.lab.serving import LOADS, PASSES

END_S = 10.0  # for a script that is interrupted
_FACTS = {"start_s", "version", "date"}
_NAMES = {f"{load}, {turn}" for load in LOADS for turn in PASSES} | _FACTS
_ENTRY = re.compile(rf"([\w-]+),? ({'|'.join(PASSES)}):? (\{{.*\}})")


def words_of(command: str, version: str | None) -> list[str]:
    """The words of a command; ValueError if it names no program, or if nobody said which version it runs."""
    words = shlex.split(command)
    if version is None:
        raise ValueError("bench serve: --peer-command runs an engine of some version; give --peer-version")
    if not words or shutil.which(words[0]) is None:
        named = repr(words[0]) if words else "nothing"
        raise ValueError(f"bench serve: --peer-command runs {named}, which is no program; variables go after `env`")
    return words


def name_of(words: list[str]) -> str:
    """The name of the script that a command runs, for records: without folders and settings."""
    scripts = [word for word in words[1:] if word.endswith((".py", ".sh"))]
    return os.path.basename((scripts or words)[0])


def run_peer(words: list[str], log: Callable[[str], None]) -> Generator[dict[str, Any]]:
    """Runs a script and yields what it has measured so far, each time that it says more.

    It writes a line for each load, `chat first {"s": 12.3, "out_tokens_per_s": 17012.0}`, or JSON objects with such
    entries (`serve_import.entry_records`). Other lines go to `log`. However the iteration is left, no process of the
    script remains.

    Raises:
        ValueError: The script failed; what it had measured was yielded before.
    """
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    assert process.stdout is not None
    found: dict[str, Any] = {}
    try:
        for line in process.stdout:
            new = _entries(line.strip())
            found |= new
            if new and not found.keys() <= _FACTS:
                yield dict(found)
            elif line.strip():
                log(line.rstrip())
        if process.wait():
            raise ValueError(f"bench serve: {shlex.join(words)} ended with status {process.returncode}")
    finally:
        _end(process)


def _entries(line: str) -> dict[str, Any]:
    """The entries of a line; {} if it has none."""
    named = _ENTRY.fullmatch(line)
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(named[3]) if named else json.loads(line)  # Python's or JSON's quotes
        entries = {f"{named[1]}, {named[2]}": value} if named else value
        if isinstance(entries, dict):
            return {name: one for name, one in entries.items() if name in _NAMES}
    return {}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a script with all that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sent)
            process.wait(END_S)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
