"""A worker: it makes env and policy of a job, keeps them, and runs episodes when it is told."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import mmap
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import EnvBase, Transform
from torchrl.envs import transforms as T

from tdcollect.envs.traits import all_transforms_of
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.opening import open_one, wants_env
from tdcollect.evaluation.episodes.policy import known_device
from tdcollect.evaluation.episodes.requested_env import RequestedEnv
from tdcollect.evaluation.manifest import subject
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.weights import set_policy, set_transforms, unpickled_weights
from tdcollect.evaluation.workers.protocol import (
    MOST_HELD,
    Answer,
    Ended,
    Fetch,
    Lacks,
    Message,
    Open,
    Opened,
    Probing,
    Raised,
    Run,
    State,
    pickled_part,
)
from tdcollect.processes.channel import Channel, packed
from tdcollect.processes.child import leave
from tdcollect.processes.errors import described
from tdcollect.processes.template import fork_on_request
from tdcollect.randomness import global_states, set_global_states


class Surroundings(NamedTuple):
    """The surroundings of an evaluation: its workers run in the same.

    Attributes:
        directory: the working directory; None if it is gone.
        path: the places of modules.
        dtype: torch's default dtype.
        precision: that of torch's float32 matrix products.
        deterministic: torch uses deterministic algorithms only.
    """

    directory: str | None
    path: tuple[str, ...]
    dtype: torch.dtype
    precision: str
    deterministic: bool

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        try:
            directory = os.getcwd()
        except OSError:
            directory = None
        return cls(
            directory,
            tuple(entry for entry in sys.path if isinstance(entry, str)),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def enter(self) -> None:
        """Make them those of this process, which looks for modules in its own places too."""
        if self.directory is not None:
            with contextlib.suppress(OSError):  # another machine may lack it
                os.chdir(self.directory)
        sys.path[:] = [*self.path, *(entry for entry in sys.path if entry not in self.path)]
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)


class Pickled(NamedTuple):
    """A pickled job.

    Attributes:
        key: tells it from other jobs.
        env_key: tells its env, as the probe sees it, from other envs.
        job: the bytes that :func:`unpickled` reads.
        around: of the process that pickled it.
    """

    key: str
    env_key: str
    job: bytes
    around: Surroundings


@dataclass(frozen=True)
class Job:
    """Test episodes of one policy in one env.

    Attributes:
        env: as :func:`tdcollect.evaluate` takes it; and the policy and the settings.
        policy: likewise.
        settings: likewise.
        num_workers: the number of workers that share the episodes.
        policy_factory: makes the policy, from an env; None for ``policy``.
        no_recorders: refuse envs that record videos.
    """

    env: Any
    policy: Any
    settings: EvaluationSettings
    num_workers: int = 1
    policy_factory: Callable[..., Any] | None = None
    no_recorders: bool = False

    def pickled(self) -> Pickled:
        """Pickle the job, for another process.

        Raises:
            TypeError: for a part that cannot be pickled, naming it.
        """
        how = (self.settings.env_kwargs, self.settings.backend, self.settings.fresh_envs)
        spec = _registered([self.env]) if isinstance(self.env, str) else {}
        env = pickled_part("env", (self.env, how, spec))
        policy = pickled_part("policy", self.policy)
        policy_factory = pickled_part("policy_factory", self.policy_factory)
        settings = (self.settings, self.num_workers, self.no_recorders)
        others = pickled_part("settings", settings)
        parts = (_modules(self.env), _registered(gym.registry), env, policy, policy_factory, others)
        job = pickle.dumps(parts)
        around = Surroundings.here()
        # A slot alone passes the probe where two that share something do not.
        slots = (self.settings.num_envs, min(self._share, 2))
        env_key = hashlib.sha256(env + repr((around, slots)).encode()).hexdigest()
        key = hashlib.sha256(env_key.encode() + policy + policy_factory + others).hexdigest()
        return Pickled(key, env_key, job, around)

    @property
    def _share(self) -> int:
        """The most episodes that a worker runs at once."""
        return max(1, -(-len(self.settings.episode_indices) // self.num_workers))

    def open(self) -> EvaluationCollector:
        """Return a collector of the job's episodes, for one of its workers."""
        policy, device = self.made_policy(), self.settings.device
        if isinstance(policy, nn.Module) and device is not None:
            policy.to(known_device(device))  # this worker's own
        collector = EvaluationCollector.from_settings(
            self.env, policy, self.settings, most_slots=self._share
        )
        if self.no_recorders:
            try:
                check_recorders(collector.env)
            except ValueError:
                collector.close()
                raise
        return collector

    def made_policy(self) -> Any:
        """Return the policy; a factory is called after ``torch.manual_seed(0)``.

        A factory with a parameter without default, or one named ``env``, is called with an env,
        made for it and closed afterwards. Global random states are as before.

        Raises:
            TypeError: if the factory gives no policy.
        """
        if self.policy_factory is None:
            return self.policy
        before = global_states()
        try:
            torch.manual_seed(0)
            policy = self._from_factory(self.policy_factory)
        finally:
            set_global_states(before)
        if not callable(policy):
            raise TypeError(f"expected policy_factory to give a policy, got {policy!r}")
        device = self.settings.device
        if not isinstance(policy, nn.Module) or device is None:
            return policy
        return policy.to(known_device(device))

    def _from_factory(self, factory: Callable[..., Any]) -> Any:
        if not wants_env(factory):
            return factory()
        if isinstance(self.env, EnvBase):
            return factory(self.env)
        env = open_one(self.env, self.settings.env_kwargs)
        try:
            return factory(env)
        finally:
            if not env.is_closed:
                env.close()


