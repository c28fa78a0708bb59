"""Actors of an evaluation: policies at one batch size, each row with its episode's stream."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isfunction, ismethod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import AdditiveGaussianModule, ConsistentDropoutModule, EGreedyModule

from tdcollect import check, keys
from tdcollect._upstream.torchrl import (
    TorchDispatchMode,
    exploration_spec,
    make_compatible_policy,
    only_projects,
    schema_of,
    set_exploration_spec,
)
from tdcollect.collect.arguments import cannot_wrap
from tdcollect.collect.policy import Call, LoweredPolicy, RandomActions, warning_of_draws
from tdcollect.collect.step_dict import StepDict, is_plain, sent, with_index
from tdcollect.envs.process.agents import ACTION_MASK
from tdcollect.keys import Key, name_of
from tdcollect.policies import parameters_of
from tdcollect.randomness import NotReproducibleError

_ALIGNMENT = 64  # bytes, of the memory that torch gives
_AT_RESETS = (
    "Let resets give it as the policy keeps it: in a function that makes the env, append TorchRL's "
    "TensorDictPrimer, for gSDE gSDENoise(state_dim=..., action_dim=...); for consistent dropout, "
    "pass input_shape= to its module"
)
_EXAMPLES = 8
_CPU = torch.device("cpu")


class Layout(NamedTuple):
    """The slots that a policy acts for, its batch size and its device."""

    size: int  # the batch size that a policy on TensorDicts always runs at
    slots: int
    batched: bool  # False for one slot without a batch dimension
    device: torch.device  # the policy's


class Actor(ABC):
    """Acts for the episodes in the slots: probed once, told of each start, then acts at each step.

    Attributes:
        left_out: the entries of the last outputs that are no dense tensors.
    """

    left_out: Sequence[Key] = ()

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        """Act on trial, and refuse a policy that would not act the same for the same episode.

        Args:
            rows: those of slots that begin an episode.
            carried: the entries that the env carries from one step to the next.

        Returns:
            The outputs for equal rows, and the entries that the policy carries on.
        """
        return StepDict(), []

    @abstractmethod
    def start(self, slot: int, seed: int) -> None:
        """Begin an episode in a slot; it draws from a stream that starts from the seed."""

    @abstractmethod
    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        """Add the actions to the rows; only those of the slots ``active`` matter."""

    def end(self) -> None:  # noqa: B027, most have nothing to check
        """End a block of steps: raise if a draw had parameters that its distribution refuses."""


class Inference(Actor):
    """Runs a policy on rows ``[N]``, in batches of a fixed size.

    A matrix product rounds differently at another batch size. So slots run in groups of that size,
    and the last group is padded. If an operation of the policy rounds a row differently at another
    place in the batch, each slot is a group of its own, padded with copies.

    The policy is a callable on TensorDicts, as a collector would call it; ``unread`` tells of an
    entry whether nobody reads it. Each episode has one of ``streams``, by slot.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        layout: Layout,
        unread: Callable[[Key], bool] | None = None,
    ):
        self.policy, self._unread = policy, unread
        self._size, self._slots, self._batched, self._device = layout
        self._mode = DrawByRow(self._size)
        self.streams: list[torch.Generator | None] = [None] * self._slots
        self._program: LoweredPolicy | None = None
        # Whether each operation outside samplers draws random numbers, once known.
        self._drawing: dict[Call, bool] = {}
        self._index: dict[int, torch.Tensor] = {}  # of the slots of a group, by its first one

    def start(self, slot: int, seed: int) -> None:
        self.streams[slot] = stream(seed)

    def act(self, rows: StepDict, active: Sequence[int]) -> None:
        program, slots, streams = self._program, self._slots, self.streams
        assert program is not None
        if len(active) < slots:  # slots that are in flight draw nothing
            acting = set(active)
            streams = [s if slot in acting else None for slot, s in enumerate(streams)]
        if self._on_rows and _lie_well(rows, program.reads_first):
            self._mode.streams = streams
            program(rows)
            return
        inputs, joined = StepDict(), StepDict()
        for key in program.reads_first if program.straight else rows:
            if key in rows:  # what the policy needs, on its device: each entry crosses once
                inputs[key] = sent(rows[key], self._device)
        for first in sorted({slot - slot % self._group for slot in active}):
            stop = min(first + self._group, slots)
            drawn = [*streams[first:stop], *[None] * (self._size - stop + first)]
            outputs = self.run(self._padded(inputs, first, stop), drawn)
            for key, value in outputs.items():
                value = value[: stop - first] if self._batched else value[0]
                if stop - first < slots:
                    if key not in joined:  # other slots keep what they have
                        joined[key] = value.new_zeros((slots, *value.shape[1:]))
                        if key in rows and rows[key].shape == joined[key].shape:
                            joined[key].copy_(rows[key])
                    joined[key][first:stop] = value
                else:
                    joined[key] = value
        rows.update(joined)

    def _padded(self, inputs: StepDict, first: int, stop: int) -> StepDict:
        """Return the inputs of a group of slots, the last one repeated up to the fixed size.

        Memory that torch allocates: how a matrix product rounds depends on alignment and strides.
        """
        index = self._index.get(first)
        if index is None:
            slots = torch.arange(first, first + self._size).clamp(max=stop - 1)
            index = self._index[first] = slots.to(self._device)
        padded = StepDict()
        for key, value in inputs.items():
            padded[key] = (value if self._batched else value.unsqueeze(0)).index_select(0, index)
        return padded

    def run(
        self,
        inputs: StepDict,
        streams: Sequence[torch.Generator | None],
        watching: LikeRows | None = None,
    ) -> StepDict:
        """Return the policy's outputs for a batch of the fixed size."""
        program, mode = self._program, self._mode
        assert program is not None
        mode.streams, mode.watching = streams, watching
        rows = StepDict(inputs)
        for op in program.calls:
            if op in program.sampling or not (watching or self._drawing.get(op, True)):
                op(rows)
                continue
            if watching is not None:
                watching.follow(rows.values())
            before = mode.draws
            with mode:
                op(rows)
            self._drawing.setdefault(op, mode.draws > before)
        written, self.left_out = StepDict(), []
        for key, value in rows.items():
            if value is inputs.get(key):
                continue
            if is_plain(value):  # others have no bits to compare, and are not kept
                written[key] = value
            else:
                self.left_out.append(key)
        return written

    def end(self) -> None:
        if self._program is not None:
            self._program.check()

    def probe(self, rows: StepDict, carried: list[Key]) -> tuple[StepDict, list[Key]]:
        size, batch = self._size, StepDict()  # equal rows, as at the start of an episode
        for key, value in rows.items():
            one = (value[:1] if self._batched else value.unsqueeze(0)).to(self._device)
            batch[key] = one.expand(size, *one.shape[1:]).clone()
        program = self._program = LoweredPolicy(
            self.policy,
            batch,
            torch.Size([size]),
            self._device,
            unread=self._unread,
            noise=self._mode,
        )
        first = self._repeated(batch)
        alike = size == 1 or (not self._mode.picks and self._rows_are_alike(batch))
        self._group = size if alike else 1  # the number of slots that run together
        remembered = program.forgets(StepDict({**rows, **first}), carried)
        if lacking := [key for key in remembered if key not in rows]:
            batch.update((key, torch.zeros_like(first[key])) for key in lacking)
            read = [key for key in lacking if key in getattr(self.policy, "in_keys", ())]
            check_same(
                first,
                StepDict({**batch, **self._on_trial(batch, range(size))}),
                f"gives other outputs {{}} where {read or lacking} is zero, as where an episode "
                f"starts, than where the env does not give it. {_AT_RESETS}",
            )
        for place in {0, self._group - 1} if size > 1 else ():
            self._check_place(place, batch, first)
        # Whether the policy may run on the slots' rows as they are: all are one group of the fixed
        # size, on the CPU, and samplers draw.
        self._on_rows = (
            program.straight
            and not any(self._drawing.values())
            and self._device.type == "cpu"
            and self._batched
            and self._slots == size == self._group
        )
        return first, remembered

    def _on_trial(self, batch: StepDict, seeds: Iterable[int]) -> StepDict:
        """Return the outputs for a batch, each row with a stream of its seed."""
        with self._unchanged_buffers():
            return self.run(batch, [*map(stream, seeds)])

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Refuse a policy that changes its buffers meanwhile, and set them back."""
        module = self.policy if isinstance(self.policy, nn.Module) else nn.Module()
        before = [(name, value, value.clone()) for name, value in module.named_buffers()]
        changed = []
        try:
            yield
        finally:
            for name, value, kept in before:
                if _bits(value) != _bits(kept):
                    changed.append(name)
                    value.copy_(kept)
        if changed:
            raise NotReproducibleError(
                f"the policy changes its own buffers {changed} as it runs, so that an episode "
                "would depend on those before it (batch norm in training mode, say); run it in "
                "eval mode (eval_mode=True), or freeze what it keeps"
            )

    def _repeated(self, batch: StepDict) -> StepDict:
        """Return the outputs for a batch, which must be the same twice."""
        size = self._size
        first = self._on_trial(batch, range(size))
        for key, value in first.items():
            if value.shape[:1] != (size,):
                raise ValueError(
                    f"expected the policy's entry {key!r} to have a row for each row that it is "
                    f"given, {size}, got one of shape {list(value.shape)}; return a tensor "
                    "with the batch size in front"
                )
        check_same(
            first,
            self._on_trial(batch, range(size)),
            "gives other outputs {} for the same rows and random streams: it keeps a state that is "
            "no entry of the TensorDict, or draws random numbers that torch does not know of; draw "
            "from torch",
        )
        return first

    def _rows_are_alike(self, batch: StepDict) -> bool:
        """Return whether equal rows give equal outputs; the answer is the same for all episodes."""
        for seed in range(_EXAMPLES):
            example = StepDict()
            for key, value in batch.items():
                example[key] = _example(key, value[:1], seed).expand_as(value).clone()
            watching = LikeRows(self._size)
            streams = [stream(seed) for _ in range(self._size)]
            try:
                with self._unchanged_buffers():
                    self.run(example, streams, watching)
            except NotReproducibleError:
                raise
            except Exception:  # it refuses made-up rows: nothing is known of them
                return False
            if watching.unlike:
                return False
        return True

    def _check_place(self, place: int, batch: StepDict, first: StepDict) -> None:
        """Refuse a policy that acts otherwise in a row whose neighbours differ."""
        others, size = StepDict(), self._size
        for key, value in batch.items():
            # Where rows are picked by their values, all of them begin an episode.
            others[key] = unlike(key, value, self._mode.picks)
            others[key][place] = value[place]
        seeds = [*range(size, 2 * size)]
        seeds[place] = 0
        try:
            alone = StepDict({**others, **self._on_trial(others, seeds)})
        except RuntimeError as error:
            if changed := [k for k in first if k in batch and first[k].shape != batch[k].shape]:
                raise ValueError(
                    f"expected a policy that leaves {changed} of the shape that the env gives, "
                    f"{[list(batch[key].shape[1:]) for key in changed]}, got one that changes it "
                    f"to {[list(first[key].shape[1:]) for key in changed]}. {_AT_RESETS}"
                ) from error
            raise
        check_same(
            first,
            alone,
            "gives a row other outputs {} where the rest of the batch differs, or at another "
            "place in it: it couples rows, as batch norm in training mode or noise on the "
            "weights does; run it in eval mode (eval_mode=True), or remove what mixes rows",
            place,
        )


def _lie_well(rows: StepDict, read: Iterable[Key]) -> bool:
    """Return whether inputs lie in memory as :meth:`Inference._padded` would place them."""
    return not any(
        value.ndim >= 4  # whose strides say more than that they are contiguous
        or not value.is_contiguous()
        or value.data_ptr() % _ALIGNMENT
        for key in read
        if (value := rows.get(key)) is not None
    )


class LikeRows:
    """Watches a policy on a batch of equal rows: all that it computes must have equal rows."""

    def __init__(self, rows: int):
        self.unlike = False
        self._rows = rows
        self._kept: list[torch.Tensor] = []  # alive, so that no other tensor takes over the storage
        self._of_batch: set[int] = set()

    def follow(self, values: Iterable[torch.Tensor]) -> None:
        self._kept += values
        self._of_batch.update(map(_place, values))

    def note(self, schema: Any, values: Sequence[Any], result: Any) -> None:
        """Note that an operation has made a result of these values."""
        read = set(map(_place, _tensors(*values)))
        if read.isdisjoint(self._of_batch):
            return
        # Weights that an operation hands back are no rows, unless it has written to them.
        handed_back = set() if schema.is_mutable else read - self._of_batch
        for value in _tensors(result):
            if (place := _place(value)) in handed_back:
                continue
            self._kept.append(value)
            self._of_batch.add(place)
            if "empty" in schema.name:  # which returns memory as it is
                continue
            if value.ndim > 0 and value.numel() > 0 and len(value) % self._rows == 0:
                apart = value.flatten().view(torch.uint8).view(self._rows, -1)
                self.unlike |= not torch.equal(apart, apart[:1].expand_as(apart))


def _place(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _example(key: Key, like: torch.Tensor, seed: int) -> torch.Tensor:
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


def check_same(first: StepDict, other: StepDict, why: str, place: int | None = None) -> None:
    """Refuse a policy whose outputs differ in rows that should be equal.

    All rows should; or only the first one of ``first`` and the other's at a place.
    """
    differing = []
    for key, value in first.items():
        one, two = value, other[key]
        if place is not None:
            one, two = one[0], two[place]
        if _bits(one) != _bits(two):
            differing.append(key)
    if differing:
        raise NotReproducibleError("the policy " + why.format(differing))


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments or results, in lists and tuples, too."""
    tensors: list[torch.Tensor] = []
    for value in values:
        tensors += filter(torch.is_tensor, value if isinstance(value, (list, tuple)) else [value])
    return tensors


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# --- random numbers: each row draws from the stream of its own episode


