"""Policies on StepDicts: a tree of TensorDict modules as a flat list of calls.

The calls are of the same modules, in the same order, with the same operations and random numbers;
only the bookkeeping between them is gone. A module that is not known to the letter (a subclass
with another ``forward``, hooks, a plain callable) is called as it is, on a TensorDict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

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
from torch import Tensor, nn
from torch.nn import functional
from torchrl import data
from torchrl import modules as M
from torchrl.data import Composite, TensorSpec
from torchrl.data.tensor_specs import BoundedContinuous
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules.distributions.utils import sample_and_log_prob
from torchrl.modules.tensordict_module import SafeProbabilisticModule, SafeSequential
from torchrl.modules.tensordict_module.probabilistic import SafeProbabilisticTensorDictSequential

from tdcollect import keys
from tdcollect._upstream import torchrl as upstream
from tdcollect._upstream.names import missing
from tdcollect.collect.arguments import missing_entries, no_tensordict
from tdcollect.collect.samplers import Draw, GlobalNoise, Noise, Sampler, sampler
from tdcollect.collect.step_dict import StepDict, is_plain, leaves
from tdcollect.envs.spaces import DrawableBox, nested, overflows
from tdcollect.envs.traits import NotKnown
from tdcollect.keys import Key, as_path, entry_path, is_next, name_of

Call = Callable[[StepDict], None]
Score = Callable[[dict[Key, Tensor], StepDict], None]

ON_TENSORDICT = "on a TensorDict"
"""The beginning of the line on a module that is called as it is."""

_STRAIGHT = "called straight"
_OWN = "its own code, on arrays"
_DRAWN = "drawn from the action spec, on arrays"


class Unscored(NamedTuple):
    """A draw without its score, which is for draws that nothing reads the score of meanwhile.

    Attributes:
        at: the index of the call that draws and scores.
        entries: those concerned: calls after it must touch none of them.
        call: draws alone.
        score: scores all draws of a batch; None where nobody reads scores at all.
    """

    at: int
    entries: set[Key]
    call: Call
    score: Score | None


class LoweredPolicy:
    """A policy as calls on StepDicts: taken apart where it is known, else called as it is.

    Args:
        given: the entries that the first call finds.
        device: the device that TensorDicts made on the way name, if any.
        select: the outputs of a compiled policy, which is called as it is.
        checked: draw with the distributions themselves, which check at every call; else whoever
            runs the policy calls :meth:`check` at the end.
        late: tells of an entry whether it may be missing until the batch is whole. The last draw
            is not scored then: whoever runs the policy calls :attr:`score` on the batch.
        unread: tells of an entry whether nobody reads it. The last draw is not scored then.
        noise: the samplers' source of random numbers; None for torch's global generator.

    Attributes:
        described: a line for each call: its name, and how it runs.
        sampling: the calls of samplers, which draw from ``noise``.
        straight: whether no module is called on a TensorDict.
        writes: the entries that every call of the policy writes.
        reads_first: the entries that it may read before it has written them.
        score: adds the log-probability that calls left out to the entries ``[*N, T, ...]`` of a
            batch, and to its last step; None where they left out none.
        module: the policy itself.
        graphs: of its calls (``"policy"``), and of whole turns (``"turn"``): the CUDA graph, None
            before there is one, or why there is none.
        has_run: whether it has run once, so that a graph can be made.
        own: the entries of a step that are there because it has written them.
    """

    has_run = False

    def __init__(
        self,
        policy: Callable[..., Any],
        given: StepDict,
        batch_size: torch.Size,
        device: torch.device | None,
        *,
        select: Sequence[Key] | None = None,
        checked: bool = False,
        late: Callable[[Key], bool] | None = None,
        unread: Callable[[Key], bool] | None = None,
        noise: Noise | None = None,
    ):
        self.module: Any = policy
        self.graphs: dict[str, Any] = {}
        self.calls: list[Call] = []
        self.described: list[tuple[str, str]] = []
        self.sampling: set[Call] = set()
        self.straight = True
        self.writes: set[Key] = set()
        self.reads_first: set[Key] = set()
        self._samplers: list[Sampler] = []
        self._batch_size = batch_size
        self._device = device
        self._given = set(given)
        self._shapes = given.shapes
        self._checked = checked
        self._noise = noise or GlobalNoise()
        self._late, self._unread = late, unread
        self._touched: list[set[Key] | None] = []  # by each call; None for any entry
        self._unscored: Unscored | None = None  # of the last draw that has one
        self.score: Score | None = None
        if select is not None:
            self._call_as_it_is(policy, "is compiled", select)
        else:
            self._lower(policy)
        if (draw := self._unscored) is not None:
            after = self._touched[draw.at + 1 :]
            if all(touched is not None and draw.entries.isdisjoint(touched) for touched in after):
                self.calls[draw.at], self.score = draw.call, draw.score
                self.sampling.add(draw.call)
        self.own = self.writes - self.reads_first

    def __call__(self, step: StepDict) -> None:
        """Run the policy; its outputs join the step."""
        for call in self.calls:
            call(step)

    def forgets(self, step: StepDict, carried: list[Key]) -> list[Key]:
        """The outputs in a step that must be zeroed when an episode starts.

        The policy reads them before it writes them, or may leave them unwritten. TorchRL zeroes
        them where some slots, but not all, are reset; the loop by episodes, wherever one starts.
        """
        others = {*carried, *keys.FLAGS, keys.TRAJ_IDS, *(self.writes - self.reads_first)}
        return [key for key in step if key not in others and not is_next(key)]

    def restart(self) -> None:
        """Begin a batch: forget draws of one that broke off."""
        for draw in self._samplers:
            draw.restart()

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""
        for draw in self._samplers:
            draw.check()

    def fold(self) -> list[Tensor]:
        """Fold what :meth:`check` looks at into tensors that stay; those tensors."""
        return [tensor for draw in self._samplers for tensor in draw.fold()]

    def _lower(self, module: Any) -> None:
        spec = _random_spec(module)
        if spec is not None:
            name = "RandomPolicy" if isinstance(module, M.RandomPolicy) else "random actions"
            leaves = {key: leaf for key, leaf in spec.items(True, True) if leaf is not None}
            self._add(_random_call(leaves), f"{name}({_names(leaves)})", _DRAWN)
            self.writes.update(leaves)
            return
        try:
            _check_known(module)
            if isinstance(module, TensorDictSequential):
                for part in upstream.modules_in_order(module):
                    self._lower(part)
            else:
                self._lower_one(module)
                self.writes.update({*module.out_keys} - {"_"})
        except NotKnown as reason:
            self._call_as_it_is(module, str(reason))
            return
        if upstream.only_projects(module):
            name = f"safe {type(module).__name__}: projected on its spec"
            self._add(_safe_outputs(module), name, _OWN)

    def _lower_one(self, module: Any) -> None:
        missing = set(module.in_keys) - self._given - self.writes
        if missing and (self.straight or not isinstance(self._noise, GlobalNoise)):
            raise NotKnown("reads an entry that is no tensor of the env or the policy")
        self.reads_first.update(set(module.in_keys) - self.writes)
        if type(module) in _OWN_CODE:
            self._add(self._own_code(module), label(module), _OWN)
            self.reads_first.update(self._given - self.writes)  # masks, say, beside in_keys
            if isinstance(module, M.OrnsteinUhlenbeckProcessModule):
                self.reads_first.update([module.is_init_key, *module.ou.out_keys])
        elif not isinstance(module, ProbabilisticTensorDictModule):
            touched = None if missing else {*module.in_keys, *module.out_keys}
            self._add(_module_call(module, self._batch_size), label(module), _STRAIGHT, touched)
        else:
            draw = self._draw(module)
            drawing = draw and sampler(draw)
            if draw is None or drawing is None:
                call = _draw_call(module, _from_distribution(module), module.in_keys)
                self._add(call, label(module), _STRAIGHT)
            else:
                names = map(name_of, module.dist_keys)
                entries = dict(zip(names, module.in_keys, strict=True))
                in_keys = [entries[name] for name in draw.names]
                call = _draw_call(module, drawing, in_keys)
                self._add(call, label(module), "computed straight, checked once per batch")
                self._samplers.append(drawing)
                self.sampling.add(call)
                if draw.scored and not missing:
                    self._leave_score(module, draw, drawing, in_keys)
        if missing:
            # A module that is called on a TensorDict may write them, and as tensors.
            as_it_is = _call_on_tensordict(module, self._batch_size, self._device)
            self.calls.append(_if_tensors(missing, self.calls.pop(), as_it_is))

    def _draw(self, module: ProbabilisticTensorDictModule) -> Draw | None:
        """The draw of a sampler; None where the distribution itself must check its arguments."""
        interaction = interaction_type() or module.default_interaction_type
        if interaction is None or self._checked or upstream.validates_arguments():
            return None
        at_random = interaction is InteractionType.RANDOM
        return Draw(
            module.distribution_class,
            tuple(sorted(map(name_of, module.dist_keys))),
            module.distribution_kwargs,
            interaction,
            module.return_log_prob,
            at_random and upstream.scores_draw(module),
            self._noise,
        )

    def _leave_score(
        self,
        module: ProbabilisticTensorDictModule,
        draw: Draw,
        drawing: Sampler,
        in_keys: Sequence[Key],
    ) -> None:
        """Remember how to do without the score of the latest draw."""
        key: Key = module.log_prob_key
        at, entries = len(self.calls) - 1, {key, *module.dist_sample_keys, *in_keys}
        if self._late is not None and drawing.late and self._late(key):
            calls = _late_calls(module, drawing, in_keys, len(self._batch_size))
            self._unscored = Unscored(at, entries, *calls)
        if self._unread is not None and self._unread(key):
            unscored = cast(Sampler, sampler(draw._replace(scored=False)))
            self._samplers.append(unscored)
            call = _draw_call(module, unscored, in_keys)
            self._unscored = Unscored(at, entries, call, None)

    def _add(self, call: Call, name: str, how: str, touched: set[Key] | None = None) -> None:
        self.calls.append(call)
        self._touched.append(touched)
        self.described.append((name, how))

    def _call_as_it_is(self, module: Any, reason: str, select: Sequence[Key] | None = None) -> None:
        self.straight = False
        call = _call_on_tensordict(module, self._batch_size, self._device, select)
        self._add(call, label(module), f"{ON_TENSORDICT}: {reason}")
        # Its out_keys promise what it writes, and need not keep it.
        self.reads_first.update(self._given - self.writes)

    def _own_code(self, module: Any) -> Call:
        """A call of a module's own ``forward``, freed of what dispatches it."""
        forward, batch_size, device = _OWN_CODE[type(module)], self._batch_size, self._device
        if isinstance(module, (M.GRUModule, M.LSTMModule)):
            return _recurrent(module, forward, batch_size)
        if isinstance(module, M.AdditiveGaussianModule) and module.spec is not None:
            return _gaussian_call(module)
        action_key: Any = getattr(module, "action_key", None)
        if isinstance(module, M.OrnsteinUhlenbeckProcessModule):
            action_key = module.ou.key
        above = action_key[:-1] if isinstance(action_key, tuple) else ()
        # A TensorDict that the policy makes has the batch size of the one in which it lies.
        around = [above[:n] for n in range(len(above), 0, -1) if above[:n] in self._shapes]
        shape = self._shapes[around[0]] if around else batch_size

        def run(step: StepDict) -> None:
            step.shape, step.device = batch_size, device
            forward(module, step)

        def run_nested(step: StepDict) -> None:  # it asks for the TensorDict with the action
            value, name = step[action_key], action_key[-1]
            inner = StepDict({name: value})
            inner.shape, inner.device = shape, device
            step[above] = inner  # type: ignore[assignment]
            try:
                run(step)
            finally:
                del step[above]
            if inner[name] is not value:
                step[action_key] = inner[name]

        return run_nested if above else run


