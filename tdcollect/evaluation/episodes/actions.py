"""Actions: checks of a policy's, and random ones, which probe an env.

An env takes the argmax of any tensor in the place of a one-hot action, logits for example: a
policy that forgets to draw from its distribution would be evaluated as another one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from torchrl.envs import EnvBase

from tdcollect import keys
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.episodes import Block
from tdcollect.collect.policy import draws_from_spec, is_masked
from tdcollect.collect.step_dict import StepDict, flat, is_plain
from tdcollect.envs.backends import SerialBackend, for_each_slot
from tdcollect.envs.differences import Row, first_divergence
from tdcollect.envs.process.values import Array, EachOptions
from tdcollect.envs.slots import SlotError
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.data import by_slot, rows_of
from tdcollect.evaluation.episodes.opening import SlotEnvs
from tdcollect.evaluation.episodes.policy import ACTION_MASKS, DrawByRow, choices_of, read_mask
from tdcollect.keys import Key
from tdcollect.randomness import GlobalRandomness, GlobalStream, NotReproducibleError


class LegalActions:
    """Random actions that the masks of an env's action specs allow, slot by slot.

    A transform or the env itself keeps the masks, in the specs that its ``rand_action`` draws from.
    """

    def __init__(self, env: SteppedEnv, spec: Composite):
        self._env = env
        self._apart = env if isinstance(env, SlotEnvs) and env.apart else None
        plain = not any(isinstance(leaf, MultiCategorical) for leaf in spec.values(True, True))
        self._singly = not (plain and draws_from_spec(env.transformed)) or is_masked(spec)
        self._by_slot = DrawByRow(1)

    def apply(self, slots: Sequence[int]) -> bool:
        """Tell whether actions must be drawn slot by slot, for masks, now or at first.

        Or for a ``rand_action`` of the env's own, or ``MultiCategorical``, drawn choice by choice.
        """
        apart = self._apart
        envs = [apart.envs[s] for s in slots] if apart else [self._env.transformed]
        return self._singly or any(is_masked(one.full_action_spec) for one in envs)

    def draw(
        self, rows: StepDict, slots: Sequence[int], streams: Sequence[torch.Generator | None]
    ) -> None:
        """Add the actions of ``slots`` to the rows, each drawn from its own stream."""
        env = self._env
        for slot in slots:
            self._by_slot.streams = [streams[slot]]
            with self._by_slot:
                drawn = self._of(rows, slot)
            for key in env.transformed.action_keys:
                value = drawn[key]
                if slot == slots[0]:
                    rows[key] = value.new_zeros((*env.batch_size, *value.shape))
                (rows[key][slot] if env.batch_size else rows[key]).copy_(value)

    def _of(self, rows: StepDict, slot: int) -> Mapping[Key, torch.Tensor]:
        env, apart = self._env, self._apart
        if apart:
            given = apart.given(StepDict((key, value[slot]) for key, value in rows.items()))
            return apart.entries(apart.envs[slot].rand_action(given))
        spec = env.transformed.full_action_spec
        if not env.batch_size:
            return flat(spec.rand())
        one = spec[slot]
        for key, leaf in spec.items(True, True):
            if getattr(leaf, "mask", None) is not None:  # which an index of Categorical drops
                one[key].update_mask(leaf.mask[slot])
        return flat(one.rand())


class ActionCheck:
    """Checks the action entries: their shapes and dtypes, and the values of discrete ones.

    Floats are refused unless the spec has them, or they are exact one-hot rows. Bounds of
    continuous actions are not checked: TorchRL and gymnasium let envs clip them.
    """

    def __init__(self, env: EnvBase, dims: int):
        spec = env.full_action_spec_unbatched
        self._specs = {key: spec[key] for key in env.action_keys}
        self._dims = dims

    def check_first_call(self, rows: StepDict) -> None:
        """Check the outputs ``[B, ...]`` of a policy's first call."""
        for key, spec in self._specs.items():
            values = rows.get(key)
            if values is None:
                continue  # the env raises for it
            floats = values.is_floating_point() and not spec.dtype.is_floating_point
            floats = floats and not isinstance(spec, _ONE_HOT)
            if values.shape[1:] != spec.shape or floats or values.is_complex():
                raise ValueError(_message(key, spec, values[0]))
            _check_values(key, spec, values)

    def check_block(self, block: Block) -> None:
        """Check all actions of the episodes in a block."""
        for key, spec in self._specs.items():
            entry = block.entries.get(key)
            if entry is not None and block.pieces and isinstance(spec, _LISTED):
                slots = by_slot(entry, self._dims)
                rows = [rows_of(piece, slots) for piece in block.pieces]
                _check_values(key, spec, torch.cat(rows))


