"""Private names of other packages in tdcollect's source, found by walking its syntax trees."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2] / "tdcollect"
OTHERS = ("torch", "tensordict", "torchrl", "gymnasium", "envpool")

DOCUMENTED = {
    "_exit": "of os",
    "_current_frames": "of sys",
    "_replace": "of named tuples",
    "_asdict": "of named tuples",
}
"""Attributes with an underscore in front that their documentation tells everybody to use."""

STRINGS = {
    "_exact_reward": "an entry of tdcollect's own rows",
    "_final_info": "gymnasium's mask of final infos, an entry of a dict",
    "_fresh": "an attribute of tdcollect's hooks, saved by its name",
    "_returns": "an attribute of tdcollect's hooks, saved by its name",
    "_lengths": "an attribute of tdcollect's hooks, saved by its name",
    "_tdcollect_resumable": "a mark that tdcollect sets",
    "_wait_for_tstate_lock": "a function of threading, in tracebacks",
}
"""Strings that look like private names of other packages, and are none."""

ENTRIES = {"_reset", "_step"}
"""TorchRL's entries of these names are public: ``tdcollect.keys`` names them."""

SHARED = {"_monitor", "_runner", "_made_env", "_child"}
"""Private attributes of tdcollect's classes that functions beside them use."""

AS_STRING = "as a string"
_PRIVATE = re.compile(r"_(?!_)\w*[A-Za-z]\w*")


class Use(NamedTuple):
    """One use of a private name of another package."""

    line: int
    name: str
    why: str


class Found(NamedTuple):
    """The private names of other packages in a module."""

    uses: list[Use]
    overrides: set[tuple[str, str]]
    """Classes, each with a private method of a parent that it defines anew."""


class Names(NamedTuple):
    """The private names of a class."""

    inherited: frozenset[str] = frozenset()
    """Of its parents in other packages, and in ``_upstream``."""
    own: frozenset[str] = frozenset()
    """Of itself, and of its parents in tdcollect."""


def is_private(name: str) -> bool:
    """Tell whether a name is private: one underscore in front, and no dunder."""
    return _PRIVATE.fullmatch(name) is not None


def modules() -> Iterator[tuple[str, str]]:
    """The dotted name and the source of each module of tdcollect that is checked."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "_upstream" not in parts and parts[-1] != "__main__":
            name = ".".join(parts).removesuffix(".__init__")
            yield name, path.read_text(encoding="utf-8")


def check_module(name: str, source: str) -> Found:
    """Check a module of tdcollect; its classes are looked up in the imported module."""
    module = importlib.import_module(name)
    classes = [cls for cls in vars(module).values() if isinstance(cls, type)]
    names = {cls.__name__: names_of(cls) for cls in classes if cls.__module__ == name}
    found = check_source(source, names)
    known = {*STRINGS, *(ENTRIES if name == "tdcollect.keys" else ())}
    uses = [use for use in found.uses if use.why != AS_STRING or use.name not in known]
    return Found(uses, found.overrides)


def check_source(source: str, classes: Mapping[str, Names]) -> Found:
    """Check the source of a module, with the names of the classes that it defines."""
    tree = ast.parse(source)
    checker = _Checker(classes)
    checker.visit(tree)
    return Found(checker.uses, checker.overrides)


def names_of(cls: type) -> Names:
    """The private names of a class, by who defines them."""
    inherited: set[str] = set()
    own: set[str] = set()
    for parent in cls.__mro__:
        if is_foreign(parent.__module__):
            inherited |= _names_in(parent)
        elif parent.__module__.startswith("tdcollect"):
            own |= _names_in(parent)
    return Names(frozenset(inherited), frozenset(own))


@functools.cache
def _names_in(cls: type) -> frozenset[str]:
    """The private names in the body of one class, and those that it sets on ``self``."""
    names = {*vars(cls), *vars(cls).get("__annotations__", ())}
    with contextlib.suppress(OSError, TypeError):  # which has no Python source
        names |= _attributes(ast.parse(textwrap.dedent(inspect.getsource(cls))))
    return frozenset(filter(is_private, names))


def is_foreign(module: str) -> bool:
    """Tell whether a module belongs to another package that is watched, or to ``_upstream``."""
    return module.split(".")[0] in OTHERS or module.startswith("tdcollect._upstream")


def _attributes(tree: ast.AST) -> set[str]:
    """The attributes that classes in a tree define: in their bodies, or on ``self``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.update(*map(_defined, node.body))
        elif isinstance(node, ast.Attribute) and _is_self(node.value):
            names.update([node.attr] if isinstance(node.ctx, ast.Store) else [])
    return names


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    targets: list[Any] = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {
        node.id
        for target in targets
        if isinstance(target, ast.AST)
        for node in ast.walk(target)
        if isinstance(node, ast.Name)
    }


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


class _Checker(ast.NodeVisitor):
    def __init__(self, known: Mapping[str, Names]):
        self.uses: list[Use] = []
        self.overrides: set[tuple[str, str]] = set()
        self._known = known
        self._classes: list[ast.ClassDef] = []
        self._methods: list[str] = []

    def _flag(self, node: Any, name: str, why: str) -> None:
        self.uses.append(Use(node.lineno, name, why))

    def _names(self) -> Names:
        cls = self._classes[-1]
        return self._known.get(cls.name) or Names(own=frozenset(_attributes(cls)))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_import(node, alias.name.split("."))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._check_import(node, [*(node.module or "").split("."), alias.name])

    def _check_import(self, node: Any, parts: list[str]) -> None:
        if parts[:2] == ["tdcollect", "_upstream"]:
            parts = ["_upstream", *parts[2:]][1:]  # its own private names stay inside
        elif parts[0] == "tdcollect":
            return
        for part in filter(is_private, parts):
            self._flag(node, part, f"is imported, of {'.'.join(parts)}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node)
        methods, self._methods = self._methods, []
        for statement in node.body:
            for name in filter(is_private, _defined(statement)):
                if name in self._names().inherited:
                    if isinstance(statement, ast.FunctionDef):
                        self.overrides.add((node.name, name))
                    else:
                        self._flag(statement, name, f"is a parent's attribute, set by {node.name}")
        self.generic_visit(node)
        self._classes.pop()
        self._methods = methods

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._methods.append(node.name)
        self.generic_visit(node)
        self._methods.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr) and node.attr not in DOCUMENTED:
            if self._classes and (_is_self(node.value) or _is_super(node.value)):
                self._check_own(node, _is_super(node.value))
            else:
                self._check_other(node, node.attr, f"of {ast.unparse(node.value)}")
        self.generic_visit(node)

    def _check_own(self, node: ast.Attribute, of_super: bool) -> None:
        name, cls = node.attr, self._classes[-1].name
        if name not in self._names().inherited:
            if name not in self._names().own:
                self._flag(node, name, f"of {cls}, where nothing in tdcollect defines it")
        elif of_super:
            if name not in self._methods[:1]:
                self._flag(node, name, f"of a parent of {cls}, not within the method of that name")
        elif (cls, name) not in self.overrides or isinstance(node.ctx, ast.Store):
            self._flag(node, name, f"of a parent of {cls}")

    def _check_other(self, node: Any, name: str, why: str) -> None:
        """Check a name of an object that is not ``self``: a class may use those of its like."""
        own = self._names().own - self._names().inherited if self._classes else ()
        if name not in own and name not in SHARED:
            self._flag(node, name, why)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and is_private(node.value):
            self._check_other(node, node.value, AS_STRING)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None and is_private(node.arg):
            self._check_other(node, node.arg, "as a keyword")
        self.generic_visit(node)