# ------------------------------------------------------------------------------ what is known


_OWN_CODE: dict[type, Callable[[Any, StepDict], Any]] = {
    cls: inspect.unwrap(cls.forward)
    for cls in (
        M.AdditiveGaussianModule,
        M.ConsistentDropoutModule,
        M.DistributionalDQNnet,
        M.DistributionalQValueModule,
        M.EGreedyModule,
        M.GRUModule,
        M.LSTMModule,
        M.OrnsteinUhlenbeckProcessModule,
        M.QValueModule,
        M.TanhModule,
    )
}
"""Modules whose own ``forward`` runs on StepDicts."""

_KNOWN: list[tuple[list[str], tuple[type, ...]]] = [
    (
        upstream.SEQUENTIAL_METHODS,
        (
            TensorDictSequential,
            ProbabilisticTensorDictSequential,
            SafeSequential,
            SafeProbabilisticTensorDictSequential,
        ),
    ),
    (upstream.PROBABILISTIC_METHODS, (ProbabilisticTensorDictModule, SafeProbabilisticModule)),
    (upstream.MODULE_METHODS, (TensorDictModule,)),
]
"""The methods that decide what a module does, and the classes whose methods are known."""


def unknown_class(module: Any) -> str | None:
    """The reason why a module's class is not known to the letter; None where it is."""
    if not isinstance(module, TensorDictModuleBase):
        return "is no TensorDict module"
    for methods, classes in _KNOWN:
        if isinstance(module, classes):
            for name in methods:
                own = vars(module).get(name, getattr(type(module), name, None))
                if all(own is not getattr(known, name, None) for known in classes):
                    return f"has a {name} of its own"
            return None
    return "is of a class that is not known here"


