"""The collector's own constructor options, beside the parent's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

HERE_ONLY: dict[str, Any] = {
    "statistics": True,
    "stats_window": 100,
    "timers": False,
    "hooks": None,
    "progress": False,
}
"""Options of a collector that runs in the user's own process, with their defaults."""

Function = TypeVar("Function", bound=Callable[..., Any])


def extends(parent: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show a function that hands ``*args, **kwargs`` on with the parameters that these may hold.

    Args:
        parent: the function that they are handed on to.
    """

    def with_signature(function: Function) -> Function:
        own = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        signature = inspect.signature(parent)
        theirs = list(signature.parameters.values())
        # Before **kwargs, where the parent's ends with one.
        last = len(theirs) - (theirs[-1].kind is inspect.Parameter.VAR_KEYWORD)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*theirs[:last], *own, *theirs[last:]]
        )
        return function

    return with_signature


def refuse_elsewhere(options: dict[str, Any], backend: str) -> None:
    """Take options with their defaults out; raise for others.

    Args:
        options: are given to a collector that runs in other processes.
        backend: which runs it.

    Raises:
        ValueError: for an option that is heeded only in the user's own process.
    """
    for name, default in HERE_ONLY.items():
        value = options.pop(name, default)
        if value is not default and value != default:
            raise ValueError(
                f"expected no {name} with backend={backend!r}, whose collectors run in other "
                f"processes, got {name}={value!r}; leave it out, or choose backend='direct'"
            )
