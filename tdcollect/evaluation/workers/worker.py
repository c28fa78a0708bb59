"""A worker: it makes env and policy of a job, sets weights, and runs episodes when it is told."""

from __future__ import annotations

import copy
import hashlib
import importlib
import mmap
import os
import pickle
import re
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.weight_update import WeightStrategy

from tdcollect.cleanup import ended_on_error
from tdcollect.envs.traits import all_transforms_of
from tdcollect.evaluation.episodes.collector import EvaluationCollector
from tdcollect.evaluation.episodes.trial import Again, Feed
from tdcollect.evaluation.ledger import FAILED
from tdcollect.evaluation.manifest import known_of, subject
from tdcollect.evaluation.requested import RequestedEnv, placed, policy_from
from tdcollect.evaluation.settings import EvaluationSettings
from tdcollect.evaluation.workers import local
from tdcollect.processes.child import Channel, described, fork_on_request, leave, packed
from tdcollect.randomness import global_states_kept
from tdcollect.surroundings import Surroundings, settings_of_process


class Pickled(NamedTuple):
    """A job as bytes for :func:`unpickled`, with keys that tell it, and its env, from others."""

    key: str
    env_key: str
    job: bytes
    around: Surroundings


@dataclass(frozen=True)
class Job:
    """Test episodes of one policy in one env, as :func:`tdcollect.evaluate` takes them.

    They are shared by ``num_workers``; ``no_recorders`` refuses envs that record videos.
    """

    env: Any
    policy: Any
    settings: EvaluationSettings
    num_workers: int = 1
    policy_factory: Callable[..., Any] | None = None
    no_recorders: bool = False

    def pickled(self) -> Pickled:
        """Pickle the job; raises TypeError that names a part which cannot be."""
        how = (self.settings.env_kwargs, self.settings.backend, self.settings.fresh_envs)
        spec = _registered([self.env]) if isinstance(self.env, str) else {}
        env = local.pickled_part("env", (self.env, how, spec))
        policy = local.pickled_part("policy", self.policy)
        policy_factory = local.pickled_part("policy_factory", self.policy_factory)
        settings = (self.settings, self.num_workers, self.no_recorders)
        others = local.pickled_part("settings", settings)
        named = self.env.env if isinstance(self.env, RequestedEnv) else self.env
        # The module that an id such as "ale_py:ALE/Pong-v5" names, which registers envs.
        modules = [named.partition(":")[0]] if isinstance(named, str) and ":" in named else []
        parts = (modules, _registered(gym.registry), env, policy, policy_factory, others)
        job = pickle.dumps(parts)
        around = Surroundings.here()
        # A slot alone passes a trial where two that share something do not.
        slots = (self.settings.num_envs, min(self._share, 2))
        decide = (around.directory, around.path, settings_of_process(), slots)
        env_key = hashlib.sha256(env + repr(decide).encode()).hexdigest()
        key = hashlib.sha256(env_key.encode() + policy + policy_factory + others).hexdigest()
        return Pickled(key, env_key, job, around)

    @property
    def _share(self) -> int:
        """The most episodes that a worker runs at once."""
        return max(1, -(-len(self.settings.episode_indices) // self.num_workers))

    def open(self) -> EvaluationCollector:
        """Return a collector of the job's episodes, for one of its workers."""
        collector = EvaluationCollector.from_settings(
            self.env, self.made_policy(), self.settings, most_slots=self._share
        )
        if self.no_recorders:
            with ended_on_error(collector.close):
                check_recorders(collector.env)
        return collector

    def made_policy(self) -> Any:
        """Return the policy on its device; global random states are as before."""
        policy = self.policy
        if self.policy_factory is not None:
            with global_states_kept():
                policy = policy_from(
                    self.policy_factory, "policy_factory", self.env, self.settings.env_kwargs
                )
        return placed(policy, self.settings.device)


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
    """Set the weights of a policy, and the statistics of its env's transforms, in place."""
    of_models: dict[str, Any] = {name: pickle.loads(blob) for name, blob in weights.items()}
    own = of_models.pop(POLICY, None)

    def prepare(env: EnvBase) -> None:
        for model_id, one in of_models.items():
            _set(_transform(env, model_id), one, f"the transform {model_id!r}")

    collector.prepare_envs(prepare)
    if own is not None:
        set_policy(collector.policy, own)


def check_recorders(env: EnvBase) -> None:
    """Refuse an env whose transforms record videos, to be dumped after each evaluation."""
    for transform in all_transforms_of(env):
        if type(transform).dump not in (Transform.dump, T.Compose.dump):
            raise ValueError(
                f"expected an env without {type(transform).__name__} for dump_video=True: test "
                "episodes run in several slots, and once more as a check, so that its frames "
                "would be mixed. Film an episode afterwards, result.replay(0, video='0.mp4') of a "
                "result of submit(), or pass dump_video=False"
            )


def _registered(ids: Iterable[str]) -> dict[str, bytes]:
    """Return the pickled specs of those ids that a fresh interpreter may not know, by id."""
    specs = {}
    for name in ids:
        spec = gym.registry.get(name)
        entry = "gymnasium." if spec is None else spec.entry_point
        if not (isinstance(entry, str) and entry.startswith("gymnasium.")):
            with suppress(Exception):  # one that cannot travel is one that no other process has
                specs[name] = cloudpickle.dumps(spec)
    return specs


Receive = Callable[[bool], local.Message | None]
"""Returns the next message; given False, it does not wait. None if the driver has gone, or if there
is none yet."""


class _Server(Feed):
    """Does what the driver says until it goes; gives the indices that arrive while episodes run.

    ``beat`` is called at each step. Running out of memory ends the loop, as other workers may have
    enough.
    """

    seconds = 0.25  # as the driver waits for records before it hands out more

    def __init__(
        self, receive: Receive, beat: Callable[[], None], answer: Callable[[local.Message], None]
    ):
        self._receive, self._answer = receive, answer
        self.stepped = self._beat = beat
        self._jobs: dict[str, EvaluationCollector] = {}  # oldest first
        self._following: list[local.Message | None] = []  # the message that ended a run

    def serve(self) -> None:
        self._beat()
        message = self._receive(True)
        try:
            while message is not None:
                self._of, what = message[:2], message.what
                try:
                    if isinstance(what, local.Open):
                        what.around.enter()
                        self._say(self._opened(what))
                    elif isinstance(what, (local.Told, local.Run)):
                        self._run(what)
                except Exception as error:
                    if _lacks_memory(error):
                        raise
                    self._say(local.Raised(described(error)))
                message = self._following.pop() if self._following else self._receive(True)
        finally:
            for collector in self._jobs.values():
                collector.close()

    def _say(self, what: Any) -> None:
        self._answer(local.Message(*self._of, what))

    def _opened(self, message: local.Open) -> local.Ready:
        collector = self._jobs.pop(self._of[1], None)
        if collector is None:
            assert message.job is not None  # else the driver knows that it is held here
            while len(self._jobs) >= local.MOST_HELD:
                self._jobs.pop(next(iter(self._jobs))).close()
            collector = unpickled(message.job).open()
            collector.tell(message.fresh_envs, asks=False)
        self._jobs[self._of[1]] = collector
        if message.weights is not None:
            set_weights(collector, message.weights)
        about = {"env": repr(collector.base), "threads": torch.get_num_threads()}
        return local.Ready(subject(collector), collector.slots, about)

    def _run(self, first: local.Told | local.Run) -> None:
        collector = self._collector = self._jobs[self._of[1]]
        self._told: dict[str, Any] = {}
        self._waiting = deque[int | Again]()
        run = first if isinstance(first, local.Run) else local.Run([], False)
        self._kept = run.keep, run.keep_steps  # of all episodes that run together
        self._take(local.Message(*self._of, first))
        for finished in collector.run(run.keep, self, keep_steps=run.keep_steps):
            record = finished.record
            failed = record.status == FAILED and not finished.again
            self._tell()
            self._say(local.Ended(finished, collector.errors[record.index] if failed else None))
            self._beat()  # to send them may take as long as a step
            del finished  # else its data would stay in memory beside the next one's
        self._tell()

    def _tell(self) -> None:
        """Tell the driver what has been found out as episodes ran, once."""
        entries = known_of(self._collector)
        if entries != self._told:
            self._told = entries
            self._say(local.Found(entries))

    def __next__(self) -> int | Again:
        while not self._following and (arrived := self._receive(False)) is not None:
            self._take(arrived)
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()

    def goes_on(self) -> bool:
        self._tell()
        if not self._following:
            self._take(self._receive(True))
        return not self._following

    def _take(self, message: local.Message | None) -> None:
        what = None if message is None or message[:2] != self._of else message.what
        if isinstance(what, local.Told):
            self._collector.tell(what.fresh_envs, asks=what.fresh_envs is None)
        elif isinstance(what, local.Run) and self._kept == (what.keep, what.keep_steps):
            self._waiting += map(Again, what.indices) if what.again else what.indices
        else:
            self._following.append(message)


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def template(end: int) -> None:
    """Fork local workers for the parent, from a process that has imported all."""
    TensorDict.from_any(torch.zeros(()))  # which imports pandas, where it is installed
    fork_on_request(end, work)


def main(end: int, steps_file: int) -> None:
    """Run a local worker in a fresh interpreter."""
    work(end, steps_file)
    leave()


def work(end: int, steps_file: int) -> None:
    """Run a local worker, which counts its steps in memory that holds one int64."""
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

    steps = memoryview(mmap.mmap(steps_file, 0)).cast("q")
    os.close(steps_file)

    def beat() -> None:
        steps[0] += 1

    _Server(receive, beat, lambda answer: channel.send(packed(answer))).serve()
    channel.close()


POLICY = "policy"
_TRANSFORM = re.compile(r"env\.transform\[(\d+)\]")
_EXTRA_STATE = "__extra_state__"  # where TorchRL's WeightStrategy puts that of the module itself


class Weights(NamedTuple):
    """The parameters and buffers of one model, and its modules' extra states by their names."""

    tensors: TensorDictBase
    states: dict[str, Any]


def check_model_ids(ids: Iterable[Any], what: str) -> None:
    """Refuse model ids that no evaluation has."""
    for name in ids:
        if name != POLICY and not (isinstance(name, str) and _TRANSFORM.fullmatch(name)):
            raise ValueError(
                f"expected the keys of {what} to be 'policy' or 'env.transform[0]', "
                f"'env.transform[1]'..., got {name!r}"
            )


def snapshot(source: Any, model_id: str) -> bytes:
    """Return the weights of a module or TensorDict as they are now, pickled."""
    states: dict[str, Any] = {}
    if isinstance(source, nn.Module):
        states, source = extra_states(source), TensorDict.from_module(source)
    if not isinstance(source, TensorDictBase):
        raise TypeError(
            f"expected the weights of {model_id!r} to be a module or a TensorDict, got "
            f"{type(source).__name__}; pass the module, or TensorDict.from_module(module).data"
        )
    tensors = source.data.detach().clone().cpu()
    return pickle.dumps(Weights(tensors, states), protocol=pickle.HIGHEST_PROTOCOL)


def snapshots_of(
    weights: Any, by_id: Mapping[str, Any] | None, policy: Any
) -> tuple[dict[str, bytes], bytes | None]:
    """Return the weights of a request as they are now, pickled, by model id.

    Without weights of the policy, they are those of the evaluator's own. If that is no module, it
    is the second value, pickled.
    """
    sources = dict(by_id or {})
    check_model_ids(sources, "weights_dict")
    if weights is not None:
        sources.setdefault(POLICY, weights)
    itself = None
    if POLICY not in sources and isinstance(policy, nn.Module):
        sources[POLICY] = policy
    elif POLICY not in sources and policy is not None:
        itself = local.pickled_part(POLICY, policy)
    return {name: snapshot(source, name) for name, source in sources.items()}, itself


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra states of a module and of those in it, by name."""
    with warnings.catch_warnings(action="ignore"):  # VecNormV2 warns that it has none yet
        return {
            name: state
            for name, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
            and (state := part.get_extra_state())
        }


def set_policy(policy: Any, weights: Weights | dict[str, Any]) -> None:
    """Set the weights of a policy, or its ``state_dict``, in place."""
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"expected no weights for a policy that is not a module, got some for "
            f"{type(policy).__name__}; make it a module, or leave weights out"
        )
    if isinstance(weights, dict):
        policy.load_state_dict(weights)
    else:
        _set(policy, weights, "the policy")


def _transform(env: EnvBase, model_id: str) -> Transform:
    place = _TRANSFORM.fullmatch(model_id)
    assert place is not None  # check_model_ids has looked
    outer = env.transform if isinstance(env, TransformedEnv) else None
    there = [] if outer is None else [*outer] if isinstance(outer, T.Compose) else [outer]
    index = int(place[1])
    if index >= len(there):
        names = ", ".join(type(transform).__name__ for transform in there) or "none"
        raise ValueError(
            f"expected weights of models that the evaluation has, got {model_id!r}; the env's "
            f"transforms are: {names}"
        )
    return there[index]


def _set(module: nn.Module, weights: Weights, what: str) -> None:
    tensors = weights.tensors
    own = tensors.exclude(_EXTRA_STATE) if _EXTRA_STATE in tensors.keys() else tensors  # noqa: SIM118
    here, there = _shapes(TensorDict.from_module(module)), _shapes(own)
    names = {name for name, _ in module.named_modules()}
    odd = [
        *(f"no {name}" for name in sorted(here.keys() - there.keys())),
        *(f"{name}, which it lacks" for name in sorted(there.keys() - here.keys())),
        *(
            f"{name} of shape {there[name]} for {here[name]}"
            for name in sorted(here.keys() & there.keys())
            if here[name] != there[name]
        ),
        *(f"an extra state of {name!r}" for name in sorted(weights.states.keys() - names)),
    ]
    if odd:
        more = f" and {len(odd) - 3} more differences" if len(odd) > 3 else ""
        raise ValueError(
            f"expected weights with the entries of {what}, {type(module).__name__}, got "
            f"{'; '.join(odd[:3])}{more}; pass the model that is evaluated, or a TensorDict of it"
        )
    with warnings.catch_warnings(), torch.no_grad():
        # VecNormV2 warns that statistics are not shared between processes, as they need not be.
        warnings.filterwarnings("ignore", "VecNorm wasn't initialized")
        WeightStrategy(extract_as="tensordict").apply_weights(module, tensors)
        for name, state in weights.states.items():
            module.get_submodule(name).set_extra_state(copy.deepcopy(state))


def _shapes(tensors: TensorDictBase) -> dict[str, list[int]]:
    return {
        ".".join(key) if isinstance(key, tuple) else key: list(value.shape)
        for key, value in tensors.items(True, True)
    }
