"""The seam below TorchRL: slots that are reset and stepped on numpy arrays.

A backend steps N gymnasium slots and writes the results straight into arrays that its caller owns.
It knows nothing of TensorDict, so the same backend serves the ``EnvBase`` wrapper, which hands it
fresh arrays, and the collector, which hands it the arrays of many steps allocated together.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from tdcollect import keys
from tdcollect.envs.spaces import SpaceCodec, observation_name
from tdcollect.workers.values import Array, InfoEntry

RESUMABLE = ("serial", "process")
"""Backends whose envs can be brought back, in another process too."""


class SlotBuffers(NamedTuple):
    """The arrays that one step of N slots is written to. All belong to the caller.

    ``observation`` and ``info`` hold one array ``[N, *shape]`` per entry, ``reward`` is float32
    ``[N]``, or float64 for a caller that needs it as the env gave it; ``terminated`` and
    ``truncated`` are bool ``[N]``.
    """

    observation: Sequence[Array]
    info: Sequence[Array]
    reward: Array
    terminated: Array
    truncated: Array


class Arrivals(NamedTuple):
    """The slots that have done what they were sent to do.

    ``failed_steps`` and ``failed_resets`` are the errors of slots whose envs raised; the others are
    in ``stepped`` or ``begun``, and their rows are written.
    """

    stepped: list[int]
    begun: list[int]
    failed_steps: dict[int, Exception]
    failed_resets: dict[int, Exception]


class Backend(abc.ABC):
    """N slots of one env.

    Attributes:
        name: the ``backend`` argument of ``make_env``.
        num_envs: N.
        observation: the entries of the observation space.
        action: the entries of the action space.
        info: the info entries that are written; set by :meth:`read_info`.
        envs: the gymnasium envs, one per slot, where they are plain ones in this process.
        steps_ended_slots: whether a slot whose episode has ended may be stepped on, as a plain
            gymnasium env may. If False, the action would be lost and the step is refused.
        steps_subset: whether some slots can be stepped while others wait.
        resets_subset: whether some slots can be reset while the episodes of others go on. If
            False, a slot alone starts anew only after the env itself has ended its episode.
        seeds_subset: whether some slots can be reset with seeds while the episodes of others go on.
        rebuilds: whether a slot's env can be built anew.
        resumable: whether the envs can be saved and brought back; see :meth:`save_states`.
        spec: the gymnasium spec of a slot's env, wrappers included; None if nothing is known.
        wait_num: how many slots :meth:`receive` waits for, where slots that are ready may go on;
            None for a backend that steps them together.
        in_flight: the slots that were sent to step or to reset, and have not been received.
    """

    name: ClassVar[str]
    num_envs: int
    observation: SpaceCodec
    action: SpaceCodec
    info: Sequence[InfoEntry] = ()
    envs: Sequence[gym.Env[Any, Any]] = ()
    steps_ended_slots = False
    steps_subset = True
    resets_subset = True
    seeds_subset = True
    rebuilds = False
    resumable = False
    spec: EnvSpec | None = None
    wait_num: int | None = None
    in_flight: Set[int] = frozenset()

    @property
    def vector_env(self) -> Any:
        """The vector env that holds all slots; None if each has an env of its own."""
        return None

    def _set_spaces(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], categorical: bool
    ) -> None:
        self.observation = SpaceCodec(
            observation,
            observation_name(observation),
            categorical=categorical,
            rename_state=True,
        )
        self.action = SpaceCodec(action, keys.ACTION, categorical=categorical)

    @abc.abstractmethod
    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> None:
        """Start an episode in each of ``slots``; write the rows of those slots only.

        Args:
            slots: the slots to reset, ascending.
            seeds: one seed per slot in ``slots``, or None to go on with the env's own generator.
            options: gymnasium's reset options, the same for every slot.
            out: receives observations and infos; its reward and flags are left alone.

        Raises:
            ValueError: if seeds or options cannot be honoured.
            SlotError: if the envs of some slots raised; the rows of the others are written.
        """

    @abc.abstractmethod
    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        """Step ``slots`` (None for all) and write their rows.

        Args:
            actions: the action entries, arrays ``[N, *shape]``.
            slots: the slots to step, ascending.
            out: receives everything; at the end of an episode the true final observation.

        Raises:
            SlotError: if the envs of some slots raised; the rows of the others are written.
        """

    def send(self, actions: Sequence[Array], slots: Sequence[int]) -> None:
        """Have ``slots`` take a step, and go on; :meth:`receive` gives its outcome.

        Args:
            actions: as of :meth:`step`.
            slots: ascending, idle all of them.
        """
        raise self._in_step()

    def send_reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None,
        options: dict[str, Any] | None,
    ) -> None:
        """Start an episode in ``slots``, and go on; :meth:`receive` gives its outcome.

        Args:
            slots: ascending, idle all of them.
            seeds: one per slot in ``slots``, None for one that goes on with its own generator.
            options: gymnasium's reset options.
        """
        raise self._in_step()

    def receive(self, out: SlotBuffers) -> Arrivals:
        """Wait for slots that were sent, and write their rows."""
        raise self._in_step()

    def recall(self) -> None:  # noqa: B027 - nothing is in flight in step
        """Wait for the slots that are in flight, and forget where they came to."""

    def is_idle(self, slot: int) -> bool:
        """Tell whether a slot may be sent; those that share a worker are busy together."""
        return True

    def _in_step(self) -> NotImplementedError:
        return NotImplementedError(f"the backend {self.name!r} steps its slots together")

    def latest_info(self, slot: int) -> Mapping[str, Any]:
        """The infos of a slot's latest step; empty if they are not kept."""
        return {}

    def rebuild(self, slots: Sequence[int]) -> list[int]:
        """Make the envs of ``slots`` anew; each must be reset before it is stepped.

        Returns:
            The slots built anew, ascending, with those that were lost together with these.
        """
        raise NotImplementedError(f"the backend {self.name!r} cannot build single slots anew")

    def save_states(self) -> dict[int, dict[str, Any]]:
        """The states of the envs, by slot, for :meth:`load_states`: built-in and NumPy types."""
        why = f"the backend {self.name!r} cannot save its envs"
        if self.name in RESUMABLE:
            why = "it was made without make_env(resumable=True)"
        return {slot: {"how": "nothing", "why": why} for slot in range(self.num_envs)}

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> dict[int, str]:
        """Bring the envs of some slots back to saved states.

        Returns:
            The reason by slot, for slots that could not be brought back. They must be reset.
        """
        here = Backend.save_states(self)
        return {
            slot: str(state["why"] if state["how"] == "nothing" else here[slot]["why"])
            for slot, state in states.items()
        }

    def check_seeds(self, seeds: Sequence[int]) -> None:  # noqa: B027
        """Raise ValueError if no reset of this backend could honour these seeds."""

    @abc.abstractmethod
    def sample_info(self) -> Mapping[str, Any]:
        """Infos of one slot, which show their shapes and dtypes."""

    def read_info(self, info_keys: Sequence[str] | Mapping[str, Any]) -> None:
        """Choose the info entries to write.

        Args:
            info_keys: names, whose shapes and dtypes are read off one reset and one step of the
                env; or a mapping from names to example values, which runs nothing.

        Raises:
            KeyError: if the env's infos lack a name.
            TypeError: if an info is not a number or an array of numbers.
        """
        examples = info_keys if isinstance(info_keys, Mapping) else self.sample_info()
        missing = [key for key in info_keys if key not in examples]
        if missing:
            raise KeyError(
                f"info_keys {missing} are in the info of neither the first reset nor the first "
                f"step, which hold {sorted(examples)}; to read an info that appears later, pass "
                "info_keys as a dict from its name to an example value"
            )
        self.info = [InfoEntry.like(key, examples[key]) for key in info_keys]

    def attributes(self, name: str) -> list[Any]:
        """An attribute of the env of each slot: values, or functions that call a method there.

        Raises:
            AttributeError: if the envs have none, or it cannot be sent from its process.
        """
        raise AttributeError(f"the backend {self.name!r} has no env per slot")

    def call(self, name: str, *arguments: Any, slots: Sequence[int] | None = None) -> list[Any]:
        """Call a method of the envs of ``slots`` (None for all).

        Returns:
            One result per slot.

        Raises:
            NotImplementedError: if the envs cannot be called singly.
            Exception: the exception of the first env that failed.
        """
        raise NotImplementedError(f"the backend {self.name!r} cannot call its envs singly")

    @abc.abstractmethod
    def render(self) -> list[Any]:
        """The rendered frame of each slot."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs and free their resources."""
