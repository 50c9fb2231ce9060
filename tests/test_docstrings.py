"""Every public name is documented: what it does, its arguments, what it returns, and an example that runs on a CPU."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashkernel

PACKAGES = ("flashkernel", "flashkernel.engine", "flashkernel.hf", "flashkernel.kvcache",
            "flashkernel.quantization", "flashkernel.compat.flash_attn")  # fmt: skip
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Note):$")
ENTRY = re.compile(r"^\*{0,2}(\w+)(?: \([^)]*\))?:(?: |$)")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _public(wanted: Callable[[Any], bool] = lambda value: True) -> list[Any]:
    """The public names that are functions or classes, as test parameters."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and wanted(value):
                found.append(pytest.param(value, id=f"{package}.{name}"))
    return found


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def sections(docstring: str) -> dict[str, list[str]]:
    """A Google-style docstring by section; what stands before the first is under ""."""
    found: dict[str, list[str]] = {"": []}
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := SECTION.match(line):
            section = heading[1]
            assert section not in found, f"the section {section} comes twice"
            found[section] = []
        else:
            found[section].append(line)
    return found


def entries(lines: list[str]) -> set[str]:
    """The names that a section of arguments has an entry for."""
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return {entry[1] for line in lines if line.strip() and (entry := ENTRY.match(line[least:]))}


def _parameters(value: Any) -> dict[str, inspect.Parameter]:
    try:
        found = dict(inspect.signature(value).parameters)
    except ValueError:  # a class made in C
        return {}
    found.pop("self", None)
    return found


def test_the_parser_reads_googles_form() -> None:
    text = """First line.

    More.

    Args:
        q: The queries,
            over two lines: with a colon.
        k (Tensor): The keys.
        **options: Others.

    Returns:
        It.
    """
    found = sections(text)
    assert list(found) == ["", "Args", "Returns"]
    assert entries(found["Args"]) == {"q", "k", "options"}


@pytest.mark.parametrize("value", _public())
def test_it_starts_with_a_sentence(value: Any) -> None:
    text = inspect.cleandoc(value.__doc__ or "")
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith("."), f"the docstring begins with {first!r}, which is no sentence"
    assert not (isinstance(value, type) and text.startswith(f"{value.__name__}(")), "the dataclass has no docstring"


@pytest.mark.parametrize("value", _public(lambda value: not _is_error(value)))
def test_every_argument_is_described(value: Any) -> None:
    found = sections(value.__doc__ or "")
    described = entries(found.get("Args", [])) | entries(found.get("Attributes", []))
    names = set(_parameters(value))
    assert names <= described, f"no entry for {sorted(names - described)}"
    assert entries(found.get("Args", [])) <= names, f"there is no argument {sorted(described - names)}"


@pytest.mark.parametrize("value", _public(lambda value: not isinstance(value, type)))
def test_the_result_is_described(value: Any) -> None:
    annotation = inspect.signature(value).return_annotation
    if annotation in (None, "None", "Iterator[None]"):  # the last: a context manager without a value
        return
    found = sections(value.__doc__ or "")
    result = "".join(found.get("Returns", []) + found.get("Yields", []))
    assert result.strip(), "no Returns section"


@pytest.mark.parametrize("value", _public(lambda value: isinstance(value, type) and not _is_error(value)))
def test_every_argument_of_a_method_is_described(value: type) -> None:
    for name, member in vars(value).items():
        if name.startswith("_") or not callable(getattr(value, name)):
            continue
        method = getattr(member, "__func__", member)
        text = inspect.getdoc(method) or ""
        assert text, f"{value.__name__}.{name} has no docstring"
        given = [one for one in _parameters(method) if one != "cls" and not one.startswith("_")]
        described = entries(sections(text).get("Args", []))
        missing = [one for one in given if one not in described]
        assert not missing, f"{value.__name__}.{name} has no entry for {missing}"
        assert described <= set(given), f"{value.__name__}.{name} has no argument {sorted(described - set(given))}"


def _run_examples(text: str, name: str) -> None:
    """Runs the examples of a docstring, after `import torch` and `import flashkernel as fk`."""
    torch.manual_seed(0)
    names = {"torch": torch, "fk": flashkernel}
    example = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), names, name, None, 0)
    told: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(example, out=told.append)
    assert not failed, "".join(told)


@pytest.mark.parametrize("value", _public())
def test_the_example_runs(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception needs no example: those of the functions that raise it serve."""
    text = value.__doc__ or ""
    has_example = ">>> " in "\n".join(sections(text).get("Example", []))
    assert has_example or _is_error(value), "no Example section with a >>> prompt"
    monkeypatch.chdir(tmp_path)
    _run_examples(text, value.__name__)
    members = vars(value).items() if isinstance(value, type) else ()
    for name, member in members:
        if not name.startswith("_") and ">>> " in (getattr(member, "__doc__", None) or ""):
            _run_examples(member.__doc__, f"{value.__name__}.{name}")


def test_the_package_lists_its_names() -> None:
    text = flashkernel.__doc__ or ""
    missing = [name for name in flashkernel.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"flashkernel's docstring does not list {missing}"
    _run_examples(text, "flashkernel")
