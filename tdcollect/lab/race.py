"""A race as data: its plan, its looks, its result, the files of its directory, and its page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tdcollect import check, display
from tdcollect.display import count_text, number_text, number_texts, one_line, percent_text
from tdcollect.evaluation import ledger
from tdcollect.evaluation.ledger import RACE, Episode, Problem
from tdcollect.evaluation.result import EvaluationResult
from tdcollect.evaluation.statistics import Running, alike
from tdcollect.evaluation.verification import Kind
from tdcollect.files import check_output, distinct_names, folder_name, write_json
from tdcollect.lab.sequential import Look, Rule, Standing
from tdcollect.pages import build, plots
from tdcollect.pages.build import REPORT, Cell, Column, DataTable, Figure, Figures, Page, Part
from tdcollect.pages.evaluation import leaves

FORMAT = 1
"""Version of the file of a race."""
POLICIES = "policies"
"""The folder with an evaluation per policy, each in a folder of the policy's name."""


@dataclass(frozen=True)
class RacePlan:
    """The plan of a race, fixed before it starts.

    Attributes:
        rule: decides after each look.
        block: the number of episodes between two looks.
        max_episodes: the most episodes of a policy.
    """

    rule: Rule
    block: int = 10
    max_episodes: int = 1000

    def __post_init__(self) -> None:
        check.positive_int(block=self.block, max_episodes=self.max_episodes)
        for name in self.rule.names:
            folder_name(name, "name of a policy")
        distinct_names(self.rule.names, "policies")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, numbers and None, for JSON."""
        return {**vars(self), "rule": self.rule.to_dict()}


class Looks:
    """The records of a race as they come, in any order, and the looks that follow from them.

    Attributes:
        records: the records of each policy, by index.
        standing: after the looks so far.
        played: the number of episodes that count of each policy that plays no more.
    """

    def __init__(self, plan: RacePlan):
        self.plan = plan
        self.standing = Standing(plan.rule)
        self.records: dict[str, dict[int, Episode]] = {name: {} for name in plan.rule.names}
        self.played: dict[str, int] = {}
        self._begun = dict.fromkeys(plan.rule.names, 0)

    def take(self, name: str, record: Episode) -> None:
        """Take the record of an episode, and look if a block has ended."""
        self.records[name][record.index] = record
        while not self.ended:
            at = self.standing.episodes
            block = range(at, min(at + self.plan.block, self.plan.max_episodes))
            if not all(self.records[one].keys() >= {*block} for one in self.standing.playing):
                return
            self.standing.add(
                {one: [self.records[one][n] for n in block] for one in self.standing.playing}
            )
            left = () if self.ended else self.standing.playing
            for one in self.plan.rule.names:
                if one not in left:
                    self.played.setdefault(one, self.standing.episodes)

    @property
    def ended(self) -> bool:
        """True once no policy plays on."""
        return self.standing.ended or self.standing.episodes >= self.plan.max_episodes

    def following(self, name: str, slots: int) -> list[int] | None:
        """Return the indices of the next episodes of a policy to run, in whole blocks.

        They fill the slots, which all policies share, and follow from them; what counts does not.
        There are none if the policy plays no more; None is for one that is ahead of another.
        """
        share = self.plan.block * max(1, -(-slots // (self.plan.block * len(self._begun))))
        while name not in self.played:
            at = self._begun[name]
            if at >= min(self.plan.max_episodes, self.standing.episodes + 2 * share):
                return None
            self._begun[name] = min(at + share, self.plan.max_episodes)
            wanted = range(at, self._begun[name])
            if indices := [index for index in wanted if index not in self.records[name]]:
                return indices
        return []


class RaceResult(display.ShownAsTable):
    """The result of a race; print it to see who is better.

    Attributes:
        plan: the plan of the race.
        outcome: the decision as plain dicts, lists, numbers and words.
        history: what was known after each look, by pair of policies.
        results: the evaluation of each policy, with the episodes that it played.
        directory: the directory of the race, or None.
    """

    def __init__(
        self,
        looks: Looks,
        results: Mapping[str, EvaluationResult],
        directory: str | os.PathLike[str] | None = None,
    ):
        self.plan = looks.plan
        self.outcome = looks.standing.outcome
        self.history: Mapping[tuple[str, str], Sequence[Look]] = looks.standing.history
        self.results = {name: results[name] for name in self.plan.rule.names}
        self.directory = None if directory is None else Path(os.path.abspath(directory))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> RaceResult:
        """Read the race that a directory holds, and decide it again from its ledgers.

        Raises:
            FileNotFoundError: if the directory holds no race.
            ValueError: for files that were altered, and for a race that is unfinished.
        """
        root = Path(directory)
        plan, _ = read(root)
        looks, results = Looks(plan), {}
        for name in plan.rule.names:
            results[name] = EvaluationResult.load(path_of(root, name))
            for record in results[name].episodes:
                looks.take(name, record)
        counted = {name: looks.played.get(name) for name in plan.rule.names}
        played = {name: len(result.episodes) for name, result in results.items()}
        if counted != played:
            texts = [
                f"{played[name]} episodes of {name!r}, and {'more' if n is None else n} by the rule"
                for name, n in counted.items()
                if n != played[name]
            ]
            raise ValueError(
                f"expected {root} to hold a race that has ended, got {'; '.join(texts)}; run the "
                "race again, which resumes it"
            )
        return cls(looks, results, root)

    @property
    def env(self) -> str:
        """The id of the env."""
        return str(next(iter(self.results.values())).manifest["env"]["id"])

    @property
    def winner(self) -> str | None:
        """The policy that all others are shown to be worse than, or worse than one that is."""
        playing = self.outcome["playing"]
        return playing[0] if len(playing) == 1 else None

    @property
    def episodes(self) -> int:
        """The number of episodes that count, of all policies together."""
        return sum(len(result.episodes) for result in self.results.values())

    @property
    def looks(self) -> int:
        """The number of looks, which is that of blocks."""
        return -(-self.outcome["episodes"] // self.plan.block)

    def to_dict(self) -> dict[str, Any]:
        """Return plan, decision and the policies' episodes as plain values, for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "outcome": self.outcome,
            "policies": {
                name: {"episodes": len(result.episodes), "ledger": result.digest}
                for name, result in self.results.items()
            },
        }

    def header(self) -> list[str]:
        sequence = f"{display.percent_text(1 - self.plan.rule.alpha)} sequence"
        return ["", "episodes", "difference", sequence, "decision"]

    def rows(self) -> list[list[str]]:
        """Return a row for each pair of policies."""
        return [pair_texts(pair) for pair in self.outcome["pairs"]]

    def notes(self) -> list[str]:
        rule, played = self.plan.rule, self.outcome["episodes"]
        notes = [f"Asked: {rule.question}"]
        if not self.outcome["ended"]:
            notes.append(f"Undecided after {played} episodes, the most that were planned.")
        without = sum(len(one.episodes) - len(one.returns) for one in self.results.values())
        if without:
            how = "as the worst value" if rule.failed == "worst" else "not at all, nor their pairs"
            notes.append(f"{count_text(without, 'failed or lost episode')} count {how}.")
        return notes

    def _head(self) -> str:
        won = "undecided" if self.winner is None else f"{self.winner} is best"
        if self.winner is None and self.outcome["ended"]:
            won = f"no difference larger than {number_text(self.plan.rule.margin)}"
        episodes, looks = count_text(self.episodes, "episode"), count_text(self.looks, "look")
        return f"{won}, after {episodes} and {looks}"

    def __repr__(self) -> str:
        return one_line(self, ", ".join(self.results), self._head())


