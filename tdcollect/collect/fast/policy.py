"""Policies on StepDicts: a tree of TensorDict modules as a flat list of calls.

The calls are of the same modules, in the same order, with the same operations and random numbers;
only the bookkeeping between them is gone. A module that is not known to the letter (a subclass
with another ``forward``, hooks, a plain callable) is called as it is, on a TensorDict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from tensordict.nn.distributions import CompositeDistribution
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import nn
from torch.nn import functional
from torchrl.modules import MLP
from torchrl.modules.distributions.utils import sample_and_log_prob
from torchrl.modules.tensordict_module import SafeProbabilisticModule

from tdcollect._upstream.modules import (
    draw_of,
    draws_sample,
    get_options,
    has_generator,
    has_hooks,
    is_compiled,
    keyword_names,
    modules_in_order,
    only_projects,
    parameters_of,
    selects_output,
    validates_arguments,
)
from tdcollect._upstream.torchrl import reshapes_output
from tdcollect.collect.fast.composite import CompositeDraw, NotKnown
from tdcollect.collect.fast.continuous import continuous_sampler
from tdcollect.collect.fast.discrete import discrete_sampler
from tdcollect.collect.fast.own_code import OWN_CODE, also_reads, own_code_call, why_not_own_code
from tdcollect.collect.fast.projection import SafeOutputs
from tdcollect.collect.fast.random_actions import RANDOM, leaves, random_call, random_spec
from tdcollect.collect.fast.sampling import ORDERS, Draw, Sampler
from tdcollect.collect.policies import (
    ON_TENSORDICT,
    Call,
    GlobalNoise,
    Noise,
    call_on_tensordict,
    label,
    names,
    unknown_class,
)
from tdcollect.collect.step_dict import Key, StepDict, is_plain, not_taken_apart

_STRAIGHT = "called straight"
_OWN = "its own code, on arrays"
_DRAWN = "drawn from the action spec, on arrays"


class Program:
    """A policy as calls on StepDicts; a :class:`~tdcollect.collect.policies.Policy`.

    Args:
        policy: the callable that the collector would call on a TensorDict.
        given: the entries that the first call finds.
        batch_size: the env's.
        device: the device that TensorDicts made on the way name, if any.
        select: the outputs of a compiled policy, which is called as it is; None for others.
        checked: draw with the distributions themselves, which check at every call; else whoever
            runs the program calls :meth:`check` at the end.
        noise: the samplers' source of random numbers; None for torch's global generator.
        as_it_is: why the policy must be called as it is; None to take it apart.

    Attributes:
        calls: its parts, in order; each reads and writes entries of the step.
        described: a line for each call: its name, and how it runs.
        samplers: those that draw in place of distribution objects.
        sampling: the calls of samplers, which draw from ``noise``.
        straight: whether no module is called on a TensorDict.
        writes: the entries that every call of the policy writes.
        reads_first: the entries that it may read before it has written them.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        given: StepDict,
        batch_size: torch.Size,
        device: torch.device | None,
        select: Sequence[Key] | None = None,
        checked: bool = False,
        noise: Noise | None = None,
        as_it_is: str | None = None,
    ):
        self.calls: list[Call] = []
        self.described: list[tuple[str, str]] = []
        self.samplers: list[Sampler] = []
        self.sampling: set[Call] = set()
        self.writes: set[Key] = set()
        self.reads_first: set[Key] = set()
        self._batch_size = batch_size
        self._device = device
        self._given = set(given)
        self._shapes = given.shapes
        self._checked = checked
        self._noise = noise or GlobalNoise()
        self.straight = True
        if select is not None:
            self._call_as_it_is(policy, "is compiled", select)
        elif as_it_is is not None:
            self._call_as_it_is(policy, as_it_is)
        else:
            self._lower(policy)

    def __call__(self, step: StepDict) -> None:
        """Run the policy; its outputs join the step."""
        for call in self.calls:
            call(step)

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""
        for draw in self.samplers:
            draw.check()

    def _lower(self, module: Any) -> None:
        drawn = random_spec(module) if type(module) in RANDOM else None
        if drawn is not None:
            spec, name = drawn
            self._add(random_call(spec), f"{name}({names(leaves(spec))})", _DRAWN)
            self.writes.update(leaves(spec))
            return
        reason = _why_not(module)
        if reason is not None:
            self._call_as_it_is(module, reason)
            return
        if isinstance(module, TensorDictSequential):
            for part in modules_in_order(module):
                self._lower(part)
        else:
            reason = self._lower_one(module)
            if reason is not None:
                self._call_as_it_is(module, reason)
                return
            self.writes.update(key for key in module.out_keys if key != "_")
        if only_projects(module):
            self._add(
                SafeOutputs(module), f"safe {type(module).__name__}: projected on its spec", _OWN
            )

    def _lower_one(self, module: Any) -> str | None:
        """Add the calls of a module; the reason why it must be called as it is, or None."""
        if getattr(module, "distribution_class", None) is CompositeDistribution:
            return self._lower_composite(module)
        missing = set(module.in_keys) - self._given - self.writes
        if missing and (self.straight or not isinstance(self._noise, GlobalNoise)):
            return "reads an entry that is no tensor of the env or the policy"
        self.reads_first.update(set(module.in_keys) - self.writes)
        if type(module) in OWN_CODE:
            run = own_code_call(module, self._batch_size, self._device, self._shapes)
            self._add(run, label(module), _OWN)
            self.reads_first.update(self._given - self.writes)  # masks, say, beside in_keys
            self.reads_first.update(also_reads(module))
        elif not isinstance(module, ProbabilisticTensorDictModule):
            self._add(_module_call(module, self._batch_size), label(module), _STRAIGHT)
        else:
            draw = self._draw(module)
            sampler = draw and (discrete_sampler(draw) or continuous_sampler(draw))
            if draw is None or sampler is None:
                self._add(_distribution_call(module), label(module), _STRAIGHT)
            else:
                keys = dict(zip(_parameters(module), module.in_keys, strict=True))
                call = _sampler_call(module, [keys[name] for name in draw.names], sampler)
                self._add_draws(call, label(module), [sampler])
        if missing:
            # A module that is called on a TensorDict may write them, and as tensors.
            as_it_is = call_on_tensordict(module, self._batch_size, self._device)
            self.calls.append(_if_tensors(missing, self.calls.pop(), as_it_is))
        return None

    def _lower_composite(self, module: ProbabilisticTensorDictModule) -> str | None:
        draw = self._draw(module)
        if draw is None:
            return "draws from a composite distribution, which checks its arguments"
        try:
            call = CompositeDraw(module, draw, self._given | self.writes, self._batch_size)
        except NotKnown as reason:
            return str(reason)
        self.reads_first.update(call.reads - self.writes)
        self._add_draws(call, label(module), call.samplers)
        return None

    def _draw(self, module: ProbabilisticTensorDictModule) -> Draw | None:
        """The draw of a sampler; None where the distribution itself must check its arguments."""
        interaction = interaction_type() or module.default_interaction_type
        if interaction is None or self._checked or validates_arguments():
            return None
        given = _parameters(module)
        at_random = interaction is InteractionType.RANDOM
        return Draw(
            module.distribution_class,
            ORDERS.get(frozenset(given), given),
            module.distribution_kwargs,
            interaction,
            module.return_log_prob,
            at_random and isinstance(module, SafeProbabilisticModule),
            self._noise,
        )

    def _add_draws(self, call: Call, name: str, samplers: list[Sampler]) -> None:
        self._add(call, name, "computed straight, checked once per batch")
        self.samplers += samplers
        self.sampling.add(call)

    def _add(self, call: Call, name: str, how: str) -> None:
        self.calls.append(call)
        self.described.append((name, how))

    def _call_as_it_is(self, module: Any, reason: str, select: Sequence[Key] | None = None) -> None:
        self.straight = False
        self.described.append((label(module), f"{ON_TENSORDICT}: {reason}"))
        self.calls.append(call_on_tensordict(module, self._batch_size, self._device, select))
        # Its out_keys promise what it writes, and need not keep it.
        self.reads_first.update(self._given - self.writes)


