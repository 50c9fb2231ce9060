"""Rules of the code base: which package may import which, what a declaration and an operator package must have."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import flashkernel
from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.core import dispatch
from flashkernel.core.op import LAYOUTS, Call, Case, Op, UnknownFactError, resolve
from flashkernel.ops import registry

ROOT = Path(flashkernel.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"), key=lambda path: (path.parent, path.name))
PACKAGES = sorted(path.parent for path in (ROOT / "ops").glob("*/__init__.py"))
OPS = list(registry().values())
by_name = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
FOLDERS = {name: list(paths) for name, paths in groupby(SOURCES, lambda path: str(path.relative_to(ROOT).parent))}
by_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def by_folder(check: Callable[[Path], None]) -> Callable[[str], None]:
    """A rule for a source file as a test for each folder; a failure names the file."""

    def test(folder: str) -> None:
        for path in FOLDERS[folder]:
            try:
                check(path)
            except AssertionError as error:
                raise AssertionError(f"{path.relative_to(ROOT)}: {error}") from error

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return pytest.mark.parametrize("folder", FOLDERS)(test)


# package -> packages of the project it may import
MAY_IMPORT = {
    "core": {"core"},
    "blocks": {"core", "blocks"},
    "ops": {"core", "blocks", "ops"},
    "kvcache": {"core", "blocks", "ops", "kvcache"},
    "lab": {"core", "ops", "lab", "engine", "hf", "quantization"},
    "compat": {"core", "blocks", "ops", "compat"},
    "hf": {"core", "blocks", "ops", "compat", "hf", "engine"},  # checkpoints, by the engine's readers
    "engine": {"core", "blocks", "kvcache", "engine"},  # operators by the package's own public names
    "quantization": {"core", "blocks", "kvcache", "engine", "quantization"},
}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flashkernel"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("flashkernel"))


@by_folder
def test_imports_follow_the_house(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    for name in _imports(path):
        target = name.split(".")
        if len(parts) > 1 and parts[0] in MAY_IMPORT and len(target) > 2:
            assert target[1] in MAY_IMPORT[parts[0]], f"{parts[0]} must not import {name}"
        within = parts[0] == "ops" and len(parts) > 2
        if within and target[1:2] == ["ops"] and target[2] != parts[1]:
            assert len(target) == 4, (
                f"package {parts[1]} must not import {name}: packages see each other's public names only"
            )
        outside = parts[0] in ("kvcache", "lab", "compat", "hf") or (within and target[2:3] != [parts[1]])
        if outside and target[1:2] == ["ops"] and len(target) > 3:
            public = importlib.import_module(".".join(target[:3]))
            assert target[3] in public.__all__, f"{parts[0]} sees packages through their public names only, not {name}"


@by_folder
def test_core_names_no_operator_and_env_is_read_in_one_file(path: Path) -> None:
    text = path.read_text()
    if path.relative_to(ROOT).parts[0] == "core":
        named = [op.name for op in OPS if re.search(rf"[\"']{op.name}[\"']", text)]
        assert not named, f"core names the operators {named}"
    if path.name != "env.py":
        assert "os.environ" not in text, "environment variables are read in core/env.py only"
        assert "os.getenv" not in text, "environment variables are read in core/env.py only"


FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


@by_folder
def test_tensors_are_made_on_a_device_that_is_named(path: Path) -> None:
    """torch.set_default_device is the user's: kernels and C++ read the addresses of what is made here."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
            named = {keyword.arg for keyword in node.keywords}
            assert named & {"device", None}, f"{path.name}:{node.lineno} has no device: {ast.unparse(node)}"


@by_package
def test_a_package_is_complete(package: Path) -> None:
    for name in ("spec.py", "reference.py", "api.py", "library.py", "protocol.py", "README.md", "configs.py"):
        assert (package / name).exists(), f"package {package.name} has no {name}"
    names = {op.name for op in OPS if op.function.startswith(f"flashkernel.ops.{package.name}.")}
    assert names, f"package {package.name} declares no operator"
    for name in names:
        assert callable(getattr(flashkernel, name)), f"flashkernel.{name} is not exported"