_ONE_HOT = (OneHot, MultiOneHot)
_LISTED = (OneHot, MultiOneHot, Categorical, MultiCategorical, Binary)


def _check_values(key: Any, spec: TensorSpec, values: torch.Tensor) -> None:
    fits = _fitting(spec, values)
    if fits is not None and not fits.all():
        rows = fits.reshape(len(values), -1).all(-1)
        raise ValueError(_message(key, spec, values[int(rows.logical_not().nonzero()[0])]))


def _fitting(spec: TensorSpec, values: torch.Tensor) -> torch.Tensor | None:
    """Mark the values ``[B, *shape]`` that a discrete spec has; None for other specs."""
    # Subclasses come before their bases.
    if isinstance(spec, _ONE_HOT):
        sizes = [box.n for box in spec.space] if isinstance(spec, MultiOneHot) else values.shape[-1]
        return torch.stack([_one_hot(block) for block in values.split(sizes, -1)], -1)
    if isinstance(spec, Binary):
        return (values == 0) | (values == 1)
    if isinstance(spec, MultiCategorical):
        return (values >= 0) & (values < spec.nvec.to(values.device))
    if isinstance(spec, Categorical) and spec.space.n >= 0:
        return (values >= 0) & (values < spec.space.n)
    return None


def _one_hot(values: torch.Tensor) -> torch.Tensor:
    return ((values == 0) | (values == 1)).all(-1) & (values.sum(-1) == 1)


def _message(key: Any, spec: TensorSpec, row: torch.Tensor) -> str:
    what = "actions"
    advice = "write what env.action_spec.rand() gives"
    if isinstance(spec, _ONE_HOT):
        what = "one-hot rows"
        advice = (
            "draw from the logits with ProbabilisticActor(distribution_class=OneHotCategorical), "
            "or write torch.nn.functional.one_hot(logits.argmax(-1), n)"
        )
    elif isinstance(spec, Binary):
        what = "bits"
        advice = "write integers or bools that are 0 or 1"
    elif isinstance(spec, (Categorical, MultiCategorical)):
        what = "numbers of choices"
        advice = "draw from the logits with a Categorical, or write logits.argmax(-1)"
    shape, dtype = tuple(spec.shape), str(spec.dtype).removeprefix("torch.")
    values = str(row.detach().cpu().tolist())
    return (
        f"expected {what} of shape {shape} and dtype {dtype} in the policy's entry {key!r}, as the "
        f"env's action spec says, got {str(row.dtype).removeprefix('torch.')} of shape "
        f"{tuple(row.shape)}: {values if len(values) <= 80 else values[:80] + '...'}; {advice}"
    )


_STEPS = 64
_SEEDS = ((0, 1, 2, 3), (4, 5, 6, 7))
"""The second four are run only if the env raises on each of the first, or ends its process."""
GROUPS = len(_SEEDS)
_ENOUGH = 4
"""Steps that two runs must have been compared over if every pair of runs was cut short."""


class Verdict(NamedTuple):
    """The result of probing an env."""

    fresh_envs: bool
    has_streams: bool


def probe(
    env: GymnasiumEnv | SlotEnvs,
    fresh_envs: bool | None = None,
    stepped: Callable[[], None] | None = None,
    skipped: int = 0,
    options: Sequence[dict[str, Any] | None] = (None,),
) -> bool:
    """Run four seeds beside each other, then one after the other in slot 0; compare the runs.

    If the env raises, its runs are compared up to there. Agreement then says little, so at least
    two runs must have come to their end, or far enough.

    Args:
        env: its slots are reset, and stepped with random actions.
        fresh_envs: True if episodes will run on new envs; None to find out.
        stepped: called at each step.
        skipped: the number of groups of seeds to leave out.
        options: reset options of some episodes.

    Returns:
        True if episodes must run on new envs: the env carries something from one episode into the
        next, so that its seed decides an episode only on a new env.

    Raises:
        NotReproducibleError: if a seed decides nothing even on new envs, or none can be made; if
            the env raises too early to tell; or if it draws from global random numbers.

    Warns:
        UserWarning: if the env raised in some run of each seed, so that less was compared.
    """

    def options_at(seed: int) -> dict[str, Any] | None:
        return copy.deepcopy(options[seed % len(options)])

    player = (_Together if isinstance(env, GymnasiumEnv) else _Apart)(env, options_at)

    def run(seeds: Sequence[int], together: int, fresh: bool) -> dict[int, _Run]:
        found: dict[int, _Run] = {}
        for i in range(0, len(seeds), together):
            chosen = dict(enumerate(seeds[i : i + together]))
            if fresh:
                env.rebuild_slots(list(chosen))
            found.update(_runs(player, chosen, stepped))
        return found

    found: NotReproducibleError | str | None = None
    randomness = GlobalRandomness()
    if not fresh_envs:
        found = _fault(env, False, run, skipped)
    differs = isinstance(found, NotReproducibleError)
    if fresh_envs or (fresh_envs is None and differs and env.can.rebuild):
        fresh_envs = True
        found = _fault(env, True, run, skipped)
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
    """The rows of a reset and of each step, and the error that cut them short."""

    rows: list[Row]
    errors: list[SlotError]