def _check_known(module: Any) -> None:
    if gone := missing():
        raise NotKnown(*gone)
    own_code = type(module) in _OWN_CODE
    if isinstance(module, TensorDictModuleBase) and skip_existing():
        raise NotKnown("runs under set_skip_existing")
    if own_code and "forward" in vars(module):
        raise NotKnown("has a forward of its own")
    if own_code and isinstance(module, (M.LSTMModule, M.GRUModule)) and module.recurrent_mode:
        raise NotKnown("is in recurrent mode")
    if not own_code and (reason := unknown_class(module)):
        raise NotKnown(reason)
    if upstream.has_hooks(module) and not upstream.only_projects(module):
        raise NotKnown("has hooks")
    if own_code:
        return
    if isinstance(module, TensorDictSequential):
        if upstream.selects_output(module) or module.inplace not in (None, True):
            raise NotKnown("selects its output")
        if module.partial_tolerant:
            raise NotKnown("tolerates missing inputs")
        drawing = isinstance(module, ProbabilisticTensorDictSequential)
        if drawing and not upstream.draws_sample(module):
            raise NotKnown("does not sample")
    elif isinstance(module, ProbabilisticTensorDictModule):
        if module.distribution_class is CompositeDistribution:
            raise NotKnown("draws from a composite distribution")
        several = len(module.dist_sample_keys) != 1
        if several or module.num_samples is not None or upstream.has_generator(module):
            raise NotKnown("draws several samples or brings a generator")
    elif module.inplace is not True or upstream.get_options(module):
        raise NotKnown("selects its output")


