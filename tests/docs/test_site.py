"""The site of the docs builds without a warning, stands alone, and has everything public."""

from __future__ import annotations

import re
import sys
import zlib
from importlib import import_module
from pathlib import Path

import pytest

from ..forkserver import run
from ..package.test_exports import EXPORTED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = ("tdcollect.keys", "tdcollect.seeding")  # without __all__: all names of their own


def public_names() -> set[str]:
    names = {
        f"{module}.{name}"
        for module, exported in EXPORTED.items()
        for name in exported
        if getattr(import_module(module), name).__module__.startswith("tdcollect")
    }  # the others are TorchRL's own
    for module in MODULES:
        text = Path(str(import_module(module).__file__)).read_text()
        own = re.findall(r"^(?:def )?([a-zA-Z]\w*)(?:\(| = )", text, re.M)
        names |= {f"{module}.{name}" for name in own}
    return names


def test_every_page_is_in_an_index() -> None:
    listed = [
        (index.parent / page).relative_to(DOCS).as_posix()
        for index in (DOCS / "index.md", DOCS / "upstream" / "index.md")
        for page in re.findall(r"^- \[.*?\]\((?!\.\.)(.*?)\)", index.read_text(), re.M)
    ]
    assert len(listed) == len(set(listed))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(listed) == {"index.md"}


def build(out: str) -> None:
    """Do as `make docs`."""
    from sphinx.cmd.build import build_main

    sys.exit(build_main(["-W", "--keep-going", "-q", "-c", str(DOCS), str(ROOT), out]))


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package, reason="the site needs tdcollect[docs]")
    done = run(build, str(tmp_path))
    assert done.returncode == 0, done.stderr
    packed = (
        (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    )  # after four lines of heading
    found = re.findall(r"^(\S+) py:", zlib.decompress(packed).decode(), re.M)
    assert public_names() - {*found} == set()
    listed = re.findall(r"^- \[.*?\]\((.*?)\)", (tmp_path / "llms.txt").read_text(), re.M)
    assert len(listed) == len(re.findall(r"^- \[.*?\]\(", (DOCS / "index.md").read_text(), re.M))
    assert all((tmp_path / page).is_file() for page in listed)
    loads = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*//"""
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 25
    assert [page for page in pages if re.search(loads, page.read_text())] == []
    styles = [*tmp_path.rglob("*.css")]
    assert [page for page in styles if re.search(r"@import|url\(.?https?:", page.read_text())] == []
    # Types stand in signatures; napoleon takes the words of a sentence before a colon for one.
    for page in (tmp_path / "docs" / "api").glob("*.html"):
        assert "Return type<" not in page.read_text(), page
