"""Store: steps stacked into a batch; Placement: each tensor crosses once between devices.

gymnasium's arrays live on the CPU. With a policy on another device, an observation is copied there
once (from pinned memory, asynchronously), actions come back once, and nothing else waits. The batch
is made of the copies that are on its device already. Of a policy that runs as a CUDA graph, copies
and stores are part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tdcollect import keys
from tdcollect._upstream.torchrl import TorchDispatchMode
from tdcollect.collect.arrays import SteppedEnv
from tdcollect.collect.policy import LoweredPolicy
from tdcollect.collect.step_dict import (
    NotReset,
    StepDict,
    chunk_steps,
    is_plain,
    sent,
    with_index,
)
from tdcollect.keys import Key, is_next, under_next

_CPU = torch.device("cpu")


@dataclass
class Store:
    """Takes the steps of a loop, and stacks them chunk by chunk, or all at once.

    ``steps`` is T, where all slots step together. It is None for rows that arrive one by one;
    ``slots`` then holds the slot of each.
    """

    env: SteppedEnv
    left_out: frozenset[Key]
    place: Placement
    in_one_piece: bool
    steps: int | None

    def __post_init__(self) -> None:
        self._dim = len(self.env.batch_size)
        self._count = self.env.batch_size.numel()
        self._held: tuple[list[StepDict], list[StepDict]] = [], []  # and what they led to
        self._rows: list[torch.Tensor] = []  # of the steps held, those that have arrived
        self._names: list[tuple[Key, Key, bool]] | None = None
        self._filled = 0
        self._devices: dict[Key, torch.device] = {}
        self._entries: dict[Key, torch.Tensor] = {}
        self._parts: dict[Key, list[torch.Tensor]] = {}
        self.slots: list[int] = []
        # The most steps that are held before they are stacked.
        self.chunk = chunk_steps(self.env.step_bytes, on_cpu=self.env.home == _CPU)

    def allocate(self) -> Iterator[Any]:
        """The buffers of each step, without end for rows; steps are stacked chunk by chunk."""
        left = math.inf if self.steps is None else self.steps
        while left > 0:
            count = int(min(self.chunk, left))
            yield from self.env.allocate(count, self.place.pinned)
            left -= count
            if not self.in_one_piece:
                self._flush()

    def append(self, step: StepDict, following: StepDict, slots: list[int]) -> None:
        """Hold a step, and what it led to; where rows arrive, the rows of these slots alone."""
        if self.steps is None:
            if not slots:
                return
            self._rows.append(len(self._held[0]) * self._count + torch.tensor(slots))
            self.slots += slots
        self._held[0].append(step)
        self._held[1].append(following)

    def rows(self) -> dict[Key, torch.Tensor]:
        """All rows, ``[F, ...]`` per entry, in the order of their arrival."""
        self._flush()
        return {k: v[0] if len(v) == 1 else torch.cat(v) for k, v in self._parts.items()}

    def grid(self) -> dict[Key, torch.Tensor]:
        """The entries ``[N, t, ...]``; rows that a slot lacks are zero."""
        if self.steps is not None:
            if not self._filled:
                self.steps = len(self._held[0])  # the loop has ended within its first chunk
            self._flush()
            if self._filled == self.steps:
                return self._entries
            return {k: v.narrow(self._dim, 0, self._filled) for k, v in self._entries.items()}
        slots = torch.tensor(self.slots)
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=self._count).tolist()
        return {
            key: pad_sequence(value[order.to(value.device)].split(counts), batch_first=True)
            for key, value in self.rows().items()
        }

    def _flush(self) -> None:
        steps, followings = self._held
        if not steps:
            return
        if self._names is None:
            step, following = steps[0], followings[0]
            if lacking := [k for k in self.env.carried if k in following and k not in step]:
                raise NotReset(
                    f"expected the entries {lacking} from resets, as steps give them, got resets "
                    "without: an episode's first row has no value for them; write them in _reset, "
                    "too, of the transform or env that writes them in steps"
                )
            names = [(key, key, False) for key in step if not is_next(key)]
            names += [(under_next(key), key, True) for key in following]
            self._names = [one for one in names if one[0] not in self.left_out]
        try:
            values = {k: [*map(itemgetter(key), self._held[at])] for k, key, at in self._names}
            coming = followings[-1].values()
            for name, brought in self.place.bring(values, self._devices, coming).items():
                self._stack(name, brought)
        except KeyError as error:
            raise RuntimeError(
                f"expected the entry {error} in every step of a batch, as in its first, got steps "
                "without it; have the policy write it at every call"
            ) from error
        except RuntimeError as error:
            for _, key, led_to in self._names:
                shapes = [held[key].shape for held in self._held[led_to]]
                odd = [shape for shape in shapes if shape != shapes[0]]
                if odd:
                    raise ValueError(
                        f"expected the entry {key!r} in one shape at every step of a batch, got "
                        f"{list(shapes[0])}, then {list(odd[0])}; pad it"
                    ) from error
            raise
        self._filled += len(steps)
        self._held, self._rows = ([], []), []

    def _stack(self, name: Key, values: list[torch.Tensor]) -> None:
        dim, steps = self._dim, self.steps
        if steps is None:
            rows = torch.stack(values).flatten(0, 1)[torch.cat(self._rows).to(values[0].device)]
            self._parts.setdefault(name, []).append(rows)
            return
        first = values[0]
        # The flags that steps begin with are one tensor at all steps, say.
        same = len(values) > 1 and all(map(is_, values, repeat(first)))
        if len(values) == steps and not same:
            # Steps in another memory format (channels last) would make the batch one, too.
            self._entries[name] = torch.stack(values, dim).contiguous()
            return
        if name not in self._entries:
            shape = (*first.shape[:dim], steps, *first.shape[dim:])
            self._entries[name] = _empty(shape, first)
        target = self._entries[name].narrow(dim, self._filled, len(values))
        if same:
            target.copy_(first.unsqueeze(dim))
        else:
            torch.stack(values, dim, out=target)


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor, on huge pages where NumPy gives them: first writes cost less."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(shape, torch.empty((), dtype=like.dtype).numpy().dtype))


class Placement:
    """Leaves all tensors where they are: on the CPU."""

    moves = False
    policy = _CPU  # the device of the policy
    pinned = False  # whether buffers should lie in pinned memory
    ring = 0  # the steps that a policy's CUDA graph keeps the outputs of
    graphs = False  # whether the policy may run as one
    # The device of the batch; None to leave entries where TorchRL has them.
    storing: torch.device | None = None

    def enter(self, step: StepDict, entries: Iterable[Key]) -> None:
        """Move a step of TorchRL's to the loop's devices: these entries to the env's."""

    def leave(self, step: StepDict) -> StepDict:
        """The loop's step for TorchRL: its entries on TorchRL's devices."""
        return step

    def run(self, policy: LoweredPolicy, step: StepDict) -> None:
        """Run the policy on its device; its outputs, which stay there, join the step."""
        policy(step)

    def for_env(self, step: StepDict) -> StepDict:
        """The step with its actions on the env's device."""
        return step

    def keep_apart(self, entries: StepDict, of_reset: bool = False) -> None:
        """Copy the entries of a step or a reset if the next one may overwrite their memory."""

    def bring(
        self,
        values: dict[Key, list[torch.Tensor]],
        devices: dict[Key, torch.device],
        coming: Iterable[torch.Tensor],
    ) -> dict[Key, list[torch.Tensor]]:
        """The values of entries, one per step, on the devices where the batch keeps them.

        ``devices`` has those of earlier steps of the batch, and is completed. Later steps can ask
        for copies of the tensors that are ``coming`` alone.
        """
        return values


