"""The trial of an env: one of its episodes runs again, so that its seed is seen to decide it.

What decides an episode cannot be read off an env, so it is tried. The first episode that ends runs
again, in its first 1,000 steps:

1. in a slot whose env is *new*, which finds random numbers that are drawn where an env
   is made, and what envs share;
2. in a slot that has had another episode, as its second, and as its third: this finds what an env
   carries from one episode into the next. All further episodes then run on new envs.

Until that is known, every episode runs on a new env; where none can be made, an env that carries
something on is refused, with all its episodes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np

from tdcollect.collect.episodes import SlotStarts, Start
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.evaluation.episodes.data import POLICY_ADVICE, Finished, StepDifference, unlike
from tdcollect.evaluation.ledger import COMPLETED, CUT
from tdcollect.randomness import NotReproducibleError

_TRIES = 3  # runs of an episode that may raise, before the env counts as untried


@dataclass(frozen=True)
class Again:
    """The index of an episode that ran before, to run once more in its first steps."""

    index: int


class Feed(Iterator[int | Again]):
    """Gives the indices of the episodes to run, here those known from the start."""

    seconds = 1.0
    stepped: Callable[[], None] | None = None
    """Called where a step of the running episodes has begun."""

    def __init__(self, indices: Iterable[int | Again]):
        self._indices = iter(indices)

    def __next__(self) -> int | Again:
        """Return the next index, if there is one; asked at each step while slots are free."""
        return next(self._indices)

    def goes_on(self) -> bool:
        """Wait for further indices once all episodes have ended; False if none will come."""
        return False


class RunStarts(SlotStarts):
    """The episodes of a run: which one starts in a slot, and which count once they have ended.

    ``fresh_envs``: whether they run on new envs; None while that is not known. ``resets``: int64
    ``[N]``, the resets of each slot's env since it was made.
    """

    asks = True  # run an episode again to find out; False until this process is told to
    # Runs under way that are not waited for to their end, by trajectory id.
    runs_again: Mapping[int, Start] = MappingProxyType({})

    def __init__(self, slots: int, fresh_envs: bool | None):
        self.fresh_envs = fresh_envs
        self.resets = np.zeros(slots, np.int64)

    def begin(self, feed: Feed, start_of: Callable[[int], Start], env: Any) -> None:
        """Take the episodes of a run in an env, given by their indices."""
        self._feed, self._start_of, self._env = feed, start_of, env

    def abandon(self) -> None:
        """Forget what is under way, and what is to come."""

    def start_over(self) -> None:
        """Forget what ran: all slots have new envs, and the episodes that were due run first."""

    def goes_on(self) -> bool:
        """Turn to further episodes once all that ran have ended; False if there are none."""
        return False

    def started(self, slot: int, start: Start) -> None:
        """Note that an episode has started in a slot."""

    @abstractmethod
    def take(self, ended: Finished, run: int) -> Finished | None:
        """Take an episode that has ended; return it if it counts."""

    def settle(self, ended: Finished) -> None:
        """Note that an episode counts: nothing was wrong with its steps."""


class Trial(RunStarts):
    """Gives each slot its next episode: of those asked for, or the one that runs again.

    ``rebuild``: the envs of slots can be made again, and are this evaluation's own.
    """

    def __init__(self, slots: int, rebuild: bool, fresh_envs: bool | None):
        super().__init__(slots, None)
        self.due: dict[int, None] = {}  # episodes that are handed out and have not ended
        self._rebuild, self._wanted = rebuild, fresh_envs
        self._given_back = deque[int | Again]()
        self.runs_again: dict[int, Start] = {}
        self._own = set[int]()  # those of the subject that have not been judged
        self._again: dict[int, None] = {}  # episodes that run again, until they count
        self._runs = count(1)
        self._tries = 0
        self.start_over()

    def start_over(self) -> None:
        unfinished = [*self.due, *map(Again, self._again), *self._given_back]
        self.abandon()
        self._given_back.extend(unfinished)
        self.resets[:] = 0
        self._subject: Finished | None = None
        self._anew = False  # whether the subject has run on a new env, as before

    def abandon(self) -> None:
        self.due.clear()
        self._given_back.clear()
        self.left_out = set()
        self._slot: int | None = None  # where it runs as the second and the third
        self._third = False  # whether it has been started there as the third
        self._latest: dict[int, int] = {}  # the latest episode of each slot
        self._nth: dict[int, int] = {}  # by run
        self._own.clear()
        self.runs_again.clear()
        self._again.clear()

    def goes_on(self) -> bool:
        return bool(self._given_back)  # one that came too late for the slot that it needs

    def start(self, slot: int, steps: int) -> Start | None:
        if (own := self._of_subject(slot, idle=False)) is not None:
            return own
        item = self._given_back.popleft() if self._given_back else next(self._feed, None)
        if item is None:
            return self._of_subject(slot, idle=True)
        if isinstance(item, Again):
            if self.fresh_envs is False and not self.due and slot != self.resets.argmax():
                self._given_back.append(item)  # the most used env shows most
                return None
            rebuild = self._rebuild and self.fresh_envs is not False and bool(self.resets[slot])
            self._again[item.index] = None
            return self._once_more(item.index, rebuild)
        self.due[item] = None
        pending = self.fresh_envs is None and self._rebuild
        fresh = bool(self.fresh_envs) or (pending and bool(self.resets[slot]))
        return replace(self._start_of(item), rebuild=fresh)

    def _of_subject(self, slot: int, idle: bool) -> Start | None:
        """A run of the subject that a slot is fit for; any is that has nothing else to do."""
        if self._subject is None or self.fresh_envs is not None or not self.asks:
            return None
        index = self._subject.record.index
        if not self._anew:
            return None if self._own else self._once_more(index, True, own=True)
        if self._slot is None:
            fits = self.resets[slot] > 0 and self._latest.get(slot) != index
            if self._own or not (fits or idle):
                return None
            self._slot = slot
        if self._slot != slot or self._third:
            return None
        self._third = bool(self.resets[slot] >= 2)
        return self._once_more(index, False, own=True)

    def _once_more(self, index: int, rebuild: bool, own: bool = False) -> Start:
        run = -next(self._runs)  # no episode's index, which other runs have for their id
        if own:
            self._own.add(run)
        self.runs_again[run] = replace(self._start_of(index), traj_id=run, rebuild=rebuild)
        return self.runs_again[run]

    def started(self, slot: int, start: Start) -> None:
        self._latest[slot] = start.index
        self._nth[start.traj_id] = int(self.resets[slot])

    def take(self, ended: Finished, run: int) -> Finished | None:
        """Take an episode that has ended; return it unless it ran for the trial alone.

        Raises:
            NotReproducibleError: if it is not what it was before.
        """
        ended = ended._replace(nth=self._nth.pop(run, 0))  # 0: its reset raised
        again = self.runs_again.pop(run, None) is not None
        if run in self._own:
            self._own.remove(run)
            if self.fresh_envs is None:
                self._judge(ended)
            return None
        # Also of those that run once more: all others may have ended before, in another process.
        wanted = self.fresh_envs is None and self._subject is None and ended.nth == 1
        if wanted and ended.record.status in (COMPLETED, CUT):
            self._subject, self._anew = ended, not self._rebuild
        return ended._replace(again=again)

    def settle(self, ended: Finished) -> None:
        if ended.again:
            self._again.pop(ended.record.index, None)  # two runs of it may end
        else:
            del self.due[ended.record.index]

    def _judge(self, ended: Finished) -> None:
        assert self._subject is not None
        difference = unlike(self._subject, ended)
        if not self._anew:
            if ended.record.status not in (CUT, self._subject.record.status):
                self._give_up()  # by chance: it says nothing of others
                return
            if difference is not None:
                raise self._fault(difference, "on a new env")
            self._anew = True
            self.fresh_envs = self._wanted or None
        elif difference is not None:
            if not self._rebuild or self._wanted is False:
                raise self._fault(difference, "after others on the same env")
            self.fresh_envs = True
        elif ended.nth > 2:
            self.fresh_envs = False
        elif self._third and not self._own:  # it was made to start elsewhere
            self._slot, self._third = None, False

    def _give_up(self) -> None:
        self._tries += 1
        if self._tries == _TRIES:
            self.fresh_envs = bool(self._wanted)
            warnings.warn(
                f"{self._env.name} raised each time that one of its episodes ran again, {_TRIES} "
                "times: it is not known whether a seed decides its episodes",
                stacklevel=2,
            )

    def _fault(self, difference: StepDifference | str, how: str) -> NotReproducibleError:
        """Say of the subject, which ran again, how it differs, why, and what to do."""
        assert self._subject is not None
        record, env = self._subject.record, self._env
        text = (
            f"episode {record.index} of {env.name} (seed {record.env_seed}) is another one when it "
            f"runs again {how}: {difference}: "
        )
        if isinstance(difference, StepDifference) and difference.of_policy:
            return NotReproducibleError(text + POLICY_ADVICE)
        if isinstance(difference, str):  # all steps are alike
            text += "an info or a metric depends on something else, such as time"
            return NotReproducibleError(text)
        seeding = "reset(seed=)" if isinstance(env, GymnasiumEnv) else "its seed"
        advice = "Pass a function that makes it: episodes can then run on new envs"
        if isinstance(env, GymnasiumEnv):
            advice = "Have it draw from env.np_random alone, and reset all that it keeps"
            if not env.can.each_seed:
                advice = "If its slots share a generator, evaluate it with episodes_per_slot=1"
        elif getattr(env, "loads_data", False):
            advice = (
                "A DataLoadingPrimer takes the next row of its data at each reset, whatever the "
                "seed: write the prompt in a transform that draws it from torch's generator"
            )
        elif env.can.rebuild:
            advice = "Seed all its generators in _set_seed, and reset all that it keeps in _reset"
        return NotReproducibleError(
            f"{text}the env draws random numbers that {seeding} does not reach, keeps something "
            "from one episode to the next, shares something with the envs of other slots, or is "
            f"unlike them. {advice}; tdcollect doctor looks at it"
        )


def indices_of(items: Iterable[int | Again]) -> Iterator[int]:
    """Yield the indices of episodes to run, those that run again among them."""
    return (item.index if isinstance(item, Again) else item for item in items)
