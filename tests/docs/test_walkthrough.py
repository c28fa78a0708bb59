"""docs/walkthrough.md shows the functions that run, and docs/architecture.md the imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import tdcollect

from .. import sizes, trace
from . import listing

PACKAGE = Path(tdcollect.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "walkthrough.md").read_text()

WAYS = dict(re.findall(r"```way ([^\n]*)\n(.*?)```", PAGE, flags=re.DOTALL))
NAMED = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`[^)]*\)", PAGE)
FILES = sorted(set(re.findall(r"\b(?:[a-z_]+/)*[a-z_]+\.py\b", PAGE)))


def test_the_way_is_the_stack_of_the_latest_step() -> None:
    for way, traced in zip(("one step", "one test episode"), trace.traced(), strict=True):
        shown = [tuple(line.split()[:2]) for line in WAYS[way].splitlines()]
        assert traced.to_the_env[::-1] == shown


def test_the_files_that_the_page_names_are_there_with_the_functions() -> None:
    assert len(FILES) > 15
    assert [file for file in FILES if not (PACKAGE / file).is_file()] == []
    for name, file in NAMED:
        nodes: Any = ast.parse((PACKAGE / file).read_text()).body
        for part in name.split("."):
            found = [node for node in nodes if getattr(node, "name", None) == part]
            assert found, f"expected {name} in {file}; correct docs/walkthrough.md"
            nodes = found[-1].body


def test_the_listing_of_the_architecture_page_is_that_of_the_package() -> None:
    assert listing.shown() == listing.listing(), "python tests/docs/listing.py writes it"


def test_no_folder_imports_one_of_a_later_stage() -> None:
    stage_of = {folder: i for i, stage in enumerate(listing.STAGES) for folder in stage}
    stages = {sizes.module_of(n): stage_of[n.rpartition("/")[0]] for n in sizes.trees()}
    later = [
        f"{module} imports {target}"
        for module, targets in sizes.imports().items()
        for target in targets
        if stages[module] < stages[target] and module != "tdcollect.__main__"
    ]
    assert later == []


def test_the_architecture_page_has_the_stages() -> None:
    page = listing.PAGE.read_text()
    (line,) = re.findall(r"none of a later stage: (.*?)\. ", page)
    shown = [[*re.findall(r"`(\w+)`", stage)] for stage in line.split(" < ")]
    folders = [[folder for folder in stage if "/" not in folder] for stage in listing.STAGES]
    assert shown == [[folder for folder in stage if folder] for stage in folders]
