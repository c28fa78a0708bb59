"""Policies that know nothing of TensorDicts: functions, and agents with a memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from typing import Any

from tdcollect.display import one_line


class SpacePolicy:
    """A policy on the spaces of an env; :func:`from_function` and :func:`from_agent` make them.

    Attributes:
        source: the function that acts, or that makes an agent.
        batched: True if it takes all observations of a batch at once, False for one at a time.
    """

    def __init__(self, source: Callable[..., Any], batched: bool = False):
        if not callable(source):
            raise TypeError(f"expected a function, got {source!r}")
        self.source, self.batched = source, batched

    def begin(self) -> Callable[[Any], Any]:
        """Return the function that acts in the next episode."""
        return self.source

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield what the source holds, by name: enclosed values, arguments, attributes."""
        source: Any = self.source
        while isinstance(source, partial):
            yield from ((str(at), part) for at, part in enumerate(source.args))
            yield from source.keywords.items()
            source = source.func
        if ismethod(source):
            yield from getattr(source.__self__, "__dict__", {}).items()
            source = source.__func__
        if isfunction(source):
            named = getclosurevars(source)
            yield from {**named.globals, **named.nonlocals}.items()
        elif not isinstance(source, type):
            yield from getattr(source, "__dict__", {}).items()

    def __repr__(self) -> str:
        name = getattr(self.source, "__qualname__", type(self.source).__name__)
        return one_line(self, name, *["batched=True"] * self.batched)


class AgentPolicy(SpacePolicy):
    """Agents, one for each running episode; :func:`from_agent` makes it."""

    def __init__(self, make: Callable[[], Any], act: str, reset: str | None):
        super().__init__(make)
        self._act, self._reset = act, reset

    def begin(self) -> Callable[[Any], Any]:
        """Make an agent, reset it, and return its method that acts."""
        agent = self.source()
        for name in (self._act, *([self._reset] if self._reset else [])):
            if not callable(getattr(agent, name, None)):
                raise TypeError(
                    f"expected an agent with a method {name}(), got {agent!r}; name its methods: "
                    "from_agent(make, act=..., reset=...), reset=None if it has none"
                )
        if self._reset:
            getattr(agent, self._reset)()
        act: Callable[[Any], Any] = getattr(agent, self._act)
        return act


def from_function(function: Callable[[Any], Any], batched: bool = False) -> SpacePolicy:
    """Return a function of an observation as a policy for :func:`tdcollect.evaluate`.

    It is called with what gymnasium's env gives, an array or a dict of arrays, and gives an action
    of the env's action space: a number for ``Discrete``, an array for ``Box``; NumPy's, torch's or
    JAX's. Draws from the global generators of torch, NumPy and Python come from the stream of
    their episode, unless the function is batched: then those of torch alone do.

    Args:
        function: of one observation; it must keep nothing from one call to the next.
        batched: it takes the observations ``[N, ...]`` of several envs, and gives ``[N, ...]``.

    Examples:
        >>> policy = from_function(lambda observation: int(observation[2] > 0))
        >>> result = tdcollect.evaluate("CartPole-v1", policy, episodes=10)
    """
    return SpacePolicy(function, batched)


def from_agent(
    make: Callable[[], Any], act: str = "select_action", reset: str | None = "reset"
) -> AgentPolicy:
    """Return agents that remember as a policy for :func:`tdcollect.evaluate`.

    Each running episode has an agent of its own, so that memory, queues of actions and histories
    are those of its episode, whatever other episodes run.

    Args:
        make: a function without arguments that makes an agent, at each episode's start; for large
            networks, one that shares them: ``lambda: Agent(net)``.
        act: its method of one observation, as :func:`from_function` has it, that gives an action.
        reset: its method, without arguments, that is called before the episode; None for none.

    Examples:
        >>> policy = from_agent(lambda: Agent(net), act="act")
        >>> result = tdcollect.evaluate("CartPole-v1", policy, episodes=10)
    """
    return AgentPolicy(make, act, reset)
