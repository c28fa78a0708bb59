"""Checks of an env's outputs: spaces, numbers, flags, ends, infos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tdcollect import keys
from tdcollect.checks.difference import leaves, row_mismatch
from tdcollect.checks.player import Row
from tdcollect.checks.registry import Failed, Skipped, Warned, check
from tdcollect.testing import gymnasium_checks as rules
from tdcollect.testing.doctor.examination import Examination
from tdcollect.testing.doctor.repeating import by_chance, outlives

GROUP = "outputs"

_FEW = 3


@check(
    GROUP,
    "space",
    "observations have the space's shape, dtype and bounds",
    advice="state the observation_space that the observations keep, or cast and clip them; "
    "batches take shapes and dtypes from it",
)
def _space(exam: Examination) -> str:
    try:
        evidence = rules.in_space(exam)
        rules.dtype(exam)
    except Failed:
        if _not_finite(exam, np.isnan):
            raise Skipped("observations that are NaN lie in no space (see numbers)") from None
        raise
    return evidence


@check(
    GROUP,
    "numbers",
    "observations and rewards are numbers, and finite",
    advice="return a float at each step; one NaN reaches every weight of a policy",
)
def _numbers(exam: Examination) -> str:
    nan = _not_finite(exam, np.isnan)
    if nan:
        raise Failed(nan, advice="find the division or the root that gives it")
    infinite = _not_finite(exam, np.isinf)
    rewards = rules.rewards(exam)
    if infinite:
        raise Warned(infinite, advice="clip it: networks and running means take no infinities")
    steps = [row for _, row in exam.all_rows() if not row.is_reset]
    types = sorted({type(row[keys.REWARD]).__name__ for row in steps})
    return f"rewards {rewards}, as {' or '.join(types)}"


def _not_finite(exam: Examination, kind: Callable[[Any], Any]) -> str:
    """Return the first number of this kind in an observation, with its place; empty if none."""
    for where, row in exam.all_rows():
        for entry, leaf in leaves("observation", row[keys.OBSERVATION]):
            array = np.asarray(leaf)
            if array.dtype.kind == "f" and kind(array).any():
                at = tuple(np.argwhere(kind(array))[0])
                return f"{where}: {entry}{''.join(f'[{i}]' for i in at)} is {array[at]}"
    return ""


@check(
    GROUP,
    "ends",
    "terminated and truncated are bools, and a time limit truncates",
    advice="return bool(...) for both",
)
def _ends(exam: Examination) -> str:
    rules.flags(exam)
    played = [*exam.episodes, *exam.varied]
    ended = [episode for episode in played if episode[-1].ends]
    steps, limit = exam.max_episode_steps, exam.limit
    limited = f"a time limit of {limit} steps" if limit else "no time limit"
    if not ended:
        if limit:
            return f"{limited}; no episode ended in {steps} steps of random actions"
        raise Warned(
            f"no episode ended in {steps} steps, and the env has no time limit",
            advice="give it one, as collecting or testing by episodes would wait for ever: "
            "make_env(..., max_episode_steps=1000)",
        )
    hidden_limit = _hidden_limit(ended)
    if hidden_limit:
        raise Warned(
            f"all {len(ended)} episodes that ended, with different seeds and actions, terminated "
            f"at step {hidden_limit}",
            cause="perhaps a time limit that is reported as terminated, or a game of "
            f"{hidden_limit} steps",
            advice="if it is a limit, set truncated (or leave it to gymnasium's TimeLimit), as the "
            "value of the final state is not zero there; if the game is over, leave it as it is",
        )
    terminated = sum(bool(episode[-1][keys.TERMINATED]) for episode in ended)
    truncated = sum(bool(episode[-1][keys.TRUNCATED]) for episode in ended)
    both = sum(bool(e[-1][keys.TERMINATED] and e[-1][keys.TRUNCATED]) for e in ended)
    counts = f"{terminated} of {len(played)} episodes terminated, {truncated} were truncated"
    if both:
        counts += f", {both} were both"
    return f"{counts}; {limited}; a step after the end {_after_the_end(exam)}"


def _hidden_limit(ended: list[list[Row]]) -> int:
    """Return the length at which all episodes terminate although they differ; 0 if none."""
    lengths = {len(episode) - 1 for episode in ended}
    if len(ended) < _FEW or len(lengths) > 1 or min(lengths) < 2 * _FEW:
        return 0
    if not all(e[-1][keys.TERMINATED] and not e[-1][keys.TRUNCATED] for e in ended):
        return 0
    unlike = any(row_mismatch(a, b) is not None for a, b in zip(ended[0], ended[-1], strict=False))
    return lengths.pop() if unlike else 0


def _after_the_end(exam: Examination) -> str:
    env = exam.env
    for seed in exam.seeds:
        if exam.play(env, seed)[-1].ends:
            try:
                env.step(env.action_space.sample())
            except Exception as error:
                return f"raises {type(error).__name__}"
            return "goes on (tdcollect resets instead)"
    return "was not tried"


_LEAVE_THE_RESET = (
    "leave the reset to the caller: the value of the last step's observation is bootstrapped"
)


@check(
    GROUP,
    "final",
    "the final observation is the episode's own, not the next one's first",
    advice=_LEAVE_THE_RESET,
)
def _final(exam: Examination) -> str:
    evidence = rules.final(exam)
    jumps = [_jumps_back(episode) for episode in exam.episodes + exam.varied]
    ended = [jump for jump in jumps if jump is not None]
    if len(ended) >= _FEW and all(ended):
        raise Warned(
            f"in all {len(ended)} episodes that ended, the last step jumps: further than any other "
            "step, and to near the first observation",
            cause="an env that restarts itself, and shows the next episode's first observation",
            advice=_LEAVE_THE_RESET,
        )
    return evidence


def _jumps_back(episode: list[Row]) -> bool | None:
    """Return whether the last step goes twice as far as any other, to near the first observation.

    None if the episode did not end, or is too short to tell.
    """
    if not episode[-1].ends or len(episode) < 2 * _FEW:
        return None
    flat = np.stack([_flat(row[keys.OBSERVATION]) for row in episode])
    if not np.isfinite(flat).all():
        return None
    steps = np.linalg.norm(np.diff(flat, axis=0), axis=1)
    to_first = np.linalg.norm(flat - flat[0], axis=1)
    return bool(steps[-1] > 2 * steps[:-1].max() and to_first[-1] < 0.5 * to_first[-2])


def _flat(observation: Any) -> Any:
    arrays = [np.asarray(leaf) for _, leaf in leaves("", observation)]
    numbers = [np.ravel(array).astype(np.float64) for array in arrays if array.dtype.kind in "biuf"]
    return np.concatenate(numbers) if numbers else np.zeros(1)


@check(
    GROUP,
    "aliasing",
    "arrays that the env gave out stay as they were",
    advice="return a copy: self.state.copy(). tdcollect copies at once; replay buffers and loops "
    "that keep the array do not",
)
def _aliasing(exam: Examination) -> str:
    rules.no_aliasing(exam)
    try:
        exam.require("seed", "global-random", "neighbours")
    except Skipped as reason:
        return f"the env does not change them later; writing to them was not tried: {reason}"
    found = _inner_buffer(exam)
    if found and exam.is_changed(exam.seed):
        assert exam.changed is not None
        raise outlives(exam.changed)
    if found and _inner_buffer(exam) != found:
        raise by_chance(exam, found)
    if found:
        raise Failed(
            found,
            cause="the observation is the env's own array",
            advice="return a copy: self.state.copy()",
        )
    return "the env does not change them later, and writing to them does not change it"


def _inner_buffer(exam: Examination) -> str:
    """Return the change in an env's course if its observations are written to; empty if none."""
    alone = exam.fresh[exam.seed][0]
    env = exam.make()
    try:
        for step, row in enumerate(exam.rows(env, exam.seed)):
            found = row_mismatch(alone[step], row)
            if found:
                return (
                    f"step {step}: writing zeros into observations given out changes {found.entry}"
                )
            for _, leaf in leaves("observation", row.given[0]):
                if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                    leaf[...] = 0
            if step == 50:
                break
    finally:
        env.close()
    return ""