def unpickled(job: bytes) -> Job:
    """Read a job that :meth:`Job.pickled` wrote."""
    modules, registered, *parts = pickle.loads(job)
    for module in modules:
        with suppress(ImportError):  # which the env raises again, with its id
            importlib.import_module(module)
    for name, spec in registered.items():
        gym.registry[name] = pickle.loads(spec)  # another one may have been of that id
    (env, *_), policy, policy_factory, others = map(pickle.loads, parts)
    settings, num_workers, no_recorders = others
    return Job(env, policy, settings, num_workers, policy_factory, no_recorders)


def set_weights(collector: EvaluationCollector, weights: Mapping[str, bytes]) -> None:
    """Set the weights of a policy, and the statistics of its env's transforms, in place.

    Args:
        collector: of a job.
        weights: pickled :class:`~tdcollect.evaluation.weights.Weights`, by model id.

    Raises:
        TypeError, ValueError: for weights of another model.
    """
    own, given = unpickled_weights(weights)

    def prepare(env: EnvBase) -> None:
        if given:
            set_transforms(env, given)

    collector.prepare_envs(prepare)
    if own is not None:
        set_policy(collector.policy, own)


def check_recorders(env: EnvBase) -> None:
    """Refuse an env whose transforms record videos, to be dumped after each evaluation.

    Raises:
        ValueError: naming the transform.
    """
    for transform in all_transforms_of(env):
        if type(transform).dump not in (Transform.dump, T.Compose.dump):
            raise ValueError(
                f"expected an env without {type(transform).__name__} for dump_video=True: test "
                "episodes run in several slots, and once more as a check, so that its frames "
                "would be mixed. Film an episode afterwards, result.replay(0, video='0.mp4') of a "
                "result of submit(), or pass dump_video=False"
            )


def _modules(env: Any) -> list[str]:
    """Return the module that an id such as ``"ale_py:ALE/Pong-v5"`` names, which registers envs.

    It is imported before the specs of this process are set, which may be others than its own.
    """
    name = env.env if isinstance(env, RequestedEnv) else env
    return [name.partition(":")[0]] if isinstance(name, str) and ":" in name else []


def _registered(ids: Iterable[str]) -> dict[str, bytes]:
    """Return the pickled specs of those ids that a fresh interpreter may not know, by id."""
    found = {}
    for name in ids:
        spec = gym.registry.get(name)
        entry = "gymnasium." if spec is None else spec.entry_point
        if not (isinstance(entry, str) and entry.startswith("gymnasium.")):
            with suppress(Exception):  # one that cannot travel is one that no other process has
                found[name] = cloudpickle.dumps(spec)
    return found


Receive = Callable[[bool], Message | None]
"""Returns the next message; given False, it does not wait. None if the driver has gone, or if there
is none yet."""


