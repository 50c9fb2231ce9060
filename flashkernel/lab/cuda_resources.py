"""Registers, shared memory and spills of the CUDA C++ kernels, on GPUs that need not be here.

The kernels are those that dispatch selects: the launchers run the declared benchmarks and cases on tensors without
data, for a pretended GPU, and their launches are recorded instead of made. NVRTC (or nvcc) then compiles them for that
GPU, and ptxas reports what they take.

`python -m flashkernel.lab.cuda_resources results` writes results/cuda_resources.json, from which `flashkernel tables`
makes the blocks `<!-- results:cuda_resources ops/attention/* -->` of the docs: registers of a thread and shared memory
of a block.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from flashkernel.core import cuda, nvrtc
from flashkernel.core import device as devices
from flashkernel.core.check import execute, wanted_gradients
from flashkernel.core.cuda import CompileError, Kernel
from flashkernel.core.dispatch import BackendError
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Case, Op
from flashkernel.lab.results import CUDA_RESOURCES, replace_text
from flashkernel.lab.selection import shapes_only
from flashkernel.ops import registry

GPUS = {
    arch: devices.KNOWN[name]
    for arch, name in {75: "t4", 80: "a100", 86: "a10", 89: "l4", 90: "h200", 120: "rtx5090"}.items()
}
_DEFINE = "--define-macro="
CASES = (  # beside the benchmarks
    "everything", "gpt-oss", "dropout", "score", "odd", "mask-causal", "int4-tiles-gate", "inference-mxfp4-tiles",
    "inference-int4-tiles",
)  # fmt: skip
HOPPER = ("linear", "quantized_linear", "moe_experts")  # their hopper backend launches CUDA C++ (sm_90a) beside Gluon


@dataclass(frozen=True)
class Instance:
    """A kernel that dispatch selects, with the largest block and dynamic shared memory it is launched with."""

    kernel: Kernel
    operators: tuple[str, ...]
    threads: int
    dynamic_shared: int


@dataclass(frozen=True)
class Resources:
    """What a kernel takes on `sm_<arch>`: registers of a thread, bytes of shared memory of a block, bytes spilled."""

    source: str  # the .cu file in the package
    kernel: str  # the template instance
    macros: str
    operators: tuple[str, ...]
    arch: int
    threads: int
    registers: int
    shared: int
    spilled: int


def operators() -> list[Op]:
    """The operators with a CUDA C++ backend."""
    return [op for op in registry().values() if op.name in HOPPER or _has_cuda(op)]


def _has_cuda(op: Op) -> bool:
    return any(backend.name == "cuda" for backend in op.backends)


def backends(op: Op, arch: int) -> list[str]:
    """The names of an operator's backends that launch CUDA C++ kernels on `sm_<arch>`."""
    return [*(["cuda"] if _has_cuda(op) else []), *(["hopper"] if arch == 90 and op.name in HOPPER else [])]


def default_cases(op: Op) -> list[Case]:
    """Its benchmarks, its first case and those of `CASES`."""
    return [*op.benches, op.cases[0], *(case for case in op.cases[1:] if case.name in CASES)]


def instances(
    arch: int,
    ops: Sequence[Op] | None = None,
    cases: Callable[[Op], Iterable[Case]] = default_cases,
    by: Callable[[Op, int], Iterable[str]] = backends,
) -> list[Instance]:
    """The kernels that operators launch on a GPU of `sm_<arch>`, forward and backward: benchmarks in float16 and
    bfloat16, other cases in float16.

    Args:
        arch: A key of `GPUS`.
        ops: The operators; by default all that have a CUDA C++ backend.
        cases: The calls of an operator that are looked at.
        by: The names of the backends that serve them, given an operator and the architecture.
    """
    found: dict[tuple[str, tuple[str, ...], str], Instance] = {}
    for op in operators() if ops is None else ops:
        for case in cases(op):
            for dtype in (torch.float16, torch.bfloat16) if case in op.benches else (torch.float16,):
                for launch in [one for name in by(op, arch) for one in _launches(op, case, dtype, GPUS[arch], name)]:
                    kernel = launch.kernel
                    key = (str(kernel.module.source_path), kernel.module.options, kernel.name)
                    known = found.get(key, Instance(kernel, (), 0, 0))
                    names = tuple(dict.fromkeys((*known.operators, op.name)))
                    threads, shared = max(known.threads, launch.threads), max(known.dynamic_shared, launch.shared)
                    found[key] = Instance(known.kernel, names, threads, shared)
    return list(found.values())


