"""Batched simulators: envs that seed all slots together, evaluated batch by batch.

A batch starts from one seed. A slot counts its first episodes, a number fixed beforehand, and all
of them are waited for: whether an episode counts does not depend on its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

from tdcollect.collect.arrays import (
    ArrayPlan,
    Arrived,
    Options,
    Seeds,
    Stepped,
    by_episodes,
    plan_for,
)
from tdcollect.collect.episodes import Start
from tdcollect.collect.step_dict import StepDict, flat, like_rows
from tdcollect.envs.make import make_env
from tdcollect.envs.slots import Stepper
from tdcollect.envs.traits import innermost
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes import opening
from tdcollect.evaluation.episodes.data import Finished
from tdcollect.evaluation.episodes.trial import Feed, RunStarts, indices_of
from tdcollect.evaluation.ledger import Batches
from tdcollect.evaluation.requested import closed_on_error, is_unstarted
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.keys import Key, entry_path
from tdcollect.randomness import GlobalStream


def open_batched(env: Any, settings: EvaluationSettings, finish: opening.Finish) -> opening.OpenEnv:
    """Open an env of batch size ``[N]``, whose slots share a seed."""
    fixed = ("num_envs", "backend", *(["env_kwargs"] if isinstance(env, EnvBase) else []))
    if other := [name for name in fixed if getattr(settings, name) is not None]:
        raise ValueError(
            f"expected no {', '.join(other)} with episodes_per_slot: the env has slots of its own, "
            "which the function that makes it sets"
        )
    make = None
    if not isinstance(env, (str, EnvBase)):
        make = partial(_made, env, settings.env_kwargs or {})
    opened = env if make is None else make()
    base = innermost(opened) if isinstance(opened, EnvBase) else None
    numbered = base is None or isinstance(base, (SerialEnv, ParallelEnv))
    if isinstance(base, GymnasiumEnv):
        numbered = base.can.each_seed
    if numbered or len(opened.batch_size) != 1 or opened.batch_size.numel() < 2:
        if make is not None and hasattr(opened, "close") and not is_unstarted(opened):
            opened.close()
        size = f" of batch size {list(opened.batch_size)}" if isinstance(opened, EnvBase) else ""
        raise ValueError(
            "expected episodes_per_slot for an env of batch size [N] whose slots share a seed, got "
            f"{' '.join(str(opened).split())}{size}; leave it out: its episodes are numbered, and "
            "do not depend on each other"
        )
    if make is None:
        return opening.OpenEnv(opened, BatchEnv(finish(opened)), made=False)
    with closed_on_error(opened):
        slots = BatchEnv(opening.still(finish, opened), lambda: opening.still(finish, make()))
    return opening.OpenEnv(slots.transformed, slots)


def _made(make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    env = opening.made_alike(make, kwargs)
    return make_env(env) if isinstance(env, VectorEnv) else env


class BatchEnv(opening.SlotEnvs):
    """Slots of one env that share a seed, and one stream in the place of the global generators.

    All are stepped together. One that waits is stepped on unseen with its last action: it is reset
    only for an episode that counts, so that its end reaches no other slot. gymnasium's vector envs,
    which are stepped on arrays, take no step after an end: a slot that waits is reset there, too.
    """

    apart = False

    def __init__(self, env: EnvBase, make: Callable[[], EnvBase] | None = None):
        super().__init__([env], make)
        self.batch_size = env.batch_size
        self._plan()
        self.can = self.can._replace(each_options=False)
        if self._whole.base is not None:
            can, self._seeds_in_reset = self._whole.can, True
            self.can = can._replace(rebuild=self.can.rebuild, each_options=False, seed_singly=True)
        self._acted = StepDict()
        self._row_of_all = StepDict()

    def _plan(self) -> None:
        is_vector = isinstance(innermost(self.transformed), GymnasiumEnv)
        plan = plan_for(self.transformed) if is_vector else ArrayPlan(None)
        self._whole = by_episodes(plan, self.transformed)

    def allocate(self, count: int, pinned: bool = False) -> list[Any]:
        return self._whole.allocate(count, pinned)

    def unseed(self, seeds: Sequence[int]) -> None:
        super().unseed(seeds[:1])

    def rebuild_slots(self, slots: list[int]) -> None:
        if not self._streams:  # it is as it was made
            return
        self._streams.clear()
        super().rebuild_slots([0])
        self._plan()

    def latest_infos(self, slots: Sequence[int], names: Sequence[str]) -> Mapping[int, Any]:
        if self._whole.base is not None:
            return self._whole.latest_infos(slots, names)
        by_path = {entry_path(key): value for key, value in self._row_of_all.items()}
        return {slot: {n: by_path[n][slot] for n in names if n in by_path} for slot in slots}

    def reset_all(self, seeds: list[int] | None, options: dict[str, Any] | None) -> StepDict:
        assert seeds is not None
        self._seed(seeds[0])
        how = {"seed": seeds[0]} if self._seeds_in_reset else {}
        with self.outside(), self._streams[0]:
            return opening.with_truncated(flat(self.transformed.reset(**how)))

    def _seed(self, seed: int) -> None:
        self._streams[0] = GlobalStream(seed, self.device)
        if not self._seeds_in_reset:
            with self.outside(), self._streams[0]:
                self.transformed.set_seed(seed)

    def advance(
        self, step: StepDict, next_keys: list[Key], buffers: Any, slots: list[int] | None = None
    ) -> Stepped:
        self.check_acted(step)
        step = StepDict((key, value.to(self.home)) for key, value in step.items())
        for key in self.transformed.action_keys if slots is not None and self._acted else ():
            acting = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
            acting[slots] = True
            step[key] = torch.where(like_rows(acting, step[key]), step[key], self._acted[key])
        self._acted = StepDict((key, step[key]) for key in self.transformed.action_keys)
        with self.outside(), self._streams[0]:
            following, error = self._whole.advance(step, next_keys, buffers)
        self._row_of_all = opening.with_truncated(following)
        return self._row_of_all, error

    def begin(
        self,
        following: StepDict,
        starting: torch.Tensor,
        slots: list[int],
        seeds: list[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> StepDict:
        with self.outside(), self._streams[0]:
            return opening.with_truncated(self._whole.begin(following, starting, slots))

    # A vector env in NEXT_STEP mode begins episodes in steps, as slots do that step asynchronously.

    @property
    def stepper(self) -> Stepper:
        return self._whole.stepper

    def send(self, step: StepDict, slots: list[int]) -> None:
        self._whole.send(step, slots)

    def send_reset(self, slots: list[int], seeds: Seeds, options: Options) -> None:
        self._whole.send_reset(slots, None, options)

    def receive(self, next_keys: list[Key], buffers: Any) -> Arrived:
        with self.outside(), self._streams[0]:
            return self._whole.receive(next_keys, buffers)

    def check_resets(self, episodes_per_slot: int) -> None:
        """Refuse an env that starts all slots again where it is asked to start one.

        Its other slots would then go on as they do after a reset of all, from the same seed. In
        batches of one episode per slot, none is asked to.
        """
        if self._seeds_in_reset or episodes_per_slot == 1:  # it has no seed but by a reset of all
            return
        seeds, starting = [0], torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        starting[0] = True  # slot 0 alone
        with self.outside(), GlobalStream(0, self.device):
            actions = flat(self.transformed.full_action_spec.rand())

        def after(row: StepDict) -> StepDict:
            return StepDict(self.advance(StepDict({**row, **actions}), [], None)[0])

        def alike(one: StepDict, other: StepDict) -> bool:
            return all(torch.equal(one[key][1:], other[key][1:]) for key in one)

        start = self.reset_all(seeds, None)
        first = after(start)
        second = after(StepDict({**start, **first}))
        first = after(start := self.reset_all(seeds, None))
        self._seed(0)
        begun = self.begin(first, starting, [0])
        if alike(after(StepDict({**start, **begun})), first) and not alike(first, second):
            raise ValueError(
                f"expected episodes_per_slot=1 for {self.name}, which starts all its slots again "
                "where one is to start: each gives the first episode of each batch"
            )


class BatchStarts(RunStarts):
    """The episodes of one batch after the other: in each, a slot's own, one after the other."""

    def __init__(self, env: BatchEnv, batches: Batches, fresh_envs: bool | None):
        super().__init__(batches.slots, env.can.rebuild if fresh_envs is None else fresh_envs)
        self._batches = batches

    def begin(self, feed: Feed, start_of: Callable[[int], Start], env: Any) -> None:
        super().begin(feed, start_of, env)
        env.check_resets(self._batches.episodes_per_slot)
        indices = {*indices_of(feed)}
        self._wanted = indices
        self._left = iter(sorted({index // self._batches.size for index in indices}))
        self.goes_on()

    def goes_on(self) -> bool:
        """Turn to the next batch; False if there is none."""
        batch = next(self._left, None)
        indices = range(0) if batch is None else self._batches.indices(batch)
        self._first = indices[: self._batches.slots]
        self._due = [iter(indices[slot :: self._batches.slots]) for slot in range(len(self.resets))]
        return batch is not None

    def start(self, slot: int, steps: int) -> Start | None:
        index = next(self._due[slot], None)
        if index is None:
            return None
        rebuild = bool(self.fresh_envs) and index in self._first
        return replace(self._start_of(index), rebuild=rebuild)

    def take(self, ended: Finished, run: int) -> Finished | None:
        record = ended.record
        if record.index not in self._wanted:
            return None
        return ended._replace(record=replace(record, place=self._batches.place(record.index)))