def pair_texts(pair: Mapping[str, Any]) -> list[str]:
    """Return what an outcome has of a pair: names, episodes, difference, interval, decision."""
    first, second = pair["policies"]
    difference, low, high = number_texts([pair["difference"], *pair["interval"]])
    decisions = [
        f"{first} is {word}" if word in ("better", "worse") else word for word in pair["decisions"]
    ]
    cells = [str(pair["episodes"]), difference, f"{low} to {high}", " and ".join(decisions)]
    return [f"{first} - {second}", *cells]


def path_of(root: Path, name: str) -> Path:
    """Return the directory of the evaluation of a policy."""
    return root / POLICIES / name


def evaluations_of(root: Path) -> list[Path]:
    """Return the directories of the evaluations of a race."""
    plan, _ = read(root)
    return [path_of(root, name) for name in plan.rule.names]


def claim(root: Path, plan: RacePlan) -> None:
    """Make a directory that of a race; refuse one of another race, or of something else."""
    if (root / RACE).exists():
        there, _ = read(root)
        if unlike := ledger.differences(there.to_dict(), plan.to_dict()):
            raise ValueError(
                f"{root} holds another race: {ledger.differences_text(unlike)}. Choose another "
                "directory, or remove this one to start anew"
            )
        return
    check_output(root, "a race", (RACE,))
    write_json(root / RACE, {"format": FORMAT, "plan": plan.to_dict()})


def read(root: Path) -> tuple[RacePlan, Mapping[str, Any]]:
    """Read the file of a race: its plan, and all that it holds."""
    file = root / RACE
    if not file.is_file():
        raise FileNotFoundError(f"expected the directory of a race, got {root}, without a {RACE}")
    content = ledger.read_object(file)
    ledger.check_format(file, content, FORMAT)
    try:
        plan = dict(content["plan"])
        return RacePlan(Rule(**plan.pop("rule")), **plan), content
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected {file} as tdcollect writes it, got a plan that is none ({error}); ask for "
            "the file as it was"
        ) from error


def _problems(root: Path) -> Iterator[Problem]:
    """Decide a race again from its ledgers, which were checked, and compare its file."""
    _, written = read(root)
    file = root / RACE
    if "outcome" not in written:
        yield Problem(file, "the race is unfinished: it has no outcome; the same call resumes it")
        return
    for name, value in RaceResult.load(root).to_dict().items():
        if not alike(value, written.get(name)):
            yield Problem(file, f"{name} is {written.get(name)!r}, and by the ledgers {value!r}")


KINDS = (Kind(lambda root: (root / RACE).is_file(), evaluations_of, _problems),)


MOST = 6  # pairs with a figure


def race_page(race: RaceResult, links: Sequence[tuple[str, str]] = ()) -> Page:
    """Return the page of a race, whose evaluations lie beside it and are linked."""
    rule, names = race.plan.rule, [*race.results]
    drawn = [*_figures(race)]
    left = len(race.history) - len(drawn)
    more = [f"{left} more pairs are in the table."] if left > 0 else []
    columns = build.columns_of(["pair", *race.header()[1:]], race.rows())
    pairs = DataTable([*columns[:-1], columns[-1]._replace(kind="")], name="Pairs of policies")
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
    what = {"return": "returns", "success": "success rates"}.get(rule.on, rule.on)
    what = "signs" if rule.by_sign else what
    y_label, y_limits = f"difference of {what}", Running(y, low, high).limits(*nulls)
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
