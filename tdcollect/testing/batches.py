"""The check of a collected batch of the counting env, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from tdcollect import keys
from tdcollect.keys import Key
from tdcollect.testing.counting import HIDDEN, CountingRules, next_episode

_NEXT_OBSERVATION = (keys.NEXT, keys.OBSERVATION)
_FAILED = (keys.NEXT, keys.ENV_ERROR)
_FLAGS = (keys.DONE, keys.TERMINATED, keys.TRUNCATED)


def check_counting_batch(
    batch: TensorDictBase,
    rules: CountingRules = CountingRules(),
    *,
    num_envs: int | None = None,
    slots: Sequence[int] | None = None,
    previous: TensorDictBase | None = None,
    predicted: bool = True,
    max_episode_steps: int | None = None,
    require: Sequence[Key] = (),
) -> None:
    """Check every row of a batch of the counting env against the truth in its observations.

    Observations must count and continue from row to row. Each ``next`` observation must be the true
    successor, or at an episode's end the true final observation. No row may stand for a reset.
    Rewards and flags must be those of the step, and actions must be predicted. ``traj_ids``,
    ``is_init``, ``step_count``, ``episode_reward`` and the hidden state of :class:`CountingPolicy`
    are checked if the batch has them. Rows marked as failed (``("next", "env_error")``) must repeat
    their observation, have reward 0 and truncate; any episode may follow them.

    Args:
        batch: ``[N, T]``; ``[T]`` of an unbatched env; or with more batch dims before T.
        rules: the rules of the env.
        num_envs: N, for a flat batch ``[N * T]`` in which each slot's T rows are contiguous.
        slots: the N slots of the batch; ``0 .. N-1`` by default.
        previous: the batch before, which this one must continue.
        predicted: whether the actions must be right.
        max_episode_steps: the time limit of the wrapper around the env: longer episodes must be
            truncated after this many steps.
        require: optional entries that must be there, ``keys.TRAJ_IDS`` for instance.

    Raises:
        AssertionError: with the broken rule, the slot, the step of the batch, the entry, the
            expected value and the value found. Step -1 is the last step of ``previous``.
    """
    rows = _Rows(batch, rules, num_envs, slots, max_episode_steps)
    _check_entries(rows, require)
    _check_slots(rows)
    _check_resets(rows)
    _check_successors(rows)
    _check_order(rows)
    _check_rewards(rows)
    _check_flags(rows)
    if predicted:
        _check_actions(rows)
    before = None
    if previous is not None:
        before = _Rows(previous, rules, num_envs, slots, max_episode_steps)
        _check_continued(rows, before)
    if keys.TRAJ_IDS in rows:
        _check_traj_ids(rows, before)
    _check_counters(rows)
    _check_returns(rows)


class _Rows:
    """A batch as ``[N, T]``, with the counters in its observations (int64 ``[N, T]`` each)."""

    def __init__(
        self,
        batch: TensorDictBase,
        rules: CountingRules,
        num_envs: int | None,
        slots: Sequence[int] | None,
        max_episode_steps: int | None,
    ):
        if batch.batch_dims == 1:
            batch = batch.reshape(num_envs or 1, -1)
        self.batch = batch.reshape(-1, batch.shape[-1])
        self.rules = rules
        self.present = set(self.batch.keys(True, True))
        n, t = self.shape = tuple(self.batch.shape)
        if slots is not None and len(slots) != n:
            raise ValueError(
                f"expected {n} slots, one for each first index of the batch, got {list(slots)}"
            )
        observation = self[keys.OBSERVATION]
        self.step, self.episode, self.shown_slot = observation.long().unbind(-1)
        numbers = torch.tensor(range(n) if slots is None else slots, device=observation.device)
        self.slot = numbers.unsqueeze(-1).expand(n, t)
        own_length = rules.length_of(self.slot, self.episode)
        self.at_limit = torch.zeros_like(self.step, dtype=torch.bool)
        self.length = own_length
        if max_episode_steps is not None:
            self.length = own_length.clamp(max=max_episode_steps)
            self.at_limit = self.step + 1 >= max_episode_steps
        self.at_end = self.step + 1 >= own_length
        self.failed = torch.zeros_like(self.at_limit)
        if _FAILED in self.present:
            self.failed = self[_FAILED].squeeze(-1)
        self.at_end = self.at_end & ~self.failed
        self.last = self.at_end | self.at_limit | self.failed

    def __contains__(self, key: Key) -> bool:
        return key in self.present

    def __getitem__(self, key: Key) -> torch.Tensor:
        if key not in self.present:
            raise AssertionError(
                f"the batch has the entry {key!r}: got {sorted(map(str, self.present))}"
            )
        return self.batch[key]

    def observation(self, step: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
        """Return the env's observation at a step of an episode, ``[N, T, 3]``."""
        return torch.stack([step, episode, self.slot], -1)

    def check(
        self,
        rule: str,
        key: Key,
        expected: Any,
        got: torch.Tensor,
        where: torch.Tensor | None = None,
        first_step: int = 0,
    ) -> None:
        """Raise AssertionError at the first row (of those in ``where``) that is not as expected."""
        expected = torch.as_tensor(expected, device=got.device).expand(got.shape)
        wrong = (got != expected).flatten(2).any(-1) if got.ndim > 2 else got != expected
        if where is not None:
            wrong = wrong & where
        self.refuse(rule, key, wrong, expected, got, first_step)

    def refuse(
        self,
        rule: str,
        key: Key,
        wrong: torch.Tensor,
        expected: torch.Tensor | str,
        got: torch.Tensor,
        first_step: int = 0,
    ) -> None:
        """Fail if any row is wrong (bool ``[N, T]``), naming the earliest one."""
        if not wrong.any():
            return
        step = int(wrong.any(0).nonzero()[0])
        slot = int(wrong[:, step].nonzero()[0])
        wanted = expected if isinstance(expected, str) else _show(expected[slot, step])
        others = int(wrong.sum()) - 1
        raise AssertionError(
            f"{rule}: slot {int(self.slot[slot, 0])}, step {step + first_step}, entry "
            f"{key!r}: expected {wanted}, got {_show(got[slot, step])}"
            + (f" (and {others} more rows)" if others else "")
        )