def _launches(op: Op, case: Case, dtype: torch.dtype, gpu: devices.Device, backend: str) -> list[cuda.RecordedLaunch]:
    if dtype not in case.dtypes and not set(case.dtypes) & {torch.float16, torch.bfloat16}:
        return []
    inputs = shapes_only(op, case, dtype)
    # Triton's launches are collected as well, and left: with gradients `linear` computes its norm there.
    with devices.pretend(gpu), collect_launches(), cuda.recorded_launches() as launches:
        wanted = wanted_gradients(op, case, inputs) if op.backend(backend).offers(op.backward) else []
        try:
            execute(op.call, inputs, {**case.options, "backend": backend}, wanted)
        except BackendError:  # the backend does not serve this call on this GPU
            return []
    return launches


def by_module(found: Iterable[Instance]) -> list[list[Instance]]:
    """Instances in groups that can be compiled together: of one file, with the same macros."""
    groups: dict[tuple[Path, tuple[str, ...]], list[Instance]] = {}
    for instance in found:
        module = instance.kernel.module
        groups.setdefault((module.source_path, module.options), []).append(instance)
    return list(groups.values())


def compile_nvrtc(group: Sequence[Instance], arch: int) -> list[Resources]:
    """What instances of one module take on `sm_<arch>`, compiled by NVRTC."""
    module = group[0].kernel.module
    compiled = nvrtc.compile_cubin(
        module.source_path.read_text(encoding="utf-8"), [one.kernel.name for one in group], module.target(arch),
        module.options, file_name=module.source_path.name, include=module.include,
    )  # fmt: skip
    reported = ptxas_report(compiled.log)
    return [_resources(one, arch, reported[compiled.names[one.kernel.name]]) for one in group]


