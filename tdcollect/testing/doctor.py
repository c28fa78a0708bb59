"""``diagnose``: whether an env is fit for collecting and testing, with likely causes and advice."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from tdcollect import check, keys
from tdcollect.cleanup import close_may_fail
from tdcollect.collect import Collector
from tdcollect.envs.backends import check_task_id
from tdcollect.envs.make import alike, make_env
from tdcollect.envs.process.worker import spec_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.processes.child import children_hash_by, hash_seed
from tdcollect.randomness import GlobalRandomness, global_states_kept, held_generators
from tdcollect.seeding import slot_seed
from tdcollect.testing import checks, rules
from tdcollect.testing.checks import (
    Failed,
    Passed,
    Row,
    Skipped,
    Warned,
    first_divergence,
    leaves,
    mismatch,
    row_mismatch,
)
from tdcollect.testing.examination import COMPARED_STEPS, GLOBAL, OWN_RANDOM, Examination, Leak

GROUP = "doctor"
_rule = partial(checks.rule, GROUP)

_WATCHED_STEPS = 200


@_rule("seed", "a seed decides the episodes that follow it")
def _seed(exam: Examination) -> str:
    difference = exam.unrepeatable
    if difference is not None:
        raise Failed(
            f"two new envs under one seed and the same actions: {difference}",
            cause=_why_unrepeatable(exam, difference),
            advice=OWN_RANDOM,
            data=difference.to_dict(),
        )
    first = exam.fresh[exam.seed]
    others = [exam.fresh[seed] for seed in exam.seeds[1:]]
    seeds = f"seeds {exam.seeds[0]} to {exam.seeds[-1]}"
    if any(first_divergence(0, first[:1], other) for other in others):
        count = sum(len(episode) - 1 for run in exam.fresh.values() for episode in run)
        return f"{seeds} on two new envs each: the same {count} steps"
    again = first_divergence(exam.seed, first[:1], first[1:])
    if again is not None:
        raise Failed(
            f"{seeds} give one and the same episode, and a reset without a seed gives another",
            cause="the env ignores its seed: its random numbers come from a generator that "
            "reset(seed=) does not reach, or what differs is carried over",
            advice=OWN_RANDOM,
        )
    raise Warned(
        f"{seeds} give one and the same episode",
        cause="the env leaves nothing to chance, or nothing that random actions reach",
        advice="if that is meant, one test episode of a deterministic policy is enough, as all are "
        "the same; else draw the start, say, from self.np_random in reset",
    )


def _why_unrepeatable(exam: Examination, difference: checks.Divergence) -> str:
    where = "reset" if difference.step == 0 else "step"
    for name, said in GLOBAL.items():
        if exam.repeats_with([name]):
            return f"{said}: the runs agree once that global generator starts from the same state"
    if exam.repeats_with(GLOBAL):
        return "several of the global generators of numpy, random and torch"
    if difference.is_small:
        return checks.SUMS
    return (
        f"random numbers in {where} from a generator of the env's own that reset(seed=) does not "
        "seed, state shared by envs, or the clock (seeding the global generators changes nothing)"
    )


@_rule("leaks", "nothing leaks from one episode into the next", needs=["seed"])
def _leaks(exam: Examination) -> str:
    leak = exam.leak
    if exam.changed is not None:
        raise Skipped("a new env no longer does what the first ones did (see neighbours)")
    if exam.unsteady is not None:
        raise exam.by_chance(f"a new env, and one used before: {exam.unsteady}", exam.unsteady)
    if leak is None:
        same = f"the same in {2 * len(exam.seeds)} episodes of any order"
        if exam.pooled:
            return f"new pools for seeded resets: {same}"
        return f"a used env and new ones: {same}, and after a life of {exam.lifetime} steps"
    evaluated = (
        "evaluate(..., fresh_envs=True), as its own probe is too short to find this"
        if leak.late
        else "tdcollect.evaluate detects this and makes them"
    )
    used = f"episodes ended: {leak.played}" + (f", steps: {leak.lifetime}" if leak.late else "")
    raise Failed(
        f"a new env, and one used before ({used}): {leak.divergence}",
        cause=_why_leaking(leak),
        advice="set all that an episode changes in reset. As it is, one episode cannot be "
        f"resumed by replay (see resumes), and test episodes need a new env each ({evaluated})",
        data={
            **leak.divergence.to_dict(),
            "attributes": leak.attributes,
            "lifetime": leak.lifetime,
        },
    )


def _why_leaking(leak: Leak) -> str:
    if left := leak.attributes:
        listed = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        return f"the same seeded reset leaves these unlike: {listed}"
    if leak.divergence.step == 0:
        return "the reset depends on the state that the episode before left"
    if leak.divergence.is_small:
        return (
            "a difference of the size of rounding, after a reset that shows none: a simulator that "
            "is not built anew (contacts, warm starts, the order of its bodies)"
        )
    return "state that the first observation does not show, and that reset does not set"


@_rule("global-random", "the env leaves the global random numbers alone")
def _global_random(exam: Examination) -> str:
    called: dict[str, list[str]] = {}
    watch = GlobalRandomness()

    held: dict[str, bytes] = {}

    def note(call: str, env: Any) -> None:
        nonlocal watch, held
        before, held = held, held_generators(type(env.unwrapped).__module__)
        moved = watch.moved() + [n for n, state in held.items() if before.get(n, state) != state]
        for name in moved:
            calls = called.setdefault(GLOBAL.get(name, name), [])
            if call not in calls:
                calls.append(call)
        if moved:
            watch = GlobalRandomness()

    with global_states_kept(), closing(exam.make()) as env:
        note("construction", env)
        steps = 0
        for row in exam.rows(env, exam.seed):
            note("reset" if row.is_reset else "step", env)
            steps += not row.is_reset
            if steps == _WATCHED_STEPS:
                break
    if not called:
        return f"np.random, random and torch are as they were after a reset and {steps} steps"
    draws = "; ".join(f"{name} at {', '.join(calls)}" for name, calls in called.items())
    evidence = f"drawn from or seeded: {draws}"
    if all(calls == ["construction"] for calls in called.values()):
        raise Warned(
            evidence,
            advice="two envs made one after the other may differ, whatever their seeds; draw "
            "in reset, from self.np_random",
            data=called,
        )
    raise Failed(
        evidence,
        cause="episodes depend on what else in the process draws random numbers, and it on them",
        advice=OWN_RANDOM,
        data=called,
    )


@_rule("neighbours", "envs in one process leave each other alone", needs=["seed", "global-random"])
def _neighbours(exam: Examination) -> str:
    if exam.changed is not None:
        exam.check_unchanged()
    alone = exam.fresh[exam.seed][:1]
    rows = exam.in_turn(len(alone[0]) // 2)
    difference = first_divergence(exam.seed, alone, [rows])
    exam.check_unchanged()
    if difference is None:
        return f"{len(rows) - 1} steps alone and in turn with others: the same"
    raise Failed(
        f"alone, and in turn with another env: {difference}",
        cause="state that envs share: class attributes, module globals, global random numbers, or "
        "a simulator of which there is one",
        advice="keep state in self, made in __init__ or reset. As it is, give each env a process "
        "of its own: make_env(..., backend='process', num_workers=num_envs)",
        data=difference.to_dict(),
    )


_FEW = 3


@_rule(
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


@_rule(
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


@_rule(
    "ends",
    "terminated and truncated are bools, and a time limit truncates",
    advice="return bool(...) for both",
)
def _ends(exam: Examination) -> str:
    rules.flags(exam)
    played = [*exam.episodes, *exam.varied]
    ended = [episode for episode in played if episode[-1].ends]
    steps, limit = exam.max_episode_steps, exam.limit
    limited = f"a time limit of {limit} steps" if limit else "no TimeLimit around it"
    if not ended:
        if limit:
            return f"{limited}; no episode ended in {steps} steps of random actions"
        raise Warned(
            f"no episode ended in {steps} steps, and there is no TimeLimit around the env",
            advice="unless it has a longer limit of its own, give it one, as collecting or testing "
            "by episodes would wait for ever: make_env(..., max_episode_steps=1000)",
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


@_rule(
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
    """True if the last step goes far, to near the first observation; None if none can tell."""
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


@_rule(
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
    change = _inner_buffer(exam)
    if change is None:
        return "the env does not change them later, and writing to them does not change it"
    exam.check_unchanged()
    if str(_inner_buffer(exam)) != str(change):
        raise exam.by_chance(f"two new envs: {change}", change)
    raise Failed(
        f"step {change.step}: writing zeros into observations given out changes {change.entry}",
        cause="the observation is the env's own array",
        advice="return a copy: self.state.copy()",
    )


def _inner_buffer(exam: Examination) -> checks.Divergence | None:
    """Return the change in an env's course if its observations are written to; None if none."""
    alone = exam.fresh[exam.seed][0]
    with exam.another() as env:
        for step, row in enumerate(exam.rows(env, exam.seed)):
            if difference := row_mismatch(alone[step], row):
                return checks.Divergence(exam.seed, 0, step, *difference)
            for _, leaf in leaves("observation", row.returned[0]):
                if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                    leaf[...] = 0
            if step == 50:
                break
    return None


