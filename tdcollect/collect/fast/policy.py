"""Policies on rows: a tree of TensorDict modules as a flat list of calls.

The calls are of the same modules, in the same order, with the same operations and random numbers;
only the bookkeeping between them is gone. A module that is not known to the letter (a subclass
with another ``forward``, hooks, a plain callable) is called as it is, on a TensorDict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    QValueModule,
)
from torchrl.modules.distributions.utils import sample_and_log_prob
from torchrl.modules.tensordict_module import SafeProbabilisticModule, SafeSequential
from torchrl.modules.tensordict_module.probabilistic import SafeProbabilisticTensorDictSequential

from tdcollect._upstream.tensordict import (
    MODULE_METHODS,
    PROBABILISTIC_METHODS,
    SEQUENTIAL_METHODS,
    draw_of,
    draws_sample,
    get_options,
    has_generator,
    keyword_names,
    modules_in_order,
    selects_output,
)
from tdcollect._upstream.torch import has_hooks, is_compiled, parameters_of
from tdcollect._upstream.torchrl import reshapes_output
from tdcollect.collect.arguments import missing_entries, no_tensordict
from tdcollect.collect.fast.samplers import Noise, Sampler, sampler
from tdcollect.collect.step_dict import Key, StepDict, not_taken_apart
from tdcollect.envs.wrapper import nested

Op = Callable[[StepDict], None]


class Program:
    """A policy as calls on rows.

    Args:
        policy: what the collector would call on a TensorDict.
        given: the entries that the first call finds.
        batch_size: the env's.
        device: the device that TensorDicts made on the way name, if any.
        select: the outputs of a compiled policy, which is called as it is; None for others.
        checked: draw with the distributions themselves, which check at every call; else whoever
            runs the program calls :meth:`check` at the end.
        noise: where the samplers take random numbers from; None for torch's global generator.
        whole: why the policy is called as it is; None to take it apart.

    Attributes:
        ops: the calls; each reads and writes entries of the rows.
        described: a line for each call: what is called, and how.
        samplers: those that draw in place of distribution objects.
        sampling: the calls of samplers, whose random numbers are ``noise``'s.
        straight: whether no module is called on a TensorDict.
        writes: the entries that every call writes.
        reads_first: the entries that a call may read before it has written them.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        given: StepDict,
        batch_size: torch.Size,
        device: torch.device | None,
        select: Iterable[Key] | None = None,
        checked: bool = False,
        noise: Noise | None = None,
        whole: str | None = None,
    ):
        self.ops: list[Op] = []
        self.described: list[tuple[str, str]] = []
        self.samplers: list[Sampler] = []
        self.sampling: set[Op] = set()
        self.writes: set[Key] = set()
        self.reads_first: set[Key] = set()
        self._batch_size = batch_size
        self._device = device
        self._given = set(given)
        self._checked = checked
        self._noise = noise or Noise()
        self.straight = True
        if select is not None:
            self._call_as_it_is(policy, "is compiled", list(select))
        elif whole is not None:
            self._call_as_it_is(policy, whole)
        else:
            self._lower(policy)

    def __call__(self, rows: StepDict) -> None:
        """Run the policy; its outputs join the rows."""
        for op in self.ops:
            op(rows)

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""
        for draw in self.samplers:
            draw.check()

    def _lower(self, module: Any) -> None:
        reason = _why_not(module)
        if reason is not None:
            self._call_as_it_is(module, reason)
        elif isinstance(module, TensorDictSequential):
            for part in modules_in_order(module):
                self._lower(part)
        elif not (self._given | self.writes).issuperset(module.in_keys):
            self._call_as_it_is(module, "reads an entry that is no tensor of the env or the policy")
        else:
            self.reads_first.update(set(module.in_keys) - self.writes)
            if type(module) in _ON_ROWS:
                self.ops.append(_own_forward_op(module, self._batch_size))
                self.described.append((_label(module), "its own code, on rows"))
                self.reads_first.update(self._given - self.writes)  # masks, say, beside in_keys
            elif isinstance(module, ProbabilisticTensorDictModule):
                self._lower_distribution(module)
            else:
                self.ops.append(_module_op(module, self._batch_size))
                self.described.append((_label(module), "called straight"))
            self.writes.update(key for key in module.out_keys if key != "_")

    def _lower_distribution(self, module: ProbabilisticTensorDictModule) -> None:
        draw = None
        interaction = interaction_type() or module.default_interaction_type
        if interaction is not None and not self._checked:
            draw = sampler(module, self._noise, interaction)
        if draw is None:
            self.ops.append(_distribution_op(module))
            self.described.append((_label(module), "called straight"))
        else:
            self.ops.append(_sampler_op(module, draw))
            self.samplers.append(draw)
            self.sampling.add(self.ops[-1])
            self.described.append((_label(module), "computed straight, checked once a batch"))

    def _call_as_it_is(self, module: Any, reason: str, select: list[Key] | None = None) -> None:
        self.straight = False
        self.described.append((_label(module), f"on a TensorDict: {reason}"))

        def op(rows: StepDict) -> None:
            given = nested(rows.items(), self._batch_size, self._device)
            if select is not None:
                torch.compiler.cudagraph_mark_step_begin()
            try:
                out = module(given)
            except KeyError as error:
                missing = missing_entries(module, rows)
                raise error if missing is None else KeyError(missing) from error
            if select is not None:
                # A graph writes its outputs into the same memory each time.
                out = out.select(*select, strict=False).clone()
            try:
                written = out.items(True, True, is_leaf=not_taken_apart)
            except (AttributeError, TypeError) as error:
                raise TypeError(no_tensordict(out)) from error
            for key, value in written:
                if rows.get(key) is not value:
                    rows[key] = value

        self.ops.append(op)
        self.reads_first.update(self._given - self.writes)
        # What it writes is seen only when it runs: its out_keys promise, and may not keep.


