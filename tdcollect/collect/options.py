"""The collector's own constructor options, beside the parent's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

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
