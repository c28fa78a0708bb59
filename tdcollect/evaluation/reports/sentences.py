"""Sentences that say what a figure shows, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tdcollect.display import count_text, number_text, number_texts, percent_text
from tdcollect.evaluation.reports.intervals import Interval
from tdcollect.evaluation.reports.statistics import Quantity
from tdcollect.pages.plots import LARGEST, Values, finite


def spread(values: Sequence[float], things: str) -> str:
    """Return where values lie: ``Half of the returns lie between 1 and 5, all between 0 and 9.``"""
    found = finite(values)
    left = len(values) - len(found)
    said = []
    if len(found) == 1:
        said.append(f"The only one of the {things} is {number_text(float(found[0]))}.")
    elif len(found) and found.min() == found.max():
        said.append(f"All {len(found)} {things} are {number_text(float(found[0]))}.")
    elif len(found):
        middle, all_of_them = _quantiles(found, [0.25, 0.75]), _quantiles(found, [0, 1])
        said.append(f"Half of the {len(found)} {things} lie {middle}, all {all_of_them}.")
    if left:
        said.append(f"{left} of {len(values)} are NaN or beyond {LARGEST:g}, and are not drawn.")
    return " ".join(said)


def middle_halves(rows: Sequence[tuple[str, Sequence[float]]], things: str) -> str:
    """Return where the middle half of each row's values lies; rows without values are left out."""
    texts = []
    for name, values in rows:
        found = finite(values)
        if len(found):
            texts.append(f"{name} {_quantiles(found, [0.25, 0.75])}")
    return f"Half of the {things} lie: {'; '.join(texts)}."


def mean_sentence(quantity: Quantity, confidence: float) -> str:
    """Return the mean with its interval as a sentence; empty if there is none."""
    if quantity.mean is None:
        return ""
    return f"The mean is {with_interval(quantity.mean, quantity.mean_interval, confidence)}."


def with_interval(value: float | None, interval: Interval | None, confidence: float) -> str:
    """Return a number, with its interval in brackets if there is one."""
    number, words = number_and_interval(value, interval, confidence)
    return number if interval is None else f"{number} ({words})"


def interval_name(confidence: float) -> str:
    """Return the name of an interval for a legend."""
    return f"{percent_text(confidence)} interval"


def number_and_interval(
    value: float | None, interval: Interval | None, confidence: float
) -> tuple[str, str]:
    """Return a number and its interval alike: ``3.5``, ``95% interval 3.1 to 4.0``."""
    if interval is None:
        return number_texts([value])[0], "no interval"
    number, low, high = number_texts([value, interval.low, interval.high])
    return number, f"{interval_name(confidence)} {low} to {high}"


def _quantiles(values: Values, shares: Sequence[float]) -> str:
    return "between {} and {}".format(*number_texts(np.quantile(values, shares).tolist()))


def parts(counts: Sequence[tuple[int, str]]) -> str:
    """Return counts with their words: ``60 episodes terminated, 3 failed``; zeros are left out."""
    said = [(count, words) for count, words in counts if count]
    if not said:
        return ""
    (count, words), *rest = said
    texts = [f"{count_text(count, 'episode')} {words}", *(f"{c} {w}" for c, w in rest)]
    return ", ".join(texts)
