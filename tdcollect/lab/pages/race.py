"""The page of a race: the running difference of each pair of policies, and the decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tdcollect.display import count_text, number_text, number_texts, percent_text
from tdcollect.evaluation.sequential import Look
from tdcollect.lab.race import POLICIES, RaceResult
from tdcollect.pages import build, plots
from tdcollect.pages.build import REPORT, Cell, Column, DataTable, Figure, Figures, Page, Part
from tdcollect.pages.evaluation import leaves

MOST = 6  # pairs with a figure


def write_race_page(directory: Path, race: RaceResult) -> list[Path]:
    """Write the page of a race and its figures; return the files."""
    return build.write_page(directory / REPORT, race_page(race))


def race_page(race: RaceResult, links: Sequence[tuple[str, str]] = ()) -> Page:
    """Return the page of a race, whose evaluations lie beside it and are linked."""
    rule, names = race.plan.rule, [*race.results]
    drawn = [*_figures(race)]
    left = len(race.history) - len(drawn)
    more = [f"{left} more pairs are in the table."] if left > 0 else []
    labels, *cells = zip(*race.rows(), strict=True)
    kinds = ("n", "n", "n", "")
    columns = [Column(*parts) for parts in zip(race.header()[1:], cells, kinds, strict=True)]
    pairs = DataTable([Column("pair", labels), *columns], name="Pairs of policies")
    figures: list[Part] = (
        [Figures(drawn), *more] if drawn else ["No pair of episodes was compared."]
    )
    return Page(
        f"{race.env}: race of {count_text(len(names), 'policy')}",
        f"{', '.join(names)} on the same test episodes, with a look after every {race.plan.block}",
        "Race",
        [
            ("Figures", figures),
            ("Pairs", [pairs, *race.notes()]),
            ("Policies", [_policies(race)]),
            ("The rule", [_rule(race)]),
        ],
        _headline(race),
        f"The probability of a wrong decision is at most {percent_text(rule.alpha)}, over all "
        "looks and all pairs together. Made by tdcollect.",
        links,
    )


def _headline(race: RaceResult) -> list[build.Card]:
    outcome = race.outcome
    if race.winner is not None:
        decision = ("Best", race.winner, "all others are out")
    elif outcome["ended"]:
        margin = number_text(race.plan.rule.margin)
        decision = ("Decision", "no difference", f"larger than {margin}")
    else:
        decision = ("Decision", "undecided", f"after {race.plan.max_episodes} episodes each")
    played = str(max(len(one.episodes) for one in race.results.values()))
    of = f"of {race.plan.max_episodes} at most"
    every = f"after every {count_text(race.plan.block, 'episode')}"
    return [decision, ("Episodes of a policy", played, of), ("Looks", str(race.looks), every)]


def _figures(race: RaceResult) -> Iterator[Figure]:
    for place, ((first, second), looks) in enumerate(race.history.items()):
        known = [look for look in looks if look.difference is not None]
        if known and place < MOST:
            yield _figure(race, f"{first} - {second}", place, known)


def _figure(race: RaceResult, pair: str, place: int, looks: Sequence[Look]) -> Figure:
    rule, last = race.plan.rule, looks[-1]
    x, y, low, high = (
        np.array([getattr(look, name) for look in looks], np.float64)
        for name in ("episodes", "difference", "low", "high")
    )
    sequence = f"{percent_text(1 - rule.alpha)} confidence sequence"
    nulls = {0.0: "no difference"}
    if rule.margin is not None:
        nulls |= dict.fromkeys((-rule.margin, rule.margin), f"margin {rule.margin:g}")
    line = plots.Line("difference", x, y, low, high)
    later = slice(min(len(x) - 1, max(4, len(x) // 20)), None)  # the first intervals hide the rest
    bottom, top = min(low[later].min(), *nulls), max(high[later].max(), *nulls)
    what = {"return": "returns", "success": "success rates"}.get(rule.on, rule.on)
    what = "signs" if rule.by_sign else what
    room = 0.05 * (top - bottom)
    y_label, y_limits = f"difference of {what}", (bottom - room, top + room)
    drawing = plots.lines(
        [line], "episodes", y_label, band_name=sequence, y_limits=y_limits, levels=nulls
    )
    mean, lowest, highest = number_texts([last.difference, last.low, last.high])
    shows = (
        f"After {count_text(last.episodes, 'episode')} the mean difference is {mean}, and the "
        f"{sequence} reaches from {lowest} to {highest}."
    )
    note = "A race may end at any look: the band holds the truth at all looks together."
    return Figure(f"pair_{place}", pair, drawing, shows, note)


def _policies(race: RaceResult) -> DataTable:
    outcome, summaries = race.outcome, [one.summary() for one in race.results.values()]
    ended = [
        f"worse than {', '.join(outcome['out'][name]['by'])}" if name in outcome["out"] else "-"
        for name in race.results
    ]
    columns = [
        Column("policy", [Cell(name, f"{POLICIES}/{name}/{REPORT}") for name in race.results]),
        Column("episodes", [str(one.episodes) for one in summaries], "n"),
        Column("mean return", [one.returns.mean for one in summaries], "n"),
        Column("length", [one.lengths.mean for one in summaries], "n"),
        Column("failed or lost", [str(one.failed + one.lost) for one in summaries], "n"),
        Column("out", ended),
    ]
    if any(one.success for one in summaries):
        rates = [one.success.rate if one.success else None for one in summaries]
        columns.insert(3, Column("success rate", rates, "n"))
    caption = "A policy leads to the report of its evaluation."
    return DataTable(columns, caption, name="Policies")


def _rule(race: RaceResult) -> DataTable:
    settings = {**race.plan.rule.to_dict(), "block": race.plan.block}
    settings |= {"max_episodes": race.plan.max_episodes, "question": race.plan.rule.question}
    names, texts = zip(*leaves("", settings), strict=True)
    return DataTable([Column("setting", names), Column("value", texts, "t")], name="Rule")
