"""Kernels compiled for GPUs that need not be here, each once in a process: resources and SASS."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from loop_bounds import inlined, lost_values

from flashkernel.core import versions
from flashkernel.core.launch import Launch, tuple_like

_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion", "ptx_options")


@dataclass(frozen=True)
class MachineCode:
    """The compiled code of a launch and the resources it takes."""

    registers: int  # per thread
    stack: int  # bytes per thread; above zero: spilled registers or an array indexed at run time
    shared: int  # bytes per block
    cubin: bytes
    ttir: str = ""
    lost: tuple[str, ...] = ()  # values that Triton loses (loop_bounds.py)

    @cached_property
    def sass(self) -> str:
        """The disassembly."""
        return disassemble(self.cubin)


_compiled: dict[tuple[Any, ...], MachineCode] = {}


def compiled(launch: Launch, arch: int, ones: bool = False) -> MachineCode:
    """The machine code of a launch. Launches of a kernel with equal constants and argument types share it, whether or
    not their integers are divisible by 16, or 1, which Triton compiles in; with `ones`, those are told apart."""
    shared = (launch.kernel, arch, _argument_types(launch), tuple(sorted(launch.constants.items())))
    own = (*shared, integers_of_one(launch))
    if (own if ones else shared) not in _compiled:
        _compiled[own] = compile_for(launch, arch)
        _compiled.setdefault(shared, _compiled[own])
    return _compiled[own if ones else shared]


def integers_of_one(launch: Launch) -> tuple[str, ...]:
    """The names of the arguments that are an integer equal to 1, and the places of those in tuples."""
    values: list[tuple[str, Any]] = []
    for name, value in zip(launch.kernel.arg_names, launch.args):
        elements = enumerate(value) if isinstance(value, tuple) else [("", value)]
        values += [(f"{name}{index}", element) for index, element in elements]
    return tuple(name for name, value in values if type(value) is int and value == 1)


def _argument_types(launch: Launch) -> tuple[Any, ...]:
    """The types of the arguments. None is compiled in, so it stands for itself."""
    from triton.runtime.jit import mangle_type

    def kind(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(element) for element in value)
        return None if value is None else mangle_type(2 if type(value) is int and value == 1 else value)

    return tuple(kind(value) for value in launch.args)


def compile_for(launch: Launch, arch: int) -> MachineCode:
    """Compile a launch for `sm_<arch>`, with the specializations that its real arguments would have."""
    code = Specialization.of(launch).compile(launch, arch)
    cubin = code.asm["cubin"]
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", cubin))
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage of {launch.name}")
    ttir = "" if launch.kernel.is_gluon() else code.asm["ttir"]
    lost: list[str] = []
    if (versions.triton_version() or (0, 0)) < (3, 7):  # later versions print and lose other things
        lost = lost_values(ttir or inlined(code.asm["source"], arch))
    return MachineCode(int(found[1]), int(found[2]), code.metadata.shared, cubin, ttir, tuple(lost))


@dataclass(frozen=True)
class Specialization:
    """What a launch is compiled for: types of its arguments, those that are compiled in, those divisible by 16."""

    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> Specialization:
        options = {name: value for name, value in launch.constants.items() if name in _OPTIONS}
        constants = {name: value for name, value in launch.constants.items() if name not in _OPTIONS}
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        tuple_constants: dict[tuple[int, ...], Any] = {}  # elements of tuples that are compiled in
        values = {**dict(zip(launch.kernel.arg_names, launch.args)), **constants}
        for position, name in enumerate(launch.kernel.arg_names):
            value = values[name]
            if isinstance(value, tuple) and name not in constants:
                kinds = [_argument(element, constexpr=False) for element in value]
                signature[name] = tuple_like(value, [kind for kind, _ in kinds])
                divisible_16 = [["tt.divisibility", 16]]
                attributes |= {(position, index): divisible_16 for index, kind in enumerate(kinds) if kind[1]}
                tuple_constants |= {
                    (position, index): value[index] for index, kind in enumerate(kinds) if kind[0] == "constexpr"
                }
                continue
            kind, divisible = _argument(value, constexpr=name in constants)
            signature[name] = kind
            if kind == "constexpr":
                constants[name] = value
            elif divisible:
                attributes[(position,)] = [["tt.divisibility", 16]]
        constexprs: dict[tuple[int, ...], Any] = {
            (launch.kernel.arg_names.index(name),): value for name, value in constants.items()
        }
        return cls(signature, constexprs | tuple_constants, attributes, options)

    def compile(self, launch: Launch, arch: int) -> Any:
        """Triton's compiled kernel, which is not loaded."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
        source = language(launch.kernel, self.signature, constexprs=self.constexprs, attrs=self.attributes)
        options = versions.compile_options(arch) | self.options
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _argument(value: Any, constexpr: bool) -> tuple[str, bool]:
    """Triton's type name of an argument, and whether Triton takes it as divisible by 16."""
    from triton.runtime.jit import mangle_type

    if constexpr or value is None or (type(value) is int and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        # A tensor that is not on a GPU stands for one in memory of its own, which torch aligns far beyond 16 bytes.
        return mangle_type(value), value.device.type != "cuda" or value.data_ptr() % 16 == 0
    return mangle_type(value), type(value) is int and value % 16 == 0


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    """The output of cuobjdump, which comes in Triton's wheel, for a cubin."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
