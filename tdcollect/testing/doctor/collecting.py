"""Questions on the env in tdcollect's hands: the data of each backend, and their speed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from tdcollect import keys
from tdcollect.collect import Collector
from tdcollect.envs.make import make_env
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.testing.doctor.patient import Patient
from tdcollect.testing.doctor.questions import (
    Answer,
    Questions,
    broken,
    by_chance,
    ok,
    outlives,
    warning,
)
from tdcollect.testing.doctor.repeating import needs_seed
from tdcollect.testing.report import NotChecked
from tdcollect.workers.pool import usable_cores

_COMPARED_STEPS = 100
_COMPARED_SECONDS = 0.5
_MEASURED_SECONDS = 0.25
_ROUNDS = 2
_SIZES = (1, 8, 32)
_SLOW_STEP = 0.005
_WORTH = 1.1
"""How many times as fast a setting must be to be worth workers, or more envs."""

QUESTIONS = Questions()


def _made(patient: Patient, backend: str, num_envs: int, workers: int | None = None) -> Any:
    if backend != "process":
        workers = None
    return make_env(
        patient.given,
        num_envs,
        backend=backend,
        env_kwargs=patient.kwargs,
        seed=patient.seed,
        num_workers=workers,
    )


def _backends(patient: Patient) -> tuple[str, ...]:
    return ("envpool",) if patient.pooled else ("serial", "process")


@QUESTIONS.add("batches", "batches hold what a plain loop gives, final observations too")
def _batches(patient: Patient) -> Answer:
    if patient.without_form:
        return broken(
            f"make_env does not take it: {patient.without_form}",
            advice="wrap the env; what it does is not at fault",
        )
    needs_seed(patient)
    patient.needs("leaks", "global-random", "neighbours", "space", "numbers", "ends")
    if patient.leak is not None:
        raise NotChecked("episodes depend on those before (see leaks)")
    seen = []
    for backend in _backends(patient):
        try:
            env = _made(patient, backend, 2, 2)
        except Exception as error:
            if backend != "process":
                raise
            return warning(
                f"backend='process' does not take it: {' '.join(str(error).split())[:200]}",
                advice="give an id, or a callable that cloudpickle can send",
            )
        steps = _compared_steps(patient)
        ends, found = _compare_with_plain_loop(patient, env, steps)
        if found:
            told = f"backend={backend!r} and a plain loop: {found}"
            again = _compare_with_plain_loop(patient, _made(patient, backend, 2, 2), steps)[1]
            if patient.is_changed(patient.seed):
                assert patient.changed is not None
                return outlives(patient.changed)
            if again != found:
                return by_chance(patient, told)
            return broken(told, **_why_unlike(backend))
        seen.append(f"{backend}: {2 * steps} rows, {ends} of them final")
    return ok("; ".join(seen))


def _why_unlike(backend: str) -> dict[str, str]:
    """The likely cause, where repeated runs in this process agree in all that was asked before."""
    if backend == "envpool":
        cause = "slots of one pool are not what a pool of one slot is"
        return {"cause": cause, "advice": "use the pool for training, and one slot for tests"}
    if backend == "process":
        return {
            "cause": "the env depends on the process that it runs in: its id, its directory, its "
            "environment variables, what was imported or set before",
            "advice": "pass to the env what it needs (env_kwargs), or use backend='serial'",
        }
    return {
        "cause": "not known: in a plain loop the env repeats itself",
        "advice": "report it to tdcollect, with the env",
    }


def _compared_steps(patient: Patient) -> int:
    """As many as show an episode's end, if that does not take long."""
    ended = [len(episode) for episode in patient.episodes if episode[-1].ends]
    wanted = max(_COMPARED_STEPS, min(ended, default=0) + 10)
    affordable = int(_COMPARED_SECONDS / max(patient.step_seconds, 1e-6))
    return min(wanted, max(affordable, 10))


