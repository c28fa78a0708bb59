"""Policy calls of an evaluation: at one batch size, each row with its own random stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

from tdcollect._upstream.modules import only_projects
from tdcollect._upstream.torchrl import (
    exploration_spec,
    make_compatible_policy,
    set_exploration_spec,
)
from tdcollect.collect.arguments import cannot_wrap, check_instance
from tdcollect.collect.path import lowered
from tdcollect.collect.policies import Call, Policy, RandomActions
from tdcollect.collect.step_dict import (
    Key,
    StepDict,
    forgotten_entries,
    is_plain,
    sent,
    with_index,
)
from tdcollect.evaluation.episodes.isolation import NotReproducibleError
from tdcollect.evaluation.episodes.kept_state import check_kept, state_of
from tdcollect.evaluation.episodes.row_checks import (
    LikeRows,
    check_same,
    example,
    unchanged_buffers,
    unlike,
)
from tdcollect.evaluation.episodes.streams import DrawByRow, RowNoise, Streams, stream

_EXAMPLES = 8
_DRAWING = (AdditiveGaussianModule, EGreedyModule)  # draw a spec's actions, or noise for them
_ALIGNMENT = 64  # bytes, of the memory that torch gives


class Inference:
    """Runs a policy on rows ``[N]``, in batches of a fixed size.

    A matrix product rounds differently at another batch size. So slots run in groups of ``size``,
    and the last group is padded. If an operation of the policy rounds a row differently at another
    place in the batch, each slot is a group of its own, padded with copies.

    Args:
        policy: a callable on TensorDicts, as a collector would call it.
        size: the batch size that the policy runs at.
        slots: N.
        batched: True if rows have the dimension N; False for one slot without it.
        device: the device that the policy runs on.

    Attributes:
        left_out: the entries of the last outputs that are no dense tensors.
        streams: the random streams of the episodes in the slots.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        size: int,
        slots: int,
        batched: bool,
        device: torch.device,
    ):
        self._policy = policy
        self._size = size
        self._slots = slots
        self._batched = batched
        self._device = device
        self._streams = Streams(size)
        self._mode = DrawByRow(self._streams)
        self.streams: list[torch.Generator | None] = [None] * slots
        self._program: Policy | None = None
        self.left_out: list[Key] = []
        # Whether each operation outside samplers draws random numbers, once known.
        self._drawing: dict[Call, bool] = {}
        self._group = size  # the number of slots that run together
        self._on_rows = False  # whether the policy may run on the slots' rows as they are
        self._index: dict[int, torch.Tensor] = {}  # of the slots of a group, by its first one

    def start(self, slot: int, seed: int) -> None:
        """Give the episode that starts in a slot a random stream of its own."""
        self.streams[slot] = stream(seed)

    def __call__(self, rows: StepDict, active: Sequence[int]) -> None:
        """Run the policy and add its outputs to the rows; only the slots ``active`` matter."""
        streams = self.streams
        if len(active) < self._slots:  # slots that are in flight draw nothing
            acting = set(active)
            streams = [s if slot in acting else None for slot, s in enumerate(streams)]
        if self._on_rows and self._lie_well(rows):
            self._streams.current = streams
            self._program(rows)  # type: ignore[misc]
            return
        given = self._inputs(rows)
        groups = []
        for first in range(0, self._slots, self._group):
            stop = min(first + self._group, self._slots)
            if any(first <= slot < stop for slot in active):
                groups.append((first, stop))
        outputs = [
            (first, stop, self._run_group(given, first, stop, streams)) for first, stop in groups
        ]
        if len(outputs) == 1 and outputs[0][1] - outputs[0][0] == self._slots:
            rows.update(outputs[0][2])
            return
        for key, like in outputs[0][2].items():
            joined = like.new_zeros((self._slots, *like.shape[1:]))
            for first, stop, out in outputs:
                joined[first:stop] = out[key]
            rows[key] = joined

    def _runs_on_rows(self) -> bool:
        """Tell whether all slots are one group of the fixed size, on the CPU, and samplers draw."""
        program = self._program
        return (
            program is not None
            and program.straight
            and not any(self._drawing.values())
            and self._device.type == "cpu"
            and self._batched
            and self._slots == self._size == self._group
        )

    def _lie_well(self, rows: StepDict) -> bool:
        """Tell whether the policy's inputs lie in memory as :meth:`_padded` would place them."""
        for key in self._program.reads_first:  # type: ignore[union-attr]
            value = rows.get(key)
            if value is not None and (
                value.ndim >= 4  # whose strides say more than that they are contiguous
                or not value.is_contiguous()
                or value.data_ptr() % _ALIGNMENT
            ):
                return False
        return True

    def _inputs(self, rows: StepDict) -> StepDict:
        """Return what the policy needs of the rows, on its device: each entry crosses once."""
        program = self._program
        needed = rows.keys() if program is None or not program.straight else program.reads_first
        return StepDict((key, sent(rows[key], self._device)) for key in needed if key in rows)

    def _run_group(
        self, given: StepDict, first: int, stop: int, streams: Sequence[torch.Generator | None]
    ) -> StepDict:
        """Return the policy's outputs ``[stop - first, ...]`` for a group of slots."""
        count = stop - first
        drawn = [*streams[first:stop], *[None] * (self._size - count)]
        outputs = self._run(self._padded(given, first, stop), drawn)
        if not self._batched:
            return StepDict((key, value[0]) for key, value in outputs.items())
        return StepDict((key, value[:count]) for key, value in outputs.items())

    def _padded(self, given: StepDict, first: int, stop: int) -> StepDict:
        """Return the inputs of a group of slots, the last one repeated up to the fixed size.

        They are copied to memory that torch allocates: how a matrix product rounds depends on the
        alignment and the strides of its inputs.
        """
        index = self._index.get(first)
        if index is None:
            slots = torch.arange(first, first + self._size).clamp(max=stop - 1)
            index = self._index[first] = slots.to(self._device)
        return StepDict(
            (key, (value if self._batched else value.unsqueeze(0)).index_select(0, index))
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
            self._program = lowered(
                self._policy,
                given,
                torch.Size([self._size]),
                self._device,
                noise=RowNoise(self._streams),
            )
        self._streams.current = streams
        rows = StepDict(given)
        for op in self._program.calls:
            if watching is not None and op not in self._program.sampling:
                watching.follow(rows.values())
                with watching, self._mode:
                    op(rows)
                continue
            if op in self._program.sampling or not self._drawing.get(op, True):
                op(rows)
                continue
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
        if first:
            self._check_lead(written)
        return written

    def _check_lead(self, written: StepDict) -> None:
        """Raise if an output does not have one row per input row."""
        for key, value in written.items():
            if value.shape[:1] != (self._size,):
                raise ValueError(
                    f"expected the policy's entry {key!r} to have a row for each row that it is "
                    f"given, {self._size}, got one of shape {list(value.shape)}; return a tensor "
                    "with the batch size in front"
                )

    def check(self) -> None:
        """Raise if a draw had parameters that its distribution refuses."""
        if self._program is not None:
            self._program.check()

    def remembered(self, rows: StepDict, carried: list[Key]) -> list[Key]:
        """Return the entries that the policy carries from one step to the next."""
        program = self._program
        assert program is not None
        return forgotten_entries(rows, carried, program.reads_first, program.writes)

    def probe(self, rows: StepDict) -> StepDict:
        """Run the policy on rows, and refuse it if an output row depends on other rows.

        Returns:
            The policy's outputs for a batch of the fixed size.

        Raises:
            NotReproducibleError: if the policy couples the rows of a batch, keeps a hidden state,
                or draws random numbers that torch does not see.
        """
        one = StepDict((k, v[:1] if self._batched else v.unsqueeze(0)) for k, v in rows.items())
        one = StepDict((key, value.to(self._device)) for key, value in one.items())
        size = self._size
        batch = StepDict((k, v.expand(size, *v.shape[1:]).clone()) for k, v in one.items())
        with unchanged_buffers(self._policy):
            first = self._run(batch, [stream(row) for row in range(size)])
            before = state_of(self._policy)
            again = self._run(batch, [stream(row) for row in range(size)])
            after = state_of(self._policy)
        check_same(
            first,
            again,
            range(size),
            range(size),
            "gives other outputs {} for the same rows and random streams: it keeps a state that is "
            "no entry of the TensorDict, or draws random numbers that torch does not know of",
        )
        check_kept(before, after)
        with unchanged_buffers(self._policy):
            alike = size == 1 or self._rows_are_alike(batch)
        self._group = size if alike else 1
        for place in {0, self._group - 1} if size > 1 else ():
            others = StepDict((key, unlike(key, value)) for key, value in batch.items())
            for key, value in one.items():
                others[key][place] = value[0]
            streams = [stream(0 if row == place else size + row) for row in range(size)]
            with unchanged_buffers(self._policy):
                alone = self._run(others, streams)
            check_same(
                first,
                alone,
                [0],
                [place],
                "gives a row other outputs {} where the rest of the batch differs, or at another "
                "place in it: it couples rows, as batch norm in training mode or noise on the "
                "weights does; run it in eval mode (eval_mode=True), or remove what mixes rows",
            )
        self._on_rows = self._runs_on_rows()
        return first

    def _rows_are_alike(self, batch: StepDict) -> bool:
        """Tell whether equal rows give equal outputs; the answer is the same for all episodes."""
        for seed in range(_EXAMPLES):
            given = StepDict()
            for key, value in batch.items():
                row = example(key, value[:1], seed)
                given[key] = row.expand_as(value).clone()
            watching = LikeRows(self._size)
            try:
                self._run(given, [stream(seed) for _ in range(self._size)], watching)
            except NotReproducibleError:
                raise
            except Exception:  # it refuses made-up rows: nothing is known of them
                return False
            if watching.unlike:
                return False
        return True


def as_policy(policy: Any, env: EnvBase, size: int) -> Callable[..., Any]:
    """Return a policy as a collector would call it, on TensorDicts.

    Raises:
        TypeError: if it can be called neither with one nor with the env's entries by name.
    """
    if policy is None or isinstance(policy, RandomPolicy):
        return RandomActions(env.full_action_spec_unbatched.expand(size))
    check_instance(policy)
    try:
        made: Callable[..., Any] = make_compatible_policy(policy, env.observation_spec, env=env)
    except TypeError as error:
        reason = cannot_wrap(policy, env)
        if reason is None:
            raise
        raise TypeError(reason) from error
    return made


def device_of(policy: Any, asked: torch.device | str | None) -> torch.device:
    """Return the device that a policy runs on, with its index.

    Raises:
        ValueError: if another one is asked for than that of its parameters, or a GPU that torch
            does not see.
    """
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    found = {with_index(tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    if asked is None:
        own = next(module.parameters(), next(module.buffers(), torch.empty(0)))
        return with_index(own.device)
    device = known_device(asked)
    if found and device not in found:
        raise ValueError(
            f"expected a policy on {device}, as device says, got one on "
            f"{', '.join(sorted(map(str, found)))}; move it: policy.to({str(device)!r})"
        )
    return device


def known_device(asked: torch.device | str) -> torch.device:
    """Return a device, with its index.

    Raises:
        ValueError: for a GPU that torch does not see.
    """
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
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    bound = [m for m in modules if isinstance(m, _DRAWING) or only_projects(m)]
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
