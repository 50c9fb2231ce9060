"""The documentation says what the code does: links, calls, environment variables, pictures, and the worked example."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashkernel.engine
import flashkernel.ops
from flashkernel.core.check import verify
from flashkernel.core.op import Op, grid_of_cases
from flashkernel.ops import registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import assemble  # noqa: E402
import pictures  # noqa: E402

PAGES = [source for source in assemble.pages() if source.endswith(".md")]
PUBLIC = ("flashkernel", "flashkernel.engine", "flashkernel.engine.server", "flashkernel.hf", "flashkernel.kvcache",
          "flashkernel.quantization", "flashkernel.compat.flash_attn")  # fmt: skip
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
NAMES = ("fk", "flashkernel", "LLM", "LLMEngine", "SamplingParams", "RequestOutput", "CompletionOutput")
SPAN = re.compile(r"`([^`\n]+)`")
FILE_BLOCK = re.compile(r"^```(?:python|cuda)\n(?:#|//) (flashkernel/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _text(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    broken = [path for _, path, _ in assemble.links(_text(page), page) if not (ROOT / path).exists()]
    assert not broken, f"{page} links to {broken}"


def test_links_are_translated_for_the_site(tmp_path: Path) -> None:
    known = {"README.md": "index.md", "docs/masks.md": "masks.md", "flashkernel/ops/norm/README.md": "packages/norm.md"}
    for name in ("README.md", "docs/masks.md", "flashkernel/ops/norm/README.md", "setup.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = "[a](docs/masks.md#1) [`b`](setup.cfg) `[c](d.md)` [e](https://f.org) ![g](docs/masks.md) [h](#i)"
    found = assemble.translated(text, "README.md", known, tmp_path)
    assert found == "[a](masks.md#1) `b` `[c](d.md)` [e](https://f.org) ![g](masks.md) [h](#i)"
    back = assemble.translated("[r](../../../README.md)", "flashkernel/ops/norm/README.md", known, tmp_path)
    assert back == "[r](../index.md)"
    with pytest.raises(ValueError, match=r"README.md links to nowhere.md, which does not exist"):
        assemble.translated("[n](nowhere.md)", "README.md", known, tmp_path)


def test_the_readme_links_every_guide() -> None:
    linked = {path for _, path, _ in assemble.links(_text("README.md"), "README.md")}
    guides = {page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/reference/")}
    assert guides <= linked, f"README.md does not link {sorted(guides - linked)}"


def test_the_reference_has_every_public_name_once() -> None:
    listed = [name for page in (DOCS / "reference").glob("*.md") for name in DIRECTIVE.findall(_text(page))]
    assert len(listed) == len(set(listed)), "a name stands on two pages"
    public = {f"{package}.{name}" for package in PUBLIC for name in importlib.import_module(package).__all__}
    assert set(listed) == public
    index = _text(DOCS / "reference/index.md")
    missing = [name for name in public if f"#{name})" not in index]
    assert not missing, f"docs/reference/index.md does not link {missing}"


def test_an_operator_is_two_clicks_from_the_readme() -> None:
    """README -> the operator's reference page -> its api.py; on the site the first click is enough."""
    links = {(path, anchor) for _, path, anchor in assemble.links(_text("README.md"), "README.md")}
    names = {*registry(), "attention_varlen", "argmax"}
    for name in names:
        pages = [path for path, anchor in links if anchor == f"flashkernel.{name}"]
        assert pages, f"README.md does not link {name}"
        assert f"::: flashkernel.{name}\n" in _text(pages[0])
        sources = [path for _, path, _ in assemble.links(_text(pages[0]), pages[0]) if path.endswith("api.py")]
        assert sources, f"{pages[0]} links no api.py"


def test_every_environment_variable_is_documented() -> None:
    source = (ROOT / "flashkernel/core/env.py").read_text()
    read = set(re.findall(r"os\.environ(?:\.get\(|\[)\"(\w+)\"", source))
    rows = re.findall(r"^\| `(\w+)` \|", _text(DOCS / "environment.md"), re.MULTILINE)
    assert set(rows) == read
    assert set(re.findall(r"^\| ([A-Z_]+) \|", source, re.MULTILINE)) == read, "the table in core/env.py is incomplete"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_show_the_masks(name: str) -> None:
    picture = pictures.PICTURES[name]
    drawn = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert f"<dc:description>{pictures.digest(picture)}</dc:description>" in drawn, "run python docs/pictures.py"
    assert f"](pictures/{name}.svg)" in _text(DOCS / "masks.md")


def test_pictures_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = pictures.draw("causal-window", tmp_path)
    assert pictures.digest(pictures.PICTURES["causal-window"]) in path.read_text()


def _calls() -> Iterator[Any]:
    """Every call of this library that stands as code in a sentence or a table."""
    for page in PAGES:
        if page == "CHANGELOG.md":
            continue
        for number, line in enumerate(_text(page).splitlines(), 1):
            ours = line.split("|")[2:] if page.startswith("docs/migrating") and line.startswith("|") else [line]
            for code in SPAN.findall("|".join(ours)):
                if _named(code) is not None:
                    yield pytest.param(code, id=f"{page}:{number}:{code}")


def _named(code: str) -> list[ast.Call | ast.Attribute] | None:
    """The calls and attributes in a piece of code, where it begins with a name of this library."""
    if not re.match(rf"({'|'.join(NAMES)})[.(]", code):
        return None
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        return None  # a command, or a path
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Attribute))]