def _label(module: Any) -> str:
    name = (
        type(module).__name__
        if isinstance(module, nn.Module)
        else getattr(module, "__name__", type(module).__name__)
    )
    # A class with a __call__ of its own need not say what it reads and writes.
    ins, outs = getattr(module, "in_keys", None), getattr(module, "out_keys", None)
    if not isinstance(module, TensorDictModuleBase) or ins is None or outs is None:
        return name
    return f"{name}({_names(ins)} -> {_names(outs)})"


def _names(entries: Iterable[Key]) -> str:
    return ", ".join(key if isinstance(key, str) else "/".join(key) for key in entries)


def unknown_class(module: Any) -> str | None:
    """Why the class of a module is not known to the letter; None where it is."""
    if not isinstance(module, TensorDictModuleBase):
        return "is no TensorDict module"
    for base, methods in _KNOWN:
        if isinstance(module, base):
            changed = [name for name in methods if _method(module, name) not in methods[name]]
            return f"has a {changed[0]} of its own" if changed else None
    return "is of a class that is not known here"


def _why_not(module: Any) -> str | None:
    """Why a module must be called as it is; None where its calls are known."""
    if isinstance(module, TensorDictModuleBase) and skip_existing():
        return "runs under set_skip_existing"
    if type(module) in _ON_ROWS:
        return _why_not_on_rows(module)
    reason = unknown_class(module)
    if reason is not None:
        return reason
    if has_hooks(module):
        return "has hooks"
    if isinstance(module, TensorDictSequential):
        if selects_output(module) or module.inplace not in (None, True):
            return "selects its output"
        if module.partial_tolerant:
            return "tolerates missing inputs"
        if isinstance(module, ProbabilisticTensorDictSequential) and not draws_sample(module):
            return "does not sample"
    elif isinstance(module, ProbabilisticTensorDictModule):
        if module.distribution_class is CompositeDistribution:
            return "draws from a composite distribution"
        single = len(module.dist_sample_keys) == 1 and module.num_samples is None
        if not single or has_generator(module):
            return "draws several samples or brings a generator"
    elif module.inplace is not True or get_options(module):
        return "selects its output"
    return None


def _why_not_on_rows(module: Any) -> str | None:
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if has_hooks(module):
        return "has hooks"
    if isinstance(module, (LSTMModule, GRUModule)) and module.recurrent_mode:
        return "is in recurrent mode"
    if isinstance(getattr(module, "action_key", None), tuple):
        return "has a nested action"
    return None


def _method(module: nn.Module, name: str) -> Any:
    if name in module.__dict__:
        return module.__dict__[name]
    return getattr(type(module), name, None)


def _methods(*classes: type, names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: [getattr(cls, name, None) for cls in classes] for name in names}


# What is lowered: a class, and the methods whose work is done here in their place.
_KNOWN: list[tuple[Any, dict[str, list[Any]]]] = [
    (
        TensorDictSequential,
        _methods(
            TensorDictSequential,
            ProbabilisticTensorDictSequential,
            SafeSequential,
            SafeProbabilisticTensorDictSequential,
            names=SEQUENTIAL_METHODS,
        ),
    ),
    (
        ProbabilisticTensorDictModule,
        _methods(
            ProbabilisticTensorDictModule,
            SafeProbabilisticModule,
            names=PROBABILISTIC_METHODS,
        ),
    ),
    (
        TensorDictModule,
        _methods(
            TensorDictModule,
            names=MODULE_METHODS,
        ),
    ),
]


