"""The slots that an evaluation runs in, and the check that a seed decides what they do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.transforms import VecNormV2

from tdcollect import keys
from tdcollect.collect.step_dict import StepDict, is_plain
from tdcollect.envs.differences import Row, first_divergence
from tdcollect.envs.make import make_env
from tdcollect.envs.process.values import Array
from tdcollect.envs.serial import SerialBackend
from tdcollect.envs.slots import SlotError
from tdcollect.envs.traits import (
    all_transforms_of,
    innermost,
    leaves_random_numbers_alone,
    transforms_of,
)
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.actions import ACTION_MASKS, read_mask
from tdcollect.evaluation.episodes.requested_env import RequestedEnv
from tdcollect.evaluation.episodes.slot_envs import SlotEnvs
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.randomness import (
    GlobalRandomness,
    GlobalStream,
    NotReproducibleError,
    Outside,
    WithStreams,
)

_SLOTS = 16


class Opened(NamedTuple):
    """The slots of an evaluation.

    Attributes:
        env: the env with its transforms; that of slot 0 if slots are envs of their own.
        slots: the slots, if they are envs of their own; None for an env of ``make_env``.
        made: True if the envs were made here, and are closed at the end.
        with_streams: makes ``env`` anew from gymnasium envs whose draws from the global generators
            come from streams of their episodes; None if it cannot be made anew.
    """

    env: EnvBase
    slots: SlotEnvs | None = None
    made: bool = True
    with_streams: Callable[[], EnvBase] | None = None

    def close(self) -> None:
        """Close what was made here."""
        if not self.made:
            return
        if self.slots is not None:
            self.slots.close()
        elif not self.env.is_closed:
            self.env.close()


Finish = Callable[[EnvBase], EnvBase]


def open_env(
    env: Any, settings: EvaluationSettings, finish: Finish, most_slots: int | None = None
) -> Opened:
    """Open the env of an evaluation; one that is made here has at most one slot per episode."""
    requested = env if isinstance(env, RequestedEnv) else None
    if requested is not None:
        env, finish = requested.bare, partial(_added, requested, finish)
    names = ("num_envs", "backend", "env_kwargs")
    given = [name for name in names if getattr(settings, name) is not None]
    episodes = max(len(settings.episode_indices), 1)
    if most_slots is not None:
        episodes = min(episodes, most_slots)
    if isinstance(env, EnvBase):
        if given:
            raise ValueError(f"the env {_text(env)} is made already: expected no {_and(given)}")
        return _open_made(env, episodes, finish, ours=False)
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not (
        isinstance(env, str) or callable(env)
    ):
        raise TypeError(
            "expected a gymnasium id, a callable that makes an env, or a TorchRL env, got "
            f"{env!r}; a gymnasium env that is made already goes through tdcollect.make_env(env)"
        )
    env_kwargs = settings.env_kwargs
    slots = min(_SLOTS if settings.num_envs is None else settings.num_envs, episodes)
    if not isinstance(env, str):
        make = partial(_made, env, env_kwargs or {})
        made = make()
        if isinstance(made, EnvBase):
            try:
                return _open_callable(made, make, slots, given, episodes, finish)
            except BaseException:
                if not _is_unstarted(made):
                    made.close()
                raise
        if hasattr(made, "close"):
            made.close()  # made only to see its type
    if requested is not None and not requested.treats_rows_alone():
        if settings.backend not in (None, "serial"):
            raise ValueError(
                f"expected no backend {settings.backend!r}: each slot is an env of its own under "
                f"the transforms of {requested}, which may treat a batch otherwise than each row"
            )
        alone = partial(_made, partial(make_env, env, env_kwargs=env_kwargs), {})
        first = alone()
        try:
            return _slots(first, alone, slots, finish)
        except BaseException:
            first.close()
            raise
    how = {"num_envs": slots, "backend": settings.backend, "env_kwargs": env_kwargs}
    again = None if settings.backend == "envpool" else partial(_with_streams, env, how, finish)
    return Opened(_finished(make_env(env, **how), finish), with_streams=again)  # type: ignore[arg-type]


def open_one(env: Any, env_kwargs: dict[str, Any] | None, backend: str | None = None) -> EnvBase:
    """Make one env, for a function that makes a policy from it."""
    kwargs = env_kwargs or {}
    if isinstance(env, RequestedEnv) and backend is not None:
        return _finished(open_one(env.bare, env_kwargs, backend), env.finished)
    if isinstance(env, str):
        return make_env(env, env_kwargs=kwargs, backend=backend)
    made = env(**kwargs)
    return made if isinstance(made, EnvBase) else make_env(made)


def wants_env(factory: Callable[..., Any]) -> bool:
    """Tell whether a factory takes an env: a parameter without default, or one named ``env``."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional
        and (parameter.default is parameter.empty or parameter.name == "env")
        for parameter in inspect.signature(factory).parameters.values()
    )


