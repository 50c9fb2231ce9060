"""Copies docs/, the READMEs and the changelog into one folder of pages, from which the site is built.

Usage: python docs/assemble.py build/docs

Links in the repository's Markdown files are paths in the repository, so that they work wherever a file is read. On the
site a link to another page is translated to that page, and a link to a source file becomes its text. A link to a file
that does not exist ends the build.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<bang>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)  # fenced and inline
SUFFIXES = (".md", ".svg")


def pages(root: Path = ROOT) -> dict[str, str]:
    """Every page: path of its source in the repository -> path on the site."""
    found = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    for path in sorted((root / "flashkernel").rglob("README.md")):
        folder = path.parent.relative_to(root / "flashkernel").as_posix()
        found[path.relative_to(root).as_posix()] = f"packages/{folder}.md"
    for path in sorted((root / "docs").rglob("*")):
        if path.suffix in SUFFIXES:
            found[path.relative_to(root).as_posix()] = path.relative_to(root / "docs").as_posix()
    return found


def links(markdown: str, source: str) -> list[tuple[re.Match[str], str, str]]:
    """The links of a page to files of the repository: (match, path in the repository, anchor)."""
    code = [found.span() for found in CODE.finditer(markdown)]
    made = []
    for found in LINK.finditer(markdown):
        target, _, anchor = found["target"].partition("#")
        inside = any(first <= found.start() < last for first, last in code)
        if target and "://" not in target and not inside:
            made.append((found, posixpath.normpath(posixpath.join(posixpath.dirname(source), target)), anchor))
    return made


def translated(markdown: str, source: str, known: dict[str, str], root: Path = ROOT) -> str:
    """The text of a page with its links made those of the site."""
    parts, last, page = [], 0, known[source]
    for found, path, anchor in links(markdown, source):
        if not (root / path).exists():
            raise ValueError(f"{source} links to {path}, which does not exist")
        text = found["text"]
        if path in known:
            relative = posixpath.relpath(known[path], posixpath.dirname(page) or ".")
            text = f"{found['bang']}[{text}]({relative}{'#' + anchor if anchor else ''})"
        parts += [markdown[last : found.start()], text]
        last = found.end()
    return "".join([*parts, markdown[last:]])


def assemble(folder: Path, root: Path = ROOT) -> None:
    """Writes every page into `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    known = pages(root)
    for source, page in known.items():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            text = (root / source).read_text(encoding="utf-8")
            target.write_text(translated(text, source, known, root), encoding="utf-8")
        else:
            shutil.copyfile(root / source, target)


if __name__ == "__main__":
    try:
        assemble(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"docs: {error}")
