"""Questions on what an env gives out: spaces, numbers, flags, ends, infos."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tdcollect.testing.doctor.divergence import row_difference
from tdcollect.testing.doctor.patient import Patient
from tdcollect.testing.doctor.questions import (
    Answer,
    Questions,
    broken,
    by_chance,
    by_rule,
    ok,
    outlives,
    warning,
)
from tdcollect.testing.doctor.repeating import needs_seed
from tdcollect.testing.gymnasium_probe import Row
from tdcollect.testing.report import NotChecked

_FEW = 3

QUESTIONS = Questions()


def _rows(patient: Patient) -> Iterator[tuple[str, Row]]:
    for i, episode in enumerate(patient.episodes):
        for step, row in enumerate(episode):
            yield f"seed {patient.seed + i}, step {step}", row


@QUESTIONS.add("space", "observations have the space's shape, dtype and bounds")
def _space(patient: Patient) -> Answer:
    answer = by_rule(
        patient,
        "observations lie in the space",
        "the dtype is the space's",
        advice="state the observation_space that the observations keep, or cast and clip them; "
        "batches take shapes and dtypes from it",
    )
    if answer.status == "broken" and _not_finite(patient, np.isnan):
        raise NotChecked(
            "not asked: observations that are no numbers lie in no space (see numbers)"
        )
    return answer


@QUESTIONS.add("numbers", "observations and rewards are numbers, and finite")
def _numbers(patient: Patient) -> Answer:
    nan = _not_finite(patient, np.isnan)
    if nan:
        return broken(nan, advice="find the division or the root that gives it")
    infinite = _not_finite(patient, np.isinf)
    answer = by_rule(
        patient,
        "rewards are finite numbers",
        advice="return a float at each step; one NaN reaches every weight of a policy",
    )
    if answer.status != "ok":
        return answer
    if infinite:
        return warning(infinite, advice="clip it: networks and running means take no infinities")
    types = sorted({type(row.reward).__name__ for _, row in _rows(patient) if not row.is_reset})
    return ok(f"rewards {answer.evidence}, as {' or '.join(types)}")


def _not_finite(patient: Patient, kind: Callable[[Any], Any]) -> str:
    """The first number of this kind in an observation, with its place; empty where none is."""
    for where, row in _rows(patient):
        for entry, leaf in _leaves("observation", row.observation):
            array = np.asarray(leaf)
            if array.dtype.kind == "f" and kind(array).any():
                at = tuple(np.argwhere(kind(array))[0])
                return f"{where}: {entry}{''.join(f'[{i}]' for i in at)} is {array[at]}"
    return ""


def _leaves(entry: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{entry}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _leaves(f"{entry}[{i}]", item)
    else:
        yield entry, value


@QUESTIONS.add("ends", "terminated and truncated are bools, and a time limit truncates")
def _ends(patient: Patient) -> Answer:
    answer = by_rule(
        patient,
        "terminated and truncated are bools",
        advice="return bool(...) for both",
    )
    if answer.status != "ok":
        return answer
    played = [*patient.episodes, *patient.varied]
    ended = [episode for episode in played if episode[-1].ends]
    limit = patient.limit
    limited = f"a time limit of {limit} steps" if limit else "no time limit"
    if not ended:
        if limit:
            return ok(f"{limited}; no episode ended in {patient.steps} steps of random actions")
        return warning(
            f"no episode ended in {patient.steps} steps, and the env has no time limit",
            advice="give it one, as collecting or testing whole episodes would wait for ever: "
            "make_env(..., max_episode_steps=1000)",
        )
    at_once = _lengths_of_a_hidden_limit(patient, ended)
    if at_once:
        return warning(
            f"all {len(ended)} episodes that ended, with different seeds and actions, terminated "
            f"at step {at_once}",
            cause="a time limit that is told as terminated",
            advice="set truncated for a limit (or leave it to gymnasium's TimeLimit): the value of "
            "the final state is not zero there",
        )
    terminated = sum(bool(episode[-1].terminated) for episode in ended)
    truncated = sum(bool(episode[-1].truncated) for episode in ended)
    both = sum(bool(e[-1].terminated and e[-1].truncated) for e in ended)
    told = f"{terminated} of {len(played)} episodes terminated, {truncated} were truncated"
    if both:
        told += f", {both} of them both"
    return ok(f"{told}; {limited}; a step after the end {_after_the_end(patient)}")


def _lengths_of_a_hidden_limit(patient: Patient, ended: list[list[Row]]) -> int:
    """The length at which all episodes terminate though they are different ones; 0 for none."""
    lengths = {len(episode) - 1 for episode in ended}
    if len(ended) < _FEW or len(lengths) > 1 or min(lengths) < 2 * _FEW:
        return 0
    if not all(episode[-1].terminated and not episode[-1].truncated for episode in ended):
        return 0
    unlike = any(
        row_difference(a, b) is not None for a, b in zip(ended[0], ended[-1], strict=False)
    )
    return lengths.pop() if unlike else 0


def _after_the_end(patient: Patient) -> str:
    env = patient.env
    for seed in patient.seeds:
        if patient.play(env, seed)[-1].ends:
            try:
                env.step(env.action_space.sample())
            except Exception as error:
                return f"raises {type(error).__name__}"
            return "goes on (tdcollect resets instead)"
    return "was not tried"


@QUESTIONS.add("final", "the final observation is the episode's own, not the next one's first")
def _final(patient: Patient) -> Answer:
    advice = "leave the reset to the caller: the value of what the last step shows is bootstrapped"
    answer = by_rule(
        patient, "the final observation is not the next episode's first", advice=advice
    )
    jumps = [_jumps_back(episode) for episode in patient.episodes + patient.varied]
    ended = [jump for jump in jumps if jump is not None]
    if answer.status == "ok" and len(ended) >= _FEW and all(ended):
        return warning(
            f"in all {len(ended)} episodes that ended, the last step jumps: further than any other "
            "step, and to near the first observation",
            cause="an env that restarts itself, and shows the next episode's first observation",
            advice=advice,
        )
    return answer


def _jumps_back(episode: list[Row]) -> bool | None:
    """Whether the last step goes further than twice any other, to near the first observation.

    None where the episode did not end, or is too short to tell.
    """
    if not episode[-1].ends or len(episode) < 2 * _FEW:
        return None
    flat = np.stack([_flat(row.observation) for row in episode])
    if not np.isfinite(flat).all():
        return None
    steps = np.linalg.norm(np.diff(flat, axis=0), axis=1)
    to_first = np.linalg.norm(flat - flat[0], axis=1)
    return bool(steps[-1] > 2 * steps[:-1].max() and to_first[-1] < 0.5 * to_first[-2])


def _flat(observation: Any) -> Any:
    leaves = [np.asarray(leaf) for _, leaf in _leaves("", observation)]
    numbers = [np.ravel(leaf).astype(np.float64) for leaf in leaves if leaf.dtype.kind in "biuf"]
    return np.concatenate(numbers) if numbers else np.zeros(1)


@QUESTIONS.add("aliasing", "what is given out stays as it was")
def _aliasing(patient: Patient) -> Answer:
    answer = by_rule(
        patient,
        "entries given out do not change later (no aliasing)",
        advice="return a copy: self.state.copy(). tdcollect copies at once; replay buffers and "
        "loops that keep the array do not",
    )
    if answer.status != "ok":
        return answer
    try:
        needs_seed(patient)
        patient.needs("global-random", "neighbours")
    except NotChecked as reason:
        return ok(f"not by the env later; nor was the env written to: {reason}")
    found = _inner_buffer(patient)
    if found and patient.is_changed(patient.seed):
        assert patient.changed is not None
        return outlives(patient.changed)
    if found and _inner_buffer(patient) != found:
        return by_chance(patient, found)
    if found:
        return broken(
            found,
            cause="the observation is the env's own array",
            advice="return a copy: self.state.copy()",
        )
    return ok("neither by the env later, nor the env by who writes to it")


def _inner_buffer(patient: Patient) -> str:
    """Whether an env goes another way where what it gave out is written to."""
    alone = patient.fresh[patient.seed][0]
    env = patient.make()
    try:
        for step, row in enumerate(patient.rows(env, patient.seed)):
            found = row_difference(alone[step], row)
            if found:
                return f"step {step}: writing zeros into observations given out changes {found[0]}"
            for _, leaf in _leaves("observation", row.given[0]):
                if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                    leaf[...] = 0
            if step == 50:
                break
    finally:
        env.close()
    return ""


@QUESTIONS.add("actions", "a step leaves its action as it was")
def _actions(patient: Patient) -> Answer:
    return by_rule(
        patient,
        "a step leaves its action as it was",
        advice="clip into a new array (np.clip(action, ...)): the action is the caller's, and "
        "belongs to the batch",
    )


@QUESTIONS.add("infos", "infos keep their keys, types and shapes")
def _infos(patient: Patient) -> Answer:
    kinds: dict[str, tuple[str, str]] = {}
    seen: dict[str, int] = {}
    last: dict[str, int] = {}
    steps = 0
    for where, row in _rows(patient):
        steps += not row.is_reset
        for key, value in row.info.items():
            seen[key] = seen.get(key, 0) + (not row.is_reset)
            last[key] = last.get(key, 0) + row.ends
            kind = _kind(value)
            first, at = kinds.setdefault(key, (kind, where))
            if kind != first:
                return warning(
                    f"info {key!r} is {first} at {at}, and {kind} at {where}",
                    advice=f"info_keys={{{key!r}: example}} says what to expect, if you collect it",
                )
    if not kinds:
        return ok("no infos")
    fleeting = [key for key in kinds if 0 < seen[key] < steps and seen[key] != last[key]]
    if fleeting:
        key = fleeting[0]
        return warning(
            f"info {key!r} is there at {seen[key]} of {steps} steps"
            + (f" (so {', '.join(map(repr, fleeting[1:4]))})" if len(fleeting) > 1 else ""),
            advice=f"a batch holds zeros where it is missing; collected with "
            f"info_keys={{{key!r}: example}}",
        )
    final = [key for key in kinds if seen[key] and seen[key] == last[key] < steps]
    at_ends = f"; at ends only: {', '.join(final)}" if final else ""
    shown = sorted(kinds)[:6] + (["..."] if len(kinds) > 6 else [])
    return ok(f"{', '.join(shown)}{at_ends}")


def _kind(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "a bool"
    if isinstance(value, (int, float, np.number)):
        return "a number"  # whatever its width: a batch casts it
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}{list(value.shape)}"
    return type(value).__name__
