"""Policies that know nothing of TensorDicts: functions, and agents with a memory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from types import ModuleType
from typing import Any

from tdcollect import check
from tdcollect.display import one_line
from tdcollect.packages import extra_module


class SpacePolicy:
    """A policy on the spaces of an env; the functions of this module make them.

    Attributes:
        source: the function that acts, or that makes an agent, or an agent to copy.
        batched: True if it takes all observations of a batch at once, False for one at a time.
        kind: ``"function"`` or ``"agent"``, for the manifest.
        algorithm: the name of what trained it, if that is known, in place of the source's.
    """

    source: Any = None
    algorithm = ""
    kind = "function"

    def __init__(self, source: Callable[..., Any], batched: bool = False, key: bool = False):
        wanted = "a function of an observation, or with key=True of one and a key of JAX"
        _check_takes(source, wanted, 1 + key)
        check.bools(batched=batched, key=key)
        if batched and key:
            raise ValueError(
                "expected batched=True or key=True, got both: a batch is of several episodes, and "
                "each has a key of its own; leave batched out"
            )
        self.source, self.batched, self._key = source, batched, key

    def check(self) -> None:
        """Raise if the policy cannot act, before an env is made."""
        if self._key:
            self.begin(0)

    def begin(self, seed: int) -> Any:
        """Return the function that acts in an episode of this policy seed."""
        if not self._key:
            return self.source
        jax = extra_module("jax", "from_function(f, key=True)")
        key = jax.random.PRNGKey(short_seed(seed))

        def act(observation: Any) -> Any:
            nonlocal key
            key, now = jax.random.split(key)
            return self.source(observation, now)

        return act

    def __repr__(self) -> str:
        name = getattr(self.source, "__qualname__", type(self.source).__name__)
        return one_line(self, name, *["batched=True"] * self.batched)


class AgentPolicy(SpacePolicy):
    """Agents, one for each running episode; :func:`from_agent` makes it.

    Attributes:
        method: the name of the agents' method that acts.
        together: True if it acts for several agents at once.
    """

    kind = "agent"

    def __init__(self, make: Any, act: str, reset: str | None, together: str | None = None):
        # A class has its agents' methods, too, and a function none of them.
        self.method, self._reset, self.together = together or act, reset, together is not None
        self._copies = not isinstance(make, type) and callable(getattr(make, self.method, None))
        if not self._copies:
            wanted = f"an agent with a method {self.method}(), or a function () that makes one"
            _check_takes(make, wanted, 0)
        self.source, self.batched, self._key = make, False, False

    def begin(self, seed: int) -> Any:
        """Make an agent, reset it, and return its method that acts; itself to act with others."""
        agent = copy.deepcopy(self.source) if self._copies else self.source()
        for name in (self.method, *([self._reset] if self._reset else [])):
            if not callable(getattr(agent, name, None)):
                raise TypeError(
                    f"expected an agent with a method {name}(), got {agent!r}; name its methods: "
                    "from_agent(make, act=..., reset=...), reset=None if it has none"
                )
        if self._reset:
            reset = getattr(agent, self._reset)
            reset(**({"seed": short_seed(seed)} if "seed" in parameters_of(reset) else {}))
        return agent if self.together else getattr(agent, self.method)


ACTING = ("select_action", "act", "get_action")
"""The methods of one observation that agents of other libraries have."""


def recognized(policy: Any) -> Any:
    """Return a policy as an evaluation runs it: agents and their classes are found out.

    Raises:
        TypeError: for an agent that can be read in several ways, or a class whose objects need
            arguments, with the lines that work.
    """
    if isinstance(policy, Mapping):
        return {group: recognized(one) for group, one in policy.items()}
    is_class = isinstance(policy, type) and not hasattr(policy, "forward")
    if isinstance(policy, SpacePolicy) or (callable(policy) and not is_class):
        return policy
    acts = [name for name in (*ACTING, "predict") if callable(getattr(policy, name, None))]
    if not acts:
        return policy
    reset = "reset" if callable(getattr(policy, "reset", None)) else None
    needs = [
        name
        for name, one in (parameters_of(policy) if is_class else {}).items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(acts) == 1 and acts != ["predict"] and not needs:
        return from_agent(policy, acts[0], reset)
    name = policy.__name__ if is_class else "policy"
    if needs:
        name = f"functools.partial({', '.join([name, *needs])})"
    rest = "" if reset else ", reset=None"
    lines = [f"tdcollect.policies.from_agent({name}, act={act!r}{rest})" for act in acts]
    if "predict" in acts and not is_class:
        lines += ["tdcollect.policies.from_function(lambda x: policy.predict(x)[0])"]
    what = f"the class {policy.__name__}" if is_class else f"a {type(policy).__name__}"
    raise TypeError(
        f"expected a policy that can be read in one way, got {what}, with {' and '.join(acts)}(); "
        f"pass {' or '.join(lines)}"
    )


def short_seed(seed: int) -> int:
    """The first 31 bits of a policy seed of 64, which every library takes as a seed."""
    return seed >> 33


def compiled_from(function: Any) -> Any:
    """The Python function that JAX has compiled; any other object as it is."""
    compiled = type(function).__module__.startswith("jax")
    return getattr(function, "__wrapped__", function) if compiled else function


def parts_of(source: Any) -> dict[str, Any]:
    """Return what an object holds, by name: enclosed values, arguments, attributes."""
    parts: dict[str, Any] = {}
    while isinstance(source, partial):
        parts |= {str(at): part for at, part in enumerate(source.args)} | source.keywords
        source = source.func
    if ismethod(source):
        own = {"class": type(source.__self__), **parts_of(source.__self__)}
        parts |= {f"self.{name}": part for name, part in own.items()}  # not the globals' names
        source = source.__func__
    source = compiled_from(source)
    if isfunction(source):
        named, defaults = getclosurevars(source), source.__defaults__ or ()
        parts |= {**named.globals, **named.nonlocals, **(source.__kwdefaults__ or {})}
        parts |= {f"default {at}": part for at, part in enumerate(defaults)}
    elif not isinstance(source, (type, ModuleType)):
        state: Any = object.__getstate__(source)
        for attributes in state if isinstance(state, tuple) else [state]:  # in __slots__, too
            parts |= attributes or {}
    return {name: compiled_from(part) for name, part in parts.items()}


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _check_takes(function: Any, wanted: str, count: int) -> None:
    """Refuse what is no function of so many arguments, as far as its parameters are known."""
    takes = ""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        takes = f", which takes {signature}"
        signature.bind(*[None] * count)
    except ValueError:  # they are not known
        return
    except TypeError as error:
        raise TypeError(
            f"expected {wanted}, got {function!r}{takes}; functools.partial(f, ...) gives a "
            "function its other arguments"
        ) from error


def from_function(
    function: Callable[..., Any], batched: bool = False, key: bool = False
) -> SpacePolicy:
    """Return a function of an observation as a policy for :func:`tdcollect.evaluate`.

    It is called with what gymnasium's env gives, an array or a dict of arrays, and gives an action
    of the env's action space: a number for ``Discrete``, an array for ``Box``; NumPy's, torch's or
    JAX's. Draws from the global generators of torch, NumPy and Python come from the stream of
    their episode, unless the function is batched: then those of torch alone do.

    Args:
        function: of one observation; it must keep nothing from one call to the next.
        batched: it takes the observations ``[N, ...]`` of several envs, and gives ``[N, ...]``.
        key: it takes a key of ``jax.random`` beside the observation, another one at each step, all
            of them from the episode's policy seed.

    Examples:
        >>> policy = from_function(lambda observation: int(observation[2] > 0))
        >>> result = tdcollect.evaluate("CartPole-v1", policy, episodes=10)
    """
    return SpacePolicy(function, batched, key)


def from_agent(
    make: Any,
    act: str = "select_action",
    reset: str | None = "reset",
    together: str | None = None,
) -> AgentPolicy:
    """Return agents that remember as a policy for :func:`tdcollect.evaluate`.

    Each running episode has an agent of its own, so that memory, queues of actions and histories
    are those of its episode, whatever other episodes run.

    Args:
        make: a function without arguments that makes an agent, at each episode's start; for large
            networks, one that shares them: ``lambda: Agent(net)``. Or an agent, of which each
            episode gets a deep copy.
        act: its method of one observation, as :func:`from_function` has it, that gives an action.
        reset: its method that is called before the episode; None for none. If it takes a ``seed``,
            it gets one of 31 bits, the first ones of the episode's policy seed.
        together: a static method of the agents in the place of ``act``, for a network that is
            faster in batches: it gets a list of agents and one of their observations, always
            ``inference_batch_size`` of them, and gives an action for each. It must run the network
            for all of them, whatever they need, and may draw from torch, a row for each agent.

    Examples:
        >>> policy = from_agent(lambda: Agent(net), act="act")
        >>> result = tdcollect.evaluate("CartPole-v1", policy, episodes=10)
    """
    return AgentPolicy(make, act, reset, together)