def own_code_of(policy: nn.Module) -> str:
    """The first part of a policy that is not torch's, tensordict's or TorchRL's; empty for none."""
    for module in policy.modules():
        kwargs = getattr(module, "distribution_kwargs", {})
        parts = [type(module), getattr(module, "distribution_class", None), *kwargs.values()]
        parts += [*kwargs.get("distribution_map", {}).values(), vars(module).get("module")]
        for part in filter(callable, parts):
            if part.__module__.partition(".")[0] not in ("torch", "tensordict", "torchrl"):
                return label(part)
    return ""


def label(module: Any) -> str:
    """The name of a module, with the entries that it reads and writes."""
    name: str = type(module).__name__
    if not isinstance(module, nn.Module):
        name = getattr(module, "__name__", name)
    # A class with a __call__ of its own need not say what it reads and writes.
    ins, outs = getattr(module, "in_keys", None), getattr(module, "out_keys", None)
    if not isinstance(module, TensorDictModuleBase) or ins is None or outs is None:
        return name
    return f"{name}({_names(ins)} -> {_names(outs)})"


def _names(entries: Iterable[Key]) -> str:
    return ", ".join(map(entry_path, entries))


# ----------------------------------------------------------------------------- calls of modules


def _call_on_tensordict(
    module: Callable[..., Any],
    batch_size: torch.Size,
    device: torch.device | None,
    select: Sequence[Key] | None = None,
) -> Call:
    def call(step: StepDict) -> None:
        tensordict = nested(step.items(), batch_size, device)
        if select is not None:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            out = module(tensordict)
        except KeyError as error:
            raise missing_entries(module, step) or error from error
        if select is not None:
            # A graph writes its outputs into the same memory each time.
            out = out.select(*select, strict=False).clone()
        try:
            written = leaves(out)
        except (AttributeError, TypeError) as error:
            raise no_tensordict(out) from error
        for key, value in written:
            if step.get(key) is not value:
                step[key] = value

    return call


