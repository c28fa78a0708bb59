"""Draws of a composite distribution: one sampler for each of its parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict, unravel_key
from tensordict.nn import ProbabilisticTensorDictModule, composite_lp_aggregate
from tensordict.nn.probabilistic import InteractionType

from tdcollect import keys
from tdcollect.collect.fast.continuous import continuous_sampler
from tdcollect.collect.fast.discrete import discrete_sampler
from tdcollect.collect.fast.sampling import ORDERS, Draw, Sampler
from tdcollect.collect.step_dict import Key, StepDict

_DETERMINISTIC = InteractionType.DETERMINISTIC
_OPTIONS = {"distribution_map", "name_map", "extra_kwargs", "log_prob_key", "entropy_key"}


class CompositeDraw:
    """The draws of a module whose distribution is composite; a :data:`Call`.

    Args:
        module: the module.
        draw: of the module; its ``kind`` and ``kwargs`` are replaced by those of the parts.
        known: the entries of a step, among them the parameters, below the module's entry.
        batch_size: the env's.

    Attributes:
        samplers: those of the parts.
        reads: the entries of the parameters.

    Raises:
        NotKnown: if the draws of a part are not known.
    """

    def __init__(
        self,
        module: ProbabilisticTensorDictModule,
        draw: Draw,
        known: Iterable[Key],
        batch_size: torch.Size,
    ):
        self.samplers: list[Sampler] = []
        self.reads: set[Key] = set()
        kwargs = draw.kwargs
        if draw.names != ("params",) or not _OPTIONS.issuperset(kwargs):
            raise NotKnown("draws from a composite distribution with options that are not known")
        prefix = _path(module.in_keys[0])
        below = [_path(key)[len(prefix) :] for key in known if _path(key)[: len(prefix)] == prefix]
        names = {_key(k): _key(v) for k, v in (kwargs.get("name_map") or {}).items()}
        extra = kwargs.get("extra_kwargs") or {}
        self._parts: list[tuple[Key, list[Key], Sampler]] = []
        for given, kind in kwargs["distribution_map"].items():
            name = _path(given)
            found = tuple(path[-1] for path in below if path[:-1] == name)
            parameters = ORDERS.get(frozenset(found), found)
            part = draw._replace(kind=kind, names=parameters, kwargs=extra.get(_key(given), {}))
            sampler = None
            if draw.interaction is not _DETERMINISTIC or hasattr(kind, "deterministic_sample"):
                sampler = continuous_sampler(part) or discrete_sampler(part)
            if sampler is None:
                raise NotKnown(
                    "draws from a composite distribution, of whose parts "
                    f"{getattr(kind, '__name__', kind)} needs an object"
                )
            entries: list[Key] = [(*prefix, *name, parameter) for parameter in parameters]
            self._parts.append((names.get(_key(given), _key(given)), entries, sampler))
            self.samplers.append(sampler)
            self.reads.update(entries)
        written = [name for name, _, _ in self._parts]
        if sorted(map(_path, written)) != sorted(map(_path, module.dist_sample_keys)):
            raise NotKnown("draws from a composite distribution whose names are not its out_keys")
        self._batch_size = batch_size
        self._together = draw.together
        self._scores: dict[Key, Key] = {}
        self._sum: Key | None = None
        if not draw.scored:
            return
        self._scores = {name: _score_of(name) for name in written}
        if composite_lp_aggregate():
            if len(prefix) > 1:
                raise NotKnown("sums the log-probs of a composite distribution of nested entries")
            self._sum = module.log_prob_key
        elif draw.together:
            # tensordict's own module does not get to its log_prob_keys.
            self._scores = dict(zip(module.dist_sample_keys, module.log_prob_keys, strict=True))

    def __call__(self, step: StepDict) -> None:
        """Draw, and score."""
        scores: dict[Key, torch.Tensor] = {}
        for name, entries, sampler in self._parts:
            step[name], log_prob = sampler(*[step[key] for key in entries])
            if log_prob is not None:
                scores[self._scores[name]] = log_prob
        step.update(scores)
        if self._sum is None:
            return
        # What is flattened, and the order of the sum, are TensorDict's.
        if self._together:
            held = TensorDict(scores, self._batch_size)
            step[self._sum] = held.sum(dim="feature", reduce=True)
        else:
            held = TensorDict({name: step[name] for name, _, _ in self._parts}, self._batch_size)
            held = held.empty(recurse=True).update(scores)
            step[self._sum] = sum(held.sum(dim="feature").values(True, True))


class NotKnown(Exception):
    """The draws of a distribution are not known; the message says why."""


def _key(key: Key) -> Key:
    found: Key = unravel_key(key)
    return found


def _path(key: Key) -> tuple[str, ...]:
    found = _key(key)
    return (found,) if isinstance(found, str) else found


def _score_of(name: Key) -> Key:
    if isinstance(name, str):
        return "_".join((name, keys.LOG_PROB))
    return (*name[:-1], "_".join((name[-1], keys.LOG_PROB)))
