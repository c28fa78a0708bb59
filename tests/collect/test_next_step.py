"""Vector envs that reset one step late: every row is a step of an episode, none a reset's.

The oracle is a loop over the vector env as gymnasium has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import Composite, Unbounded
from torchrl.envs import TransformedEnv
from torchrl.envs import transforms as T

import tdcollect
from tdcollect import Collector, keys, make_env
from tdcollect.seeding import batch_seed

from .oracle import UPSTREAM

pytestmark = pytest.mark.filterwarnings(UPSTREAM)

N, LIMIT = 5, 20


def poles(slots: int = N) -> CartPoleVectorEnv:
    return CartPoleVectorEnv(slots, max_episode_steps=LIMIT)


class Row(NamedTuple):
    slot: int
    observation: list[float]
    action: int
    following: list[float]
    reward: float
    terminated: bool
    truncated: bool
    step: int  # of its episode


def lean(observation: Any) -> Any:
    return observation[..., 0] + observation[..., 2] > 0


def plain(env: VectorEnv[Any, Any, Any], seed: int) -> Iterator[Row]:
    """The rows of a loop, without those of resets: an env that begins late takes these itself."""
    late = env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    now, _ = env.reset(seed=seed)
    resets, steps = np.zeros(env.num_envs, bool), np.zeros(env.num_envs, int)
    while True:
        actions = lean(now).astype(np.int64)
        following, rewards, terminated, truncated, _ = env.step(actions)
        for slot in np.flatnonzero(~resets):
            parts = now[slot].tolist(), int(actions[slot]), following[slot].tolist()
            ends = float(rewards[slot]), bool(terminated[slot]), bool(truncated[slot])
            yield Row(int(slot), *parts, *ends, int(steps[slot]))
        ended, now = terminated | truncated, following
        steps = np.where(ended | resets, 0, steps + 1)
        if late:
            resets = ended
        elif ended.any():
            now, _ = env.reset(options={"reset_mask": ended})


def rows_of(batch: TensorDictBase) -> list[Row]:
    after = batch["next"]
    columns = (
        batch[keys.SLOT],
        batch["observation"],
        batch["action"].argmax(-1),
        after["observation"],
        after["reward"][..., 0],
        after["terminated"][..., 0],
        after["truncated"][..., 0],
        batch["count"][..., 0],
    )
    return [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def leaning() -> TensorDictModule:
    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(lean(observation).long(), 2)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def counting() -> TensorDictModule:
    """Leans, and counts the steps of the episode in a hidden state."""
    act = leaning()

    def both(observation: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return act(observation=observation), count + 1

    keys_in, keys_out = ["observation", "count"], ["action", ("next", "count")]
    return TensorDictModule(both, in_keys=keys_in, out_keys=keys_out)


def collector_of(frames: int = 7, **options: Any) -> Collector:
    count = Composite(count=Unbounded((N, 1), dtype=torch.int64), shape=(N,))
    env = TransformedEnv(make_env(poles()), T.TensorDictPrimer(count))
    collector = Collector(env, counting(), frames_per_batch=frames, by_arrival=True, **options)
    collector.set_seed(3)
    return collector


def ended(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.terminated or row.truncated]


@pytest.mark.parametrize("interrupted", [False, True])
def test_rows_by_arrival_are_those_of_a_plain_loop(interrupted: bool) -> None:
    collector = collector_of()
    rows: list[Row] = []
    slot_of: dict[int, int] = {}
    for batch in islice(collector, 60):
        rows += rows_of(batch)
        ids = batch["collector", "traj_ids"].tolist()
        slot_of.update(zip(ids, batch[keys.SLOT].tolist(), strict=True))
        assert len(collector._runner.arrivals.surplus_slots) < N
        if interrupted:
            collector.state_dict()
    expected = list(islice(plain(poles(), 3), len(rows)))
    assert rows == expected
    ends = ended(expected)
    assert {row.terminated for row in ends} == {True, False}
    begun = [row.slot for row in expected if row.step == 0]
    assert [slot_of[number] for number in sorted(slot_of)] == begun
    assert collector.stats.lifetime.episodes == len(ends)
    assert collector.stats.window.lengths.tolist() == [row.step + 1 for row in ends]
    collector.shutdown()


def test_a_policy_may_follow_random_actions_at_any_row() -> None:
    for frames in range(20, 40):
        collector = collector_of(frames, init_random_frames=frames)
        batches = list(islice(collector, 3))
        rows = [row for batch in batches[1:] for row in rows_of(batch)]
        for row in rows[N:]:  # those before were waiting
            assert row.action == lean(np.array(row.observation, np.float32))
        latest: dict[int, Row] = {}
        for row in (row for batch in batches for row in rows_of(batch)):
            before = latest.get(row.slot)
            if before is not None and not (before.terminated or before.truncated):
                assert row.observation == before.following
            elif before is not None:
                assert max(map(abs, row.observation)) <= 0.05
            latest[row.slot] = row
        collector.shutdown()


def test_whole_episodes_are_the_first_to_start() -> None:
    collector = collector_of()
    for seed in (3, 4):
        found = collector.collect(episodes=9, seed=seed)
        rows = list(islice(plain(poles(), seed), 500))
        starts = [i for i, row in enumerate(rows) if row.step == 0][:9]
        lengths = [
            next(r.step + 1 for r in ended(rows[i:]) if r.slot == rows[i].slot) for i in starts
        ]
        ends = found["next", "done"][..., 0].nonzero()[:, 0]
        assert torch.diff(ends, prepend=torch.tensor([-1])).tolist() == lengths
    assert len(next(iter(collector))) == 7
    collector.shutdown()


def test_without_by_arrival_one_line_says_what_to_do() -> None:
    env = make_env(poles())
    told = r"^CartPoleVectorEnv.*one step late .*by_arrival=True.*backend='serial'$"
    with pytest.raises(ValueError, match=told):
        Collector(env, None, frames_per_batch=N, total_frames=-1)
    env.reset()
    mask = torch.arange(N)[:, None] < 1
    with pytest.raises(ValueError, match=told):
        env.reset(TensorDict({"_reset": mask}, [N]))
    with pytest.raises(RuntimeError, match="expected a step of all 5 slots, got one of slots"):
        env.step(TensorDict({"_step": mask, "action": env.action_spec.rand()}, [N]))
    with pytest.raises(ValueError, match="expected no max_episode_steps"):
        make_env(poles(), max_episode_steps=3)
    collector = Collector(env, None, frames_per_batch=7, by_arrival=True)
    assert ("slots", "NEXT_STEP", "begin again in a step of the others", "") in collector.explain()
    collector.shutdown()


class Disabled(CartPoleVectorEnv):
    """Resets the slots of a mask, with one generator for all of them."""

    def __init__(self, slots: int = N):
        super().__init__(slots, max_episode_steps=LIMIT)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if mask.all():
            return super().reset(seed=seed)
        assert seed is None
        self.prev_done[:] = False
        self.state[:, mask] = self.np_random.uniform(-0.05, 0.05, (4, int(mask.sum())))
        self.steps[mask] = 0
        return self.state.T.astype(np.float32), {}


@pytest.mark.parametrize("make", [poles, Disabled])
@pytest.mark.parametrize("per_slot", [1, 3])
def test_batched_episodes_are_those_of_a_plain_loop(make: Any, per_slot: int) -> None:
    count = 2 * N * per_slot
    how: dict[str, Any] = {"episodes_per_slot": per_slot, "progress": False}
    found = tdcollect.evaluate(lambda: make_env(make()), leaning(), count, **how)
    assert found.manifest["repeated"]["differing"] == 0
    lengths = []
    for batch in range(2):
        ends = ended(list(islice(plain(make(), batch_seed(0, batch)), 1000)))
        of_slots = [[row for row in ends if row.slot == slot] for slot in range(N)]
        lengths += [rows[nth].step + 1 for nth in range(per_slot) for rows in of_slots]
    assert [episode.length for episode in found.episodes] == lengths
    assert found.returns.tolist() == lengths
    for env in (make, make_env(make())):  # a function that makes a vector env; an env
        assert tdcollect.evaluate(env, leaning(), count, **how).digest == found.digest


def atari() -> Any:
    vector_env = pytest.importorskip("ale_py.vector_env")
    how = {"num_threads": 1, "max_num_frames_per_episode": 24, "noop_max": 8}
    return vector_env.AtariVectorEnv("pong", 2, autoreset_mode=AutoresetMode.NEXT_STEP, **how)


def test_atari_resets_single_slots_right_after_an_end() -> None:
    env = make_env(atari(), info_keys=["episode_frame_number"])
    collector = Collector(env, None, frames_per_batch=2 * 20, total_frames=-1)
    collector.set_seed(3)
    batch = next(iter(collector))
    plain_env = atari()
    now, info = plain_env.reset(seed=3)
    for t in range(20):
        row, actions = batch[:, t], batch["action"][:, t].argmax(-1).numpy()
        assert (row["observation"].numpy() == now).all()
        assert (row["episode_frame_number"].numpy() == info["episode_frame_number"]).all()
        now, _, terminated, truncated, info = plain_env.step(actions)
        assert (row["next", "observation"].numpy() == now).all()
        assert (row["next", "truncated"][:, 0].numpy() == truncated).all()
        if (over := terminated | truncated).any():
            now, info = plain_env.reset(options={"reset_mask": over})
            assert (row["next", "episode_frame_number"].numpy()[over] >= 24).all()
    assert batch["next", "done"].sum() > 4
    collector.shutdown()
