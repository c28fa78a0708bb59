"""The policy of an evaluation: at one batch size, each row with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.utils import RandomPolicy
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

from tdcollect import keys
from tdcollect._upstream import make_compatible_policy
from tdcollect.collect.policy import Op, Program
from tdcollect.collect.rows import Key, Rows, is_next
from tdcollect.evaluation.errors import NotReproducibleError
from tdcollect.evaluation.streams import DrawByRow, RowNoise, Stream, Streams


class Inference:
    """Runs a policy on rows ``[N]``, in batches of a fixed size.

    A matrix product rounds differently at another batch size. So the slots are taken in groups of
    ``size``, and the last group is filled up.

    Args:
        policy: what a collector would call on a TensorDict.
        size: the batch size that the policy is run at.
        slots: N.
        batched: whether rows have the N in front; False for one slot without it.
        device: where the policy runs.
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
        self._of_slot: list[Stream | None] = [None] * slots
        self._program: Program | None = None
        # Operations that draw, outside samplers, and those of which it is not known yet.
        self._drawing: dict[Op, bool] = {}

    def start(self, slot: int, seed: int) -> None:
        """Have the episode that starts in a slot draw from a stream of its own."""
        self._of_slot[slot] = Stream(seed)

    def __call__(self, rows: Rows, active: Sequence[int]) -> None:
        """Run the policy; its outputs join the rows. Only those of the slots ``active`` matter."""
        if self._batched and self._slots == self._size and self._device.type == "cpu":
            if self._program is not None and not any(self._drawing.values()):
                self._streams.current = self._of_slot
                self._program(rows)
            else:
                rows.update(self._run(rows, self._of_slot))
            return
        groups = []
        for first in range(0, self._slots, self._size):
            stop = min(first + self._size, self._slots)
            if any(first <= slot < stop for slot in active):
                groups.append((first, stop))
        outputs = [(first, stop, self._run_group(rows, first, stop)) for first, stop in groups]
        if len(outputs) == 1 and outputs[0][1] - outputs[0][0] == self._slots:
            rows.update(outputs[0][2])
            return
        for key, like in outputs[0][2].items():
            whole = like.new_zeros((self._slots, *like.shape[1:]))
            for first, stop, out in outputs:
                whole[first:stop] = out[key]
            rows[key] = whole

    def _run_group(self, rows: Rows, first: int, stop: int) -> Rows:
        """The policy's outputs ``[stop - first, ...]`` for a group of slots."""
        count = stop - first
        given = Rows()
        for key, value in rows.items():
            part = value[first:stop] if self._batched else value.unsqueeze(0)
            if count < self._size:
                filling = part[-1:].expand(self._size - count, *part.shape[1:])
                part = torch.cat([part, filling])
            given[key] = part if part.device == self._device else part.to(self._device)
        streams = [*self._of_slot[first:stop], *[None] * (self._size - count)]
        outputs = self._run(given, streams)
        if not self._batched:
            return Rows((key, value[0]) for key, value in outputs.items())
        return Rows((key, value[:count]) for key, value in outputs.items())

    def _run(self, given: Rows, streams: Sequence[Stream | None]) -> Rows:
        """The policy's outputs for a batch of the fixed size."""
        if self._program is None:
            self._program = Program(
                self._policy,
                given,
                torch.Size([self._size]),
                self._device,
                noise=RowNoise(self._streams),
            )
        self._streams.current = streams
        rows = Rows(given)
        for op in self._program.ops:
            if op in self._program.sampling or not self._drawing.get(op, True):
                op(rows)
                continue
            before = self._mode.draws
            with self._mode:
                op(rows)
            self._drawing.setdefault(op, self._mode.draws > before)
        return Rows((key, value) for key, value in rows.items() if value is not given.get(key))

    def check(self) -> None:
        """Raise where a draw had parameters that its distribution refuses."""
        if self._program is not None:
            self._program.check()

    def remembered(self, rows: Rows, carried: Sequence[Key]) -> list[Key]:
        """The entries that the policy takes from one step to the next."""
        program = self._program
        assert program is not None
        known = {*carried, *keys.FLAGS, keys.TRAJ_IDS}
        return [
            key
            for key in rows
            if key not in known
            and not is_next(key)
            and (key in program.reads_first or key not in program.writes)
        ]

    def probe(self, rows: Rows) -> Rows:
        """Run the policy on rows, and refuse one whose rows are not each their own.

        Returns:
            The policy's outputs for a batch of the fixed size.

        Raises:
            NotReproducibleError: for a policy that couples the rows of a batch, keeps a state of
                its own, or draws random numbers where they cannot be seen.
        """
        one = Rows((k, (v[:1] if self._batched else v.unsqueeze(0))) for k, v in rows.items())
        one = Rows((key, value.to(self._device)) for key, value in one.items())
        last = self._size - 1
        batch = Rows((k, v.expand(self._size, *v.shape[1:]).clone()) for k, v in one.items())
        other = Rows((key, torch.zeros_like(value)) for key, value in batch.items())
        for key, value in one.items():
            other[key][[0, last]] = value
        with _unchanged_buffers(self._policy):
            first = self._run(batch, [Stream(row) for row in range(self._size)])
            again = self._run(batch, [Stream(row) for row in range(self._size)])
        _check_same(
            first,
            again,
            range(self._size),
            range(self._size),
            "gives other outputs {} for the same rows and random streams: it keeps a state that is "
            "no entry of the TensorDict, or draws random numbers that torch does not know of",
        )
        if last == 0:
            return first
        with _unchanged_buffers(self._policy):
            seeds = [0 if row in (0, last) else self._size + row for row in range(self._size)]
            alone = self._run(other, [Stream(seed) for seed in seeds])
        _check_same(
            first,
            alone,
            [0, 0],
            [0, last],
            "gives a row other outputs {} where the rest of the batch differs, or at another place "
            "in it: it couples rows, as batch norm in training mode does; call policy.eval(), or "
            "remove what mixes rows",
        )
        return first