_rule(
    "actions",
    "a step leaves its action as it was",
    advice="clip into a new array (np.clip(action, ...)): the action is the caller's, and "
    "belongs to the batch",
)(rules.action_kept)


@_rule("infos", "infos keep their keys, types and shapes")
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


@_rule(
    "resumes",
    "an interrupted run can be brought back: make_env(resumable=...)",
    needs=["seed", "global-random", "neighbours"],
)
def _resumes(exam: Examination) -> str | Passed:
    if exam.pooled:
        raise Skipped("backend='envpool' cannot bring its envs back")
    reason = exam.why_not_resumed(history=False)
    if reason is None:
        return "resumable=True brings it back amid its second episode"
    other_reason = exam.why_not_resumed(history=True)
    if other_reason is None:
        return Passed(
            "resumable='history' brings it back, playing all of its episodes again; "
            f"resumable=True does not: {reason}",
            advice="make_env(..., resumable='history') for runs that are to be resumed",
        )
    raise Warned(
        f"resumable=True does not bring it back: {reason}; nor does resumable='history': "
        f"{other_reason}",
        advice="give it snapshot() and restore(snapshot); as it is, a resumed run begins new "
        "episodes in all slots",
    )


def _made(exam: Examination, backend: str) -> GymnasiumEnv:
    with children_hash_by("2" if hash_seed() == "1" else "1"):
        return make_env(
            exam.source,
            2,
            backend=backend,
            env_kwargs=exam.kwargs,
            seed=exam.seed,
            num_workers=2 if backend == "process" else None,
        )


