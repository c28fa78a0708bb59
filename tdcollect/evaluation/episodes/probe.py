"""The check before an evaluation that a seed decides what an env does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from tdcollect import keys
from tdcollect.checks.difference import first_divergence
from tdcollect.checks.player import Row, SlotPlayer
from tdcollect.collect.step_dict import StepDict, is_plain
from tdcollect.envs.errors import SlotError
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.actions import ACTION_MASKS, read_mask
from tdcollect.evaluation.episodes.global_streams import GlobalStream
from tdcollect.evaluation.episodes.isolation import GlobalRandomness, NotReproducibleError
from tdcollect.evaluation.episodes.slot_envs import SlotEnvs
from tdcollect.workers.values import Array

_STEPS = 64
_SEEDS = ((0, 1, 2, 3), (4, 5, 6, 7))
"""The second four are run only if the env raises on each of the first, or ends its process."""
GROUPS = len(_SEEDS)
_ENOUGH = 4
"""Steps that two runs must have been compared over if every pair of runs was cut short."""


class Verdict(NamedTuple):
    """The result of probing an env.

    Attributes:
        fresh_envs: episodes must run on new envs.
        has_streams: draws from the global generators come from a stream of each episode.
    """

    fresh_envs: bool
    has_streams: bool


def probe_env(
    env: GymnasiumEnv,
    fresh_envs: bool | None = None,
    stepped: Callable[[], None] | None = None,
    skipped: int = 0,
) -> bool:
    """Run a few seeds in slot 0, alone and then, in reverse order, beside slot 1; compare the runs.

    If the env raises, its runs are compared up to there. Agreement then says little, so at least
    two runs must have come to their end, or far enough.

    Args:
        env: its slots are reset, and stepped with actions drawn from the action spec.
        fresh_envs: True if episodes will run on new envs; None to find out.
        stepped: called at each step.
        skipped: the number of groups of seeds to leave out.

    Returns:
        True if episodes must run on new envs: the env carries something from one episode into the
        next, so that its seed decides an episode only on a new env.

    Raises:
        NotReproducibleError: if a seed decides nothing even on new envs, or none can be made; if
            the env raises too early to tell; or if it draws from global random numbers.

    Warns:
        UserWarning: if the env raised in some run of each seed, so that less was compared.
    """
    player = SlotPlayer(env, _Actions(env).at, _STEPS)

    def run(seed: int, slots: int) -> _Run:
        return _run(player, seed, slots, stepped)

    return _probe(env, env.num_envs, run, fresh_envs, skipped)


def probe_slots(
    slots: SlotEnvs,
    fresh_envs: bool | None = None,
    stepped: Callable[[], None] | None = None,
    skipped: int = 0,
) -> bool:
    """Run a few seeds in slots that are envs of their own, as :func:`probe_env` does.

    Each env is played with its transforms.
    """

    def run(seed: int, beside: int) -> _Run:
        return _run_alone(slots, seed, beside, stepped)

    return _probe(slots, len(slots.envs), run, fresh_envs, skipped)


def _probe(
    env: GymnasiumEnv | SlotEnvs,
    count: int,
    run: Callable[[int, int], _Run],
    fresh_envs: bool | None,
    skipped: int,
) -> bool:
    """Compare runs, on new envs if need be; True if episodes must run on new envs."""

    def run_on_new_envs(seed: int, slots: int) -> _Run:
        env.rebuild_slots(list(range(min(slots, count))))
        return run(seed, slots)

    found: NotReproducibleError | str | None = None
    randomness = GlobalRandomness()
    if not fresh_envs:
        found = _fault(env, "episodes", run, skipped)
    differs = isinstance(found, NotReproducibleError)
    if fresh_envs or (fresh_envs is None and differs and env.rebuilds_singly):
        fresh_envs = True
        found = _fault(env, "episodes on new envs", run_on_new_envs, skipped)
    try:
        randomness.check(f"the env {env.name}")
        if isinstance(found, NotReproducibleError):
            raise found
    except NotReproducibleError as fault:
        fault.may_be_draws = randomness.settle()
        raise
    if found is not None:
        warnings.warn(found, stacklevel=2)
    return bool(fresh_envs)


class _Run(NamedTuple):
    """The rows of slot 0, of its reset and each step, and the error that cut them short."""

    rows: list[Row]
    error: SlotError | None


class _Actions:
    """Random actions, the same each time, in each slot and in each process.

    If envs in this process have sb3-contrib's ``action_masks()``, invalid actions are replaced by
    valid ones: such an env may refuse them.
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
        """Return the env's actions of a step for ``slots``; each seed begins elsewhere."""
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
    """Return the number of choices of each part of a discrete action."""
    return np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def _allowed(space: Any, value: Any, mask: Any) -> Any:
    """Return an action with each choice that its mask forbids replaced by an allowed one."""
    start = np.broadcast_to(np.asarray(space.start), np.shape(value))
    chosen = np.ravel(value - start)
    parts = np.split(mask, np.cumsum(_sizes(space))[:-1])
    for i, part in enumerate(parts):
        if part.any() and not part[chosen[i]]:
            allowed = np.flatnonzero(part)
            chosen[i] = allowed[chosen[i] % len(allowed)]
    return chosen.reshape(np.shape(value)) + start