def _why_not(module: Any) -> str | None:
    """The reason why a module must be called as it is; None where its calls are known."""
    if isinstance(module, TensorDictModuleBase) and skip_existing():
        return "runs under set_skip_existing"
    reason = why_not_own_code(module) if type(module) in OWN_CODE else unknown_class(module)
    if reason is not None:
        return reason
    if has_hooks(module) and not only_projects(module):
        return "has hooks"
    if type(module) in OWN_CODE:
        return None
    if isinstance(module, TensorDictSequential):
        if selects_output(module) or module.inplace not in (None, True):
            return "selects its output"
        if module.partial_tolerant:
            return "tolerates missing inputs"
        if isinstance(module, ProbabilisticTensorDictSequential) and not draws_sample(module):
            return "does not sample"
    elif isinstance(module, ProbabilisticTensorDictModule):
        several = module.distribution_class is not CompositeDistribution and (
            len(module.dist_sample_keys) != 1
        )
        if several or module.num_samples is not None or has_generator(module):
            return "draws several samples or brings a generator"
    elif module.inplace is not True or get_options(module):
        return "selects its output"
    return None


def _module_call(module: TensorDictModule, batch_size: torch.Size) -> Call:
    in_keys: list[Key] = list(module.in_keys)
    out_keys: list[Key] = list(module.out_keys)
    names: list[str] | None = keyword_names(module)
    call = (
        _direct(module.module) if module.method is None else getattr(module.module, module.method)
    )
    kwargs = module.method_kwargs
    single = out_keys[0] if len(out_keys) == 1 else None

    def run(step: StepDict) -> None:
        if names is None:
            out = call(*[step[key] for key in in_keys], **kwargs)
        else:
            out = call(**{n: step[k] for n, k in zip(names, in_keys, strict=True)}, **kwargs)
        if single is not None and type(out) is torch.Tensor:
            step[single] = out
            return
        if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in out_keys):
            out = tuple(out.get(key) for key in out_keys)
        if not isinstance(out, tuple):
            out = (out,)
        if len(out) != len(out_keys):
            raise RuntimeError(
                f"expected {len(out_keys)} outputs, one for each of out_keys={out_keys}, got "
                f"{len(out)} from {module}"
            )
        for key, value in zip(out_keys, out, strict=True):
            if isinstance(value, torch.Tensor):
                step[key] = value
            else:
                _set_other(step, key, value, batch_size)

    def without_ignored(step: StepDict) -> None:
        run(step)
        del step["_"]

    return without_ignored if "_" in out_keys else run