check(
    GROUP,
    "actions",
    "a step leaves its action as it was",
    advice="clip into a new array (np.clip(action, ...)): the action is the caller's, and "
    "belongs to the batch",
)(rules.action_kept)


@check(GROUP, "infos", "infos keep their keys, types and shapes")
def _infos(exam: Examination) -> str:
    kinds: dict[str, tuple[str, str]] = {}
    seen: dict[str, int] = {}
    last: dict[str, int] = {}
    steps = 0
    for where, row in exam.all_rows():
        steps += not row.is_reset
        for key, value in row.extra.items():
            seen[key] = seen.get(key, 0) + (not row.is_reset)
            last[key] = last.get(key, 0) + row.ends
            kind = _kind(value)
            first, at = kinds.setdefault(key, (kind, where))
            if kind != first:
                raise Warned(
                    f"info {key!r} is {first} at {at}, and {kind} at {where}",
                    advice=f"info_keys={{{key!r}: example}} says what to expect, if you collect it",
                )
    if not kinds:
        return "no infos"
    fleeting = [key for key in kinds if 0 < seen[key] < steps and seen[key] != last[key]]
    if fleeting:
        key = fleeting[0]
        raise Warned(
            f"info {key!r} is there at {seen[key]} of {steps} steps"
            + (f" (so {', '.join(map(repr, fleeting[1:4]))})" if len(fleeting) > 1 else ""),
            advice=f"a batch holds zeros where it is missing; collected with "
            f"info_keys={{{key!r}: example}}",
        )
    final = [key for key in kinds if seen[key] and seen[key] == last[key] < steps]
    at_ends = f"; at ends only: {', '.join(final)}" if final else ""
    listed = sorted(kinds)[:6] + (["..."] if len(kinds) > 6 else [])
    return f"{', '.join(listed)}{at_ends}"


def _kind(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "a bool"
    if isinstance(value, (int, float, np.number)):
        return "a number"  # of any width: a batch casts it
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}{list(value.shape)}"
    return type(value).__name__
