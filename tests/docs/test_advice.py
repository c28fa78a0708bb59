"""Every file, name, command and option that a message, docstring or page advises exists."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import click
import pytest

from tdcollect import registry
from tdcollect.cli.program import program

from ..forkserver import run_anew

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
SOURCES = [*(ROOT / "tdcollect").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
NAMES = r"(?<![\w./-])tdcollect((?:\.[A-Za-z_]\w*)+)(?![\w/])"
PLACEHOLDERS = ("FILE.py", "path/to/file.py", "file.py", "agents.py", "envs.py")


@functools.cache
def texts(file: Path) -> list[str]:
    """The text of a page; for a module, its strings, joined as Python joins them."""
    if file.suffix == ".md":
        return [file.read_text()]
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            found.append("".join(map(str, parts)))
    return found


def named(pattern: str, least: int) -> list[Any]:
    """The matches of a pattern, each with its file; there are at least so many."""
    found = {
        (str(file.relative_to(ROOT)), match)
        for file in [*PAGES, *SOURCES]
        for text in texts(file)
        for match in re.findall(pattern, text, re.MULTILINE)
    }
    assert len(found) >= least
    return sorted(found)


def test_functions_of_files_are_there() -> None:
    for said, (file, name) in named(r"([\w./-]+\.py):([A-Za-z_]\w*)", 5):
        if file in PLACEHOLDERS:
            continue
        place = ROOT / file if (ROOT / file).is_file() else ROOT / "examples" / file
        assert place.is_file(), f"{said} advises {file}"
        body = ast.parse(place.read_text()).body
        there = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in there, f"{said} advises {file}:{name}"


def listed(file: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE))


def test_files_targets_and_extras_are_there() -> None:
    folders = "docs|examples|benchmarks|tests|tdcollect"
    files = named(rf"(?<![\w./-])((?:{folders})/[\w/-]+\.(?:py|md))\b", 20)
    assert [(said, file) for said, file in files if not (ROOT / file).exists()] == []
    targets = listed("Makefile", r"^([a-z-]+):")
    made = named(r"(?:^|`)make ([a-z-]+)(?=`|$|  )", 4)
    assert [(said, target) for said, target in made if target not in targets] == []
    extras = listed("pyproject.toml", r"^(\w+) = \[")
    installed = named(r"pip install '(?:tdcollect|\.)\[(\w+)\]'", 2)
    assert [(said, extra) for said, extra in installed if extra not in extras] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def known(command: click.Command) -> set[str]:
    """The options of a command, and of those that it groups."""
    parts = command.commands.values() if isinstance(command, click.Group) else []
    own = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return own.union(*map(known, parts))


def test_commands_and_their_options_are_there() -> None:
    registry.load(registry.COMMANDS)
    for said, (name, rest) in named(r"(?:^\s*(?:\$ )?|`)tdcollect ([a-z]+)([^`\n]*)", 15):
        command = program.commands.get(name)
        if isinstance(command, click.Group) and (words := re.match(r" ([a-z]+)", rest)):
            name, command = f"{name} {words[1]}", command.commands.get(words[1])
        assert isinstance(command, click.Command), f"{said} advises tdcollect {name}"
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
            assert option in known(command), f"{said} advises tdcollect {name} {option}"
    for page in ("docs/overview", "docs/reproducibility", "docs/safe-to-open", "docs/doctor"):
        alone = listed(f"{page}.md", r"`(--[a-z-]+)")
        assert alone
        assert alone <= known(program), page


def test_names_of_the_package_are_there() -> None:
    """On pages, they need no import but that of the package, so that a line can be copied."""
    found = named(NAMES, 20)
    on_pages = {path for said, path in found if said.endswith(".md") and path != ".md"}
    assert ".evaluation.sb3.load_policy" in on_pages
    lines = "\n".join(["import tdcollect", *(f"tdcollect{path}" for path in sorted(on_pages))])
    done = run_anew(lines)
    assert done.returncode == 0, done.stderr
    for said, path in found:
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


def test_each_numbered_behaviour_is_shown_by_a_test() -> None:
    """The collectors that tdcollect succeeds have these; ``pytest.mark.behaviour`` names them."""
    marks = re.compile(r"pytest\.mark\.behaviour\(([\d, ]+)\)")
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    shown = {int(n) for text in texts for mark in marks.findall(text) for n in mark.split(",")}
    assert set(range(1, 32)) <= shown <= set(range(1, 34))