class _Actions:
    """Random actions, the same each time, in each slot and in each process.

    Illegal ones are replaced by legal ones, as an env may refuse them: by its masks, or if it is in
    this process and has sb3-contrib's ``action_masks()``.
    """

    def __init__(self, env: GymnasiumEnv):
        spec = env.full_action_spec_unbatched
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = [spec.rand() for _ in range(_STEPS)]
        self._drawn = [env.read_actions(td.expand(*env.batch_size).clone()) for td in drawn]
        self._backend = env.stepper.backend
        self._masks = [(self._backend.action.paths.index(k), m) for k, m in env.masks.items()]
        space = self._backend.action.space
        self._are_masked = (
            isinstance(self._backend, SerialBackend)
            and isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
            and all(one.has_wrapper_attr(ACTION_MASKS) for one in self._backend.envs)
        )

    def at(self, step: int, seeds: Mapping[int, int]) -> list[Array]:
        """Return the env's actions of a step, for slots with these seeds; each begins elsewhere."""
        actions = [array.copy() for array in self._drawn[0]]
        for slot, seed in seeds.items():
            for array, drawn in zip(actions, self._drawn[(step + 7 * seed) % _STEPS], strict=True):
                array[slot] = drawn[slot]
        leaves = self._backend.action.leaves
        for place, legal in self._masks:
            _allow(leaves[place], actions[place], legal.numpy(force=True))
        if self._are_masked:
            count = int(choices_of(self._backend.action.space).sum())
            for slot in seeds:
                mask = read_mask(self._backend.envs[slot], slot, count)
                _allow(leaves[0], actions[0][slot : slot + 1], mask)
        return actions


def _allow(leaf: Any, entry: Array, masks: Array) -> None:
    """Replace choices ``[N, *shape]`` that masks forbid by the next that these allow."""
    values = leaf.read(entry)
    rows, starts = values.reshape(len(values), -1), np.ravel(leaf.start)
    parts = np.split(masks.reshape(len(rows), -1), np.cumsum(leaf.n)[:-1], -1)
    for i, part in enumerate(parts):
        chosen = (rows[:, i, None] - starts[i] + np.arange(part.shape[1])) % part.shape[1]
        first = np.take_along_axis(part, chosen, -1).argmax(-1, keepdims=True)
        rows[:, i] = np.take_along_axis(chosen, first, -1)[:, 0] + starts[i]
    leaf.write(values, entry)


OptionsAt = Callable[[int], "dict[str, Any] | None"]
"""The reset options for a seed of the probe."""