@by_folder
def test_operators_are_registered_in_library_files(path: Path) -> None:
    """`KernelOp(...)` stands in a package's library.py alone, and api.py reaches kernels through it alone."""
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if path.relative_to(ROOT).parts[0] != "core":
        assert ("KernelOp" in called) == (path.name == "library.py"), "torch operators are registered in library.py"
    if path.name == "api.py" and path.relative_to(ROOT).parts[0] == "ops":
        assert "resolve" not in called, "api.py calls the operators of library.py, not kernels"


def _protocol(op: Op) -> type:
    package = op.function.partition(":")[0].rpartition(".")[0]
    return importlib.import_module(f"{package}.protocol").PROTOCOLS[op.name]


@by_name
def test_kernel_modules_satisfy_the_protocol(op: Op) -> None:
    """Kernels are called by position: a function takes as many arguments as its protocol says."""
    protocol = _protocol(op)
    wanted = {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    assert op.backward is None or not op.differentiable or op.backward in wanted
    for backend in op.backends:
        if backend.composite:
            continue
        for name, declared in wanted.items():
            function = getattr(backend.run, name, None)
            if not callable(function):
                assert name.endswith("backward"), f"{backend.target} has no function {name}: see {protocol.__name__}"
                continue
            (_, *parameters), given = inspect.signature(declared).parameters, inspect.signature(function).parameters
            assert len(given) == len(parameters), (
                f"{backend.target}.{name} takes {list(given)}, but {protocol.__name__} says {parameters}"
            )


def test_a_backend_may_be_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.delattr("flashkernel.ops.norm.triton.backward")
    x = torch.randn(3, 16)
    expected = flashkernel.rms_norm(x, backend="reference")
    torch.testing.assert_close(flashkernel.rms_norm(x, backend="triton"), expected)
    x.requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(flashkernel.rms_norm(x, backend="triton"), expected)
    with pytest.raises(flashkernel.BackendError, match="'triton' cannot serve this call: it has no backward pass"):
        flashkernel.rms_norm(x, backend="triton")
    verdicts = {one.backend: one.reason for one in flashkernel.explain(flashkernel.rms_norm, x).verdicts}
    assert "no backward pass" in str(verdicts["triton"])
    assert verdicts["torch"] is None
    with pytest.raises(RuntimeError, match="no backward pass"):  # in torch's own exception
        torch.compile(lambda x: flashkernel.rms_norm(x, backend="triton"), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("question", ["supports", "deprioritized"])
def test_a_fact_that_no_call_has_is_an_error_that_names_it(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled name in a backend's `supports` was a KeyError, with neither operator nor backend."""

    def asks(call: Call) -> str | None:
        return None if call.facts["widht"] else "too wide"

    op = registry()["rms_norm"]
    monkeypatch.setitem(Op.declared, "rms_norm", op)  # before `replace`, which declares what it makes
    answers: dict[str, Any] = {"supports": lambda call: None, question: asks}
    first = replace(op.backends[0], auto_devices=("cpu", "cuda"), **answers)
    monkeypatch.setattr("flashkernel.ops.norm.spec.RMS_NORM", replace(op, backends=(first, *op.backends[1:])))
    wrong = r"rms_norm: backend 'triton' asks for the fact 'widht', .* gives to choose\(\): .*width"
    for call in (flashkernel.rms_norm, lambda x: flashkernel.explain(flashkernel.rms_norm, x)):
        with pytest.raises(UnknownFactError, match=wrong):
            call(torch.randn(2, 8))


@by_name
def test_a_declaration_is_whole(op: Op) -> None:
    assert op.summary
    assert op.cases, "no test cases"
    assert op.benches, "no benchmark cases"
    assert len({case.name for case in op.cases}) == len(op.cases), "two test cases share a name"
    assert len({case.name for case in op.benches}) == len(op.benches), "two benchmark cases share a name"
    names = [backend.name for backend in op.backends]
    assert len(set(names)) == len(names)
    assert {"torch", "reference"} <= set(names)
    for backend in op.backends:
        assert backend.name in ("reference", "torch", "triton", "hopper", "cuda", "cpp")
        if backend.name in ("reference", "torch"):
            assert backend.composite
            assert callable(backend.run)
    assert resolve(op.reference).__doc__ or op.plain.__doc__


@by_name
def test_cases_and_costs_fit_the_inputs(op: Op) -> None:
    for case in (*op.cases, *op.benches):
        assert case.layout in LAYOUTS
        assert set(case.present) <= {name for name, spec in op.inputs.items() if spec.optional}
        assert all(size >= 0 for shape in _shapes(op, case) for size in shape)
    for case in op.benches:
        for direction, cost in op.cost(case, case.dtypes[0]).items():
            assert direction in ("fwd", "bwd", "fwd+bwd")
            assert cost.flops > 0
            assert cost.bytes > 0


@by_name
def test_cases_cover_what_every_operator_owes(op: Op) -> None:
    shapes = [shape for case in op.cases for shape in _shapes(op, case)]
    assert any(0 in shape for shape in shapes), "no empty input"
    assert {case.layout for case in op.cases} >= {"padded", "transposed"}, "no strided inputs"
    dtypes = {dtype for case in op.cases for dtype in case.dtypes}
    assert dtypes >= {torch.float32, torch.float16, torch.bfloat16}
    assert any(size % 2 for shape in shapes for size in shape if size > 1), "no odd size"


def _shapes(op: Op, case: Case) -> list[tuple[int, ...]]:
    given = [spec for name, spec in op.inputs.items() if not spec.optional or name in case.present]
    return [spec.shape(case.axes) for spec in given]


def test_a_backward_pass_reads_its_saved_tensors_once() -> None:
    """Activation checkpointing computes them when they are read, and refuses a second time."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                parts = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
                read = [one for one in parts if one.attr == "saved_tensors" and isinstance(one.ctx, ast.Load)]
                assert len(read) <= 1, f"{path.name}: {node.name} reads ctx.saved_tensors {len(read)} times"


def test_public_names_have_docstrings() -> None:
    for name in flashkernel.__all__:
        value = getattr(flashkernel, name)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"flashkernel.{name} has no docstring"


def test_no_function_shadows_a_module() -> None:
    """A package that imports a name must have no module of that name: `package.name` would be either."""
    for path in ROOT.rglob("__init__.py"):
        modules = {item.stem for item in path.parent.iterdir() if item.suffix == ".py"}
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):  # those under TYPE_CHECKING are imported when they are used
            if isinstance(node, (ast.ImportFrom, ast.Import)):
                names |= {alias.asname or alias.name for alias in node.names}
        assert not names & modules, f"{path.parent.name}: {sorted(names & modules)}"


def test_the_folder_of_shared_cuda_headers_stands_in_one_file() -> None:
    names = [str(path.relative_to(ROOT)) for path in SOURCES if '"blocks" / "cuda"' in path.read_text()]
    assert not names, "take blocks/cuda_headers.py"
    assert all((folder / "ptx.cuh").is_file() for folder in CUDA_HEADERS)


def test_constants_of_exponentials_stand_in_one_place_of_each_language() -> None:
    """The C++ of CPUs has a header of its own, with fewer digits."""
    text = re.compile(r"1\.44269504088|0\.69314718055")
    found = [path for kind in ("*.py", "*.cu", "*.cuh") for path in ROOT.rglob(kind) if text.search(path.read_text())]
    assert [path.name for path in found] == ["constants.cuh"]


RESERVED = {"params", "options", "specialization"}  # locals of the function that Triton generates to launch a kernel


def test_launched_kernels_name_no_parameter_as_triton_does() -> None:
    """Such a kernel compiles, and cannot be launched."""
    found, wrong = 0, []
    for path in SOURCES:
        names = set(re.findall(r"\blaunch\(\s*(\w+),", path.read_text()))
        module = (
            importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts)) if names else None
        )
        for kernel in (getattr(module, name, None) for name in names):
            if kernel is not None and hasattr(kernel, "arg_names"):
                found += 1
                wrong += [f"{path.name}: {kernel.__name__} has {name}" for name in RESERVED & set(kernel.arg_names)]
    assert found > 20
    assert not wrong
