"""The policy of an evaluation: at one batch size, each row with its episode's random stream."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import getclosurevars
from itertools import count, islice
from types import FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import AdditiveGaussianModule, ConsistentDropoutModule, EGreedyModule

from tdcollect import keys
from tdcollect._upstream.torchrl import (
    TorchDispatchMode,
    exploration_spec,
    make_compatible_policy,
    only_projects,
    schema_of,
    set_exploration_spec,
)
from tdcollect.collect.arguments import cannot_wrap, check_instance
from tdcollect.collect.policy import Call, Policy, RandomActions, warning_of_draws
from tdcollect.collect.step_dict import StepDict, is_plain, sent, with_index
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.process.agents import ACTION_MASK
from tdcollect.envs.traits import base_of
from tdcollect.envs.wrapper import GymnasiumEnv
from tdcollect.keys import Key, name_of
from tdcollect.policies import parameters_of
from tdcollect.randomness import NotReproducibleError

_CPU = torch.device("cpu")


def stream(seed: int) -> torch.Generator:
    """Return a generator for one episode, from a seed in ``[0, 2**64)``."""
    return torch.Generator().manual_seed(seed)


class RowNoise:
    """Draws for the samplers of a policy, each row from its own stream; a ``Noise``."""

    def __init__(self, by_row: DrawByRow):
        self._by_row = by_row
        # Draws, and their rows: each is written over the one before, which no sampler keeps.
        self._memory: dict[Any, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the exponential distribution of rate 1, of the shape and dtype given."""
        return self._drawn(like, torch.Tensor.exponential_)

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the standard normal distribution, of the shape and dtype given."""
        return self._drawn(like, torch.Tensor.normal_)

    def _drawn(self, like: torch.Tensor, draw: Any) -> torch.Tensor:
        made = self._memory.get(found := (draw, like.shape, like.stride(), like.dtype))
        if made is None:
            layout = torch.contiguous_format if draw is torch.Tensor.normal_ else None
            values = torch.ones_like(like, device=_CPU, memory_format=layout)
            made = self._memory[found] = values, values.unbind(0)
        for row, generator in zip(made[1], self._by_row.streams, strict=True):
            if generator is not None:
                draw(row, generator=generator)
        return made[0] if like.is_cpu else sent(made[0], like.device)


class DrawByRow(TorchDispatchMode):
    """Runs random operations row by row, each with one of ``streams``; None for no episode.

    Attributes:
        draws: the number of random operations.
        picks: True once rows were picked by their values: how many then depends on the batch.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.streams: Sequence[torch.Generator | None] = [None] * rows
        self.draws, self.picks = 0, False
        self._unused = stream(0)  # for rows of no episode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            if torch.Tag.dynamic_output_shape in func.tags:
                by_number = func is torch.ops.aten.index.Tensor
                self.picks |= not by_number or getattr(args[1][0], "dtype", None) == torch.bool
            return func(*args, **kwargs)
        self.draws += 1
        schema = schema_of(func)
        asked = _by_name(schema, args, kwargs)
        tensor = next((v for v in asked.values() if isinstance(v, torch.Tensor)), None)
        home = torch.device(asked.get("device") or _CPU) if tensor is None else tensor.device
        given = asked if home == _CPU else _on_cpu(schema, asked)
        split = self._split(func, given)
        takes_generator = "generator" in asked
        results = []
        for row, own in enumerate(self.streams):
            generator = own or self._unused
            mine = {**given, **{name: parts[row] for name, parts in split.items()}}
            if takes_generator:
                mine["generator"] = generator
            results.append(_call(func, mine, None if takes_generator else generator))
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if written:
            for name in written if home != _CPU else ():
                asked[name].copy_(sent(given[name], home))
            return asked[written[0]]
        if isinstance(results[0], tuple):
            return tuple(sent(_joined(parts), home) for parts in zip(*results, strict=True))
        return sent(_joined(results), home)

    def _split(self, func: Any, given: dict[str, Any]) -> dict[str, list[Any]]:
        """Split the arguments that have the batch as their first dimension into rows.

        A multiple of the batch size is a batch that was flattened, several elements per row.
        """
        rows = len(self.streams)
        if rows == 1:  # all is of this row
            return {}
        tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
        most = max((value.ndim for value in tensors.values()), default=0)
        split: dict[str, list[Any]] = {
            name: list(value.split(len(value) // rows))
            for name, value in tensors.items()
            if value.ndim == most > 0 and len(value) > 0 and len(value) % rows == 0
        }
        size = given.get("size")
        if size and size[0] and size[0] % rows == 0:
            split["size"] = [[size[0] // rows, *size[1:]]] * rows
        if not split:
            shapes = [list(value.shape) for value in tensors.values()]
            shape = list(size) if size is not None else next(iter(shapes), "unknown")
            raise NotReproducibleError(
                f"the policy draws random numbers of shape {shape} ({func}), which cannot be "
                f"assigned to rows: expected a batch of {rows} rows in front, one per episode. "
                "Draw for each row of the observations, or evaluate a policy without this draw"
            )
        return split


# The ends of names of operations that have the tag of random ones, and draw nothing.
_DRAWS_NEVER = ("backward", "sdp_choice", "softmax_with_shape", "no_dropout_inplace")


def draws(
    func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return whether a call of an operation draws random numbers, as its tag alone does not say.

    Recurrent layers, attention and dropout draw in training alone, at a dropout that is not zero.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = schema_of(func)
    values = _by_name(schema, args, kwargs)
    if values.get("train", values.get("training")) is False or schema.name.endswith(_DRAWS_NEVER):
        return False
    names = ["dropout", "dropout_p", *["p"] * ("dropout" in schema.name)]
    rates = [values[name] for name in names if name in values]
    return not rates or any(rates)


def _by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, defaults too."""
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return {**values, **dict(zip(values, args, strict=False)), **kwargs}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows; a single one may have no dimensions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _call(func: Any, given: dict[str, Any], generator: torch.Generator | None) -> Any:
    if generator is None:
        return func(**given)
    # The operation takes no generator: set the default one to this one's state meanwhile.
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(**given)
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _on_cpu(schema: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a random operation, on the CPU."""
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    fills = len(tensors) == 1 and any(
        a.name == tensors[0] and a.alias_info and a.alias_info.is_write for a in schema.arguments
    )
    # Values that the operation does not read stay where they are: bringing them would wait.
    unread = fills or schema.name.endswith("like")
    moved: dict[str, Any] = {
        name: torch.empty_like(given[name], device=_CPU) if unread else given[name].cpu()
        for name in tensors
    }
    if given.get("device") is not None:
        moved["device"] = _CPU
    return {**given, **moved}


class LikeRows(TorchDispatchMode):
    """Watches a policy on a batch of equal rows: all that it computes must have equal rows."""

    def __init__(self, rows: int):
        super().__init__()
        self.unlike = False
        self._rows = rows
        self._kept: list[torch.Tensor] = []  # alive, so that no other tensor takes over the storage
        self._of_batch: set[int] = set()

    def follow(self, values: Iterable[torch.Tensor]) -> None:
        """Watch all that is computed from these."""
        for value in values:
            self._kept.append(value)
            self._of_batch.add(_place(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {_place(value) for value in _tensors((args, kwargs))}
        if not read.isdisjoint(self._of_batch):
            # Weights that an operation hands back are no rows, unless it has written to them.
            written = any(a.alias_info and a.alias_info.is_write for a in schema_of(func).arguments)
            handed_back = set() if written else read - self._of_batch
            computed = [value for value in _tensors(result) if _place(value) not in handed_back]
            self.follow(computed)
            for value in computed:
                if "empty" in schema_of(func).name:  # which returns memory as it is
                    continue
                if value.ndim > 0 and value.numel() > 0 and len(value) % self._rows == 0:
                    apart = value.flatten().view(torch.uint8).view(self._rows, -1)
                    self.unlike |= not torch.equal(apart, apart[:1].expand_as(apart))
        return result


def _place(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def example(key: Key, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return values for an entry, of the given shape and dtype; the same in every evaluation."""
    generator = torch.Generator().manual_seed(seed)
    if like.dtype == torch.bool:
        # In the middle of an episode, with nothing masked.
        drawn = torch.full(like.shape, float(name_of(key) not in (*keys.FLAGS, keys.IS_INIT)))
    elif like.is_floating_point():
        drawn = torch.randn(like.shape, generator=generator)
    else:
        most = 256 if like.dtype == torch.uint8 else 2
        drawn = torch.randint(0, most, like.shape, generator=generator)
    return drawn.to(dtype=like.dtype, device=like.device)


@contextmanager
def unchanged_buffers(policy: Any) -> Iterator[None]:
    """Refuse a policy that changes its buffers meanwhile, and set them back."""
    buffers = dict(policy.named_buffers()) if isinstance(policy, nn.Module) else {}
    before = {name: value.clone() for name, value in buffers.items()}
    changed = []
    try:
        yield
    finally:
        for name, value in buffers.items():
            if _bits(value) != _bits(before[name]):
                changed.append(name)
                value.copy_(before[name])
    if changed:
        raise NotReproducibleError(
            f"the policy changes its own buffers {changed} as it runs, so that an episode would "
            "depend on those before it (batch norm in training mode, say); run it in eval mode "
            "(eval_mode=True), or freeze what it keeps"
        )


def unlike(key: Key, value: torch.Tensor, starting: bool = False) -> torch.Tensor:
    """Return an entry that differs in every element, with values that a policy may find there.

    The flags stay: a policy sees no row whose episode has ended. So does ``is_init`` if all rows
    are ``starting``.
    """
    if name_of(key) in (*keys.FLAGS, *[keys.IS_INIT] * starting):
        return value.clone()
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point():
        return value * 0.5 + 0.25
    return torch.where(value > 0, value - 1, value + 1)


def check_same(first: StepDict, other: StepDict, why: str) -> None:
    """Refuse a policy whose outputs differ in rows that should be equal."""
    differing = [key for key in first if _bits(first[key]) != _bits(other[key])]
    if differing:
        raise NotReproducibleError("the policy " + why.format(differing))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


_MOST = 20_000  # values that are compared, those nearest to the policy first
_LARGE = 2**20  # bytes; of larger arrays, only the shape is compared
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    type(None),
    count,
)  # what repr() shows all of
_LIBRARIES = ("torch", "tensordict", "torchrl")

State = dict[str, Any]
"""Plain values and arrays, as text, by the path to them."""


def state_of(policy: Any) -> State:
    """Return the attributes that can be reached from a policy, by value, up to a bound.

    Left out are parameters and buffers, which have a check of their own; hooks, which observe; and
    the counts that modules of torch and TorchRL keep, as their outputs do not depend on them.
    """
    found: State = {}
    reached: dict[int, Any] = {}  # alive, so that nothing else takes over an id
    waiting: deque[tuple[str, Any]] = deque([("policy", policy)])
    while waiting and len(found) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            found[path] = repr(value)
        elif id(value) not in reached:
            reached[id(value)] = value
            with suppress(Exception):  # of values that do not let themselves be looked at
                if isinstance(value, (torch.Tensor, np.ndarray)):
                    found[path] = value.shape if value.nbytes > _LARGE else repr(value.tolist())
                    continue
                parts = _parts(value)
                found[path] = len(parts)
                waiting.extend((path + name, part) for name, part in islice(parts.items(), _MOST))
    return found


_AS_ENTRY = "Write what it must remember as an entry of the TensorDict"


def check_kept(before: State, after: State, remember: str = _AS_ENTRY) -> None:
    """Refuse a policy whose state has changed in a call that had another one's inputs."""
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if changed:
        raise NotReproducibleError(
            f"the policy changes what it keeps, {', '.join(changed[:3])}, as it runs, so that an "
            f"episode may depend on those before it. {remember}, and take out what only counts or "
            "records its calls"
        )


def _parts(value: Any) -> dict[str, Any]:
    """Return what a value consists of, by the end of its path."""
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {f"[{key!r}]": part for key, part in items}
    own: dict[str, Any] = {}
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, FunctionType):
        library = value.__module__.partition(".")[0]
        named = getclosurevars(value)
        own = {} if library in _LIBRARIES else {**named.globals, **named.nonlocals}
        own = {name: part for name, part in own.items() if hasattr(part, "__dict__")}
    elif library in ("jax", "jaxlib") and hasattr(value, "__wrapped__"):
        own = {"__wrapped__": value.__wrapped__}  # of a compiled function, whose caches grow
    elif isinstance(value, GeneratorType):
        own = {"gi_frame": value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals)}
    elif isinstance(value, nn.Module):
        own = {name: part for name, part in vars(value).items() if name not in _OF_MODULES}
        own |= value.named_children()
    elif not isinstance(value, (type, ModuleType)):
        for place, part in enumerate(value.__reduce_ex__(4)[1:]):  # as pickle takes it apart
            parts = list(part) if isinstance(part, Iterator) else part
            own |= parts if isinstance(parts, dict) else {str(place): parts}
    if library in _LIBRARIES:
        own = {name: part for name, part in own.items() if not isinstance(part, _PLAIN)}
    return {f".{name}": part for name, part in own.items()}


_OF_MODULES = {*vars(nn.Module()), "action_dist"}  # the last one is Stable-Baselines3's scratch


_AT_RESETS = (
    "Let resets give it as the policy keeps it: in a function that makes the env, append TorchRL's "
    "TensorDictPrimer, for gSDE gSDENoise(state_dim=..., action_dim=...); for consistent dropout, "
    "pass input_shape= to its module"
)
_EXAMPLES = 8
_DRAWING = (AdditiveGaussianModule, EGreedyModule)  # draw a spec's actions, or noise for them
_ALIGNMENT = 64  # bytes, of the memory that torch gives


@dataclass(eq=False)
class Inference:
    """Runs a policy on rows ``[N]``, in batches of a fixed size.

    A matrix product rounds differently at another batch size. So slots run in groups of ``size``,
    and the last group is padded. If an operation of the policy rounds a row differently at another
    place in the batch, each slot is a group of its own, padded with copies.

    Attributes:
        policy: a callable on TensorDicts, as a collector would call it.
        size: the batch size that the policy runs at.
        slots: N.
        batched: True if rows have the dimension N; False for one slot without it.
        device: the device that the policy runs on.
        unread: tells of an entry whether nobody reads it.
        left_out: the entries of the last outputs that are no dense tensors.
        streams: the random streams of the episodes in the slots.
    """

    policy: Callable[..., Any]
    size: int
    slots: int
    batched: bool
    device: torch.device
    unread: Callable[[Key], bool] | None = None

    def __post_init__(self) -> None:
        self._mode = DrawByRow(self.size)
        self.streams: list[torch.Generator | None] = [None] * self.slots
        self._program: Policy | None = None
        self.left_out: list[Key] = []
        # Whether each operation outside samplers draws random numbers, once known.
        self._drawing: dict[Call, bool] = {}
        self._group = self.size  # the number of slots that run together
        self._on_rows = False  # whether the policy may run on the slots' rows as they are
        self._index: dict[int, torch.Tensor] = {}  # of the slots of a group, by its first one

    def start(self, slot: int, seed: int) -> None:
        """Give the episode that starts in a slot a random stream of its own."""
        self.streams[slot] = stream(seed)

    def __call__(self, rows: StepDict, active: Sequence[int]) -> None:
        """Run the policy and add its outputs to the rows; only the slots ``active`` matter."""
        streams = self.streams
        if len(active) < self.slots:  # slots that are in flight draw nothing
            acting = set(active)
            streams = [s if slot in acting else None for slot, s in enumerate(streams)]
        if self._on_rows and self._lie_well(rows):
            self._mode.streams = streams
            self._program(rows)  # type: ignore[misc]
            return
        program = self._program
        needed = rows.keys() if program is None or not program.straight else program.reads_first
        # What the policy needs, on its device: each entry crosses once.
        given = StepDict((key, sent(rows[key], self.device)) for key in needed if key in rows)
        joined = StepDict()
        for first in range(0, self.slots, self._group):
            stop = min(first + self._group, self.slots)
            if not any(first <= slot < stop for slot in active):
                continue
            drawn = [*streams[first:stop], *[None] * (self.size - stop + first)]
            outputs = self._run(self._padded(given, first, stop), drawn)
            for key, value in outputs.items():
                value = value[: stop - first] if self.batched else value[0]
                if stop - first < self.slots:
                    if key not in joined:  # other slots keep what they have
                        joined[key] = value.new_zeros((self.slots, *value.shape[1:]))
                        if key in rows and rows[key].shape == joined[key].shape:
                            joined[key].copy_(rows[key])
                    joined[key][first:stop] = value
                else:
                    joined[key] = value
        rows.update(joined)

    def _lie_well(self, rows: StepDict) -> bool:
        """Tell whether the policy's inputs lie in memory as :meth:`_padded` would place them."""
        return not any(
            value.ndim >= 4  # whose strides say more than that they are contiguous
            or not value.is_contiguous()
            or value.data_ptr() % _ALIGNMENT
            for key in self._program.reads_first  # type: ignore[union-attr]
            if (value := rows.get(key)) is not None
        )

    def _padded(self, given: StepDict, first: int, stop: int) -> StepDict:
        """Return the inputs of a group of slots, the last one repeated up to the fixed size.

        Memory that torch allocates: how a matrix product rounds depends on alignment and strides.
        """
        index = self._index.get(first)
        if index is None:
            slots = torch.arange(first, first + self.size).clamp(max=stop - 1)
            index = self._index[first] = slots.to(self.device)
        return StepDict(
            (key, (value if self.batched else value.unsqueeze(0)).index_select(0, index))
            for key, value in given.items()
        )

    def _run(
        self,
        given: StepDict,
        streams: Sequence[torch.Generator | None],
        watching: LikeRows | None = None,
    ) -> StepDict:
        """Return the policy's outputs for a batch of the fixed size."""
        first = self._program is None
        if self._program is None:
            noise, size = RowNoise(self._mode), torch.Size([self.size])
            self._program = Policy(
                self.policy, given, size, self.device, unread=self.unread, noise=noise
            )
        self._mode.streams = streams
        rows = StepDict(given)
        for op in self._program.calls:
            draws_itself = op in self._program.sampling
            if watching is not None and not draws_itself:
                watching.follow(rows.values())
                with watching, self._mode:
                    op(rows)
            elif draws_itself or not self._drawing.get(op, True):
                op(rows)
            else:
                before = self._mode.draws
                with self._mode:
                    op(rows)
                self._drawing.setdefault(op, self._mode.draws > before)
        written = StepDict(
            (key, value) for key, value in rows.items() if value is not given.get(key)
        )
        # Only dense tensors have bits to compare, and are kept.
        self.left_out = [key for key, value in written.items() if not is_plain(value)]
        for key in self.left_out:
            del written[key]
        for key, value in written.items() if first else ():
            if value.shape[:1] != (self.size,):
                raise ValueError(
                    f"expected the policy's entry {key!r} to have a row for each row that it is "
                    f"given, {self.size}, got one of shape {list(value.shape)}; return a tensor "
                    "with the batch size in front"
                )
        return written

    def check(self) -> None:
        """Raise if a draw had parameters that its distribution refuses."""
        if self._program is not None:
            self._program.check()

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        """Run the policy on rows, and refuse it if an output row depends on other rows.

        Args:
            rows: those of slots that begin an episode.
            carried: the entries that the env carries from one step to the next.

        Returns:
            The outputs for equal rows, and the entries that the policy carries on.
        """
        size = self.size
        leads = ((k, v[:1] if self.batched else v.unsqueeze(0)) for k, v in rows.items())
        one = StepDict((key, value.to(self.device)) for key, value in leads)
        batch = StepDict((k, v.expand(size, *v.shape[1:]).clone()) for k, v in one.items())

        def run(given: StepDict, seeds: Iterable[int]) -> StepDict:
            with unchanged_buffers(self.policy):
                return self._run(given, [*map(stream, seeds)])

        first = run(batch, range(size))
        before = state_of(self.policy)
        again = run(batch, range(size))
        after = state_of(self.policy)
        check_same(
            first,
            again,
            "gives other outputs {} for the same rows and random streams: it keeps a state that is "
            "no entry of the TensorDict, or draws random numbers that torch does not know of; draw "
            "from torch",
        )
        check_kept(before, after)
        with unchanged_buffers(self.policy):
            alike = size == 1 or (not self._mode.picks and self._rows_are_alike(batch))
        self._group = size if alike else 1
        program = self._program
        assert program is not None
        remembered = program.forgets(StepDict({**rows, **first}), carried)
        if lacking := [key for key in remembered if key not in rows]:
            batch.update((key, torch.zeros_like(first[key])) for key in lacking)
            read = [key for key in lacking if key in getattr(self.policy, "in_keys", ())]
            check_same(
                first,
                StepDict({**batch, **run(batch, range(size))}),
                f"gives other outputs {{}} where {read or lacking} is zero, as where an episode "
                f"starts, than where the env does not give it. {_AT_RESETS}",
            )
        for place in {0, self._group - 1} if size > 1 else ():
            others = StepDict((k, unlike(k, v, self._mode.picks)) for k, v in batch.items())
            for key, value in batch.items():
                others[key][place] = value[place]
            seeds = [0 if row == place else size + row for row in range(size)]
            try:
                alone = {**others, **run(others, seeds)}
            except RuntimeError as error:
                if changed := [k for k in first if k in one and first[k].shape != batch[k].shape]:
                    raise ValueError(
                        f"expected a policy that leaves {changed} of the shape that the env gives, "
                        f"{[list(one[key].shape[1:]) for key in changed]}, got one that changes it "
                        f"to {[list(first[key].shape[1:]) for key in changed]}. {_AT_RESETS}"
                    ) from error
                raise
            check_same(
                StepDict((key, value[0]) for key, value in first.items()),
                StepDict((key, alone[key][place]) for key in first),
                "gives a row other outputs {} where the rest of the batch differs, or at another "
                "place in it: it couples rows, as batch norm in training mode or noise on the "
                "weights does; run it in eval mode (eval_mode=True), or remove what mixes rows",
            )
        # All slots are one group of the fixed size, on the CPU, and samplers draw.
        self._on_rows = (
            program.straight
            and not any(self._drawing.values())
            and self.device.type == "cpu"
            and self.batched
            and self.slots == self.size == self._group
        )
        return first, remembered

    def _rows_are_alike(self, batch: StepDict) -> bool:
        """Tell whether equal rows give equal outputs; the answer is the same for all episodes."""
        for seed in range(_EXAMPLES):
            given = StepDict()
            for key, value in batch.items():
                row = example(key, value[:1], seed)
                given[key] = row.expand_as(value).clone()
            watching = LikeRows(self.size)
            try:
                self._run(given, [stream(seed) for _ in range(self.size)], watching)
            except NotReproducibleError:
                raise
            except Exception:  # it refuses made-up rows: nothing is known of them
                return False
            if watching.unlike:
                return False
        return True


def as_policy(policy: Any, env: EnvBase, size: int) -> Callable[..., Any]:
    """Return a policy as a collector would call it, on TensorDicts."""
    if policy is None or isinstance(policy, RandomPolicy):
        drawn = RandomActions(env.full_action_spec_unbatched.expand(size))
        if text := warning_of_draws(drawn):
            warnings.warn(text, stacklevel=2)
        return drawn
    check_instance(policy)
    try:
        made: Callable[..., Any] = make_compatible_policy(policy, env.observation_spec, env=env)
    except TypeError as error:
        reason = cannot_wrap(policy, env, evaluating=True)
        if reason is None:
            raise
        raise TypeError(reason) from error
    return made


def modules_of(policy: Any) -> Iterable[nn.Module]:
    """Return the modules of a policy; none of one that is no module."""
    return policy.modules() if isinstance(policy, nn.Module) else ()


def reads_masks(policy: Any) -> bool:
    """Return whether a policy reads masks of actions: a random one, or one that names them."""
    names = getattr(policy, "in_keys", None) or parameters_of(getattr(policy, "forward", policy))
    return policy is None or isinstance(policy, RandomPolicy) or ACTION_MASK in names


def draws_at_starts(policy: Any) -> bool:
    """Tell whether the env must draw for a policy where an episode starts, in its slot alone."""
    return any(isinstance(module, ConsistentDropoutModule) for module in modules_of(policy))


def device_of(policy: Any, asked: torch.device | str | None) -> torch.device:
    """Return the device that a policy runs on, with its index."""
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    found = [with_index(tensor.device) for tensor in (*module.parameters(), *module.buffers())]
    if asked is None:
        return found[0] if found else with_index(torch.empty(0).device)
    device = known_device(asked)
    if found and device not in found:
        raise ValueError(
            f"expected a policy on {device}, as device says, got one on "
            f"{', '.join(sorted({*map(str, found)}))}; move it: policy.to({str(device)!r})"
        )
    return device


def known_device(asked: torch.device | str) -> torch.device:
    """Return a device, with its index."""
    device = torch.device(asked)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        seen = "no GPU" if count == 0 else f"{count} of them"
        raise ValueError(
            f"expected a device that is here, got device={str(device)!r}, and torch sees {seen}; "
            "leave device out, or name one that is there"
        )
    return with_index(device)


@contextmanager
def at_batch_size(policy: Any, env: EnvBase, size: int) -> Iterator[None]:
    """Let modules that hold an action spec, to draw or to project, take a batch of this size."""
    bound = [m for m in modules_of(policy) if isinstance(m, _DRAWING) or only_projects(m)]
    before = [(module, exploration_spec(module)) for module in bound]
    for module, spec in before:
        if not isinstance(module, _DRAWING):
            set_exploration_spec(module, _of_one_row(spec, env.full_action_spec_unbatched))
            continue
        key = module.action_key
        spec = env.full_action_spec_unbatched[key]
        spec = spec.expand(size, *spec.shape).to(next(module.buffers()).device)
        set_exploration_spec(module, Composite({key: spec}, shape=[size]))
    try:
        yield
    finally:
        for module, spec in before:
            set_exploration_spec(module, spec)


def _of_one_row(spec: Composite, actions: Composite) -> Composite:
    """A module's spec, with its actions' specs for one row, whose bounds any batch broadcasts."""
    leaves = dict(spec.items(True, True))
    for key, action in actions.items(True, True):
        leaf = leaves.get(key)
        if leaf is not None and leaf.ndim > action.ndim:
            leaves[key] = leaf[(0,) * (leaf.ndim - action.ndim)]
    return Composite(leaves)


ACTION_MASKS = "action_masks"
"""The name of the envs' method, as in sb3-contrib, and of the entry of the masks."""


def with_masks(env: EnvBase, policy: Any) -> EnvBase:
    """Return the env, under a transform that adds masks if a module of the policy reads them.

    Such a module has an attribute ``mask_size``.
    """
    sizes = [size for one in modules_of(policy) if (size := getattr(one, "mask_size", None))]
    if not sizes:
        return env
    check_masks(env)
    # Its transforms are those of the env given, which stays as it is.
    own = TransformedEnv(env, auto_unwrap=True)
    return own.append_transform(ActionMasks(sizes[0]))


def check_masks(env: EnvBase) -> None:
    """Raise ValueError for an env without masks, or one whose masks cannot be read."""
    base = base_of(env)
    name = base.backend_name if isinstance(base, GymnasiumEnv) else type(base).__name__
    if name != SerialBackend.name:
        raise ValueError(
            f"expected backend='serial', got {name!r}: "
            "the policy asks for masks of valid actions, and the envs' action_masks() can be "
            "called in this process only; make the env with backend='serial'"
        )
    for slot, one in enumerate(base.slot_envs):
        try:
            one.get_wrapper_attr(ACTION_MASKS)
        except AttributeError:
            raise ValueError(
                f"expected an env with a method action_masks(), got {one} in slot {slot}: the "
                "policy asks for masks of valid actions; wrap the env as in training "
                "(sb3_contrib.common.wrappers.ActionMasker)"
            ) from None


def choices_of(space: Any) -> Any:
    """The number of choices of each part of a discrete action."""
    if isinstance(space, spaces.MultiBinary):
        return np.full(space.shape, 2)
    return np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def read_mask(env: Any, slot: int, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the mask of valid actions of one gymnasium env, bool ``[size]``."""
    mask = np.asarray(env.get_wrapper_attr(ACTION_MASKS)())
    if mask.size != size:
        raise ValueError(
            f"expected action_masks() of slot {slot} to give {size} values, one for each choice, "
            f"got shape {mask.shape}; correct the env"
        )
    return mask.reshape(-1).astype(bool)


class ActionMasks(Transform):
    """Adds the masks of the envs in this process, bool ``[N, size]``, True for valid actions.

    They are read after each reset and step of a slot; all are True once its episode has ended.
    """

    def __init__(self, size: int):
        super().__init__(in_keys=[], out_keys=[ACTION_MASKS])
        self._size = size

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get(keys.DONE).reshape(-1).tolist()
        masks = np.ones((len(done), self._size), bool)
        base = base_of(self.parent)
        for slot, env in enumerate(base.slot_envs):
            if not done[slot]:
                masks[slot] = read_mask(env, slot, self._size)
        shape = (*next_tensordict.batch_size, self._size)
        return next_tensordict.set(ACTION_MASKS, torch.from_numpy(masks).reshape(shape))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape = (*observation_spec.shape, self._size)
        observation_spec[ACTION_MASKS] = Binary(self._size, shape=shape, dtype=torch.bool)
        return observation_spec