class Devices(Placement):
    """Moves tensors between an env, the policy's device and the batch's.

    An env's entries are on one device, where its transforms see them: the CPU, or the device that
    the env names if it steps there itself, or if a transform has tensors there or would round
    otherwise.
    """

    moves = True

    def __init__(self, env: SteppedEnv, policy: torch.device | None, storing: torch.device | None):
        named = env.transformed.device
        self.env = named and with_index(named)
        self.policy = with_index(policy or named or _CPU)
        self.home = with_index(env.home)
        self.storing = storing and with_index(storing)
        self.pinned = "cuda" in (self.policy.type, self.home.type)
        self._carried = (*env.carried, *keys.FLAGS)
        self.actions = env.transformed.action_keys
        self._reuses_memory = env.base is None  # tdcollect's slots write each step into new memory
        # Copies by the identity of their source, which is held so that it stays its own, and by
        # their device.
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        # The env's own tensors of the latest step, and of the latest reset.
        self._latest: dict[bool, StepDict] = {}
        self._late: set[torch.device] = set()  # from which copies to the CPU are under way
        self._whole: PolicyGraph | None = None  # the policy's, once there is one
        self._graph: PolicyGraph | None = None  # likewise, if the present step's outputs are of it
        self._at = 0  # the place of the next step in its rings

    def __repr__(self) -> str:
        return f"policy on {self.policy}, env on {self.env}, batch on {self.storing}"

    def enter(self, step: StepDict, entries: Iterable[Key]) -> None:
        for key in entries:
            if key in step:
                step[key] = step[key].to(self.home)
        if keys.TRAJ_IDS in step:
            step[keys.TRAJ_IDS] = step[keys.TRAJ_IDS].cpu()
        self.keep_apart(step)

    def leave(self, step: StepDict) -> StepDict:
        placed = StepDict(step)
        for key in self._carried:
            if key in placed and self.env is not None:
                placed[key] = placed[key].to(self.env)
        if keys.TRAJ_IDS in placed and self.storing is not None:
            placed[keys.TRAJ_IDS] = placed[keys.TRAJ_IDS].to(self.storing)
        return placed

    def run(self, policy: LoweredPolicy, step: StepDict) -> None:
        self._graph = graph = self._graph_of(policy, step)
        if graph is not None:
            self.finish()  # what is under way reads the memory that the step goes to
            graph.run(step, self._at)
            self._at += 1
            if self.home == _CPU:
                self._late.add(self.policy)
            return
        # Beside what it needs, what lies there already: its outputs of the step before, perhaps.
        inputs = StepDict(
            (key, self._sent(value, self.policy))
            for key, value in step.items()
            if key in policy.reads_first or value.device == self.policy
        )
        before = dict(inputs)
        policy(inputs)
        for key, value in inputs.items():
            if before.get(key) is not value:
                step[key] = value
        for key in before.keys() - inputs.keys():  # scored once a batch
            del step[key]

    def _graph_of(self, policy: LoweredPolicy, step: StepDict) -> PolicyGraph | None:
        """The policy's graph, made if need be; None where the policy runs without."""
        if self._whole is None and self.graphs and self.ring:
            make = partial(PolicyGraph, policy, step, self)
            self._whole = kept_graph(policy, "policy", make, self.ring)
        graph = self._whole
        if graph is not None and self._at == 0:
            graph.restart(step)
        return graph if graph is not None and graph.takes(step) else None

    def for_env(self, step: StepDict) -> StepDict:
        if self.home != _CPU:  # such an env gets all entries there
            placed = StepDict((key, self._sent(value, self.home)) for key, value in step.items())
            for key in self.actions if self._graph is not None else ():
                placed[key] = placed[key].clone()  # an env may keep it longer than a ring does
            return placed
        away = [key for key in self.actions if key in step and step[key].device != _CPU]
        if not away:
            return step
        placed = StepDict(step)
        if (graph := self._graph) is not None:
            self.finish()  # they have come down with the outputs
        for key in away:
            down = self._down(step[key], late=len(away) > 1) if graph is None else graph.down[key]
            placed[key] = self._keep(step[key], down if graph is None else down.clone())
        self.finish()  # one wait for all of them
        return placed

    def keep_apart(self, entries: StepDict, of_reset: bool = False) -> None:
        if not self._reuses_memory:
            return
        before, latest = self._latest.get(of_reset, StepDict()), StepDict(entries)
        self._latest[of_reset] = latest
        for key, value in latest.items():
            known = before.get(key)  # the first are copied, as it is not known yet
            if known is None or known.data_ptr() == value.data_ptr():
                entries[key] = value.clone()

    def bring(
        self,
        values: dict[Key, list[torch.Tensor]],
        devices: dict[Key, torch.device],
        coming: Iterable[torch.Tensor],
    ) -> dict[Key, list[torch.Tensor]]:
        brought = {key: self._brought(key, each, devices) for key, each in values.items()}
        self.finish()
        self._at = 0
        identities = {id(value) for value in coming}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] in identities}
        return brought

    def _brought(
        self, key: Key, values: list[torch.Tensor], known: dict[Key, torch.device]
    ) -> list[torch.Tensor]:
        """Those brought to the CPU have no values before :meth:`finish`."""
        devices = {value.device for value in values}
        target = known.get(key) or self._target(key, devices)
        known[key] = target or values[0].device
        if target is None or devices == {target}:
            return values
        # Those that have crossed are there; the others cross together.
        missing: dict[torch.device, list[torch.Tensor]] = {}
        for value in values:
            if value.device != target and (id(value), target) not in self._copies:
                missing.setdefault(value.device, []).append(value)
        for group in missing.values():
            together = torch.stack(group)
            down = target == _CPU
            copies = self._down(together, late=True) if down else sent(together, target)
            for value, copy in zip(group, copies, strict=True):
                self._keep(value, copy)
        return [v if v.device == target else self._copies[id(v), target][1] for v in values]

    def finish(self) -> None:
        """Wait for what is being brought to the CPU."""
        for device in self._late:
            torch.cuda.current_stream(device).synchronize()
        self._late.clear()

    def _sent(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if value.device == device:
            return value
        there = self._copies.get((id(value), device))
        return self._keep(value, sent(value, device)) if there is None else there[1]

    def _down(self, value: torch.Tensor, late: bool) -> torch.Tensor:
        """A copy on the CPU; a late one has no values before :meth:`finish`."""
        late = late and value.device.type == "cuda"
        if late:
            self._late.add(value.device)
        return value.to(_CPU, non_blocking=late)

    def _keep(self, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        self._copies[id(value), copy.device] = value, copy
        return copy

    def _target(self, key: Key, devices: set[torch.device]) -> torch.device | None:
        """The device for an entry; None to leave it where it is."""
        target = self.storing
        if target is None and (is_next(key) or key in self._carried):
            # One that the policy overwrites at every step is where the policy is.
            overwritten = not is_next(key) and devices == {self.policy} != {self.home}
            target = None if overwritten else self.env
        if target is None and len(devices) > 1:  # a hidden state begins in the env
            target = self.policy
        return target


# ----------------------------------------------------------------------------------- CUDA graphs


class Captured:
    """Operations on a GPU as one CUDA graph: a replay does them again, and nothing of Python.

    Random numbers are those that the device's generator would give. What the ``body`` returns goes
    to rings of this ``length``, whose next place the GPU counts itself. Its tensors stay where they
    are; those ``kept`` are put back after trial runs. RuntimeError where a replay would do
    something else.
    """

    def __init__(
        self,
        policy: LoweredPolicy,
        body: Callable[[], StepDict],
        device: torch.device,
        length: int,
        *facts: Any,
        kept: Sequence[torch.Tensor] = (),
    ):
        self._policy, self._body, self._device, self._length = policy, body, device, length
        self._facts = self._facts_now(facts)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self.rings: dict[Key, torch.Tensor] = {}
        kept = [*kept, self._next, *policy.module.buffers(), *policy.fold()]
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with _put_back(device, kept), torch.cuda.device(device):
            with torch.cuda.stream(side):
                for key, value in body().items():
                    if not is_plain(value) or value.device != device:
                        raise RuntimeError(f"the entry {key!r} is no tensor on {device}")
                    self.rings[key] = value.new_empty((length, *value.shape))
                with _trial() as trial:
                    self._run()
            current.wait_stream(side)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Other threads may do meanwhile what a capture is not allowed.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
        self._operations, self.replay = trial.operations, graph.replay
        self._memory = {ring.untyped_storage().data_ptr() for ring in self.rings.values()}

    def __str__(self) -> str:
        return f"one CUDA graph of {self._operations} operations"

    def _facts_now(self, facts: tuple[Any, ...]) -> Any:
        """With what else decides which kernels run, and on which memory."""
        module, kind = self._policy.module, self._device.type
        weights = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]
        casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return *facts, weights, casts, torch.is_inference_mode_enabled()

    def holds(self, length: int, facts: tuple[Any, ...]) -> bool:
        """Return whether the graph is that of these facts, and its rings are long enough."""
        return length <= self._length and self._facts == self._facts_now(facts)

    def _run(self) -> None:
        for key, value in self._body().items():
            self.rings[key].index_copy_(0, self._next, value.unsqueeze(0))
        self._next.add_(1)
        self._go_on()

    def _go_on(self) -> None:
        """Do what is left once the step is stored."""

    def restart(self, step: StepDict) -> None:
        """Go on at the first place of the rings; the step gets copies of what it has in them."""
        self._next.zero_()
        for key, value in step.items():
            if value.untyped_storage().data_ptr() in self._memory:
                step[key] = value.clone()


def kept_graph(policy: LoweredPolicy, kind: str, make: Any, length: int, *facts: Any) -> Any:
    """A policy's graph of a kind, made after a first run; None before, and where none can be."""
    graph = policy.graphs.get(kind)
    if isinstance(graph, Captured) and not graph.holds(length, facts):
        graph, policy.has_run = None, False  # a batch's first inputs may lie elsewhere
    if graph is None and policy.has_run:
        try:
            graph = make()
        except RuntimeError as error:
            graph = str(error).partition("\n")[0]
    policy.graphs[kind], policy.has_run = graph, True
    return graph if isinstance(graph, Captured) else None


class PolicyGraph(Captured):
    """The calls of a policy as a CUDA graph, with the copies up and ``down``, and the stores."""

    def __init__(self, policy: LoweredPolicy, step: StepDict, place: Devices):
        self._given, self._host, self.down = StepDict(), StepDict(), StepDict()
        for key, value in step.items():
            there = value.device == place.policy
            if key in policy.reads_first or (there and not policy.straight):
                self._given[key] = value.to(place.policy, copy=True)
                if not there:
                    self._host[key] = value.clone().pin_memory()
        self._brought = place.actions if place.home == _CPU else ()
        super().__init__(policy, self._call, place.policy, place.ring)

    def _call(self) -> StepDict:
        for key, host in self._host.items():
            self._given[key].copy_(host, non_blocking=True)
        step = StepDict(self._given)
        self._policy(step)
        self._policy.fold()
        outputs = StepDict((k, v) for k, v in step.items() if self._given.get(k) is not v)
        for key in outputs.keys() & self._brought:
            if key not in self.down:
                self.down[key] = torch.empty_like(outputs[key], device=_CPU).pin_memory()
            self.down[key].copy_(outputs[key], non_blocking=True)
        return outputs

    def takes(self, step: StepDict) -> bool:
        """Return whether the inputs of a step come from where they came from."""
        return all((step[key].device == _CPU) == (key in self._host) for key in self._given)

    def run(self, step: StepDict, at: int) -> None:
        """Run the policy, ``at`` steps after the restart: its outputs join the step."""
        for key, given in self._given.items():
            self._host.get(key, given).copy_(step[key], non_blocking=True)
        self.replay()
        step.update((key, ring[at]) for key, ring in self.rings.items())


class _Counted(TorchDispatchMode):
    """Counts operations, and refuses copies from memory that a replay would read again."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "to") or name.endswith("to_copy"):
            source = args[name == "copy_"]
            if source.device == _CPU != out.device and not source.is_pinned():
                raise RuntimeError("it copies values from the CPU, which may be others each time")
        self.operations += func.namespace == "aten" and not func.is_view
        return out


@contextmanager
def _trial() -> Iterator[_Counted]:
    """Refuse what a CUDA graph cannot do: a capture that fails leaves the GPU's generator unfit."""
    drawn, before = torch.get_rng_state(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told, _Counted() as watched:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # an error would meet other threads, too
        try:
            yield watched
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any("called a synchronizing" in str(warning.message) for warning in told):
        raise RuntimeError("it waits for the GPU")
    if not torch.equal(drawn, torch.get_rng_state()):
        raise RuntimeError("it draws random numbers on the CPU")


@contextmanager
def _put_back(device: torch.device, kept: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leave random numbers and these tensors as they were; casts of weights are not kept."""
    generator = torch.cuda.default_generators[device.index]
    state, host, values = generator.get_state(), torch.get_rng_state(), [t.clone() for t in kept]
    caches = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        generator.set_state(state)
        torch.set_rng_state(host)
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)


def placement(
    env: SteppedEnv, policy: torch.device | None, storing: torch.device | None
) -> Placement:
    """Moves tensors between the devices of an env, its policy and its batches."""
    devices = (policy, env.transformed.device, storing)
    on_cpu = all(device is None or device.type == "cpu" for device in devices)
    return Placement() if on_cpu else Devices(env, policy, storing)