def stream(seed: int) -> torch.Generator:
    """Return a generator for one episode, from a seed in ``[0, 2**64)``."""
    return torch.Generator().manual_seed(seed)


class DrawByRow(TorchDispatchMode):
    """Runs random operations row by row, each with one of ``streams``; None for no episode.

    It draws for the samplers of a policy, too, as their ``Noise``.

    Attributes:
        watching: is told of each operation, if there is one.
        draws: the number of random operations.
        picks: True once rows were picked by their values: how many then depends on the batch.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.streams: Sequence[torch.Generator | None] = [None] * rows
        self.watching: LikeRows | None = None
        self.draws, self.picks = 0, False
        self._unused = stream(0)  # for rows of no episode
        # Draws of samplers, and their rows: each is written over the one before, which no sampler
        # keeps.
        self._memory: dict[Any, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        return self._drawn(like, torch.Tensor.exponential_)

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        return self._drawn(like, torch.Tensor.normal_)

    def _drawn(self, like: torch.Tensor, draw: Any) -> torch.Tensor:
        key = (draw, like.shape, like.stride(), like.dtype)
        if (memory := self._memory.get(key)) is None:
            layout = torch.contiguous_format if draw is torch.Tensor.normal_ else None
            values = torch.ones_like(like, device=_CPU, memory_format=layout)
            memory = self._memory[key] = values, values.unbind(0)
        for row, generator in zip(memory[1], self.streams, strict=True):
            if generator is not None:
                draw(row, generator=generator)
        return memory[0] if like.is_cpu else sent(memory[0], like.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            result = self._by_row(func, args, kwargs)
        else:
            if torch.Tag.dynamic_output_shape in func.tags:
                by_number = func is torch.ops.aten.index.Tensor
                self.picks |= not by_number or getattr(args[1][0], "dtype", None) == torch.bool
            result = func(*args, **kwargs)
        if self.watching is not None:
            self.watching.note(schema_of(func), (*args, *kwargs.values()), result)
        return result

    def _by_row(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.draws += 1
        schema = schema_of(func)
        arguments = _by_name(schema, args, kwargs)
        tensor = next((v for v in arguments.values() if isinstance(v, torch.Tensor)), None)
        home = torch.device(arguments.get("device") or _CPU) if tensor is None else tensor.device
        on_cpu = arguments if home == _CPU else _on_cpu(schema, arguments)
        split = self._split(func, on_cpu)
        takes_generator = "generator" in arguments
        results = []
        for row, own in enumerate(self.streams):
            generator = own or self._unused
            of_row = {**on_cpu, **{name: parts[row] for name, parts in split.items()}}
            if takes_generator:
                of_row["generator"] = generator
            results.append(_call(func, of_row, None if takes_generator else generator))
        if written := _written(schema):
            for name in written if home != _CPU else ():
                arguments[name].copy_(sent(on_cpu[name], home))
            return arguments[written[0]]
        if isinstance(results[0], tuple):
            return tuple(sent(_joined(parts), home) for parts in zip(*results, strict=True))
        return sent(_joined(results), home)

    def _split(self, func: Any, arguments: dict[str, Any]) -> dict[str, list[Any]]:
        """Split the arguments that have the batch as their first dimension into rows.

        A multiple of the batch size is a batch that was flattened, several elements per row.
        """
        rows = len(self.streams)
        if rows == 1:  # all is of this row
            return {}
        tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        most = max((value.ndim for value in tensors.values()), default=0)
        split: dict[str, list[Any]] = {
            name: list(value.split(len(value) // rows))
            for name, value in tensors.items()
            if value.ndim == most > 0 and len(value) > 0 and len(value) % rows == 0
        }
        size = arguments.get("size")
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
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return {**values, **dict(zip(values, args, strict=False)), **kwargs}


def _written(schema: Any) -> list[str]:
    """Return the names of the arguments that an operation writes to."""
    return [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows; a single one may have no dimensions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _call(func: Any, arguments: dict[str, Any], generator: torch.Generator | None) -> Any:
    if generator is None:
        return func(**arguments)
    # The operation takes no generator: set the default one to this one's state meanwhile.
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(**arguments)
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _on_cpu(schema: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    fills = len(tensors) == 1 and tensors[0] in _written(schema)
    # Values that the operation does not read stay where they are: bringing them would wait.
    unread = fills or schema.name.endswith("like")
    moved: dict[str, Any] = {
        name: torch.empty_like(arguments[name], device=_CPU) if unread else arguments[name].cpu()
        for name in tensors
    }
    if arguments.get("device") is not None:
        moved["device"] = _CPU
    return {**arguments, **moved}


_DRAWING = (AdditiveGaussianModule, EGreedyModule)  # draw a spec's actions, or noise for them


def as_policy(policy: Any, env: EnvBase, size: int) -> Callable[..., Any]:
    """Return a policy as a collector would call it, on TensorDicts."""
    if policy is None or isinstance(policy, RandomPolicy):
        drawn = RandomActions(env.full_action_spec_unbatched.expand(size))
        if any(leaf.dtype is None for leaf in drawn.spec.values(True, True)):
            raise ValueError(
                "expected a policy for an env whose actions are texts, of which TorchRL's spec "
                "draws one alone; make it with tdcollect.make_env for random ones"
            )
        if text := warning_of_draws(drawn):
            warnings.warn(text, stacklevel=2)
        return drawn
    try:
        return make_compatible_policy(policy, env.observation_spec, env=env)
    except TypeError as error:
        reason = cannot_wrap(policy, env, evaluating=True)
        if reason is None:
            raise
        raise TypeError(reason) from error


def modules_of(policy: Any) -> Iterable[nn.Module]:
    """Return the modules of a policy; none of one that is no module."""
    return policy.modules() if isinstance(policy, nn.Module) else ()


def reads_masks(policy: Any) -> bool:
    """Return whether a policy reads masks of actions: a random one, or one that names them."""
    names = getattr(policy, "in_keys", None) or parameters_of(getattr(policy, "forward", policy))
    return policy is None or isinstance(policy, RandomPolicy) or ACTION_MASK in names


def draws_at_starts(policy: Any) -> bool:
    """Return whether the env must draw for a policy where an episode starts, in its slot alone."""
    return any(isinstance(module, ConsistentDropoutModule) for module in modules_of(policy))


def device_of(policy: Any, named: torch.device | str | None) -> torch.device:
    """Return the device that a policy runs on, with its index; ``named`` is in the settings."""
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    devices = [with_index(tensor.device) for tensor in (*module.parameters(), *module.buffers())]
    if named is None:
        return devices[0] if devices else with_index(torch.empty(0).device)
    device = with_index(check.device(named))
    if devices and device not in devices:
        raise ValueError(
            f"expected a policy on {device}, as device says, got one on "
            f"{', '.join(sorted({*map(str, devices)}))}; move it: policy.to({str(device)!r})"
        )
    return device


@contextmanager
def at_batch_size(policy: Any, env: EnvBase, size: int) -> Iterator[None]:
    """Let modules that hold an action spec, to draw or to project, take a batch of this size."""
    before = [
        (module, exploration_spec(module))
        for module in modules_of(policy)
        if isinstance(module, _DRAWING) or only_projects(module)
    ]
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


@contextmanager
def two_readings(policy: Any, env: EnvBase) -> Iterator[None]:
    """Name the other reading of a function that fails as one of tensors, by its argument's name."""
    try:
        yield
    except Exception as error:
        names = [*parameters_of(policy)] if isfunction(policy) or ismethod(policy) else []
        if len(names) == 1 and names[0] in env.observation_keys:
            error.add_note(
                f"its argument is named like the env's entry {names[0]!r}, so that it was called "
                "with a batch of tensors; if it takes one NumPy observation: "
                "tdcollect.policies.from_function(policy)"
            )
        raise