@_rule("batches", "batches hold what a plain loop gives, final observations too")
def _batches(exam: Examination) -> str:
    if exam.without_form:
        raise Failed(
            f"make_env does not take it: {exam.without_form}",
            advice="wrap the env; what it does is not at fault",
        )
    exam.require("seed", "leaks", "global-random", "neighbours", "space", "numbers", "ends")
    if exam.leak is not None:
        raise Skipped("episodes depend on those before (see leaks)")
    seen = []
    for backend in ("envpool",) if exam.pooled else ("serial", "process"):
        try:
            env = _made(exam, backend)
        except Exception as error:
            if backend != "process":
                raise
            raise Warned(
                f"backend='process' does not take it: {' '.join(str(error).split())[:200]}",
                advice="give an id, or a callable that cloudpickle can send",
            ) from error
        steps = _compared_steps(exam)
        ends, difference = _compare_with_plain_loop(exam, env, steps)
        if difference:
            evidence = f"backend={backend!r} and a plain loop: {difference}"
            again = _compare_with_plain_loop(exam, _made(exam, backend), steps)[1]
            exam.check_unchanged()
            if again != difference:
                raise exam.by_chance(evidence)
            raise _unlike(backend, evidence)
        seen.append(f"{backend}: {2 * steps} rows, {ends} of them final")
    return "; ".join(seen)


def _unlike(backend: str, evidence: str) -> Failed:
    """Return the failure of a backend, given that runs in this process agreed so far."""
    cause = "unknown: in a plain loop the env repeats itself"
    advice = "report it to tdcollect, with the env"
    if backend == "envpool":
        cause = "slots of one pool differ from a pool of one slot"
        advice = "use the pool for training, and one slot for tests"
    if backend == "process":
        cause = (
            "the env depends on the process that it runs in: the order of a set of strings, or "
            "hash() of one, which differ in each process; or its id, directory, environment "
            "variables, modules imported"
        )
        advice = (
            "sort such sets, or set PYTHONHASHSEED before Python starts; pass to the env what it "
            "needs (env_kwargs), or use backend='serial'"
        )
    return Failed(evidence, cause, advice)


def _compared_steps(exam: Examination) -> int:
    """Return the number of steps that shows an episode's end, if that does not take long."""
    ended = [len(episode) for episode in exam.episodes if episode[-1].ends]
    wanted = max(COMPARED_STEPS, min(ended, default=0) + 10)
    return min(wanted, exam.affordable_steps())