def _if_tensors(entries: set[Key], call: Call, otherwise: Call) -> Call:

    def run(step: StepDict) -> None:
        (call if all(is_plain(step.get(key)) for key in entries) else otherwise)(step)

    return run


def _module_call(module: TensorDictModule, batch_size: torch.Size) -> Call:
    in_keys: list[Key] = list(module.in_keys)
    out_keys: list[Key] = list(module.out_keys)
    names: list[str] | None = upstream.keyword_names(module)
    call = (
        _direct(module.module) if module.method is None else getattr(module.module, module.method)
    )
    kwargs = module.method_kwargs
    single = out_keys[0] if len(out_keys) == 1 else None

    def run(step: StepDict) -> None:
        if names is None:
            out = call(*map(step.__getitem__, in_keys), **kwargs)
        else:
            out = call(**{n: step[k] for n, k in zip(names, in_keys, strict=True)}, **kwargs)
        if single is not None and type(out) is Tensor:
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
            if isinstance(value, Tensor):
                step[key] = value
            else:
                _set_other(step, key, value, batch_size)

    def without_ignored(step: StepDict) -> None:
        run(step)
        del step["_"]

    return without_ignored if "_" in out_keys else run


_FUNCTIONS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    nn.Tanh: (torch.tanh, torch.tanh_),
    nn.ReLU: (torch.relu, torch.relu_),
    nn.Sigmoid: (torch.sigmoid, torch.sigmoid_),
}
"""The functions that modules call, and nothing else; the same in place."""