def _run(player: SlotPlayer, seed: int, slots: int, stepped: Callable[[], None] | None) -> _Run:
    """Play slot 0 beside ``slots - 1`` others; rebuild the envs that raise."""
    rows: list[Row] = []
    stepper = player.env.stepper
    try:
        for row in player.rows(player.env, seed, slots):
            rows.append(row)  # one by one: those before an error are kept
            if stepped is not None:
                stepped()
    except SlotError as error:
        if not stepper.backend.rebuilds:
            raise
        stepper.rebuild(list(error.causes))
        return _Run(rows, error)
    return _Run(rows, None)


def _run_alone(slots: SlotEnvs, seed: int, beside: int, stepped: Callable[[], None] | None) -> _Run:
    """Play slot 0 beside ``beside - 1`` others, with random actions; rebuild an env that raises."""
    running = list(range(min(beside, len(slots.envs))))
    rows: list[Row] = []
    slot = 0
    try:
        with slots.outside():
            present = {}
            for slot in running:
                present[slot] = slots.reset_slot(slot, seed + slot)
            for step in range(_STEPS + 1):
                rows.append(_row_of(present[0]))
                if stepped is not None:
                    stepped()
                if rows[-1].ends or step == _STEPS:
                    break
                for slot in running:
                    present[slot] = _random_step(slots, slot, present[slot], step + 7 * seed)
    except Exception as error:
        failed = SlotError("step" if rows else "reset", {slot: error})
        if not slots.rebuilds_singly:
            raise failed from error
        slots.rebuild_slots([slot])
        return _Run(rows, failed)
    return _Run(rows, None)


def _random_step(slots: SlotEnvs, slot: int, row: StepDict, draw: int) -> StepDict:
    """Step a slot with an action that depends on nothing but ``draw``; reset it if it has ended."""
    if row[keys.DONE].all():
        return slots.reset_slot(slot, draw)
    given = slots.given(row)
    with GlobalStream(draw, slots.device):
        acted = slots.envs[slot].rand_action(given)
    return StepDict({**row, **slots.step_slot(slot, acted)})


def _row_of(values: StepDict) -> Row:
    """Record copies of the entries of a slot's row."""
    kept = {key: value.detach().clone() for key, value in values.items() if is_plain(value)}
    return Row(kept, bool(values[keys.DONE].all()))


def _fault(
    env: GymnasiumEnv | SlotEnvs, what: str, run: Callable[[int, int], _Run], skipped: int
) -> NotReproducibleError | str | None:
    """Return the error if runs on one seed differ or end too early; a warning if they end early."""
    furthest, raised = -1, None
    for seeds in _SEEDS[skipped:]:
        first = {seed: run(seed, 1) for seed in seeds}
        again = {seed: run(seed, 2) for seed in reversed(seeds)}
        found = _difference(first, again)
        if found is not None:
            return NotReproducibleError(
                f"{what} of {env.name} with the same seed and actions differ from {found} "
                f"on: the env draws random numbers that {_seeding(env)} does not reach, or keeps "
                "something from one episode to the next, or shares something with the envs of "
                f"other slots. {_advice(env)}"
            )
        for seed in seeds:
            pair = first[seed], again[seed]
            errors = [one.error for one in pair if one.error is not None]
            if not errors:
                return None
            raised = raised or errors[0]
            furthest = max(furthest, min(len(one.rows) for one in pair) - 1)
    tried = (
        f"{env.name} raised in {what} of each of the seeds {_SEEDS[skipped][0]} to "
        f"{_SEEDS[-1][-1]} with random actions, which are run before an evaluation to check that "
        f"a seed decides what the env does: {raised}"
    )
    if furthest >= _ENOUGH:
        return f"{tried}. No more than {furthest} steps could be compared; they agree"
    got = "not even a reset" if furthest < 0 else f"no more than {furthest} steps after the reset"
    return NotReproducibleError(
        f"{tried}. {got.capitalize()} could be compared, and expected {_ENOUGH} steps or an entire "
        "episode: correct the env, which must take any action of its action space, or have "
        "action_masks()"
    )


def _seeding(env: GymnasiumEnv | SlotEnvs) -> str:
    return "reset(seed=)" if isinstance(env, GymnasiumEnv) else "its seed"


def _advice(env: GymnasiumEnv | SlotEnvs) -> str:
    """Return the way out for an env whose seed does not decide its episodes."""
    if isinstance(env, GymnasiumEnv):
        return "Have it draw from env.np_random alone, and reset all that it keeps"
    if env.rebuilds_singly:
        return "Seed all its generators in _set_seed, and reset all that it keeps in _reset"
    return "Pass a function that makes it: episodes can then run on new envs"


def _difference(first: Mapping[int, _Run], again: Mapping[int, _Run]) -> str | None:
    """Return the place of the first difference of two runs of the same episodes, or None."""
    for seed, one in first.items():
        rows, others = one.rows, again[seed].rows
        if one.error or again[seed].error:  # compared as far as neither raised
            common = min(len(rows), len(others))
            rows, others = rows[:common], others[:common]
        found = first_divergence(seed, [rows], [others], exact=True)
        if found is not None and found.entry == "length":
            return f"step {found.step + 1} (seed {seed}), where one ends,"
        if found is not None:
            return f"step {found.step} (seed {seed}, {found.mismatch})"
    return None
