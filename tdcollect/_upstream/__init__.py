"""The private names of other packages that tdcollect uses: all of them, and only here.

``tests/upstream`` holds the table of these names, each with its owner, and fails when upstream
renames one, or when one is used anywhere else. (A subclass still defines the methods that its
parent calls.)
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

V = TypeVar("V")


class View:
    """The private state of an object, under plain names; made where it is needed.

    It holds the object and nothing else. (Kept on the object, it would keep that one alive.)
    """

    __slots__ = ("_of",)

    def __init__(self, of: Any):
        self._of = of


class Alias(Generic[V]):
    """A private attribute of the object that a view holds; ``default`` where it has none."""

    def __init__(self, name: str, *default: V):
        self._name = name
        self._default = default

    def __get__(self, view: View, owner: type) -> V:
        return getattr(view._of, self._name, *self._default)

    def __set__(self, view: View, value: V) -> None:
        setattr(view._of, self._name, value)
