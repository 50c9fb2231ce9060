"""Files that several processes share: written whole, and changed under a lock."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_TIMEOUT_S, STALE_LOCK_S = 10.0, 60.0


def write_whole(path: Path, text: str) -> None:
    """Write a file so that others see the old one or the new one, never a part; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between processes: by the operating system where it can, else by the file's existence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is not None:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file closes, even if the process dies
            yield
        return
    _create_alone(path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _create_alone(path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_LOCK_S:
                    path.unlink()  # its holder died
                    continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