def _direct(module: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a module without hooks; another module itself."""
    if (
        not isinstance(module, nn.Module)
        or has_hooks(module)
        or type(module).__call__ is not nn.Module.__call__
        or is_compiled(module)
        or "forward" in module.__dict__
    ):
        return module
    if type(module) is nn.Linear:
        # Looking its parameters up through the module costs as much as a small product.
        parameters: dict[str, Any] = parameters_of(module)
        return lambda value: functional.linear(value, parameters["weight"], parameters["bias"])
    plain_mlp = type(module) is MLP and not reshapes_output(module)
    if not plain_mlp and type(module) is not nn.Sequential:
        return module.forward
    # Not children(), which leaves out a module that comes twice.
    calls = [_direct(child) for child in cast(nn.Sequential, module)]

    def run(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    if plain_mlp:  # which joins several inputs
        return lambda value, *more: run(torch.cat([value, *more], -1) if more else value)
    return run


def _set_other(step: StepDict, key: Key, value: Any, batch_size: torch.Size) -> None:
    """Store an output that is no tensor, as a TensorDict would."""
    if isinstance(value, (np.ndarray, np.generic, float, int)):
        step[key] = torch.as_tensor(value)
        return
    made = TensorDict.from_any(value)
    if isinstance(made, torch.Tensor) and made.shape[: len(batch_size)] != batch_size:
        raise ValueError(
            f"expected the policy's entry {key!r} to have the batch size {list(batch_size)} in "
            f"front, got a {type(value).__name__} of shape {list(made.shape)}; return a tensor"
        )
    made = TensorDict(batch_size=batch_size).set(key, made)
    step.update(made.items(True, True, is_leaf=not_taken_apart))


def _if_tensors(entries: set[Key], call: Call, otherwise: Call) -> Call:
    """One call where entries of the step are tensors, and another where they are not."""

    def run(step: StepDict) -> None:
        (call if all(is_plain(step.get(key)) for key in entries) else otherwise)(step)

    return run


def _parameters(module: ProbabilisticTensorDictModule) -> tuple[str, ...]:
    """The parameters of a module's distribution, one for each of its ``in_keys``."""
    return tuple(key if isinstance(key, str) else key[-1] for key in module.dist_keys)


def _sampler_call(module: ProbabilisticTensorDictModule, in_keys: list[Key], draw: Sampler) -> Call:
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key | None = module.log_prob_key if module.return_log_prob else None

    def run(step: StepDict) -> None:
        step[sample_key], log_prob = draw(*[step[key] for key in in_keys])
        if log_prob_key is not None and log_prob is not None:
            step[log_prob_key] = log_prob

    return run


def _distribution_call(module: ProbabilisticTensorDictModule) -> Call:
    draw = draw_of(module)
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key | None = module.log_prob_key if module.return_log_prob else None
    interaction = interaction_type() or module.default_interaction_type
    # TorchRL's module scores the very draw that it returns; tensordict's scores the result.
    together = isinstance(module, SafeProbabilisticModule) and interaction is InteractionType.RANDOM

    def run(step: StepDict) -> None:
        dist = module.get_dist(step)
        if together and log_prob_key is not None:
            step[sample_key], step[log_prob_key] = sample_and_log_prob(
                dist, torch.Size(), reparameterize=dist.has_rsample
            )
            return
        sample = step[sample_key] = draw(dist, interaction_type=interaction)
        if log_prob_key is not None:
            step[log_prob_key] = dist.log_prob(sample)

    return run
