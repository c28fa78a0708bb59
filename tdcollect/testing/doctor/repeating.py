"""Questions whose answer is a comparison of runs that should agree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from tdcollect.evaluation.episodes.isolation import GlobalRandomness
from tdcollect.testing.doctor.divergence import Divergence, first_divergence
from tdcollect.testing.doctor.patient import GLOBAL, Leak, Patient
from tdcollect.testing.doctor.questions import (
    OWN_RANDOM,
    Answer,
    Questions,
    broken,
    by_chance,
    ok,
    outlives,
    warning,
)
from tdcollect.testing.gymnasium_probe import Env, Row
from tdcollect.testing.report import NotChecked

_WATCHED_STEPS = 200

QUESTIONS = Questions()


@QUESTIONS.add("seed", "a seed decides the episodes that follow it")
def _seed(patient: Patient) -> Answer:
    found = patient.unrepeatable
    if found is not None:
        return broken(
            f"two new envs under one seed and the same actions: {found}",
            cause=_why_unrepeatable(patient, found),
            advice=OWN_RANDOM,
            data=found.to_dict(),
        )
    first = patient.fresh[patient.seed]
    others = [patient.fresh[seed] for seed in patient.seeds[1:]]
    seeds = f"seeds {patient.seeds[0]} to {patient.seeds[-1]}"
    if any(first_divergence(0, first[:1], other) for other in others):
        count = sum(len(episode) - 1 for run in patient.fresh.values() for episode in run)
        return ok(f"{seeds} on two new envs each: the same {count} steps")
    again = first_divergence(patient.seed, first[:1], first[1:])
    if again is not None:
        return broken(
            f"{seeds} give one and the same episode, and a reset without a seed gives another",
            cause="the env ignores its seed: its random numbers come from a generator that "
            "reset(seed=) does not reach, or what differs is carried over",
            advice=OWN_RANDOM,
        )
    return ok(f"{seeds} give one and the same episode: nothing is left to chance")


def _why_unrepeatable(patient: Patient, found: Divergence) -> str:
    where = "reset" if found.step == 0 else "step"
    for names in ([name] for name in GLOBAL):
        if patient.repeats_with(names):
            return (
                f"{GLOBAL[names[0]]}: the runs agree once that global generator starts from the "
                "same state"
            )
    if patient.repeats_with(GLOBAL):
        return "several of the global generators of numpy, random and torch"
    return (
        f"random numbers in {where} from a generator of the env's own that reset(seed=) does not "
        "seed, state shared by envs, or the clock (seeding the global generators changes nothing)"
    )


@QUESTIONS.add("leaks", "nothing leaks from one episode into the next")
def _leaks(patient: Patient) -> Answer:
    needs_seed(patient)
    leak = patient.leak
    if patient.changed is not None:
        raise NotChecked("a new env no longer does what the first ones did (see neighbours)")
    if patient.unsteady is not None:
        return by_chance(
            patient, f"a new env, and one used before: {patient.unsteady}", patient.unsteady
        )
    if leak is None:
        told = f"the same in {2 * len(patient.seeds)} episodes of any order"
        if patient.pooled:
            return ok(f"new pools for seeded resets: {told}")
        return ok(f"a used env and new ones: {told}, and after a life of {patient.lifetime} steps")
    evaluated = (
        "evaluate(..., fresh_envs=True), as its own look is shorter than that life"
        if leak.late
        else "tdcollect.evaluate finds that out and makes them"
    )
    used = f"episodes ended: {leak.played}" + (f", steps: {leak.lifetime}" if leak.late else "")
    return broken(
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


def needs_seed(patient: Patient) -> None:
    """Raise NotChecked where runs on one seed have nothing in common to be compared by."""
    patient.needs("seed")
    if patient.has_chance is not None:
        found_by = patient.broken[patient.has_chance]
        raise NotChecked(f"not asked: runs differ by chance as it is (see {found_by})")
    if patient.unrepeatable is not None:
        raise NotChecked("new envs differ under one seed as it is (see seed)")


def _why_leaking(leak: Leak) -> str:
    left = leak.attributes
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        return f"the same seeded reset leaves these unlike: {shown}"
    if leak.divergence.step == 0:
        return "the reset builds on what the episode before left behind"
    if leak.divergence.is_small:
        return (
            "a difference of the size of rounding, after a reset that shows none: a simulator that "
            "is not built anew (contacts, warm starts, the order of its bodies)"
        )
    return "state that no observation shows at the reset, and that reset leaves as it was"


@QUESTIONS.add("global-random", "the env leaves the global random numbers alone")
def _global_random(patient: Patient) -> Answer:
    called: dict[str, list[str]] = {}
    watch = GlobalRandomness()

    def note(call: str) -> None:
        nonlocal watch
        moved = watch.moved()
        for name in moved:
            calls = called.setdefault(GLOBAL.get(name, name), [])
            if call not in calls:
                calls.append(call)
        if moved:
            watch = GlobalRandomness()

    before = GlobalRandomness()
    env = patient.make()
    try:
        note("construction")
        steps = 0
        for row in patient.rows(env, patient.seed):
            note("reset" if row.is_reset else "step")
            steps += not row.is_reset
            if steps == _WATCHED_STEPS:
                break
    finally:
        env.close()
        before.restore()
    if not called:
        return ok(f"np.random, random and torch are as they were after a reset and {steps} steps")
    told = "; ".join(f"{name} at {', '.join(calls)}" for name, calls in called.items())
    evidence = f"drawn from or seeded: {told}"
    if all(calls == ["construction"] for calls in called.values()):
        return warning(
            evidence,
            advice="two envs made one after the other may differ, whatever their seeds; draw "
            "in reset, from self.np_random",
            data=called,
        )
    return broken(
        evidence,
        cause="episodes depend on what else in the process draws random numbers, and it on them",
        advice=OWN_RANDOM,
        data=called,
    )


@QUESTIONS.add("neighbours", "envs in one process leave each other alone")
def _neighbours(patient: Patient) -> Answer:
    needs_seed(patient)
    patient.needs("global-random")
    if patient.changed is not None:
        return outlives(patient.changed)
    alone = patient.fresh[patient.seed][:1]
    envs = [patient.make() for _ in range(2)]
    try:
        beside = _forever(patient, envs[1], patient.seed + 1)
        half, rows = len(alone[0]) // 2, []
        for number, row in enumerate(patient.rows(envs[0], patient.seed)):
            rows.append(row)
            next(beside)
            if number == half:  # one goes, and another comes
                envs[1].close()
                envs[1] = patient.make()
                beside = _forever(patient, envs[1], patient.seed + 2)
    finally:
        for env in envs:
            env.close()
    found = first_divergence(patient.seed, alone, [rows])
    if patient.is_changed(patient.seed):
        assert patient.changed is not None
        return outlives(patient.changed)
    if found is None:
        return ok(f"{len(rows) - 1} steps alone and in turn with others: the same")
    return broken(
        f"alone, and in turn with another env: {found}",
        cause="state that envs share: class attributes, module globals, global random numbers, or "
        "a simulator of which there is one",
        advice="keep state in self, made in __init__ or reset. As it is, give each env a process "
        "of its own: make_env(..., backend='process', num_workers=num_envs)",
        data=found.to_dict(),
    )


def _forever(patient: Patient, env: Env, seed: int) -> Iterator[Row]:
    for start in chain([seed], repeat(None)):
        yield from patient.rows(env, start)
