"""Checks of arguments and settings, each with one wording: "expected ..., got ..."."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_count(value: Any, least: int = 0, below: float = math.inf) -> bool:
    """Return whether a value is an int of at least ``least``, and below a bound."""
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    return is_int and least <= int(value) < below


def is_number(value: Any) -> bool:
    """Return whether a value is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _each(
    is_right: Callable[[Any], bool],
    wanted: str,
    error: type[Exception] = ValueError,
    /,
    **values: Any,
) -> None:
    for name, value in values.items():
        if not is_right(value):
            raise error(f"expected {name} to be {wanted}, got {value!r}")


count = partial(_each, is_count, "an int and not negative")
"""Raise ValueError for what is no int, or is negative."""
positive_int = partial(_each, lambda value: is_count(value, 1), "a positive int")
"""Raise ValueError for what is no positive int."""
positive_int_or_none = partial(
    _each, lambda value: value is None or is_count(value, 1), "a positive int or None"
)
"""Raise ValueError for what is neither a positive int nor None."""
seconds_or_none = partial(
    _each,
    lambda value: value is None or (is_number(value) and 0 < value < math.inf),
    "seconds above 0, or None",
)
"""Raise ValueError for what is neither a positive, finite number nor None."""
share = partial(_each, lambda value: is_number(value) and 0 < value < 1, "between 0 and 1")
"""Raise ValueError for what is no number between 0 and 1."""
bools = partial(_each, lambda value: isinstance(value, bool), "a bool", TypeError)
"""Raise TypeError for what is no bool."""
callables = partial(
    _each, lambda value: value is None or callable(value), "callable or None", TypeError
)
"""Raise TypeError for what is neither callable nor None."""


def one_of(choices: Sequence[Any], **values: Any) -> None:
    """Raise ValueError for a value that is none of the choices."""
    *texts, last = map(repr, choices)
    wanted = f"{', '.join(texts)}{' or ' * bool(texts)}{last}"
    _each(choices.__contains__, wanted, **values)


def either(**values: Any) -> None:
    """Raise ValueError unless exactly one of the values is not None."""
    if sum(value is not None for value in values.values()) != 1:
        got = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"expected either {' or '.join(values)}, got {got}")


def only_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for a key that a table does not have, with the nearest one that it has."""
    known = list(known)
    for key in table:
        if key not in known:
            advice = f"; {near(str(key), known)}".removesuffix("; ")
            raise ValueError(f"expected in {where} only {', '.join(known)}, got {key!r}{advice}")


def arguments(
    function: Callable[..., Any], passed: Mapping[str, Any], more: Iterable[str] = ()
) -> None:
    """Raise TypeError for arguments of unknown names, with the nearest one that there is.

    ``more`` are names that the signature lacks.
    """
    known = [*inspect.signature(function).parameters, *more]
    for name in passed.keys() - known:
        called = function.__qualname__.removesuffix(".__init__")
        advice = near(name, known) or f"see help({called})"
        raise TypeError(f"expected arguments of {called}(), got {name}; {advice}")


def near(name: str, known: Sequence[str]) -> str:
    """Return the question whether the known name that is most like this one was meant, if any."""
    folded = {one.lower(): one for one in known}
    return "".join(f"did you mean {folded[n]}?" for n in get_close_matches(name.lower(), folded, 1))


@contextmanager
def within(where: object) -> Iterator[None]:
    """Have errors of the block begin with the place of what is wrong."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def device(value: Any, name: str = "device", here: bool = True) -> torch.device:
    """Return a device of torch; raise ValueError for what is none, or, if ``here``, is missing."""
    import torch

    try:
        of = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"expected {name} to be one of torch, such as 'cpu' or 'cuda:0', got {value!r}"
        ) from error
    if here and of.type == "cuda" and (of.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"expected a device that is here, got {name}={str(of)!r}, and torch sees {count} GPUs; "
            f"leave {name} out, or name one that is there"
        )
    return of
