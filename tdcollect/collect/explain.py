"""What ``Collector.explain()`` says: which parts of a collection run how, and why."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One part of the loop: what it is, how it runs, and why not faster where it could not."""

    name: str
    what: str
    how: str


class Explanation(tuple[Part, ...]):
    """The parts of a collection; prints as a table."""

    def __repr__(self) -> str:
        name_width = max(len(part.name) for part in self)
        what_width = max(len(part.what) for part in self)
        return "\n".join(
            f"{part.name:<{name_width}}  {part.what:<{what_width}}  {part.how}" for part in self
        )
