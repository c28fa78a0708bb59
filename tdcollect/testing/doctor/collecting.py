"""Checks of an env in tdcollect's hands: how it is resumed, its batches, and their speed."""

from __future__ import annotations

import time
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from tdcollect import keys
from tdcollect.checks.difference import mismatch, row_mismatch
from tdcollect.checks.player import Env, Row, gymnasium_row
from tdcollect.checks.registry import Failed, Passed, Skipped, Warned, check
from tdcollect.collect import Collector
from tdcollect.envs.make import make_env
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.testing.doctor.examination import Examination
from tdcollect.testing.doctor.repeating import by_chance, outlives
from tdcollect.workers.pool import usable_cores
from tdcollect.workers.resumable import Resumable

GROUP = "collecting"

_COMPARED_STEPS = 100
_COMPARED_SECONDS = 0.5
_MEASURED_SECONDS = 0.25
_ROUNDS = 2
_SIZES = (1, 8, 32)
_SLOW_STEP = 0.005
_WORTH = 1.1
"""The gain in speed that makes workers, or more envs, worth it."""


@check(
    GROUP,
    "resumes",
    "an interrupted run can be brought back: make_env(resumable=...)",
    needs=["seed", "global-random", "neighbours"],
)
def _resumes(exam: Examination) -> str | Passed:
    if exam.pooled:
        raise Skipped("backend='envpool' cannot bring its envs back")
    reason = _why_not(exam, history=False)
    if reason is None:
        return "resumable=True brings it back amid its second episode"
    other_reason = _why_not(exam, history=True)
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