def _direct(module: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a module without hooks; another module itself."""
    if (
        not isinstance(module, nn.Module)
        or upstream.has_hooks(module)
        or type(module).__call__ is not nn.Module.__call__
        or upstream.is_compiled(module)
        or "forward" in module.__dict__
    ):
        return module
    if type(module) in _FUNCTIONS and not getattr(module, "inplace", False):
        return _FUNCTIONS[type(module)][0]
    if type(module) is nn.Linear:
        # Looking its parameters up through the module costs as much as a small product.
        parameters: dict[str, Any] = upstream.parameters_of(module)
        return lambda value: functional.linear(value, parameters["weight"], parameters["bias"])
    plain_mlp = type(module) is M.MLP and not upstream.reshapes_output(module)
    if not plain_mlp and type(module) is not nn.Sequential:
        return module.forward
    # Not children(), which leaves out a module that comes twice.
    children = [*cast(nn.Sequential, module)]
    calls = [*map(_direct, children)]
    # What a linear layer gives is nobody else's: the next function may write into it.
    in_place = [*calls]
    for i, (before, after) in enumerate(pairwise(children)):
        functions = _FUNCTIONS.get(type(after))
        fresh = type(before) is nn.Linear and calls[i] is not before
        if fresh and functions is not None and calls[i + 1] is functions[0]:
            in_place[i + 1] = functions[1]

    def run(value: Any) -> Any:
        for call in calls if torch.is_grad_enabled() else in_place:
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
    converted = TensorDict.from_any(value)
    if isinstance(converted, Tensor) and converted.shape[: len(batch_size)] != batch_size:
        raise ValueError(
            f"expected the policy's entry {key!r} to have the batch size {list(batch_size)} in "
            f"front, got a {type(value).__name__} of shape {list(converted.shape)}; return a tensor"
        )
    converted = TensorDict(batch_size=batch_size).set(key, converted)
    step.update(leaves(converted))


def _recurrent(module: Any, forward: Callable[..., Any], batch_size: torch.Size) -> Call:
    in_keys: list[Key] = list(module.in_keys)

    def run(step: StepDict) -> None:
        # These reshape all that they are given: hand them their inputs alone.
        inputs = StepDict((key, step[key]) for key in in_keys)
        inputs.shape = batch_size
        forward(module, inputs)
        for key in module.out_keys:
            step[key] = inputs[key]

    return run


# ---------------------------------------------------------------------------------------- draws


Drawing = Callable[..., tuple[Tensor, Tensor | None]]
"""Gives a sample of these parameters and, if it is wanted, its log-probability."""


def _draw_call(
    module: ProbabilisticTensorDictModule, draw: Drawing, in_keys: Sequence[Key]
) -> Call:
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key | None = module.log_prob_key if module.return_log_prob else None

    def run(step: StepDict) -> None:
        step[sample_key], log_prob = draw(*map(step.__getitem__, in_keys))
        if log_prob_key is not None and log_prob is not None:
            step[log_prob_key] = log_prob

    return run


def _late_calls(
    module: ProbabilisticTensorDictModule, drawing: Sampler, in_keys: Sequence[Key], dims: int
) -> tuple[Call, Score]:
    """Calls that draw, and that score all draws of a batch, with ``dims`` dims of slots."""
    sample_key: Key = module.dist_sample_keys[0]
    log_prob_key: Key = module.log_prob_key

    def draw(step: StepDict) -> None:
        step[sample_key] = drawing.unscored(*map(step.__getitem__, in_keys))
        step.pop(log_prob_key, None)

    def score(entries: dict[Key, Tensor], last: StepDict) -> None:
        scores = drawing.scores()
        if scores is not None:
            entries[log_prob_key] = scores.movedim(0, dims).contiguous()
            last[log_prob_key] = scores[-1].clone()  # which the batch shares with nobody

    return draw, score


def _from_distribution(module: ProbabilisticTensorDictModule) -> Drawing:
    draw, scored = upstream.draw_of(module), module.return_log_prob
    interaction = interaction_type() or module.default_interaction_type
    together = upstream.scores_draw(module) and interaction is InteractionType.RANDOM

    def run(*parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        dist = module.get_dist(StepDict(zip(module.in_keys, parameters, strict=True)))
        if together and scored:
            return sample_and_log_prob(dist, torch.Size(), reparameterize=dist.has_rsample)
        sample = draw(dist, interaction_type=interaction)
        return sample, dist.log_prob(sample) if scored else None

    return run


# ---------------------------------------------------------------------------------- projections


Projection = Callable[[Tensor], Tensor]


def _projection(spec: TensorSpec) -> Projection:
    """The projection that ``spec.project`` makes; the bounds of floats are read once."""
    if type(spec) not in (BoundedContinuous, DrawableBox) or not spec.dtype.is_floating_point:
        project: Projection = spec.project
        return project
    shape, dtype, device, dims = spec.shape, spec.dtype, spec.device, len(spec.shape)
    low, high = spec.space.low, spec.space.high

    def clamped(value: Tensor) -> Tensor:
        fits = value.shape[value.ndim - dims :] == shape
        if not fits or value.dtype != dtype or value.device != device:
            return spec.project(value)
        projected = torch.clamp(value, low, high)
        # The value itself within the bounds, with the sign of its zeros.
        return value if torch.equal(projected, value) else projected

    return clamped


def _safe_outputs(module: Any) -> Call:
    """The hook of a module made with ``safe=True``, whose spec may change meanwhile."""
    seen: Any = None
    projections: list[tuple[Key, Projection]] = []

    def run(step: StepDict) -> None:
        nonlocal seen, projections
        spec = module.spec
        if type(spec) is not Composite:
            upstream.project_outputs(module, step, step)
            return
        if spec is not seen:
            leaves = [(key, leaf) for key, leaf in spec.items(True, True) if leaf is not None]
            projections, seen = [(key, _projection(leaf)) for key, leaf in leaves], spec
        for key, project in projections:
            if key in step:
                step[key] = project(step[key])

    return run


def _gaussian_call(module: M.AdditiveGaussianModule) -> Call:
    key: Key = module.action_key
    seen: Any = None
    project: Projection

    def run(step: StepDict) -> None:
        nonlocal seen, project
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return
        spec = module.spec
        if spec is not seen:
            project, seen = _projection(spec[key]), spec
        action = step[key]
        mean, std = (
            value if value.is_floating_point() else value.to(torch.get_default_dtype())
            for value in (module.mean.expand(action.shape), module.std.expand(action.shape))
        )
        noise = torch.normal(mean=mean, std=std).to(action.device)
        step[key] = project(action + noise * module.sigma)

    return run


# ------------------------------------------------------------------------------- random actions


class RandomActions:
    """Random actions of an action spec with the batch size in front, as a policy."""

    def __init__(self, spec: Composite):
        self.spec = spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write actions."""
        return tensordict.update(self.spec.rand())


def draws_from_spec(env: EnvBase) -> bool:
    """Return whether ``env.rand_action`` is TorchRL's, which draws from the action spec."""
    known = (EnvBase.rand_action, TransformedEnv.rand_action)
    while type(env).rand_action in known and "rand_action" not in env.__dict__:
        if not isinstance(env, TransformedEnv):
            return True
        env = env.base_env
    return False


def not_of(env: EnvBase, outputs: Iterable[Key]) -> set[Key]:
    """Return the outputs of a policy that an env neither gives nor takes."""
    specs = env.full_observation_spec, env.full_state_spec, env.full_action_spec
    known = {as_path(key) for spec in specs for key in spec.keys(True, True)}
    return {key for key in outputs if not {as_path(key), as_path(key)[1:]} & known}


def is_masked(spec: Composite) -> bool:
    """Return whether an action spec has a mask of the legal actions now."""
    return any(getattr(leaf, "mask", None) is not None for leaf in spec.values(True, True))


def warning_of_draws(policy: Any) -> str | None:
    """Return a warning of a random policy whose actions TorchRL draws as infinite or NaN."""
    leaves = (_random_spec(policy) or Composite()).items(True, True)
    if wide := [key for key, leaf in leaves if leaf is not None and overflows(leaf)]:
        return (
            f"random actions {wide} are infinite or NaN: TorchRL draws them uniformly between "
            "bounds of which one is infinite, or which are too far apart. Make the env with "
            "tdcollect.make_env, which draws as gymnasium does, or give its action space other "
            "bounds"
        )
    return None


def _random_spec(policy: Any) -> Composite | None:
    """The spec that a random policy draws from, if its leaves are drawn one by one."""
    if type(policy) is RandomActions:
        spec = policy.spec
    elif type(policy) is M.RandomPolicy and policy.action_spec is not None:
        spec = policy.action_spec
        if not isinstance(spec, Composite):
            spec = Composite({policy.action_key: spec}, shape=())
    else:
        return None
    return spec if _drawn_by_leaf(spec) else None


def _drawn_by_leaf(spec: TensorSpec | None) -> bool:
    if isinstance(spec, Composite):
        plain = type(spec) is Composite and spec.data_cls is None
        return plain and all(map(_drawn_by_leaf, spec.values()))
    return spec is None or isinstance(spec, _LEAVES)


_LEAVES = (data.Bounded, data.Categorical, data.OneHot, data.Unbounded)  # and their subclasses


def _random_call(leaves: dict[Key, TensorSpec]) -> Call:

    def draw(step: StepDict) -> None:
        for key, leaf in leaves.items():
            step[key] = leaf.rand(())

    return draw


def needs_state(policy: Any) -> bool:
    """Return whether a policy carries a hidden state, or reads where episodes begin."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(
        hasattr(type(module), "make_tensordict_primer") or hasattr(module, "is_init_key")
        for module in modules
    ) or any(name_of(key) == keys.IS_INIT for key in getattr(policy, "in_keys", None) or ())