def _value(node: ast.expr) -> Any:
    """What a dotted name stands for; LookupError where it is not one of ours."""
    if isinstance(node, ast.Name):
        if node.id in ("fk", "flashkernel"):
            return flashkernel
        if node.id in NAMES:
            return getattr(flashkernel.engine, node.id)
        raise LookupError(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value)
        if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
            return importlib.import_module(f"{owner.__name__}.{node.attr}")
        if is_dataclass(owner) and node.attr in {field.name for field in fields(owner)}:
            return None
        return getattr(owner, node.attr)
    raise LookupError


def _parameters(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a call; options that go on to another function are that function's."""
    signature, further = inspect.signature(function), None
    if function is flashkernel.engine.LLM:
        further = flashkernel.engine.EngineArgs
    elif function is flashkernel.attention_varlen:
        further = flashkernel.attention
    kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    if further is not None:
        taken = {one.name for one in kept}
        kept += [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(further).parameters.values()
            if one.name not in taken
        ]
    return signature.replace(parameters=kept)


@pytest.mark.parametrize("code", list(_calls()))
def test_calls_in_the_text_fit_the_signatures(code: str) -> None:
    for node in _named(code) or []:
        try:
            value = _value(node.func if isinstance(node, ast.Call) else node)
        except LookupError:
            continue
        if not isinstance(node, ast.Call):
            continue
        starred = any(isinstance(one, ast.Starred) for one in node.args)
        arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        signature = _parameters(value)
        if inspect.isfunction(value) and "self" in signature.parameters:  # a method of a class
            arguments = [None, *arguments]  # type: ignore[list-item]
        bind = signature.bind_partial if starred else signature.bind
        bind(*arguments, **named)


def _commands() -> list[Any]:
    """Every `flashkernel ...` command in a block of shell lines or in a sentence."""
    found = []
    for page in PAGES:
        if page == "CHANGELOG.md":
            continue
        for number, line in enumerate(_text(page).splitlines(), 1):
            for command in re.findall(r"^flashkernel (\w+[^#]*)|`flashkernel (\w+[^`]*)`", line):
                found.append(pytest.param("".join(command), id=f"{page}:{number}:{''.join(command).strip()}"))
    return found


@pytest.mark.parametrize("command", _commands())
def test_commands_in_the_text_exist(command: str) -> None:
    import typer

    from flashkernel.cli import app

    commands: Any = typer.main.get_command(app)
    name, *words = shlex.split(command)
    if (name, *words[:1]) == ("bench", "serve"):
        name = "bench-serve"
    assert name in commands.commands, f"there is no flashkernel {name}"
    options = {option for one in commands.commands[name].params for option in one.opts}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in options]
    assert not unknown, f"flashkernel {name} has no {unknown}"


@pytest.fixture(name="softsign", scope="module")
def softsign_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Op]:
    """The operator of docs/extending, built from the files printed there."""
    folder = tmp_path_factory.mktemp("ops")
    for page in ("operator.md", "backend.md"):
        for path, text in FILE_BLOCK.findall(_text(DOCS / "extending" / page)):
            target = folder / Path(path).relative_to("flashkernel/ops")
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
    flashkernel.ops.__path__.append(str(folder))
    try:
        yield importlib.import_module("flashkernel.ops.softsign.spec").SOFTSIGN
    finally:
        flashkernel.ops.__path__.remove(str(folder))
        Op.declared.pop("softsign", None)
        for name in [name for name in sys.modules if name.startswith("flashkernel.ops.softsign")]:
            del sys.modules[name]
        vars(flashkernel.ops).pop("softsign", None)


def test_the_worked_example_is_right(softsign: Op) -> None:
    """Every case, dtype and backend that the page declares, forward and backward, as `flashkernel check` runs them."""
    on_gpu = torch.cuda.is_available()
    for case, dtype in grid_of_cases(softsign):
        for backend in ("torch", "triton"):
            if backend == "triton" and dtype == torch.bfloat16 and not on_gpu:
                continue  # Triton's interpreter computes bfloat16 wrongly
            reports = verify(softsign, case, dtype, backend, "cuda" if on_gpu else "cpu")
            assert not [report.message for report in reports if not report.ok]
    protocol = importlib.import_module("flashkernel.ops.softsign.protocol").PROTOCOLS["softsign"]
    for kernels in ("triton", "cuda"):
        module = importlib.import_module(f"flashkernel.ops.softsign.{kernels}")
        for name in ("forward", "backward"):
            declared = list(inspect.signature(getattr(protocol, name)).parameters)[1:]
            assert list(inspect.signature(getattr(module, name)).parameters) == declared
    with pytest.raises(ValueError, match="softsign: x has dtype"):
        softsign.call(torch.zeros(2, dtype=torch.int32))
    for case in softsign.benches:
        assert all(cost.bytes > 0 for cost in softsign.cost(case, torch.bfloat16).values())


def test_the_worked_example_compiles_in_cuda(softsign: Op) -> None:
    from flashkernel.core.cuda import can_compile

    if reason := can_compile():
        pytest.skip(reason)
    kernels = importlib.import_module("flashkernel.ops.softsign.cuda")
    for kind in kernels.TYPES.values():
        for name in (f"softsign_forward<{kind}>", f"softsign_backward<{kind}>"):
            assert kernels.MODULE.compile(name, 80).spilled_bytes == 0
    backend = importlib.import_module("flashkernel.ops.softsign.cuda_backend").CUDA
    assert backend.name == "cuda"
    assert backend.run is kernels