class _Together:
    """Plays episodes in the slots of one env."""

    def __init__(self, env: Any, options_at: OptionsAt):
        self.env, self._options_at = env, options_at
        self._actions = _Actions(env)
        self._singly = env.can.pause and env.can.seed_singly

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Start episodes with seeds by slot; all slots run if they cannot be stepped singly."""
        self._seeds = dict(seeds)
        if not self._singly:
            self._seeds = {slot: seeds.get(slot, slot) for slot in range(self.env.num_envs)}
        (self._buffers,) = self.env.allocate(1)
        raw, done = self._buffers.raw, self._buffers.done
        arrays = (*self._buffers.entries, raw.reward, raw.terminated, raw.truncated, done)
        self._views = dict(zip(self.env.writes, arrays, strict=True))
        self._reset([*self._seeds], [*self._seeds.values()])

    def _reset(self, slots: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        each = EachOptions((slot, self._options_at(self._seeds[slot])) for slot in slots)
        options = None if all(one is None for one in each.values()) else each
        self.env.stepper.reset(slots, self._buffers, seeds, options)

    def row(self, slot: int) -> Row:
        """Return the row that a slot is at."""
        row = {key: view[slot].copy() for key, view in self._views.items()}
        return Row(row, bool(row[keys.DONE]))

    def step(self, step: int, slots: Sequence[int]) -> None:
        """Step slots, or all if they cannot be stepped singly."""
        asked: Sequence[int] | None = slots
        if not self._singly:
            slots, asked = [*self._seeds], None
            if ended := [slot for slot in slots if self._buffers.done[slot]]:
                self._reset(ended)
        given = self._actions.at(step, {slot: self._seeds[slot] for slot in slots})
        self.env.stepper.step(given, asked, self._buffers, restart=False)


class _Apart:
    """Plays episodes in slots that are envs of their own."""

    def __init__(self, env: Any, options_at: OptionsAt):
        self.env, self._options_at = env, options_at
        self._present: dict[int, StepDict] = {}

    def begin(self, seeds: Mapping[int, int]) -> None:
        self._seeds = seeds
        with self.env.outside():
            for_each_slot("reset", self._seeds, self._start)

    def _start(self, slot: int) -> None:
        seed = self._seeds[slot]
        self._present[slot] = self.env.reset_slot(slot, seed, self._options_at(seed))

    def row(self, slot: int) -> Row:
        row = self._present[slot]
        kept = {key: value.detach().clone() for key, value in row.items() if is_plain(value)}
        return Row(kept, bool(row[keys.DONE].all()))

    def step(self, step: int, slots: Sequence[int]) -> None:
        with self.env.outside():
            for_each_slot("step", slots, partial(self._step, step))

    def _step(self, step: int, slot: int) -> None:
        row = self._present[slot]
        given = self.env.given(row)
        with GlobalStream(step + 7 * self._seeds[slot], self.env.device):
            acted = self.env.envs[slot].rand_action(given)
        self._present[slot] = StepDict({**row, **self.env.step_slot(slot, acted)})


def _runs(
    player: _Together | _Apart, seeds: Mapping[int, int], stepped: Callable[[], None] | None
) -> dict[int, _Run]:
    """Play episodes with seeds by slot, as far as they come; rebuild the envs that raise."""
    runs = {slot: _Run([], []) for slot in seeds}
    move, running = partial(player.begin, seeds), [*runs]
    for step in range(_STEPS + 1):
        try:
            move()
        except SlotError as error:
            if not player.env.can.rebuild:
                raise
            player.env.rebuild_slots(list(error.causes))
            for slot in error.causes.keys() & runs.keys():
                runs[slot].errors.append(error)
        running = [slot for slot in running if not runs[slot].errors]
        for slot in running:
            runs[slot].rows.append(player.row(slot))
        if stepped is not None:
            stepped()
        running = [slot for slot in running if not runs[slot].rows[-1].ends]
        if not running:
            break
        move = partial(player.step, step, running)
    return {seed: runs[slot] for slot, seed in seeds.items()}


def _fault(
    env: GymnasiumEnv | SlotEnvs,
    fresh: bool,
    run: Callable[[Sequence[int], int, bool], dict[int, _Run]],
    skipped: int,
) -> NotReproducibleError | str | None:
    """Return the error if runs on one seed differ or end too early, or a warning."""
    furthest, raised, what = -1, None, "episodes" + " on new envs" * fresh
    for seeds in _SEEDS[skipped:]:
        first = run(seeds, min(len(seeds), env.batch_size.numel()), fresh)
        # One env for all of them: BipedalWalker differs from its third episode on.
        again = run(seeds[::-1], 1, fresh)
        found = _difference(first, again, fresh)
        if found is not None:
            return _undecided(env, what, found)
        for seed in seeds:
            pair = first[seed], again[seed]
            errors = [error for one in pair for error in one.errors]
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


def _undecided(env: GymnasiumEnv | SlotEnvs, what: str, place: str) -> NotReproducibleError:
    seeding = "its seed"
    advice = "Pass a function that makes it: episodes can then run on new envs"
    if isinstance(env, GymnasiumEnv):
        seeding = "reset(seed=)"
        advice = "Have it draw from env.np_random alone, and reset all that it keeps"
    elif env.can.rebuild:
        advice = "Seed all its generators in _set_seed, and reset all that it keeps in _reset"
    return NotReproducibleError(
        f"{what} of {env.name} with the same seed and actions differ from {place} on: the env "
        f"draws random numbers that {seeding} does not reach, keeps something from one episode to "
        f"the next, shares something with the envs of other slots, or is unlike them. {advice}"
    )


def _difference(first: Mapping[int, _Run], again: Mapping[int, _Run], fresh: bool) -> str | None:
    """Return the place of the first difference of two runs of the same episodes."""
    for seed, one in first.items():
        other = again[seed]
        rows, others = one.rows, other.rows
        if one.errors or other.errors:  # compared as far as neither raised
            common = min(len(rows), len(others))
            rows, others = rows[:common], others[:common]
        found = first_divergence(seed, [rows], [others], exact=True)
        if found is not None and found.entry == "length":
            return f"step {found.step + 1} (seed {seed}), where one ends,"
        if found is not None:
            return f"step {found.step} (seed {seed}, {found.mismatch})"
        counts = [(len(run.rows), len(run.errors)) for run in (one, other)]
        # An env that is used again may raise where a new one does not; new ones fail by chance.
        if counts[0] != counts[1] and not fresh:
            return f"step {len(rows)} (seed {seed}), where one raises,"
    return None
