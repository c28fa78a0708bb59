"""Whether a seed decides what an env does, found out before an evaluation begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from tdcollect.envs.errors import SlotError
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.spaces import Array
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.actions import ACTION_MASKS, read_mask
from tdcollect.evaluation.episodes.isolation import GlobalRandomness, NotReproducibleError

_STEPS = 64
_SEEDS = ((0, 1, 2, 3), (4, 5, 6, 7))
"""The second four are run only where the env raises on each of the first."""
_ENOUGH = 4
"""Steps that two runs must have been compared over where every pair of runs was cut short."""


def probe_env(env: GymnasiumEnv, fresh_envs: bool | None = None) -> bool:
    """Run a few seeds in slot 0: in one order alone, in another beside a second slot; compare.

    Where the env raises, its runs are compared as far as they came. No difference then says little,
    so at least two runs must have come to their end, or far enough.

    Args:
        env: its slots are reset, and stepped with actions drawn from the action spec.
        fresh_envs: whether episodes shall run on new envs; None to find out.

    Returns:
        Whether they must, as the env carries something from one episode into the next, so that
        only a new env gives an episode that its seed decides.

    Raises:
        NotReproducibleError: where not even a new env does, or none can be made; where the env
            raises too early to tell; or where it draws from global random numbers.

    Warns:
        UserWarning: where the env raised in some run of each seed, so that less was compared.
    """
    actions = _Actions(env)
    found: NotReproducibleError | str | None = None
    randomness = GlobalRandomness()
    if not fresh_envs:
        found = _fault(env, "episodes", lambda seed, slots: _episode(env, actions, seed, slots))
    differs = isinstance(found, NotReproducibleError)
    if fresh_envs or (fresh_envs is None and differs and env.rebuilds_singly):
        fresh_envs = True
        found = _fault(
            env,
            "episodes on new envs",
            lambda seed, slots: _on_a_new_env(env, actions, seed, slots),
        )
    randomness.check(f"the env {env.name}")
    if isinstance(found, NotReproducibleError):
        raise found
    if found is not None:
        warnings.warn(found, stacklevel=2)
    return bool(fresh_envs)


# The entries that an env shows at each step; where it raised, the error comes last.
_Shown = list[dict[str, bytes] | SlotError]


class _Actions:
    """Random actions, the same at each reading, in each slot and in each process.

    Where envs in this process tell valid actions by ``action_masks()``, as sb3-contrib has it,
    the others are replaced by valid ones: such an env may refuse them.
    """

    def __init__(self, env: GymnasiumEnv):
        spec = env.full_action_spec_unbatched
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = [spec.rand() for _ in range(_STEPS)]
        self._drawn = [env.read_actions(td.expand(*env.batch_size).clone()) for td in drawn]
        self._backend = env.stepper.backend
        space = self._backend.action.space
        self._are_masked = (
            isinstance(self._backend, SerialBackend)
            and isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
            and all(one.has_wrapper_attr(ACTION_MASKS) for one in self._backend.envs)
        )

    def at(self, step: int, seed: int, slots: Sequence[int]) -> list[Array]:
        """The env's action of a step for ``slots``; each seed begins elsewhere."""
        drawn = self._drawn[(step + 7 * seed) % _STEPS]
        if not self._are_masked:
            return drawn
        actions, codec = [array.copy() for array in drawn], self._backend.action
        values = codec.read_slots(drawn)
        for slot in slots:
            env = self._backend.envs[slot]
            mask = read_mask(env, slot, int(_sizes(codec.space).sum()))
            codec.write_slot(_allowed(codec.space, values[slot], mask), actions, slot)
        return actions


def _sizes(space: Any) -> Any:
    """The number of choices of each part of a discrete action."""
    return np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def _allowed(space: Any, value: Any, mask: Any) -> Any:
    """An action, with each choice that its mask (one value per choice) forbids put to another."""
    start = np.broadcast_to(np.asarray(space.start), np.shape(value))
    chosen = np.ravel(value - start)
    parts = np.split(mask, np.cumsum(_sizes(space))[:-1])
    for i, part in enumerate(parts):
        if part.any() and not part[chosen[i]]:
            allowed = np.flatnonzero(part)
            chosen[i] = allowed[chosen[i] % len(allowed)]
    return chosen.reshape(np.shape(value)) + start