def _why_not(exam: Examination, history: bool) -> str | None:
    """Return the reason that a new env cannot take over from a used one; None if it can."""
    make = Resumable(exam.make, history)
    env, other = make(), make()
    try:
        steps = max(10, min(_COMPARED_STEPS, _affordable_steps(exam)))
        first = list(islice(exam.rows(env, exam.seed), steps))
        # The second one begins without a seed, as episodes in a batch do.
        second = list(islice(exam.rows(env, None), max(2, len(first) // 2)))
        why: str | None = other.load_state(env.save_state())
        return why or _difference(exam, env, other, second[-1].ends, steps)
    finally:
        for made in (env, other):
            made.close()


def _difference(exam: Examination, env: Env, other: Env, ended: bool, steps: int) -> str | None:
    """Return the first difference of two envs in one state, played with the same actions."""
    actions = deepcopy(env.action_space)
    actions.seed(exam.seed)
    for step in range(steps):
        action = None if ended else actions.sample()
        one, two = (_row(each, action) for each in (env, other))
        found = row_mismatch(one, two)
        if found is not None:
            return f"it comes back, but {step + 1} steps on {found}"
        ended = one.ends
    return None


def _row(env: Env, action: Any) -> Row:
    """Step, or reset if there is no action."""
    return gymnasium_row(env.reset() if action is None else env.step(deepcopy(action)))


def _made(exam: Examination, backend: str, num_envs: int, workers: int | None = None) -> Any:
    if backend != "process":
        workers = None
    return make_env(
        exam.given,
        num_envs,
        backend=backend,
        env_kwargs=exam.kwargs,
        seed=exam.seed,
        num_workers=workers,
    )


def _backends(exam: Examination) -> tuple[str, ...]:
    return ("envpool",) if exam.pooled else ("serial", "process")


@check(GROUP, "batches", "batches hold what a plain loop gives, final observations too")
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
    for backend in _backends(exam):
        try:
            env = _made(exam, backend, 2, 2)
        except Exception as error:
            if backend != "process":
                raise
            raise Warned(
                f"backend='process' does not take it: {' '.join(str(error).split())[:200]}",
                advice="give an id, or a callable that cloudpickle can send",
            ) from error
        steps = _compared_steps(exam)
        ends, found = _compare_with_plain_loop(exam, env, steps)
        if found:
            evidence = f"backend={backend!r} and a plain loop: {found}"
            again = _compare_with_plain_loop(exam, _made(exam, backend, 2, 2), steps)[1]
            if exam.is_changed(exam.seed):
                assert exam.changed is not None
                raise outlives(exam.changed)
            if again != found:
                raise by_chance(exam, evidence)
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
            "the env depends on the process that it runs in: its id, its directory, its "
            "environment variables, modules imported or settings made before"
        )
        advice = "pass to the env what it needs (env_kwargs), or use backend='serial'"
    return Failed(evidence, cause, advice)


def _compared_steps(exam: Examination) -> int:
    """Return the number of steps that shows an episode's end, if that does not take long."""
    ended = [len(episode) for episode in exam.episodes if episode[-1].ends]
    wanted = max(_COMPARED_STEPS, min(ended, default=0) + 10)
    return min(wanted, max(_affordable_steps(exam), 10))


def _affordable_steps(exam: Examination) -> int:
    return int(_COMPARED_SECONDS / max(exam.step_seconds, 1e-6))


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
        actions = [backend.action.read_slots(env.read_actions(batch[:, t])) for t in range(steps)]
        for slot in range(2):
            plain = exam.make()
            try:
                observation = plain.reset(seed=exam.seed + slot)[0]
                for t in range(steps):
                    # Before the step: an env may write into its last observation.
                    backend.observation.write_slot(observation, roots, 0)
                    given, reward, terminated, truncated, _ = plain.step(actions[t][slot])
                    backend.observation.write_slot(given, values, 0)
                    for where, source, rows in (("", batch, roots), ("next ", nexts, values)):
                        for path, expected in zip(paths, rows, strict=False):
                            key = path if len(path) > 1 else path[0]
                            if mismatch("", source[key][slot, t], expected[0]):
                                return 0, f"slot {slot}, step {t}: {where}{key!r} differs"
                    scalars = {
                        keys.REWARD: np.float32(reward),
                        keys.TERMINATED: terminated,
                        keys.TRUNCATED: truncated,
                    }
                    for name, value in scalars.items():
                        if mismatch("", nexts[name][slot, t], np.asarray([value])):
                            return 0, f"slot {slot}, step {t}: {name} differs"
                    ended = bool(terminated) or bool(truncated)
                    observation = plain.reset()[0] if ended else given
            finally:
                plain.close()
        return int(nexts[keys.DONE].sum()), ""
    finally:
        collector.shutdown()


@check(GROUP, "speed", "steps and resets are timed, and the fastest setting is named")
def _speed(exam: Examination) -> Passed:
    if exam.without_form:
        raise Skipped("make_env does not take it (see batches)")
    workers = max(2, usable_cores())
    step, reset = exam.step_seconds, exam.reset_seconds
    settings = [
        (backend, num_envs)
        for backend in _backends(exam)
        for num_envs in _SIZES
        if num_envs == 1 or step < _SLOW_STEP or num_envs == _SIZES[1]
        if backend != "process" or num_envs > 1
    ]
    rates = _rates(exam, settings, workers)
    best = max(rates.values())
    # The first setting that is nearly as fast: fewer envs, no workers.
    backend, num_envs = next(s for s in settings if rates.get(s, 0) * _WORTH >= best)
    figures = ", ".join(f"{name} {n}: {_rounded(rate)}" for (name, n), rate in rates.items())
    process = f", num_workers={min(workers, num_envs)}" if backend == "process" else ""
    return Passed(
        f"{step * 1e6:.3g} us per step, {reset * 1e6:.3g} us per reset. Frames per second with "
        f"random actions, by backend and num_envs: {figures}",
        advice=f"make_env(..., num_envs={num_envs}, backend={backend!r}{process}) where envs take "
        "most of the time; a large policy wants more envs",
        data={
            "step_us": step * 1e6,
            "reset_us": reset * 1e6,
            "frames_per_second": [
                {"backend": name, "num_envs": n, "frames_per_second": rate}
                for (name, n), rate in rates.items()
            ],
            "recommended": {"backend": backend, "num_envs": num_envs},
        },
    )


def _rates(
    exam: Examination, settings: list[tuple[str, int]], workers: int
) -> dict[tuple[str, int], float]:
    """Return frames per second in each setting, the best of a few interleaved rounds."""
    collectors = {}
    rates: dict[tuple[str, int], float] = {}
    step = max(exam.step_seconds, 1e-6)
    try:
        for backend, num_envs in settings:
            rows = max(1, min(256, int(_MEASURED_SECONDS / 4 / step / num_envs)))
            try:
                env = _made(exam, backend, num_envs, min(workers, num_envs))
            except Exception:
                if backend != "process":
                    raise
                continue  # the check of batches reports the error
            collectors[backend, num_envs] = Collector(
                env, None, frames_per_batch=rows * num_envs, total_frames=-1
            )
        for measure in [partial(_rate, seconds=0.0)] + [_rate] * _ROUNDS:  # one batch to warm up
            for setting, collector in collectors.items():
                rates[setting] = max(rates.get(setting, 0.0), measure(collector))
    finally:
        for collector in collectors.values():
            collector.shutdown()
    return rates


def _rate(collector: Collector, seconds: float = _MEASURED_SECONDS) -> float:
    frames, began = 0, time.perf_counter()
    for batch in collector:
        frames += batch.numel()
        if time.perf_counter() - began >= seconds:
            break
    return frames / (time.perf_counter() - began)


def _rounded(rate: float) -> str:
    return f"{float(f'{rate:.2g}'):,.0f}"