def _open_callable(
    made: EnvBase,
    make: Callable[[], EnvBase],
    count: int,
    given: list[str],
    episodes: int,
    finish: Finish,
) -> Opened:
    """Open the env that a callable has made, and with it those of further slots."""
    given = [name for name in given if name != "env_kwargs"]
    alone = _runs_alone(made)
    refused = [name for name in given if not alone or name != "num_envs"]
    if refused:
        what = "a TorchRL env" if alone else "an env whose slots are fixed"
        raise ValueError(f"the callable makes {what}, {_text(made)}: expected no {_and(refused)}")
    if not alone:
        return _open_made(made, episodes, finish, ours=True)
    return _slots(made, make, count, finish)


def _open_made(env: EnvBase, episodes: int, finish: Finish, ours: bool) -> Opened:
    """Open an env that was given, or that a callable has made."""
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)):
        make = _maker(env, base)
        first = make()
        try:
            opened = _slots(first, make, min(base.num_workers, episodes), finish)
        except BaseException:
            first.close()
            raise
        if ours and not _is_unstarted(env):
            env.close()
        return opened
    if _runs_alone(env):
        return Opened(env, SlotEnvs([finish(env)]), made=False)
    if not isinstance(base, GymnasiumEnv):
        raise TypeError(_batched(env, base))
    _check_transforms(env)
    return Opened(finish(env), made=ours)


def _slots(first: EnvBase, make: Callable[[], EnvBase], count: int, finish: Finish) -> Opened:
    """Open ``count`` slots that are envs of their own."""

    def another() -> EnvBase:
        env = make()
        if env is first:
            raise ValueError(
                "expected a callable that makes a new env at each call, one per slot, got the "
                f"same {_text(env)} twice; make it in the callable, or pass the env itself"
            )
        return _still(finish(env))

    envs = [first]
    try:
        envs[0] = _still(finish(first))
        while len(envs) < count:
            envs.append(another())
        return Opened(envs[0], SlotEnvs(envs, another))
    except BaseException:
        for env in envs[1:]:
            env.close()  # the caller closes the first one
        raise