def _compare_with_plain_loop(patient: Patient, env: GymnasiumEnv, steps: int) -> tuple[int, str]:
    """How many rows of a batch are final, and where it differs from a plain loop, if anywhere."""
    collector = Collector(env, None, frames_per_batch=2 * steps, total_frames=2 * steps)
    try:
        collector.set_seed(patient.seed)
        torch.manual_seed(patient.seed)  # for the actions
        batch = next(iter(collector))
        backend, paths = env.stepper.backend, [e.path for e in env.stepper.entries]
        nexts = batch[keys.NEXT]
        roots, values = backend.observation.empty(1), backend.observation.empty(1)
        actions = [backend.action.read_slots(env.read_actions(batch[:, t])) for t in range(steps)]
        for slot in range(2):
            plain = patient.make()
            try:
                observation = plain.reset(seed=patient.seed + slot)[0]
                for t in range(steps):
                    # Before the step: an env may write into what it gave out.
                    backend.observation.write_slot(observation, roots, 0)
                    given, reward, terminated, truncated, _ = plain.step(actions[t][slot])
                    backend.observation.write_slot(given, values, 0)
                    for where, source, rows in (("", batch, roots), ("next ", nexts, values)):
                        for path, expected in zip(paths, rows, strict=False):
                            key = path if len(path) > 1 else path[0]
                            if not _same(source[key][slot, t], expected[0]):
                                return 0, f"slot {slot}, step {t}: {where}{key!r} differs"
                    told = {
                        keys.REWARD: np.float32(reward),
                        keys.TERMINATED: terminated,
                        keys.TRUNCATED: truncated,
                    }
                    for name, number in told.items():
                        if not _same(nexts[name][slot, t], np.asarray([number])):
                            return 0, f"slot {slot}, step {t}: {name} differs"
                    ended = bool(terminated) or bool(truncated)
                    observation = plain.reset()[0] if ended else given
            finally:
                plain.close()
        return int(nexts[keys.DONE].sum()), ""
    finally:
        collector.shutdown()


def _same(given: torch.Tensor, expected: Any) -> bool:
    return np.array_equal(given.numpy(), expected, equal_nan=given.is_floating_point())


@QUESTIONS.add("speed", "how long steps take, and what pays off here")
def _speed(patient: Patient) -> Answer:
    if patient.without_form:
        raise NotChecked("make_env does not take it (see batches)")
    workers = max(2, usable_cores())
    step, reset = patient.step_seconds, patient.reset_seconds
    settings = [
        (backend, num_envs)
        for backend in _backends(patient)
        for num_envs in _SIZES
        if num_envs == 1 or step < _SLOW_STEP or num_envs == _SIZES[1]
        if backend != "process" or num_envs > 1
    ]
    rates = _rates(patient, settings, workers)
    best = max(rates.values())
    # The first that is nearly as fast: fewer envs, no workers.
    backend, num_envs = next(s for s in settings if rates.get(s, 0) * _WORTH >= best)
    told = ", ".join(f"{name} {n}: {_rounded(rate)}" for (name, n), rate in rates.items())
    process = f", num_workers={min(workers, num_envs)}" if backend == "process" else ""
    return ok(
        f"{step * 1e6:.3g} us a step, {reset * 1e6:.3g} us a reset. Frames a second with random "
        f"actions, by backend and num_envs: {told}",
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
    patient: Patient, settings: list[tuple[str, int]], workers: int
) -> dict[tuple[str, int], float]:
    """Frames a second in each setting, the best of a few interleaved rounds."""
    collectors = {}
    rates: dict[tuple[str, int], float] = {}
    step = max(patient.step_seconds, 1e-6)
    try:
        for backend, num_envs in settings:
            rows = max(1, min(256, int(_MEASURED_SECONDS / 4 / step / num_envs)))
            try:
                env = _made(patient, backend, num_envs, min(workers, num_envs))
            except Exception:
                if backend != "process":
                    raise
                continue  # what it says is told by the question on batches
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
