"""Checks that compare runs which should agree."""

from __future__ import annotations

from tdcollect.checks.difference import Divergence, first_divergence
from tdcollect.checks.registry import Failed, Skipped, Warned, check
from tdcollect.evaluation.episodes.isolation import GlobalRandomness
from tdcollect.testing.doctor.examination import GLOBAL, Examination, Leak

GROUP = "repeating"
OWN_RANDOM = (
    "draw all random numbers from self.np_random, which gymnasium's Env.reset(seed=seed) seeds; "
    "call super().reset(seed=seed) first in reset"
)

_WATCHED_STEPS = 200


def by_chance(exam: Examination, evidence: str, found: Divergence | None = None) -> Failed:
    """Return the failure of runs that should agree, and differ in another way when repeated."""
    exam.has_chance = len(exam.failed)
    return Failed(
        f"{evidence}; run again, these do not differ there",
        cause="random numbers that reset(seed=) does not reach, drawn now and then, or the clock",
        advice=OWN_RANDOM,
        data={} if found is None else found.to_dict(),
    )


def outlives(found: Divergence) -> Failed:
    """Return the failure of a new env that no longer does what the first ones did."""
    return Failed(
        f"a new env, and another one made after some had been played: {found}",
        cause="state that outlives the envs: class attributes, module globals, a file",
        advice="keep state in self, made in __init__ or reset",
        data=found.to_dict(),
    )


@check(GROUP, "seed", "a seed decides the episodes that follow it")
def _seed(exam: Examination) -> str:
    found = exam.unrepeatable
    if found is not None:
        raise Failed(
            f"two new envs under one seed and the same actions: {found}",
            cause=_why_unrepeatable(exam, found),
            advice=OWN_RANDOM,
            data=found.to_dict(),
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


def _why_unrepeatable(exam: Examination, found: Divergence) -> str:
    where = "reset" if found.step == 0 else "step"
    for names in ([name] for name in GLOBAL):
        if exam.repeats_with(names):
            return (
                f"{GLOBAL[names[0]]}: the runs agree once that global generator starts from the "
                "same state"
            )
    if exam.repeats_with(GLOBAL):
        return "several of the global generators of numpy, random and torch"
    return (
        f"random numbers in {where} from a generator of the env's own that reset(seed=) does not "
        "seed, state shared by envs, or the clock (seeding the global generators changes nothing)"
    )


@check(GROUP, "leaks", "nothing leaks from one episode into the next", needs=["seed"])
def _leaks(exam: Examination) -> str:
    leak = exam.leak
    if exam.changed is not None:
        raise Skipped("a new env no longer does what the first ones did (see neighbours)")
    if exam.unsteady is not None:
        raise by_chance(exam, f"a new env, and one used before: {exam.unsteady}", exam.unsteady)
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
    left = leak.attributes
    if left:
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


@check(GROUP, "global-random", "the env leaves the global random numbers alone")
def _global_random(exam: Examination) -> str:
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
    env = exam.make()
    try:
        note("construction")
        steps = 0
        for row in exam.rows(env, exam.seed):
            note("reset" if row.is_reset else "step")
            steps += not row.is_reset
            if steps == _WATCHED_STEPS:
                break
    finally:
        env.close()
        before.restore()
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


@check(
    GROUP,
    "neighbours",
    "envs in one process leave each other alone",
    needs=["seed", "global-random"],
)
def _neighbours(exam: Examination) -> str:
    if exam.changed is not None:
        raise outlives(exam.changed)
    alone = exam.fresh[exam.seed][:1]
    envs = [exam.make() for _ in range(2)]
    try:
        beside = exam.forever(envs[1], exam.seed + 1)
        half, rows = len(alone[0]) // 2, []
        for step, row in enumerate(exam.rows(envs[0], exam.seed)):
            rows.append(row)
            next(beside)
            if step == half:  # replace the neighbour
                envs[1].close()
                envs[1] = exam.make()
                beside = exam.forever(envs[1], exam.seed + 2)
    finally:
        for env in envs:
            env.close()
    found = first_divergence(exam.seed, alone, [rows])
    if exam.is_changed(exam.seed):
        assert exam.changed is not None
        raise outlives(exam.changed)
    if found is None:
        return f"{len(rows) - 1} steps alone and in turn with others: the same"
    raise Failed(
        f"alone, and in turn with another env: {found}",
        cause="state that envs share: class attributes, module globals, global random numbers, or "
        "a simulator of which there is one",
        advice="keep state in self, made in __init__ or reset. As it is, give each env a process "
        "of its own: make_env(..., backend='process', num_workers=num_envs)",
        data=found.to_dict(),
    )