def _on_a_new_env(env: GymnasiumEnv, actions: _Actions, seed: int, most: int) -> _Shown:
    env.rebuild_slots(list(range(min(most, env.num_envs))))
    return _episode(env, actions, seed, most)


def _episode(env: GymnasiumEnv, actions: _Actions, seed: int, most: int) -> _Shown:
    """What slot 0 shows at each step, of the first steps or to its episode's end.

    Up to ``most`` slots run; all of them where they cannot be stepped singly.
    """
    stepper = env.stepper
    backend = stepper.backend
    alone = backend.steps_subset and backend.seeds_subset
    slots = list(range(min(most, env.num_envs) if alone else env.num_envs))
    names = ["/".join(entry.path) for entry in stepper.entries]
    (buffers,) = env.allocate(1)
    shown: _Shown = []
    try:
        stepper.reset(slots, buffers, seeds=[seed + slot for slot in slots])
        for step in range(_STEPS):
            entries = {n: e[0].tobytes() for n, e in zip(names, buffers.entries, strict=True)}
            for name in ("reward", "terminated", "truncated"):
                entries[name] = getattr(buffers.raw, name)[0].tobytes()
            shown.append(entries)
            if buffers.done[0]:
                break
            others = [slot for slot in slots if buffers.done[slot]]
            if others:
                stepper.reset(others, buffers)
                buffers.done[others] = False
            given = actions.at(step, seed, slots)
            stepper.step(given, slots if alone else None, buffers, restart=False)
    except SlotError as error:
        if not backend.rebuilds:
            raise
        stepper.rebuild(list(error.causes))
        shown.append(error)
    return shown


def _fault(
    env: GymnasiumEnv, what: str, run: Callable[[int, int], _Shown]
) -> NotReproducibleError | str | None:
    """The error if runs on the same seeds differ, or end too early; a warning's text if early."""
    furthest, raised = -1, None
    for seeds in _SEEDS:
        first = {seed: run(seed, 1) for seed in seeds}
        again = {seed: run(seed, 2) for seed in reversed(seeds)}
        found = _where(first, again)
        if found is not None:
            return NotReproducibleError(
                f"{what} of {env.name} with the same seed and actions differ from {found} "
                "on: the env draws random numbers that reset(seed=) does not reach, or keeps "
                "something from one episode to the next, or shares something with the envs of "
                "other slots. Have it draw from env.np_random alone, and reset all that it keeps"
            )
        for seed in seeds:
            ends = [shown[-1] for shown in (first[seed], again[seed])]
            errors = [end for end in ends if isinstance(end, SlotError)]
            if not errors:
                return None
            raised = raised or errors[0]
            lengths = (_length(first[seed]), _length(again[seed]))
            furthest = max(furthest, min(lengths) - 1)
    tried = (
        f"{env.name} raised in {what} of each of the seeds {_SEEDS[0][0]} to {_SEEDS[-1][-1]} "
        "with random actions, which are run before an evaluation to see whether a seed decides "
        f"what the env does: {raised}"
    )
    if furthest >= _ENOUGH:
        return f"{tried}. No more than {furthest} steps could be compared; they agree"
    got = "not even a reset" if furthest < 0 else f"no more than {furthest} steps after the reset"
    return NotReproducibleError(
        f"{tried}. {got.capitalize()} could be compared, and expected {_ENOUGH} steps or a whole "
        "episode: correct the env, which must take any action of its action space, or tell valid "
        "ones by action_masks()"
    )


def _where(first: Mapping[int, _Shown], again: Mapping[int, _Shown]) -> str | None:
    """Where two runs of the same episodes differ, as far as neither raised."""
    for seed, shown in first.items():
        for step, (one, other) in enumerate(zip(shown, again[seed], strict=False)):
            if isinstance(one, SlotError) or isinstance(other, SlotError):
                break
            for name in one:
                if one[name] != other[name]:
                    return f"step {step} (seed {seed}, entry {name!r})"
        else:
            if len(shown) != len(again[seed]):
                step = min(len(shown), len(again[seed]))
                return f"step {step} (seed {seed}), where one ends,"
    return None


def _length(shown: _Shown) -> int:
    """The number of rows that an env showed, its reset included."""
    return len(shown) - isinstance(shown[-1], SlotError)
