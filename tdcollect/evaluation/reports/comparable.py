"""Checks that two evaluations are of the same episodes, and remarks on their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tdcollect.display import listed_text
from tdcollect.evaluation.ledger.manifest import (
    RANDOM,
    leaf_differences,
    manifest_entry,
    mixed_values,
)
from tdcollect.evaluation.ledger.records import Episode
from tdcollect.evaluation.reports.statistics import in_order

SAME = ("protocol", "env", "max_episode_steps", "returns")
REMARKED = (
    "inference_batch_size",
    "inference_threads",
    "device",
    "platform",
    "versions",
)
TRANSFORMS = "env.transforms"  # those of one policy may normalise its observations, say
OF_POLICY = ("policy.exploration", "policy.mode")


class Evaluation(Protocol):
    """An evaluation to compare: its manifest and its records."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the evaluation."""

    @property
    def episodes(self) -> Sequence[Episode]:
        """Its records."""


def check_same_episodes(
    first: Evaluation, second: Evaluation, first_name: str, second_name: str
) -> None:
    """Refuse evaluations that are not of the same episodes.

    Raises:
        ValueError: if protocol, env (but for its transforms), step limit, the number of episodes,
            or an episode's env seed differ, with each difference.
    """
    reasons = [
        *(
            text
            for text in _manifest_differences(first, second, SAME, first_name, second_name)
            if not text.startswith(TRANSFORMS)
        ),
        *_episode_differences(
            in_order(first.episodes), in_order(second.episodes), first_name, second_name
        ),
    ]
    if reasons:
        raise ValueError(
            f"expected evaluations on the same episodes, but {first_name} and {second_name} "
            "differ: " + "; ".join(reasons)
        )


def remarks(
    first: Evaluation, second: Evaluation, first_name: str, second_name: str
) -> tuple[str, ...]:
    """Return their other differences that may change a return, one sentence each."""
    acting = (manifest_entry(e.manifest, "policy.class") != RANDOM for e in (first, second))
    # Random actions do not depend on the mode, nor on the exploration type.
    keys = REMARKED + (OF_POLICY if all(acting) else ())
    found = _manifest_differences(first, second, keys, first_name, second_name)
    transforms = [
        f"Not the same in both: {text}. Returns can be compared if these leave rewards alone."
        for text in _manifest_differences(first, second, [TRANSFORMS], first_name, second_name)
    ]
    mixed = [
        f"Not the same for all episodes of {name}: {path}, {listed_text(values)}."
        for name, evaluation in ((first_name, first), (second_name, second))
        for path, values in mixed_values(evaluation.manifest).items()
    ]
    return (*(f"Not the same in both: {text}." for text in found), *transforms, *mixed)


def _manifest_differences(
    first: Evaluation, second: Evaluation, keys: Sequence[str], name_a: str, name_b: str
) -> list[str]:
    return [
        f"{path} is {a!r} in {name_a} and {b!r} in {name_b}"
        for key in keys
        for path, a, b in leaf_differences(
            key, manifest_entry(first.manifest, key), manifest_entry(second.manifest, key)
        )
    ]


def _episode_differences(
    first: Sequence[Episode], second: Sequence[Episode], name_a: str, name_b: str
) -> list[str]:
    reasons = []
    if len(first) != len(second):
        reasons.append(f"{name_a} has {len(first)} episodes and {name_b} has {len(second)}")
    seeds_a = {episode.index: episode.env_seed for episode in first}
    seeds_b = {episode.index: episode.env_seed for episode in second}
    common = sorted(seeds_a.keys() & seeds_b.keys())
    unequal = [index for index in common if seeds_a[index] != seeds_b[index]]
    if unequal:
        index = unequal[0]
        text = (
            f"env_seed of episode {index} is {seeds_a[index]} in {name_a} and {seeds_b[index]} "
            f"in {name_b}"
        )
        others = len(unequal) - 1
        reasons.append(text + (f", and {others} more differ" if others else ""))
    if len(first) == len(second) and len(common) < len(first):
        missing = min(seeds_a.keys() ^ seeds_b.keys())
        reasons.append(f"episode {missing} is in only one of {name_a} and {name_b}")
    return reasons
