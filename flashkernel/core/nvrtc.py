"""NVRTC: compiles CUDA C++ to machine code, with or without a GPU; the disk cache of compiled kernels.

NVRTC is called through cuda-bindings, which cuda-core is built on: cuda-core's own Program cannot make PTX without a
driver.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashkernel.core import env, files

HINT = "install the 'cuda' extra: pip install flashkernel[cuda]"


class CompileError(RuntimeError):
    """NVRTC could not compile; the message has its log and the source lines of the errors."""


@dataclass(frozen=True)
class CompiledCubin:
    """Machine code (PTX for a `compute_` architecture), symbols by name expression, and NVRTC's log."""

    code: bytes
    names: Mapping[str, str]
    log: str

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that ptxas spilled to memory, stores and loads, over all kernels."""
        return sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log))


@cache
def core() -> Any:
    """cuda-core's module; it lived in `experimental` before 1.0."""
    from cuda import core

    if hasattr(core, "Program"):
        return core
    from cuda.core import experimental

    return experimental


@cache
def version() -> tuple[int, int]:
    """NVRTC's, as (major, minor)."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"NVRTC does not answer: {status}")
    return int(major), int(minor)


@cache
def can_compile() -> str | None:
    """The reason why CUDA C++ cannot be compiled here, or None. No GPU is needed."""
    try:
        core()
    except ImportError as error:
        return f"cuda-core cannot be imported ({error}); {HINT}"
    try:
        version()
    except Exception as error:  # cuda-bindings is missing, or its libnvrtc is
        return f"NVRTC cannot be loaded ({str(error).splitlines()[0]}); {HINT}"
    if not include_dirs():
        return f"the CUDA headers (cuda_fp16.h) were not found; {HINT}, or set CUDA_HOME to a CUDA toolkit"
    return None


@cache
def include_dirs() -> tuple[str, ...]:
    """Folders with the CUDA headers of NVRTC's major version: the pip packages', then a toolkit's."""
    major, _ = version()
    roots: list[Path] = []
    with suppress(ImportError):
        import nvidia

        packages = ("cuda_runtime", "cuda_nvcc") if major == 12 else (f"cu{major}",)
        roots += [Path(folder) / package / "include" for folder in nvidia.__path__ for package in packages]
    toolkit = env.cuda_home() / "include"
    if header_version(toolkit) // 1000 == major:
        roots.append(toolkit)
    found = [root for root in roots if root.is_dir()]
    return tuple(map(str, found)) if any((root / "cuda_fp16.h").exists() for root in found) else ()


def header_version(root: str | Path) -> int:
    """13000 for CUDA 13.0; 0 where there is no runtime header."""
    try:
        with open(Path(root) / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
            found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", file.read(1 << 16))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def compile_cubin(
    source: str,
    name_expressions: Sequence[str],
    arch: str,
    options: Sequence[str] = (),
    *,
    file_name: str = "kernel.cu",
    include: Sequence[str | Path] = (),
) -> CompiledCubin:
    """Compile CUDA C++ for "sm_90" (machine code) or "compute_75" (PTX, which the driver compiles). Needs no GPU.

    `options` are NVRTC's own: "--use_fast_math", "--maxrregcount=128", "--define-macro=BLOCK=64", ...
    """
    reason = can_compile()
    if reason is not None:
        raise CompileError(f"{file_name}: {reason}")
    virtual = arch.startswith("compute_")
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *([] if virtual else ["--ptxas-options=-v"]), *options]
    flags += [f"--include-path={folder}" for folder in (*include, *include_dirs())]
    program = _nvrtc("CreateProgram", source.encode(), file_name.encode(), 0, [], [])
    try:
        for name in name_expressions:
            _nvrtc("AddNameExpression", program, name.encode())
        try:
            _nvrtc("CompileProgram", program, len(flags), [flag.encode() for flag in flags])
        except NvrtcError as error:
            log = _fetch("ProgramLog", program).decode(errors="replace").strip("\0\n ")
            text = f"{file_name} does not compile for {arch} ({error}):\n{log}\n{_quoted_lines(source, file_name, log)}"
            raise CompileError(text.rstrip()) from None
        names = {name: _nvrtc("GetLoweredName", program, name.encode()).decode() for name in name_expressions}
        log = _fetch("ProgramLog", program).decode(errors="replace").strip("\0\n ")
        return CompiledCubin(_fetch("PTX" if virtual else "CUBIN", program), names, log)
    finally:
        _nvrtc("DestroyProgram", program)


class NvrtcError(RuntimeError):
    """An NVRTC function failed."""


def _nvrtc(function: str, *args: Any) -> Any:
    """Call an NVRTC function and return its result; NvrtcError with the name of its status."""
    from cuda.bindings import nvrtc

    status, *results = getattr(nvrtc, f"nvrtc{function}")(*args)
    if int(status) != 0:
        raise NvrtcError(f"nvrtc{function}: {status.name}")
    return results[0] if results else None


def _fetch(what: str, program: Any) -> bytes:
    """One of a program's results (log, PTX, cubin) as bytes."""
    buffer = b"\0" * _nvrtc(f"Get{what}Size", program)
    _nvrtc(f"Get{what}", program, buffer)  # cuda-bindings fills the bytes object in place
    return buffer


def _quoted_lines(source: str, file_name: str, log: str) -> str:
    """The source lines that a log reports errors for, with their numbers and two lines around."""
    text = source.splitlines()
    wrong = {int(number) for number in re.findall(rf"{re.escape(file_name)}\((\d+)\): (?:catastrophic )?error", log)}
    shown = sorted({near for line in wrong for near in range(line - 2, line + 3) if 1 <= near <= len(text)})
    return "\n".join(f"{'>' if number in wrong else ' '} {number:4d} | {text[number - 1]}" for number in shown)


def read_cached(path: Path, name: str) -> CompiledCubin | None:
    """A compiled kernel from the disk cache; None if it is not there, or (with a warning) damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        code = base64.b64decode(stored["code"], validate=True)
        if hashlib.sha256(code).hexdigest() != stored["sha256"] or not isinstance(stored["names"][name], str):
            raise ValueError("its contents do not match its checksum")
        return CompiledCubin(code, stored["names"], str(stored["log"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path}: compiling again, this cached kernel is damaged ({error!r})", stacklevel=4)
        return None


def write_cached(path: Path, compiled: CompiledCubin) -> None:
    """Write a compiled kernel to the disk cache; a folder that cannot be written is a warning."""
    stored = {
        "code": base64.b64encode(compiled.code).decode(),
        "sha256": hashlib.sha256(compiled.code).hexdigest(),
        "names": dict(compiled.names),
        "log": compiled.log,
    }
    try:
        files.write_whole(path, json.dumps(stored))
    except OSError as error:
        warnings.warn(f"{path}: this compiled kernel cannot be kept ({error})", stacklevel=4)
