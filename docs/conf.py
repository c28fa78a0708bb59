"""Settings of the site that `make docs` builds with Sphinx, from the root of the repository.

The sources are the pages as they are in the repository, so that one relative link works in both.
"""

from __future__ import annotations

import posixpath
import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

project = "tdcollect"
version = release = metadata("tdcollect")["Version"]
copyright = "the authors of tdcollect. MIT licence"
html_title = f"tdcollect {version}"

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "examples/README.md"]
exclude_patterns = [".*", "runs", "site", "tdcollect", "tests", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_additional_pages = {"index": "to-the-index.html"}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"  # of blocks that name no language
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings are the project's own; those that a class inherits are its parent's to show.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list, as that of the arguments

# Names of the package must lead somewhere. Those of others would need their inventories, from the
# network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!tdcollect\b).*")]
# Types of the package's own parts, in signatures of methods that scripts do not call.
nitpick_ignore = [
    ("py:class", f"tdcollect.{name}")
    for name in (
        "testing.checks.Mismatch",
        "collect.hooks.ScalarLogger",
        "collect.statistics.Moments",
        "envs.spaces.StepBuffers",
        "envs.spaces.SpaceCodec",
        "envs.slots.Can",
        "envs.slots.Stepper",
        "evaluation.episodes.data.Finished",
        "evaluation.episodes.trial.Feed",
        "evaluation.episodes.actions.Verdict",
        "evaluation.comparison.Evaluated",
        "lab.race.Looks",
        "evaluation.settings.EpisodeOptions",
        "evaluation.workers.local.Workers",
    )
]


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Make the site's table of contents of the lists of links in docs/index.md and below it."""
    if name not in (root_doc, "docs/upstream/index"):
        return
    for caption, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", source[0], re.S | re.M):
        pages = re.findall(r"^- \[(.*?)\]\((.*?)\.md\)", text, re.M)
        lines = [f"{title} <{page}>" for title, page in pages]
        if lines:
            head = ["", "```{toctree}", ":hidden:", f":caption: {caption}", ""]
            source[0] += "\n".join([*head, *lines, "```", ""])


def place_pictures(app: Any, name: str, source: list[str]) -> None:
    """Have the pictures of README.md, which are HTML, come from where the site has them."""
    if name == "README":
        source[0] = source[0].replace('"docs/_static/', '"_static/')


def write_llms(app: Any, error: Exception | None) -> None:
    """Write llms.txt beside the site: the list of pages, as docs/index.md has it."""
    if error is not None or app.builder.name != "html":
        return
    root, out = Path(app.srcdir), Path(app.outdir)
    lines = [f"# {project} {version}", "", f"> {metadata(project)['Summary']}"]
    for line in (root / "docs" / "index.md").read_text().splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif link := re.match(r"- \[(.*?)\]\((.*?)\.md\)(.*)", line):
            page = posixpath.normpath(f"docs/{link[2]}")
            lines.append(f"- [{link[1]}]({page}.html){link[3]}")
    (out / "llms.txt").write_text("\n".join(lines) + "\n")


def show_arguments(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str
) -> tuple[str | None, str] | None:
    """Show the arguments of ``__init__`` where TorchRL's metaclasses take any."""
    if what != "class" or signature is None:
        return None
    if signature.startswith("(*args"):
        found = signature_of(obj.__init__, bound_method=True)
        signature = stringify_signature(
            found, show_return_annotation=False, unqualified_typehints=True
        )
    return signature.replace("<factory>", "..."), returns  # a dataclass's; it does not parse


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples: the docstring of the class describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def drop_builtin_docs(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Leave out the docstring of ``str``, which a constant without one of its own would show."""
    if what == "data" and lines and (type(obj).__doc__ or "").startswith(lines[0]):
        lines.clear()


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("source-read", place_pictures)
    app.connect("build-finished", write_llms)
    app.connect("autodoc-process-docstring", drop_builtin_docs)
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("autodoc-skip-member", skip_fields)
    app.add_lexer("way", TextLexer)  # docs/walkthrough.md; its test reads these blocks
