"""Whether a seed decides what an env does, found out before an evaluation begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tdcollect.envs.errors import SlotError
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.evaluation.isolation import GlobalRandomness

_STEPS = 64
_SEEDS = (0, 1, 2, 3)


def probe_env(env: GymnasiumEnv, new_envs: bool | None = None) -> bool:
    """Run a few seeds in slot 0: in one order alone, in another beside a second slot; compare.

    Args:
        env: its slots are reset, and stepped with actions drawn from the action spec.
        new_envs: whether episodes shall run on new envs; None to find out.

    Returns:
        Whether they must, as the env carries something from one episode into the next, so that
        only a new env gives an episode that its seed decides.

    Raises:
        NotReproducibleError: where not even a new env does, or none can be made, or where the env
            draws from global random numbers.
    """
    actions = _Actions(env)
    found = None
    randomness = GlobalRandomness()
    if not new_envs:
        first = {seed: _episode(env, actions, seed) for seed in _SEEDS}
        again = {seed: _episode(env, actions, seed, 2) for seed in reversed(_SEEDS)}
        found = _where(first, again)
    if new_envs or (new_envs is None and found and env.stepper.backend.rebuilds):
        new_envs = True
        found = _where(_on_new_envs(env, actions, 1), _on_new_envs(env, actions, 2))
    randomness.check(f"the env {env.name}")
    if found is None:
        return bool(new_envs)
    what = "episodes on new envs" if new_envs else "episodes"
    raise NotReproducibleError(
        f"{what} of {env.name} with the same seed and actions differ from {found} "
        "on: the env draws random numbers that reset(seed=) does not reach, or keeps something "
        "from one episode to the next, or shares something with the envs of other slots. Have it "
        "draw from env.np_random alone, and reset all that it keeps"
    )


# What an env shows at each step, by entry; None at the end where the env raised.
_Shown = list[dict[str, bytes] | None]


def _on_new_envs(env: GymnasiumEnv, actions: _Actions, most: int) -> dict[int, _Shown]:
    shown = {}
    for seed in _SEEDS if most == 1 else reversed(_SEEDS):
        env.stepper.rebuild(list(range(min(most, env.num_envs))))
        shown[seed] = _episode(env, actions, seed, most)
    return shown


class _Actions:
    """Random actions, the same at each reading, in each slot and in each process."""

    def __init__(self, env: GymnasiumEnv):
        spec = env.full_action_spec_unbatched
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = [spec.rand() for _ in range(_STEPS)]
        self._of_step = [
            [np.stack([td.get(key).numpy(force=True)] * env.num_envs) for key in env.action_keys]
            for td in drawn
        ]

    def at(self, step: int) -> list[Any]:
        """The action entries ``[N, ...]`` of a step."""
        return self._of_step[step]


def _episode(env: GymnasiumEnv, actions: _Actions, seed: int, most: int = 1) -> _Shown:
    """What slot 0 shows at each step, of the first steps or to its episode's end.

    Up to ``most`` slots run; all of them where they cannot be stepped singly.
    """
    stepper = env.stepper
    backend = stepper.backend
    alone = backend.steps_subset and backend.seeds_subset
    slots = list(range(min(most, env.num_envs) if alone else env.num_envs))
    names = ["/".join(entry.path) for entry in stepper.entries]
    (frame,) = env.frames(1)
    shown: _Shown = []
    try:
        stepper.reset(slots, frame, seeds=[seed + slot for slot in slots])
        for step in range(_STEPS):
            entries = {n: e[0].tobytes() for n, e in zip(names, frame.entries, strict=True)}
            for name in ("reward", "terminated", "truncated"):
                entries[name] = getattr(frame.backend, name)[0].tobytes()
            shown.append(entries)
            if frame.done[0]:
                break
            others = [slot for slot in slots if frame.done[slot]]
            if others:
                stepper.reset(others, frame)
                frame.done[others] = False
            stepper.step(actions.at(step), slots if alone else None, frame)
    except SlotError as error:
        if not backend.rebuilds:
            raise
        stepper.rebuild(list(error.causes))
        shown.append(None)
    return shown


def _where(first: dict[int, _Shown], again: dict[int, _Shown]) -> str | None:
    """Where two runs of the same episodes differ, as far as neither raised."""
    for seed, shown in first.items():
        for step, (one, other) in enumerate(zip(shown, again[seed], strict=False)):
            if one is None or other is None:
                break
            for name in one:
                if one[name] != other[name]:
                    return f"step {step} (seed {seed}, entry {name!r})"
        else:
            if len(shown) != len(again[seed]):
                step = min(len(shown), len(again[seed]))
                return f"step {step} (seed {seed}), where one ends,"
    return None
