"""Private names of other packages are used in ``tdcollect/_upstream/`` only.

A checker walks the syntax trees of tdcollect's source; it looks classes up in the imported modules.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "tdcollect"
OTHERS = ("torch", "tensordict", "torchrl", "gymnasium", "envpool")

DOCUMENTED = {"_exit", "_current_frames", "_replace", "_asdict", "_fields", "_on_event"}
"""Names of os, of sys, of named tuples and of Stable-Baselines3's callbacks, for all to use."""

STRINGS = {
    **dict.fromkeys(("_exact_reward", "_sent"), "entries of tdcollect's own rows"),
    **dict.fromkeys(("_low", "_high"), "ends of the names of columns"),
    "_final_info": "gymnasium's mask of final infos, an entry of a dict",
    "_reset": "an entry of TorchRL's",
    "_step": "an entry of TorchRL's",
    "_tdcollect_resumable": "a mark that tdcollect sets",
    "_wait_for_tstate_lock": "a function of threading, in tracebacks",
}
"""Strings that look like private names of other packages, and are none."""

SHARED = {"_shaped", "_monitor", "_runner", "_child", "_lost_worker"}
"""Private attributes of tdcollect's classes that other modules use."""


def is_private(name: str) -> bool:
    """Return whether a name has one underscore in front, and is no dunder."""
    return re.fullmatch(r"_(?!_)\w*[A-Za-z]\w*", name) is not None


def is_foreign(module: str) -> bool:
    return module.split(".")[0] in OTHERS or module.startswith("tdcollect._upstream")


class Names(NamedTuple):
    """The private names of a class: of its foreign parents; of itself and of its other parents."""

    inherited: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()


def names_of(cls: type) -> Names:
    foreign = [parent for parent in cls.__mro__ if is_foreign(parent.__module__)]
    ours = [parent for parent in cls.__mro__ if parent.__module__.startswith("tdcollect.")]
    return Names(*(frozenset().union(*map(_names_in, kinds)) for kinds in (foreign, ours)))


@functools.cache
def source(thing: Any) -> str:
    """The source of anything; of a class in a moment, which ``inspect`` parses its module for."""
    with contextlib.suppress(OSError, TypeError):  # of what is not written in Python
        if not isinstance(thing, type):
            return inspect.getsource(thing)
        body = rf"^class {thing.__name__}\b.*?(?=^(?:@|class |def |\w+(?:: .*)? = )|\Z)"
        found = re.search(body, source(import_module(thing.__module__)), re.MULTILINE | re.DOTALL)
        return found.group() if found else ""
    return ""