def _compare_with_plain_loop(exam: Examination, env: GymnasiumEnv, steps: int) -> tuple[int, str]:
    """Return the number of final rows of a batch, and its difference from a plain loop, if any."""
    collector = Collector(env, None, frames_per_batch=2 * steps, total_frames=2 * steps)
    try:
        collector.set_seed(exam.seed)
        torch.manual_seed(exam.seed)  # for the actions
        batch = next(iter(collector))
        backend, paths = env.stepper.backend, [e.path for e in env.stepper.entries]
        nexts = batch[keys.NEXT]
        roots, values = backend.observation.empty(1), backend.observation.empty(1)
        actions = [
            backend.action.read_slots(backend.action.of_step(batch[:, t], env.batch_size))
            for t in range(steps)
        ]
        for slot in range(2):
            with exam.another() as plain:
                observation = plain.reset(seed=slot_seed(exam.seed, slot))[0]
                for t in range(steps):
                    # Before the step: an env may write into its last observation.
                    backend.observation.write_slot(observation, roots, 0)
                    following, reward, terminated, truncated, _ = plain.step(actions[t][slot])
                    backend.observation.write_slot(following, values, 0)
                    for where, source, rows in (("", batch, roots), ("next ", nexts, values)):
                        for path, row in zip(paths, rows, strict=False):
                            key = keys.key_of(path)
                            first = not where and key in env.reward_keys  # of agents
                            expected = env.texts[key].read(row) if key in env.texts else row
                            if not first and mismatch("", source[slot, t][key], expected[0]):
                                return 0, f"slot {slot}, step {t}: {where}{key!r} differs"
                    scalars = {
                        keys.REWARD: np.float32(reward),
                        keys.TERMINATED: terminated,
                        keys.TRUNCATED: truncated,
                    }
                    for name, value in scalars.items():
                        collected = nexts.get(name, None)  # agents have rewards of their own
                        if collected is not None and mismatch(
                            "", collected[slot, t], np.asarray([value])
                        ):
                            return 0, f"slot {slot}, step {t}: {name} differs"
                    ended = bool(terminated) or bool(truncated)
                    observation = plain.reset()[0] if ended else following
        return int(nexts[keys.DONE].sum()), ""
    finally:
        collector.shutdown()


def diagnose(
    env: str | Callable[[], gym.Env[Any, Any]],
    *,
    backend: str | None = None,
    max_episode_steps: int = 1000,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
) -> checks.Report:
    """Check whether an env is fit for collecting and testing.

    Each run is bounded: episodes are cut after ``max_episode_steps`` steps or about two seconds.
    An env that raises gets a finding. Global random states are restored.

    Args:
        env: a gymnasium id, a callable that makes a new ``gymnasium.Env`` at each call, or with
            ``backend="envpool"`` an EnvPool id.
        backend: None, or ``"envpool"``.
        max_episode_steps: the most steps that an episode is played for.
        seed: the first of the seeds that are tried.
        env_kwargs: passed to ``gymnasium.make``, to the callable or to EnvPool.
        skip: names of checks to leave out, whose faults are known and intended.

    Returns:
        A report with one finding per check; print it, or call ``raise_if_failed()``.

    Raises:
        TypeError, ValueError: for arguments that cannot be honoured.
        gymnasium.error.Error: for an unknown id.
        ModuleNotFoundError: for an id whose module does not exist.

    Examples:
        >>> print(diagnose("CartPole-v1"))
        >>> diagnose(MyEnv).raise_if_failed()
    """
    chosen = checks.select("runs") | checks.select(GROUP, skip=skip)
    _check_arguments(env, backend, max_episode_steps)
    kwargs = alike(env, env_kwargs) or {}
    exam = Examination(env, backend, kwargs, max_episode_steps, seed)
    with global_states_kept():
        try:
            with warnings.catch_warnings(action="ignore"), torch.no_grad():
                findings = checks.run_checks(chosen.values(), exam, skip)
        finally:
            with close_may_fail(exits=True):  # the findings stand
                exam.close()
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    return checks.Report(name, findings)


@checks.rule("runs", "runs", "the env can be made, reset and stepped")
def _runs(exam: Examination) -> str:
    most = exam.max_episode_steps
    exam.open()
    exam.time()
    evidence = rules.episodes_run(exam)
    steps = exam.max_episode_steps
    cut = "" if steps == most else f"; cut at {steps}, to bound time or memory"
    played = f"{evidence} with random actions{cut}"
    if not callable(replaced := exam.env.action_space.seed):
        raise Warned(
            f"{played}; action_space.seed is {replaced!r}, no method any more",
            cause="the env sets action_space.seed",
            advice="call it: self.action_space.seed(seed)",
        )
    return played


def _check_arguments(env: Any, backend: Any, max_episode_steps: int) -> None:
    """Raise for arguments that cannot be honoured, an unknown id too: a typo says nothing."""
    if isinstance(env, gym.Env) or not (isinstance(env, str) or callable(env)):
        raise TypeError(
            "expected a gymnasium id or a callable that makes a new env at each call, as new envs "
            f"are compared with used ones, got {env!r}"
        )
    check.one_of((None, "envpool"), backend=backend)
    if backend == "envpool" and not isinstance(env, str):
        raise TypeError(f"backend='envpool' expects an EnvPool id, got {env!r}")
    check.positive_int(max_episode_steps=max_episode_steps)
    if backend == "envpool":
        check_task_id(env)
    elif isinstance(env, str):
        module, _, name = env.rpartition(":")
        if module:
            importlib.import_module(module)
        spec_of(name)