class RandomActions:
    """Random actions from an env's action spec, for a batch of any size.

    Args:
        env: whose actions.
        size: the batch size.
    """

    def __init__(self, env: EnvBase, size: int):
        self._spec = env.full_action_spec_unbatched.expand(size)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write actions."""
        return tensordict.update(self._spec.rand())


def as_policy(policy: Any, env: EnvBase, size: int) -> Callable[..., Any]:
    """A policy as a collector would take it: something to call on a TensorDict."""
    if policy is None or isinstance(policy, RandomPolicy):
        return RandomActions(env, size)
    return make_compatible_policy(policy, env.observation_spec, env=env)


@contextmanager
def at_batch_size(policy: Any, env: EnvBase, size: int) -> Iterator[None]:
    """Have exploration modules, which hold the action spec of an env, take a batch of this size."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    exploring = [m for m in modules if isinstance(m, (AdditiveGaussianModule, EGreedyModule))]
    before = [(module, module._spec) for module in exploring]
    for module in exploring:
        key = module.action_key
        spec = env.full_action_spec_unbatched[key]
        spec = spec.expand(size, *spec.shape).to(next(module.buffers()).device)
        module._spec = Composite({key: spec}, shape=[size])
    try:
        yield
    finally:
        for module, spec in before:
            module._spec = spec


@contextmanager
def _unchanged_buffers(policy: Any) -> Iterator[None]:
    buffers = dict(policy.named_buffers()) if isinstance(policy, nn.Module) else {}
    before = {name: value.clone() for name, value in buffers.items()}
    yield
    changed = [name for name, value in buffers.items() if _bits(value) != _bits(before[name])]
    for name in changed:
        buffers[name].copy_(before[name])
    if changed:
        raise NotReproducibleError(
            f"the policy changes its own buffers {changed} as it runs, so that an episode would "
            "depend on those before it (batch norm in training mode, say); call policy.eval(), or "
            "freeze what it keeps"
        )


def _check_same(
    first: Rows, other: Rows, rows: Sequence[int], others: Sequence[int], why: str
) -> None:
    differing = [
        key
        for key, value in first.items()
        if any(_bits(value[i]) != _bits(other[key][j]) for i, j in zip(rows, others, strict=True))
    ]
    if differing:
        raise NotReproducibleError("the policy " + why.format(differing))


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