def compile_nvcc(group: Sequence[Instance], arch: int) -> dict[str, dict[str, int]]:
    """What ptxas reports of the instances of one module, compiled by nvcc; CompileError where it refuses."""
    module = group[0].kernel.module
    names = [one.kernel.name for one in group]
    macros = [_macro(option) for option in module.options if option.startswith(_DEFINE)]
    options = [option for option in module.options if not option.startswith(_DEFINE)]
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "instances.cu"
        taken = "".join(f"    reinterpret_cast<const void*>(&{name}),\n" for name in names)
        defines = "".join(f"#define {name} {value}\n" for name, value in macros)
        unit.write_text(
            f'{defines}#include "{module.source_path}"\nextern const void* const kernels[] = {{\n{taken}}};\n'
        )
        command = [
            "nvcc", "-cubin", f"-arch={module.target(arch)}", "-std=c++17", "-Xptxas", "-v", *options,
            *(f"-I{path}" for path in module.include), "-o", str(unit.with_suffix(".cubin")), str(unit),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(f"nvcc does not compile {module.source_path.name} for sm_{arch}:\n{done.stderr}")
    return ptxas_report(done.stderr)


def _macro(option: str) -> tuple[str, str]:
    """Name and value of a macro. nvcc passes macros on through a shell, which values with operators do not survive."""
    name, _, value = option.removeprefix(_DEFINE).partition("=")
    return name, value


def has_nvcc() -> bool:
    """True if nvcc is on the PATH."""
    return shutil.which("nvcc") is not None


def ptxas_report(log: str) -> dict[str, dict[str, int]]:
    """Registers, static shared memory and spilled bytes by symbol, from the log of `ptxas -v`.

    Example:
        >>> log = '''ptxas info    : Compiling entry function 'add' for 'sm_80'
        ... ptxas info    : Function properties for add
        ...     0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
        ... ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem, 416 bytes cmem[0]'''
        >>> ptxas_report(log)
        {'add': {'registers': 40, 'shared': 64, 'spilled': 12}}
    """
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        symbol = re.match(r"'([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        if symbol is None or registers is None:
            raise ValueError(f"ptxas says nothing of registers in {part!r}")
        shared = re.search(r"(\d+) bytes smem", part)
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", part))
        found[symbol[1]] = {
            "registers": int(registers[1]), "shared": int(shared[1]) if shared else 0, "spilled": spilled,
        }  # fmt: skip
    return found


def _resources(instance: Instance, arch: int, reported: Mapping[str, int]) -> Resources:
    return Resources(
        **_selected(instance),
        arch=arch,
        registers=reported["registers"],
        shared=reported["shared"] + instance.dynamic_shared,
        spilled=reported["spilled"],
    )


def _selected(instance: Instance) -> dict[str, Any]:
    """The fields of `Resources` that are known before the kernel is compiled."""
    module = instance.kernel.module
    package = Path(__file__).parents[1]
    path = module.source_path
    macros = [option.removeprefix(_DEFINE) for option in module.options]
    return {
        "source": path.relative_to(package).as_posix() if path.is_relative_to(package) else path.name,
        "kernel": instance.kernel.name,
        "macros": " ".join(macro for macro in macros if not macro.endswith("=0")),
        "operators": instance.operators,
        "threads": instance.threads,
    }


def differences(saved: Mapping[str, Any], arch: int) -> list[str]:
    """The kernels of `sm_<arch>` that are selected and not saved ("+"), or saved and not selected ("-")."""
    now = {tuple(_selected(one).values()) for one in instances(arch)}
    then = {
        (one["source"], one["kernel"], one["macros"], tuple(one["operators"]), one["threads"])
        for one in saved["kernels"]
        if one["arch"] == arch
    }
    return sorted([f"+ {one}" for one in now - then] + [f"- {one}" for one in then - now])


def measure(report: Callable[[str], None] = print) -> list[Resources]:
    """All kernels on all `GPUS`, compiled by NVRTC."""
    found = []
    for arch in GPUS:
        groups = by_module(instances(arch))
        report(f"sm_{arch}: {sum(map(len, groups))} kernels")
        for group in groups:
            found += compile_nvrtc(group, arch)
    return found


def save(folder: Path, found: Iterable[Resources]) -> Path:
    """Writes the resources into a results folder, a line each; returns the file."""
    version = ".".join(map(str, nvrtc.version()))
    lines = ",\n".join("  " + json.dumps(asdict(one)) for one in found)
    path = folder / CUDA_RESOURCES
    replace_text(path, f'{{\n "compiler": "NVRTC {version}",\n "kernels": [\n{lines}\n ]\n}}\n')
    return path


def load(folder: Path) -> dict[str, Any] | None:
    """The saved resources of a results folder; None where there are none."""
    path = folder / CUDA_RESOURCES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def markdown(saved: Mapping[str, Any], glob: str | None = None) -> str:
    """A table with a row for each kernel and a column for each architecture; `glob` selects source files."""
    grouped: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for one in saved["kernels"]:
        if glob is None or fnmatchcase(one["source"], glob):
            grouped.setdefault((one["source"], one["kernel"], one["macros"]), {})[one["arch"]] = one
    if not grouped:
        return ""
    archs = sorted({arch for row in grouped.values() for arch in row})
    lines = [
        f"| kernel | {' | '.join(f'sm_{arch}' for arch in archs)} |",
        f"| --- |{' ---: |' * len(archs)}",
    ]
    for (_, kernel, macros), row in grouped.items():
        name = f"`{kernel}`" + (f" `{_shown(macros)}`" if _shown(macros) else "")
        lines.append(f"| {name} | {' | '.join(_cell(row.get(arch)) for arch in archs)} |")
    return "\n".join(lines)


def _shown(macros: str) -> str:
    """The macros that say what a kernel can do, without types and expressions."""
    return " ".join(name.lower() for name in re.findall(r"\bHAS_(\w+)=1", macros))


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    spilled = f" ({found['spilled']} B spilled)" if found["spilled"] else ""
    return f"{found['registers']}, {found['shared'] / 1024:.4g} KiB{spilled}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m flashkernel.lab.cuda_resources RESULTS")
    print(save(Path(sys.argv[1]), measure()))