def _made(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Make an env, whose constructor may draw: the same for every slot, and nothing outside."""
    with Outside(), GlobalStream(0):
        return make(**kwargs)


def _still(env: EnvBase) -> EnvBase:
    """Put the transforms of an env that was made here into eval mode, with statistics frozen."""
    for transform in all_transforms_of(env):
        transform.eval()
        if getattr(transform, "frozen", None) is False:
            transform.freeze()
    return env


def _added(requested: RequestedEnv, finish: Finish, env: EnvBase) -> EnvBase:
    """Add the transforms that were asked for, then what the policy asks for."""
    made = requested.finished(env)
    if made.batch_size and isinstance(innermost(made), GymnasiumEnv):
        _check_transforms(made)
    return finish(made)


def _finished(env: EnvBase, finish: Finish) -> EnvBase:
    try:
        return finish(env)
    except BaseException:
        env.close()
        raise


def _with_streams(env: Any, how: dict[str, Any], finish: Finish) -> EnvBase:
    """Make gymnasium envs whose draws from the global generators come from streams."""
    name = env if isinstance(env, str) else getattr(env, "__name__", None) or type(env).__name__
    make = WithStreams(partial(gym.make, env) if isinstance(env, str) else env, name)
    return _finished(make_env(make, **how), finish)


def _runs_alone(env: EnvBase) -> bool:
    """Tell whether an env is one slot, to be stepped through its own methods.

    An env of ``make_env`` is stepped below them, unless it is under a transform that may draw.
    """
    base = innermost(env)
    if isinstance(base, (SerialEnv, ParallelEnv)) or env.batch_size.numel() != 1:
        return False
    plain = type(env) is TransformedEnv or env is base
    known = plain and all(map(leaves_random_numbers_alone, transforms_of(env)))
    return not (isinstance(base, GymnasiumEnv) and (env.batch_size or known))


def _is_unstarted(env: EnvBase) -> bool:
    """Tell whether an env is a batched one whose envs are not made yet; closing it would raise."""
    base = innermost(env)
    return isinstance(base, (SerialEnv, ParallelEnv)) and base.is_closed


def _maker(env: EnvBase, base: Any) -> Callable[[], EnvBase]:
    """Return a function that makes an env of a ``SerialEnv`` or ``ParallelEnv``, as it is there."""
    pairs = list(zip(base.create_env_fn, base.create_env_kwargs, strict=True))
    make_one, kwargs = pairs[0]
    if any(make is not make_one or its != kwargs for make, its in pairs):
        raise ValueError(
            f"expected an env whose slots are alike, got {type(base).__name__} of unlike "
            "functions: an episode would depend on its slot; evaluate each function by itself"
        )
    # What its envs have learned, running statistics of transforms say, goes along.
    state = None if base.is_closed else base.state_dict()["worker0"]
    outer = all_transforms_of(env)

    def make() -> EnvBase:
        made = _made(make_one, kwargs)
        if state:
            made.load_state_dict(state)
        if outer:
            made = TransformedEnv(made, T.Compose(*[transform.clone() for transform in outer]))
        return made

    return make


def _check_transforms(env: EnvBase) -> None:
    """Refuse transforms that make an episode's data depend on its slot or its neighbours."""
    for transform in transforms_of(env):
        by_slot = isinstance(transform, VecNormV2) and not transform.reduce_batch_dims
        if by_slot and env.batch_size:
            raise NotReproducibleError(
                "the transform VecNormV2 keeps statistics of each slot apart, so that an episode "
                "would depend on where it runs; make it with reduce_batch_dims=True"
            )
        if next(transform.parameters(), None) is not None:
            raise NotReproducibleError(
                f"the transform {type(transform).__name__} runs a network, at a batch size that is "
                "the number of slots: another number would round differently. Move the network "
                "into the policy"
            )


def _batched(env: EnvBase, base: EnvBase) -> str:
    """Return the message for an env whose slots cannot be seeded one by one."""
    advice = (
        "pass a function that makes one with batch size [] or [1] (num_envs=1, say), which is "
        "called once per slot: evaluate(make_one, policy)"
    )
    if isinstance(base, GymWrapper):
        advice = "pass the gymnasium id, or a function that makes one GymEnv without num_envs"
    return (
        f"expected an env whose slots can be seeded one by one, got {_text(base)} of batch size "
        f"{list(env.batch_size)}, which seeds all of them together; {advice}"
    )


def _and(names: list[str]) -> str:
    return ", ".join(names)


def _text(env: EnvBase) -> str:
    return " ".join(str(env).split())


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
    actions = _Actions(env)

    def run(seed: int, slots: int) -> _Run:
        return _run(env, actions, seed, slots, stepped)

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
    if fresh_envs or (fresh_envs is None and differs and env.can.rebuild):
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


def _run(
    env: GymnasiumEnv,
    actions: _Actions,
    seed: int,
    slots: int,
    stepped: Callable[[], None] | None,
) -> _Run:
    """Play slot 0 beside ``slots - 1`` others; rebuild the envs that raise."""
    rows: list[Row] = []
    stepper = env.stepper
    try:
        for row in _rows(env, actions, seed, slots):
            rows.append(row)  # one by one: those before an error are kept
            if stepped is not None:
                stepped()
    except SlotError as error:
        if not stepper.can.rebuild:
            raise
        stepper.rebuild(list(error.causes))
        return _Run(rows, error)
    return _Run(rows, None)


def _rows(env: GymnasiumEnv, actions: _Actions, seed: int, slots: int) -> Iterator[Row]:
    """Yield the rows of slot 0; slot i is reset with ``seed + i``.

    All slots run if they cannot be stepped singly. Raises ``SlotError`` where an env raises.
    """
    stepper = env.stepper
    alone = env.can.pause and env.can.seed_singly
    running = list(range(min(slots, env.num_envs) if alone else env.num_envs))
    (buffers,) = env.allocate(1)
    raw = buffers.raw
    views = {"/".join(e.path): b for e, b in zip(stepper.entries, buffers.entries, strict=True)}
    views |= {
        keys.REWARD: raw.reward,
        keys.TERMINATED: raw.terminated,
        keys.TRUNCATED: raw.truncated,
    }
    stepper.reset(running, buffers, seeds=[seed + slot for slot in running])
    for step in range(_STEPS):
        ends = bool(buffers.done[0])
        yield Row({name: view[0].copy() for name, view in views.items()}, ends)
        if ends:
            return
        others = [slot for slot in running if buffers.done[slot]]
        if others:
            stepper.reset(others, buffers)
        given = actions.at(step, seed, running)
        stepper.step(given, running if alone else None, buffers, restart=False)


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
        if not slots.can.rebuild:
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
    if env.can.rebuild:
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
