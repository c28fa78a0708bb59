"""Checks of arguments and settings, each with one wording: "expected ..., got ..."."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


def is_count(value: Any, least: int = 0, below: float = math.inf) -> bool:
    """Return whether a value is an int of at least ``least``, and below a bound."""
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    return is_int and least <= int(value) < below


def is_number(value: Any) -> bool:
    """Return whether a value is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def count(**values: Any) -> None:
    """Raise ValueError for what is no int, or is negative."""
    _each(values, is_count, "an int and not negative")


def positive_int(**values: Any) -> None:
    """Raise ValueError for what is no positive int."""
    _each(values, lambda value: is_count(value, 1), "a positive int")


def positive_int_or_none(**values: Any) -> None:
    """Raise ValueError for what is neither a positive int nor None."""
    _each(values, lambda value: value is None or is_count(value, 1), "a positive int or None")


def int_up_to(most: int, note: str, **values: Any) -> None:
    """Raise ValueError for what is neither an int from 1 to ``most`` nor None.

    ``note`` says what ``most`` is, and what None means.
    """
    _each(
        values,
        lambda value: value is None or (is_count(value, 1) and value <= most),
        f"an int from 1 to {most}, {note}",
    )


def seconds_or_none(**values: Any) -> None:
    """Raise ValueError for what is neither a positive, finite number nor None."""
    _each(
        values,
        lambda value: value is None or (is_number(value) and 0 < value < math.inf),
        "seconds above 0, or None",
    )


def share(**values: Any) -> None:
    """Raise ValueError for what is no number between 0 and 1."""
    _each(values, lambda value: is_number(value) and 0 < value < 1, "between 0 and 1")


def one_of(choices: Sequence[Any], **values: Any) -> None:
    """Raise ValueError for a value that is none of the choices."""
    *texts, last = map(repr, choices)
    wanted = f"{', '.join(texts)}{' or ' * bool(texts)}{last}"
    _each(values, lambda value: value in choices, wanted)


def bools(**values: Any) -> None:
    """Raise TypeError for what is no bool."""
    _each(values, lambda value: isinstance(value, bool), "a bool", TypeError)


def callables(**values: Any) -> None:
    """Raise TypeError for what is neither callable nor None."""
    _each(values, lambda value: value is None or callable(value), "callable or None", TypeError)


def _each(
    values: Mapping[str, Any],
    is_right: Callable[[Any], bool],
    wanted: str,
    error: type[Exception] = ValueError,
) -> None:
    for name, value in values.items():
        if not is_right(value):
            raise error(f"expected {name} to be {wanted}, got {value!r}")


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
            raise ValueError(
                f"expected in {where} only {', '.join(known)}, got {key!r}"
                + "".join(f"; did you mean {near!r}?" for near in get_close_matches(key, known, 1))
            )
