"""Every file, name, command and option that a message, docstring or page advises exists."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tdcollect.cli.commands import program

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
SOURCES = [*(ROOT / "tdcollect").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
NAMES = r"(?<![\w./-])tdcollect((?:\.[A-Za-z_]\w*)+)(?![\w/])"
PLACEHOLDERS = ("FILE.py", "path/to/file.py", "file.py")


def texts(file: Path) -> Iterator[str]:
    """The text of a page; for a module, its strings, joined as Python joins them."""
    if file.suffix == ".md":
        yield file.read_text()
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(map(str, parts))


def found(pattern: str) -> list[Any]:
    """The matches of a pattern, each with its file."""
    return sorted(
        {
            (str(file.relative_to(ROOT)), match)
            for file in [*PAGES, *SOURCES]
            for text in texts(file)
            for match in re.findall(pattern, text, re.MULTILINE)
        }
    )


def test_functions_of_files_are_there() -> None:
    named = found(r"([\w./-]+\.py):([A-Za-z_]\w*)")
    wanted = [(said, file, name) for said, (file, name) in named if file not in PLACEHOLDERS]
    assert len(wanted) >= 5
    for said, file, name in wanted:
        place = ROOT / file if (ROOT / file).is_file() else ROOT / "examples" / file
        assert place.is_file(), f"{said} advises {file}"
        body = ast.parse(place.read_text()).body
        there = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in there, f"{said} advises {file}:{name}"


def test_files_are_there() -> None:
    folders = "docs|examples|benchmarks|tests|tdcollect"
    named = found(rf"(?<![\w./-])((?:{folders})/[\w/-]+\.(?:py|md))\b")
    assert len(named) >= 20
    assert [(said, file) for said, file in named if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def known(command: click.Command) -> set[str]:
    """The options of a command."""
    return {o for p in command.params for o in (*p.opts, *p.secondary_opts)}


def test_commands_and_their_options_are_there() -> None:
    named = found(r"(?:^\s*(?:\$ )?|`)tdcollect ([a-z]+)([^`\n]*)")
    assert len(named) >= 15
    for said, (name, rest) in named:
        command = program.commands.get(name)
        if isinstance(command, click.Group) and (words := re.match(r" ([a-z]+)", rest)):
            name, command = f"{name} {words[1]}", command.commands.get(words[1])
        assert isinstance(command, click.Command), f"{said} advises tdcollect {name}"
        options = known(command)
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
            assert option in options, f"{said} advises tdcollect {name} {option}"


def test_options_that_are_named_alone_are_of_some_command() -> None:
    groups = [c for c in program.commands.values() if isinstance(c, click.Group)]
    commands = [
        *program.commands.values(),
        *(c for group in groups for c in group.commands.values()),
    ]
    options = set().union(*map(known, commands))
    for name in ("README", "docs/reproducibility", "docs/safe-to-open", "docs/doctor"):
        named = re.findall(r"`(--[a-z-]+)", (ROOT / f"{name}.md").read_text())
        assert named
        assert set(named) <= options, name


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = found(r"(?:^|`)make ([a-z-]+)(?=`|$|  )")
    assert len(named) >= 4
    assert [(said, target) for said, target in named if target not in targets] == []


def test_extras_are_there() -> None:
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = found(r"pip install '(?:tdcollect|\.)\[(\w+)\]'")
    assert len(named) >= 2
    assert [(said, extra) for said, extra in named if extra not in extras] == []


def test_names_on_pages_need_no_import_but_that_of_the_package() -> None:
    """So a line can be copied from a page."""
    named = {path for said, path in found(NAMES) if said.endswith(".md") and path != ".md"}
    assert ".evaluation.sb3.load_policy" in named
    lines = ["import tdcollect", *(f"tdcollect{path}" for path in sorted(named))]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_of_the_package_are_there() -> None:
    named = found(NAMES)
    assert len(named) >= 20
    for said, path in named:
        value = importlib.import_module("tdcollect")
        where = "tdcollect"
        for part in path.split(".")[1:]:
            where += f".{part}"
            if part in ("py", "egg", "toml"):
                break
            if not hasattr(value, part):
                try:
                    importlib.import_module(where)
                except ModuleNotFoundError as error:
                    raise AssertionError(f"{said} names tdcollect{path}") from error
            value = getattr(value, part)
