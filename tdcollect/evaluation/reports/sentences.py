"""Sentences that say what a figure shows, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tdcollect.display import count_text, number_text, percent_text
from tdcollect.evaluation.reports.intervals import Interval
from tdcollect.evaluation.reports.statistics import Quantity
from tdcollect.pages.plots import finite


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
        low, first, third, high = map(float, np.quantile(found, [0, 0.25, 0.75, 1]))
        said.append(
            f"Half of the {len(found)} {things} lie between {number_text(first)} and "
            f"{number_text(third)}, all between {number_text(low)} and {number_text(high)}."
        )
    if left:
        said.append(f"{left} of {len(values)} are NaN or infinite, and are not drawn.")
    return " ".join(said)


def middle_halves(rows: Sequence[tuple[str, Sequence[float]]], things: str) -> str:
    """Return where the middle half of each row's values lies; rows without values are left out."""
    texts = []
    for name, values in rows:
        found = finite(values)
        if len(found):
            first, third = (number_text(float(end)) for end in np.quantile(found, [0.25, 0.75]))
            texts.append(f"{name} between {first} and {third}")
    return f"Half of the {things} lie: {'; '.join(texts)}."


def mean_sentence(quantity: Quantity, confidence: float) -> str:
    """Return the mean with its interval as a sentence; empty if there is none."""
    if quantity.mean is None:
        return ""
    interval = within(quantity.mean_interval, confidence)
    return f"The mean is {number_text(quantity.mean)}{interval}."


def within(interval: Interval | None, confidence: float) -> str:
    """Return an interval in brackets, as the end of a number; empty if there is none."""
    if interval is None:
        return ""
    return f" ({interval_words(interval, confidence)})"


def interval_name(confidence: float) -> str:
    """Return the name of an interval for a legend."""
    return f"{percent_text(confidence)} interval"


def interval_words(interval: Interval | None, confidence: float) -> str:
    """Return an interval as a remark: ``95% interval 3 to 4``."""
    if interval is None:
        return "no interval"
    low, high = number_text(interval.low), number_text(interval.high)
    return f"{interval_name(confidence)} {low} to {high}"


def ends(interval: Interval | None) -> tuple[float, float] | None:
    """Return the ends of an interval as plots take them."""
    return None if interval is None else (interval.low, interval.high)


def parts(counts: Sequence[tuple[int, str]]) -> str:
    """Return counts with their words: ``60 episodes terminated, 3 failed``; zeros are left out."""
    said = [(count, words) for count, words in counts if count]
    if not said:
        return ""
    (count, words), *rest = said
    texts = [f"{count_text(count, 'episode')} {words}", *(f"{c} {w}" for c, w in rest)]
    return ", ".join(texts)
