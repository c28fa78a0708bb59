"""Whether a seed decides what an env does, found out before an evaluation begins."""

from __future__ import annotations

from typing import Any

from torchrl.envs import EnvBase, TransformedEnv

from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.evaluation.isolation import GlobalRandomness

_STEPS = 64
_SEEDS = (0, 1, 2, 3)


def base_env(env: EnvBase) -> EnvBase:
    """The env under its transforms."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def probe_env(env: GymnasiumEnv) -> bool:
    """Run a few seeds in slot 0, in one order and in another, and compare.

    Args:
        env: its slots are reset, and stepped with random actions of the action spec.

    Returns:
        Whether the env carries something from one episode into the next, so that only a new env
        gives an episode that its seed decides.

    Raises:
        NotReproducibleError: where not even a new env does, or none can be made, or where the env
            draws from global random numbers.
    """
    actions = _Actions(env)
    randomness = GlobalRandomness()
    first = {seed: _episode(env, actions, seed) for seed in _SEEDS}
    again = {seed: _episode(env, actions, seed) for seed in reversed(_SEEDS)}
    randomness.check(f"the env {env.name}")
    if first == again:
        return False
    if env.stepper.backend.rebuilds:
        first, again = _on_new_envs(env, actions), _on_new_envs(env, actions)
        if first == again:
            return True
    what = "episodes on new envs" if env.stepper.backend.rebuilds else "episodes"
    raise NotReproducibleError(
        f"{what} of {env.name} with the same seed and actions differ from {_where(first, again)} "
        "on: the env draws random numbers that reset(seed=) does not reach, or keeps something "
        "from one episode to the next. Have it draw from env.np_random alone, and reset all that "
        "it keeps"
    )


_Shown = list[dict[str, bytes]]


def _on_new_envs(env: GymnasiumEnv, actions: _Actions) -> dict[int, _Shown]:
    shown = {}
    for seed in _SEEDS:
        env.stepper.rebuild([0])
        shown[seed] = _episode(env, actions, seed)
    return shown


class _Actions:
    """Random actions ``[N, ...]``, the same at each reading."""

    def __init__(self, env: GymnasiumEnv):
        spec = env.full_action_spec
        self._drawn = [spec.rand() for _ in range(_STEPS)]
        self._keys = list(env.action_keys)
        self._env = env

    def at(self, step: int) -> list[Any]:
        return [self._env._rows(self._drawn[step].get(key)) for key in self._keys]


def _episode(env: GymnasiumEnv, actions: _Actions, seed: int) -> _Shown:
    """What slot 0 shows at each step, of the first steps or to its episode's end."""
    stepper = env.stepper
    backend = stepper.backend
    alone = backend.steps_subset and backend.seeds_subset
    slots = [0] if alone else list(range(env.num_envs))
    names = ["/".join(entry.path) for entry in stepper.entries]
    (frame,) = env.frames(1)
    stepper.reset(slots, frame, seeds=[seed + slot for slot in slots])
    shown = []
    for step in range(_STEPS):
        shown.append({n: e[0].tobytes() for n, e in zip(names, frame.entries, strict=True)})
        for name in ("reward", "terminated", "truncated"):
            shown[-1][name] = getattr(frame.backend, name)[0].tobytes()
        if frame.done[0]:
            break
        others = [slot for slot in slots if frame.done[slot]]
        if others:
            stepper.reset(others, frame)
            frame.done[others] = False
        stepper.step(actions.at(step), slots if alone else None, frame)
    return shown


def _where(first: dict[int, _Shown], again: dict[int, _Shown]) -> str:
    seed = next(seed for seed in first if first[seed] != again[seed])
    for step, (one, other) in enumerate(zip(first[seed], again[seed], strict=False)):
        for name in one:
            if one[name] != other[name]:
                return f"step {step} (seed {seed}, entry {name!r})"
    return f"step {min(len(first[seed]), len(again[seed]))} (seed {seed}), where one ends,"