def _show(value: torch.Tensor) -> Any:
    """Format a value for a message: integers without ``.0``, single values without brackets."""
    numbers: Any = value.tolist()
    if isinstance(numbers, list) and len(numbers) == 1:
        numbers = numbers[0]
    if isinstance(numbers, list):
        return [_as_int(number) for number in numbers]
    return _as_int(numbers)


def _as_int(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _check_entries(rows: _Rows, require: Sequence[Key]) -> None:
    n, t = rows.shape
    expected: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {
        keys.OBSERVATION: ((n, t, 3), torch.float32),
        _NEXT_OBSERVATION: ((n, t, 3), torch.float32),
        (keys.NEXT, keys.REWARD): ((n, t, 1), torch.float32),
    }
    for flag in _FLAGS:
        expected[flag] = expected[keys.NEXT, flag] = ((n, t, 1), torch.bool)
    optional: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {
        keys.TRAJ_IDS: ((n, t), torch.int64),
        keys.IS_INIT: ((n, t, 1), torch.bool),
    }
    for key, form in optional.items():
        if key in rows:
            expected[key] = form
    wanted: list[Key] = [*expected, keys.ACTION, *require]
    for key in wanted:
        value = rows[key]
        got = (tuple(value.shape), value.dtype)
        if got != expected.get(key, got):
            raise AssertionError(
                f"entries have their shape and dtype: entry {key!r}: expected {expected[key]}, "
                f"got {got}"
            )


def _check_slots(rows: _Rows) -> None:
    rule = "a slot keeps to its own place"
    rows.check(rule, keys.OBSERVATION, rows.slot, rows.shown_slot)


def _check_resets(rows: _Rows) -> None:
    rule = "there is no row for a reset: no action follows the observation that ends an episode"
    latest = torch.minimum(rows.step, rows.length - 1)
    expected = rows.observation(latest, rows.episode)
    rows.check(rule, keys.OBSERVATION, expected, rows[keys.OBSERVATION])


def _check_successors(rows: _Rows) -> None:
    expected = rows.observation(rows.step + (~rows.failed).long(), rows.episode)
    got = rows[_NEXT_OBSERVATION]
    rule = "a failed step leads nowhere: its next observation is its own"
    rows.check(rule, _NEXT_OBSERVATION, expected, got, where=rows.failed)
    rule = "the final observation of an episode is the true one"
    rows.check(rule, _NEXT_OBSERVATION, expected, got, where=rows.last)
    rule = "the next observation is the one that follows"
    rows.check(rule, _NEXT_OBSERVATION, expected, got)


def _check_order(rows: _Rows) -> None:
    """Each row begins where the one before it ended, in the same slot."""
    got = rows[keys.OBSERVATION][:, 1:]
    last = rows.last[:, :-1]
    expected = _of_any_episode(_successors(rows)[:, :-1], got, rows.failed[:, :-1])
    rule = "an episode starts at step 0, with the number after the one that ended"
    rows.check(rule, keys.OBSERVATION, expected, got, where=last, first_step=1)
    rule = "a row begins where the row before it ended"
    rows.check(rule, keys.OBSERVATION, expected, got, first_step=1)


def _successors(rows: _Rows) -> torch.Tensor:
    """Return the observation of the row after each row, ``[N, T, 3]``."""
    step = torch.where(rows.last, 0, rows.step + 1)
    episode = torch.where(rows.last, next_episode(rows.episode), rows.episode)
    return rows.observation(step, episode)


def _of_any_episode(
    expected: torch.Tensor, got: torch.Tensor, failed: torch.Tensor
) -> torch.Tensor:
    """Return ``expected``, but accept any episode after a failed step: the env was rebuilt."""
    shown = torch.stack([expected[..., 0], got[..., 1].to(expected.dtype), expected[..., 2]], -1)
    return torch.where(failed.unsqueeze(-1), shown, expected)


def _check_continued(rows: _Rows, before: _Rows) -> None:
    rule = "a batch goes on where the previous one ended"
    got = rows[keys.OBSERVATION][:, :1]
    expected = _of_any_episode(_successors(before)[:, -1:], got, before.failed[:, -1:])
    rows.check(rule, keys.OBSERVATION, expected, got)


def _check_rewards(rows: _Rows) -> None:
    key = (keys.NEXT, keys.REWARD)
    expected = rows.rules.reward(rows.slot, rows.episode, rows.step + 1) * ~rows.failed
    rows.check("a reward is that of its step", key, expected, rows[key].squeeze(-1))


def _check_flags(rows: _Rows) -> None:
    terminates = rows.rules.terminates(rows.episode)
    expected = {
        keys.TERMINATED: rows.at_end & terminates,
        keys.TRUNCATED: (rows.at_end & ~terminates) | rows.at_limit | rows.failed,
        keys.DONE: rows.last,
    }
    rules = {
        keys.TERMINATED: "terminated is what the env said",
        keys.TRUNCATED: "truncated is what the env said, or a time limit",
        keys.DONE: "done is terminated or truncated",
    }
    for flag, value in expected.items():
        key = (keys.NEXT, flag)
        rows.check(rules[flag], key, value, rows[key].squeeze(-1))
        rows.check("no step starts from an ended episode", flag, False, rows[flag].squeeze(-1))


def _check_actions(rows: _Rows) -> None:
    action = rows[keys.ACTION]
    if action.ndim > 2:
        action = action.long().argmax(-1)
    rule = "an action is the one that the state asks for"
    rows.check(rule, keys.ACTION, rows.rules.action(rows.step), action)


def _check_traj_ids(rows: _Rows, before: _Rows | None) -> None:
    ids, step, first = rows[keys.TRAJ_IDS], rows.step, 0
    seen = ids.new_empty(0)
    if before is not None:
        seen = before[keys.TRAJ_IDS]
        ids = torch.cat([seen[:, -1:], ids], -1)
        step = torch.cat([before.step[:, -1:], step], -1)
        first = -1
    within = step[:, 1:] > 0
    rule = "traj_ids stay the same within an episode"
    rows.check(rule, keys.TRAJ_IDS, ids[:, :-1], ids[:, 1:], within, first_step=first + 1)
    same = ~within & (ids[:, 1:] == ids[:, :-1])
    rule = "traj_ids change where an episode starts"
    rows.refuse(rule, keys.TRAJ_IDS, same, "another id", ids[:, 1:], first_step=first + 1)
    _check_unique(rows, seen)


def _check_unique(rows: _Rows, seen: torch.Tensor) -> None:
    """Check that the ids of episodes that start in this batch are new, and differ."""
    ids = rows[keys.TRAJ_IDS]
    # An episode that went on from before the batch has its id in its first row only.
    starts = rows.step == 0
    chunks = starts.clone()
    chunks[:, 0] = True
    _, index, counts = ids[chunks].unique(return_inverse=True, return_counts=True)
    repeated = torch.zeros_like(chunks)
    repeated[chunks] = counts[index] > 1
    repeated |= starts & torch.isin(ids, seen)
    rows.refuse("no two episodes share a traj_id", keys.TRAJ_IDS, repeated, "a new id", ids)


def _check_counters(rows: _Rows) -> None:
    """Check the entries that follow from the step count, if the batch has them."""
    rules: dict[Key, tuple[str, Any]] = {
        keys.IS_INIT: ("is_init marks an episode's first row, and no other", rows.step == 0),
        (keys.NEXT, keys.IS_INIT): ("next is_init is False: a step ends in no first row", False),
        keys.STEP_COUNT: ("step_count counts the steps before the row", rows.step),
        (keys.NEXT, keys.STEP_COUNT): ("next step_count counts the row too", rows.step + 1),
        HIDDEN: ("the hidden state is the one before the step, zero at a start", rows.step),
        (keys.NEXT, HIDDEN): ("the next hidden state is the one after the step", rows.step + 1),
    }
    for key, (rule, expected) in rules.items():
        if key in rows:
            rows.check(rule, key, expected, rows[key].squeeze(-1))


def _check_returns(rows: _Rows) -> None:
    key = (keys.NEXT, keys.EPISODE_REWARD)
    if keys.EPISODE_REWARD not in rows or key not in rows:
        return
    before, after = rows[keys.EPISODE_REWARD], rows[key]
    starts = rows.step == 0
    rule = "episode_reward is zero where an episode starts"
    rows.check(rule, keys.EPISODE_REWARD, 0, before, where=starts)
    rule = "episode_reward goes on from row to row"
    rows.check(
        rule, keys.EPISODE_REWARD, after[:, :-1], before[:, 1:], ~starts[:, 1:], first_step=1
    )
    rule = "next episode_reward adds the row's reward"
    rows.check(rule, key, before + rows[keys.NEXT, keys.REWARD], after)