# Modules whose own forward, freed of what dispatches it, runs on rows.
_ON_ROWS: dict[type, Callable[[Any, StepDict], Any]] = {
    cls: inspect.unwrap(cls.forward)
    for cls in (AdditiveGaussianModule, EGreedyModule, GRUModule, LSTMModule, QValueModule)
}


def _own_forward_op(module: Any, batch_size: torch.Size) -> Op:
    forward = _ON_ROWS[type(module)]
    if not isinstance(module, (GRUModule, LSTMModule)):

        def op(rows: StepDict) -> None:
            rows.shape = batch_size
            forward(module, rows)

        return op

    in_keys: list[Key] = list(module.in_keys)

    def recurrent(rows: StepDict) -> None:
        # These reshape all that they are given: hand them their inputs alone.
        given = StepDict((key, rows[key]) for key in in_keys)
        given.shape = batch_size
        forward(module, given)
        for key in module.out_keys:
            rows[key] = given[key]

    return recurrent


def _module_op(module: TensorDictModule, batch_size: torch.Size) -> Op:
    in_keys: list[Key] = list(module.in_keys)
    out_keys: list[Key] = list(module.out_keys)
    names: list[str] | None = keyword_names(module)
    call = (
        _direct(module.module) if module.method is None else getattr(module.module, module.method)
    )
    kwargs = module.method_kwargs
    single = out_keys[0] if len(out_keys) == 1 else None

    def op(rows: StepDict) -> None:
        if names is None:
            out = call(*[rows[key] for key in in_keys], **kwargs)
        else:
            out = call(**{n: rows[k] for n, k in zip(names, in_keys, strict=True)}, **kwargs)
        if single is not None and type(out) is torch.Tensor:
            rows[single] = out
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
                rows[key] = value
            else:
                _set_other(rows, key, value, batch_size)

    def without_ignored(rows: StepDict) -> None:
        op(rows)
        del rows["_"]

    return without_ignored if "_" in out_keys else op


def _direct(module: Callable[..., Any]) -> Callable[..., Any]:
    """What calling a module comes down to where it has no hooks: its ``forward``."""
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


def _set_other(rows: StepDict, key: Key, value: Any, batch_size: torch.Size) -> None:
    """Store an output that is no tensor, as a TensorDict would."""
    if isinstance(value, (np.ndarray, np.generic, float, int)):
        rows[key] = torch.as_tensor(value)
        return
    made = TensorDict.from_any(value)
    if isinstance(made, torch.Tensor) and made.shape[: len(batch_size)] != batch_size:
        raise ValueError(
            f"expected the policy's entry {key!r} to have the batch size {list(batch_size)} in "
            f"front, got a {type(value).__name__} of shape {list(made.shape)}; return a tensor"
        )
    made = TensorDict(batch_size=batch_size).set(key, made)
    rows.update(made.items(True, True, is_leaf=not_taken_apart))


def _sampler_op(module: ProbabilisticTensorDictModule, draw: Sampler) -> Op:
    in_keys: list[Key] = list(module.in_keys)
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key | None = module.log_prob_key if module.return_log_prob else None

    def op(rows: StepDict) -> None:
        rows[sample_key], log_prob = draw(*[rows[key] for key in in_keys])
        if log_prob_key is not None and log_prob is not None:
            rows[log_prob_key] = log_prob

    return op


def _distribution_op(module: ProbabilisticTensorDictModule) -> Op:
    draw = draw_of(module)
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key | None = module.log_prob_key if module.return_log_prob else None
    interaction = interaction_type() or module.default_interaction_type
    # TorchRL's module scores the very draw that it returns; tensordict's scores the result.
    together = isinstance(module, SafeProbabilisticModule) and interaction is InteractionType.RANDOM

    def op(rows: StepDict) -> None:
        dist = module.get_dist(rows)
        if together and log_prob_key is not None:
            rows[sample_key], rows[log_prob_key] = sample_and_log_prob(
                dist, torch.Size(), reparameterize=dist.has_rsample
            )
            return
        sample = rows[sample_key] = draw(dist, interaction_type=interaction)
        if log_prob_key is not None:
            rows[log_prob_key] = dist.log_prob(sample)

    return op