def serve(receive: Receive, beat: Callable[[], None]) -> Generator[Answer, None, None]:
    """Do what the driver says until it goes; yields the answers.

    Running out of memory ends the loop, as it would end the process elsewhere: what fits beside
    fewer episodes may still run.

    Args:
        receive: returns the next message; given False, it does not wait.
        beat: called at each step.
    """
    jobs: dict[str, EvaluationCollector] = {}
    beat()
    message = receive(True)
    try:
        while message is not None:
            turn, key = message.turn, message.key
            following: list[Message | None] = []
            try:
                if isinstance(message, Open):
                    message.around.enter()
                    yield from _open(jobs, message, beat)
                elif isinstance(message, Fetch):
                    yield State(turn, key, _state(jobs[key].policy))
                else:
                    feed = _Feed(message, receive, beat, following)
                    yield from _ended(jobs[key], message, feed)
            except Exception as error:
                if _lacks_memory(error):
                    raise
                yield Raised(turn, key, described(error))
            message = following[0] if following else receive(True)
    finally:
        for collector in jobs.values():
            collector.close()


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _open(
    jobs: dict[str, EvaluationCollector], message: Open, beat: Callable[[], None]
) -> Iterator[Answer]:
    collector = jobs.pop(message.key, None)
    if collector is None:
        if message.job is None:
            yield Lacks(message.turn, message.key)
            return
        while len(jobs) >= MOST_HELD:
            jobs.pop(next(iter(jobs))).close()
        collector = unpickled(message.job).open()
    jobs[message.key] = collector  # the latest last
    if message.weights is not None:
        set_weights(collector, message.weights)
    if message.verdict is None:
        yield Probing(message.turn, message.key, message.skipped)
    verdict = collector.prepare(message.verdict, beat, message.skipped)
    assert verdict is not None
    yield Opened(
        message.turn,
        message.key,
        subject(collector),
        verdict,
        collector.slots,
        repr(collector.base),
        torch.get_num_threads(),
    )


def _state(policy: Any) -> dict[str, Any]:
    state = policy.state_dict() if isinstance(policy, nn.Module) else {}
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _ended(collector: EvaluationCollector, message: Run, feed: _Feed) -> Iterator[Ended]:
    for finished in collector.run(message.keep, feed):
        record = finished.record
        error = None if record.completed else collector.errors[record.index]
        yield Ended(message.turn, message.key, record, error, finished.data)
        feed.stepped()  # to send them may take as long as a step
        del finished  # else its data would stay in memory beside the next one's


class _Feed:
    """Indices that arrive while episodes run.

    Args:
        message: the first ones.
        receive: returns the next message.
        beat: called at each step.
        following: gets the message that ends the run, or None for the end of all.
    """

    seconds = 0.25  # as the driver waits for records before it hands out more

    def __init__(
        self, message: Run, receive: Receive, beat: Callable[[], None], following: list[Any]
    ):
        self._turn, self._keep = message.turn, message.keep
        self._indices = deque(message.indices)
        self._receive = receive
        self.stepped = beat
        self._following = following

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.arrived():
            raise StopIteration
        return self._indices.popleft()

    def arrived(self) -> bool:
        if not self._indices and not self._following:
            message = self._receive(False)
            if message is not None:
                self._take(message)
        return bool(self._indices)

    def goes_on(self) -> bool:
        if not self._following:
            self._take(self._receive(True))
        return not self._following

    def _take(self, message: Message | None) -> None:
        more = isinstance(message, Run) and (message.turn, message.keep) == (self._turn, self._keep)
        if more:
            self._indices += message.indices  # type: ignore[union-attr]
        else:
            self._following.append(message)


def template(end: int) -> None:
    """Fork local workers for the parent, from a process that has imported all."""
    TensorDict.from_any({})  # which imports pandas, where it is installed
    fork_on_request(end, work)


def main(end: int, beats_file: int) -> None:
    """Run a local worker in a fresh interpreter."""
    work(end, beats_file)
    leave()


def work(end: int, beats_file: int) -> None:
    """Run a local worker.

    Args:
        end: its end of the socket pair.
        beats_file: memory with one int64 per worker, in which it counts its steps.
    """
    channel = Channel(socket.socket(fileno=end))
    messages: deque[bytes] = deque()

    def receive(waits: bool) -> Any:
        try:
            while not messages:
                arrived = channel.read()
                if arrived is None and not waits:
                    return None
                if arrived is None:
                    channel.wait()
                messages.extend(arrived or ())
        except EOFError:
            return None
        return pickle.loads(messages.popleft())

    rank = receive(True)
    beats = memoryview(mmap.mmap(beats_file, 0)).cast("q")
    os.close(beats_file)

    def beat() -> None:
        beats[rank] += 1

    for answer in serve(receive, beat):
        channel.send(packed(answer))