@functools.cache
def _names_in(cls: type) -> frozenset[str]:
    """The private names in the body of one class, and those that it sets on ``self``."""
    names = {*vars(cls), *vars(cls).get("__annotations__", ())}
    for node in ast.walk(ast.parse(source(cls))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(filter(is_private, names))


class Checker(ast.NodeVisitor):
    """Collects the uses of private names, and the private methods that are overridden."""

    def __init__(self, source: str, classes: Mapping[str, Names]):
        self.uses: list[tuple[int, str]] = []
        self.overrides: set[tuple[str, str]] = set()
        self.classes = classes
        self.cls, self.names, self.method = "", Names(), ""
        self.visit(ast.parse(source))

    def flag(self, node: Any, name: str) -> None:
        self.uses.append((node.lineno, name))

    def visit_Import(self, node: ast.Import) -> None:
        self.check_import(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.check_import(node, [f"{node.module}.{alias.name}" for alias in node.names])

    def check_import(self, node: Any, names: list[str]) -> None:
        for parts in (name.split(".") for name in names):
            if parts[:2] == ["tdcollect", "_upstream"]:
                parts = parts[2:]
            elif parts[0] == "tdcollect":
                continue
            for part in filter(is_private, parts):
                self.flag(node, part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.cls, self.names
        self.cls, self.names = node.name, self.classes.get(node.name, Names())
        for part in node.body:
            targets = getattr(part, "targets", None) or [getattr(part, "target", part)]
            for target in targets:
                name = getattr(target, "name", getattr(target, "id", ""))
                if name in self.names.inherited and is_private(name):
                    if isinstance(part, ast.FunctionDef):
                        self.overrides.add((node.name, name))
                    else:
                        self.flag(part, name)
        self.generic_visit(node)
        self.cls, self.names = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.method = self.method, self.method or node.name
        self.generic_visit(node)
        self.method = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        if is_private(name) and name not in DOCUMENTED:
            of = ast.unparse(node.value)
            if not self.cls or of not in ("self", "cls", "super()"):
                self.check_other(node, name)
            elif name not in self.names.inherited:
                if name not in self.names.own:
                    self.flag(node, name)  # nothing in tdcollect defines it
            elif of == "super()":
                if name != self.method:
                    self.flag(node, name)
            elif (self.cls, name) not in self.overrides or isinstance(node.ctx, ast.Store):
                self.flag(node, name)
        self.generic_visit(node)

    def check_other(self, node: Any, name: str) -> None:
        """Check a name of an object that is not ``self``: a class may use those of its like."""
        own = self.names.own - self.names.inherited if self.cls else ()
        if name not in own and name not in SHARED:
            self.flag(node, name)

    def visit_Constant(self, node: ast.Constant) -> None:
        name = node.value
        if isinstance(name, str) and is_private(name) and name not in STRINGS:
            self.check_other(node, name)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None and is_private(node.arg):
            self.check_other(node, node.arg)
        self.generic_visit(node)


def sources() -> Iterator[tuple[str, str]]:
    """The dotted name and the source of each module of tdcollect that is checked."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "_upstream" not in parts and parts[-1] != "__main__":
            yield ".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")


def classes_of(name: str) -> dict[str, type]:
    found = [cls for cls in vars(import_module(name)).values() if isinstance(cls, type)]
    return {cls.__name__: cls for cls in found if cls.__module__ == name}


@functools.cache
def checked(name: str, source: str) -> Checker:
    return Checker(source, {cls: names_of(of) for cls, of in classes_of(name).items()})


def test_private_names_of_other_packages_are_used_in_one_place_only() -> None:
    uses = [
        f"{name}:{line}: {use}"
        for name, source in sources()
        for line, use in checked(name, source).uses
    ]
    assert not uses, "move them to tdcollect/_upstream/ and to the table of test_names.py:\n" + (
        "\n".join(uses)
    )


def test_upstream_calls_the_methods_that_are_defined_anew_as_these_take_it() -> None:
    count = 0
    for module, source in sources():
        for cls, name in checked(module, source).overrides:
            ours = classes_of(module)[cls]
            parent = next(c for c in ours.__mro__ if is_foreign(c.__module__) and name in vars(c))
            check_called(parent, name)
            check_takes(getattr(ours, name), vars(parent)[name])
            count += 1
    assert count > 20


def check_called(parent: type, name: str) -> None:
    kinds = [*parent.__mro__, *parent.__subclasses__()]
    modules = {kind.__module__ for kind in kinds if is_foreign(kind.__module__)}
    found = (inspect.getsource(import_module(module)) for module in modules)
    assert any(re.search(rf"\.{name}\b", text) for text in found), (
        f"{parent.__name__}.{name} is not called"
    )


def check_takes(ours: Any, theirs: Any) -> None:
    mine, asked = (inspect.signature(one).parameters.values() for one in (ours, theirs))
    if not any(p.kind is p.VAR_POSITIONAL for p in (*mine, *asked)):
        by_position = [[p for p in ps if p.kind < p.VAR_POSITIONAL] for ps in (mine, asked)]
        assert len(by_position[0]) == len(by_position[1]), ours.__qualname__


CHILD = {"Child": Names(inherited=frozenset({"_theirs", "_step"}), own=frozenset({"_mine"}))}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.utils import _thing as thing", "_thing"),
        ("from tdcollect._upstream.torchrl import _module", "_module"),
        ("getattr(module, '_kwargs', None)", "_kwargs"),
        ("settings(_use_buffers=False)", "_use_buffers"),
        ("class Child:\n    def f(self): self._theirs", "_theirs"),
        ("class Child:\n    def _step(self): self._step = 1", "_step"),
        ("class Child:\n    _theirs: int", "_theirs"),
        ("class Child:\n    def f(self): self._unknown", "_unknown"),
        ("class Child:\n    def f(self): super()._step()", "_step"),
        ("class Child:\n    def _step(self): self.env._step()", "_step"),
        ("class Child:\n    def _step(self): pass\ndef f(child): child._mine", "_mine"),
        # and what is allowed
        ("from tdcollect._upstream.torchrl import has_hooks", ""),
        ("from tdcollect.collect.run import _MOST", ""),
        ("def f(_, __): return _.__dict__['forward']", ""),
        ("present._replace(a=1)", ""),
        ("class Child:\n    def f(self, other): return self._mine, other._mine", ""),
        ("class Child:\n    def _step(self): pass\n    def f(self): self._step()", ""),
    ],
)
def test_the_checker_finds(source: str, name: str) -> None:
    found = Checker(dedent(source), CHILD)
    assert [use for _, use in found.uses] == [name] * bool(name)
    assert found.overrides == ({("Child", "_step")} if "def _step" in source else set())
