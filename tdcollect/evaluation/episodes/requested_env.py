"""Envs with wrappers and transforms that are named, and statistics that were saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T

from tdcollect.display import one_line
from tdcollect.envs.make import make_env
from tdcollect.envs.transforms import all_transforms_of, flat_transforms, is_lifted
from tdcollect.evaluation.episodes.env_state import check_statistics, load_state
from tdcollect.evaluation.episodes.global_streams import GlobalStream, Outside


@dataclass(frozen=True)
class Call:
    """A function with its keyword arguments.

    Attributes:
        name: the name that it was given by, for messages.
        function: the function, or the class.
        kwargs: its keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.kwargs)


@dataclass(frozen=True, repr=False)
class RequestedEnv:
    """A callable that makes an env, with wrappers, transforms and their statistics.

    With wrappers alone it makes a ``gymnasium.Env``; with transforms, an ``EnvBase`` of batch size
    ``[]``. An evaluation steps all slots together if the transforms treat each row by itself.

    Attributes:
        name: the env's name in messages and manifests.
        env: a gymnasium id, or a callable that makes a ``gymnasium.Env`` or an ``EnvBase``.
        wrappers: called with a ``gymnasium.Env``, innermost first; each returns one.
        transforms: called without positional arguments, innermost first; each returns a transform.
        state: the ``state_dict`` of the env with its transforms, or None.
        file: the file of the state, for messages.
        outermost: one more wrapper, around all of these, which no manifest tells; or None.
    """

    name: str
    env: str | Callable[..., Any]
    wrappers: tuple[Call, ...] = ()
    transforms: tuple[Call, ...] = ()
    state: Mapping[str, Any] | None = None
    file: str = "the state"
    outermost: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None

    def __repr__(self) -> str:
        parts = [call.name for call in (*self.wrappers, *self.transforms)]
        return one_line(self, self.name, *parts)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def is_bare(self) -> bool:
        """True if there are no transforms, and no state of any."""
        return not self.transforms and self.state is None

    @property
    def bare(self) -> str | Callable[..., Any]:
        """The env with its wrappers and without the transforms: an id, or a callable.

        Raises:
            gymnasium.error.Error: for an unknown id.
        """
        wrappers = self.wrappers
        if self.outermost is not None:
            wrappers = (*wrappers, Call(self.name, self.outermost))
        if not wrappers:
            return self.env
        # A worker process may not know the id; gymnasium imports those of module:id.
        known = isinstance(self.env, str) and ":" not in self.env
        return Wrapped(self.name, gym.spec(self.env) if known else self.env, wrappers)  # type: ignore[arg-type]

    def __call__(self, **kwargs: Any) -> Any:
        """Make one env.

        Raises:
            TypeError, ValueError: if a wrapper, a transform or the state does not fit.
        """
        bare = self.bare
        made = gym.make(bare, **kwargs) if isinstance(bare, str) else bare(**kwargs)
        if self.is_bare:
            return made
        try:
            return self.finished(made if isinstance(made, EnvBase) else make_env(made))
        except BaseException:
            made.close()
            raise

    def finished(self, env: EnvBase) -> EnvBase:
        """Add the transforms to an env of any batch size.

        They are in eval mode, and their statistics are those of the state, frozen.

        Raises:
            ValueError: if the state does not fit, or is missing.
        """
        with warnings.catch_warnings():  # of batches, and of statistics that are not there yet
            warnings.filterwarnings("ignore", ".*VecNorm.*")
            made = self._transforms()
            if made:
                whole = made[0] if len(made) == 1 else T.Compose(*made)
                env = TransformedEnv(env, whole, auto_unwrap=True)
            if self.state is not None:
                if not isinstance(env, TransformedEnv):
                    raise ValueError(
                        f"expected an env with transforms for {self.file}, got {self.name} without "
                        "any; name those that the file is of (--transform NAME)"
                    )
                load_state(env.transform, self.state, self.file)
        for transform in all_transforms_of(env):
            check_statistics(transform, self.file)
            transform.eval()
            if getattr(transform, "frozen", None) is False:
                transform.freeze()
            if type(transform) is T.VecNormV2 and transform.stateful:
                transform.reduce_batch_dims = True  # frozen: all slots have them in common
        return env

    def treats_rows_alone(self) -> bool:
        """Tell whether a batch of slots gets from the transforms what each slot alone gets."""
        return all(
            is_lifted(transform)
            or type(transform) in (T.TimeMaxPool, T.VecNorm, T.VecNormV2)
            or (type(transform) is T.CatFrames and transform.dim < 0)
            for made in self._transforms()
            for transform in flat_transforms(made)
        )

    def check_state(self) -> None:
        """Load the state into the transforms, without an env.

        Raises:
            TypeError, ValueError: if a transform is none, or the state does not fit.
        """
        made = self._transforms()
        if made and self.state is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*VecNorm.*")
                load_state(made[0] if len(made) == 1 else T.Compose(*made), self.state, self.file)

    def _transforms(self) -> list[T.Transform]:
        """Make the transforms anew."""
        found = []
        for call in self.transforms:
            with Outside(), GlobalStream(0):  # a constructor that draws draws the same in each slot
                transform = call()
            if not isinstance(transform, T.Transform):
                raise TypeError(
                    f"expected {call.name} to give a TorchRL transform, got {transform!r}; name a "
                    "class such as torchrl.envs:RewardSum, or a function that makes one"
                )
            found.append(transform)
        return found


@dataclass(frozen=True)
class Wrapped:
    """A callable that makes a gymnasium env under wrappers.

    Attributes:
        name: the env's name.
        env: a gymnasium id or spec, or a callable that makes a ``gymnasium.Env``.
        wrappers: called with the env, innermost first.
    """

    name: str
    env: str | EnvSpec | Callable[..., Any]
    wrappers: tuple[Call, ...]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        """Make one env.

        Raises:
            TypeError: if the env, or what a wrapper returns, is no ``gymnasium.Env``.
        """
        if isinstance(self.env, (str, EnvSpec)):
            # gymnasium's checker takes time in each step, and changes nothing.
            make: Callable[..., Any] = partial(gym.make, self.env, disable_env_checker=True)
        else:
            make = self.env
        made = [make(**kwargs)]
        try:
            _check_gymnasium(made[0], self.name)
            for wrapper in self.wrappers:
                made.append(wrapper(made[-1]))
                _check_gymnasium(made[-1], wrapper.name)
        except BaseException:
            made[0].close()
            raise
        return made[-1]


def _check_gymnasium(env: Any, name: str) -> None:
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"expected {name} to give a gymnasium.Env, got {' '.join(repr(env).split())}; wrappers "
            "are for gymnasium envs, and transforms for envs of TorchRL"
        )
