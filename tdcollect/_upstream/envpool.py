"""Private names of EnvPool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class FlatPool(NamedTuple):
    """The methods of a pool below its ``step`` and ``reset``, which nest its arrays.

    A step is ``pool.send(actions, slots)``, then ``receive()``; a reset, ``reset(slots)``, then
    ``receive()``.
    """

    names: list[str]
    """Of the arrays that ``receive`` gives."""
    reset: Callable[[Any], None]
    """Starts episodes in slots, an int32 array."""
    receive: Callable[[], list[Any]]
    """Waits for the slots that were sent something; gives their arrays."""
    nest: Callable[..., Any]
    """Nests arrays as ``pool.step`` gives them: ``nest(arrays, True, True)[0]`` is observations."""


def flat_pool(pool: Any) -> FlatPool:
    """The methods of a pool of ``envpool.make_gymnasium``, bound to it."""
    return FlatPool(list(pool._state_keys), pool._reset, pool._recv, pool._to)


__all__ = ["FlatPool", "flat_pool"]
