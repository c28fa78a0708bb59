"""Digests of batches, random states and files, to hold two checkouts against each other.

In each checkout: ``python tests/freeze.py FILE.json``. Then ``python tests/freeze.py A B`` names
what differs. Bits depend on the machine, so that no file of them is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensorclass,
)
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tdcollect  # noqa: E402  the checkout's
from tdcollect.lab import Suite  # noqa: E402
from tests.collect import digests, oracle, policies, transforms  # noqa: E402
from tests.collect.envs import ENVS  # noqa: E402
from tests.collect.test_parent_behaviours import OPTIONS, PAIRS  # noqa: E402

Found = dict[str, Any]
TIMES = ("run.json", ".lock")

TASKS = [("cartpole", "CartPole-v1", "random", 475), ("acrobot", "Acrobot-v1", -500, -100)]
SUITE: Found = {
    "suite": {"name": "frozen", "version": 1, "episodes": 6},
    "defaults": {"max_episode_steps": 60},
    "tasks": [
        {"name": name, "env": env, "score": {"low": low, "high": high, "source": "gymnasium"}}
        for name, env, low, high in TASKS
    ],
    "policies": [{"name": "random", "factory": "random"}],
    "report": {"metrics": ["iqm", "mean"]},
}


def feed(digest: Any, value: Any) -> None:
    """Add a value of the oracle's records to a digest."""
    if isinstance(value, (NonTensorData, NonTensorStack)):
        digest.update(repr(value.tolist()).encode())
    elif is_tensorclass(value):
        feed(digest, value.to_tensordict())
    elif isinstance(value, LazyStackedTensorDict):
        feed(digest, value.tensordicts)
    elif isinstance(value, TensorDictBase):
        digest.update(f"{list(value.batch_size)}{value.names}{value.device}".encode())
        feed(digest, {str(key): value.get(key) for key in sorted(value.keys(), key=str)})
    elif isinstance(value, torch.Tensor):
        plain = (value.values() if value.is_nested else value).detach().cpu()
        plain = plain.clone(memory_format=torch.contiguous_format)  # one number may be expanded
        digest.update(f"{value.dtype}{list(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, part in value.items():
            digest.update(str(key).encode())
            feed(digest, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            feed(digest, part)
    else:
        digest.update(repr(value).encode())


def batches() -> Found:
    """Three batches of each case of the oracle, with the random states after each."""
    cases: dict[str, tuple[Any, ...]] = {}
    random = policies.random_policy
    for name in policies.POLICIES:
        cases[f"policy {name}"] = policies.case(name)
    for name in transforms.TRANSFORMS:
        cases[f"transform {name}"] = (lambda name=name: transforms.make(name), random)
    for name, make in ENVS.items():
        cases[f"env {name}"] = (make, random)
    for pair, (make, policy) in PAIRS.items():
        for name, options in OPTIONS.items():
            cases[f"options {name} of {pair}"] = (make, policy, lambda options=options: options)
    records: dict[str, Any] = {}
    for name, (make, policy, *options) in cases.items():
        given = options[0] if options else dict
        record = oracle.run(tdcollect.Collector, make, policy, oracle.batches(), given, catch=True)
        records[name] = record
    found: Found = {}
    for name, record in {**records, **digests.main()}.items():
        digest = hashlib.sha256()
        feed(digest, record)
        found[name] = digest.hexdigest()
    return found


def files(root: Path) -> Found:
    """The files of evaluations, shards, a learning curve and a suite."""
    actor = digests.policy_of("categorical")

    def evaluate(env: Any, policy: Any, episodes: int, **how: Any) -> Callable[[Path], Any]:
        return lambda path: tdcollect.evaluate(
            env, policy, episodes, output_dir=path, progress=False, **how
        )

    def shards(path: Path) -> None:
        for i in range(2):
            evaluate("CartPole-v1", actor, 9, shard=(i, 2))(path / f"shard-{i}")
        tdcollect.merge([path / "shard-0", path / "shard-1"], path / "merged")

    def curve(path: Path) -> None:
        with tdcollect.Evaluator("CartPole-v1", actor, num_trajectories=4, output_dir=path) as one:
            for step in (0, 10):
                one.evaluate(actor, step=step)

    sampled = {"exploration_type": ExplorationType.RANDOM}
    limited = {"max_episode_steps": 20}
    cases: dict[str, Callable[[Path], Any]] = {
        "most likely": evaluate("CartPole-v1", actor, 12, num_envs=3),
        "sampled": evaluate("CartPole-v1", actor, 12, num_envs=5, **sampled),
        "random": evaluate("CartPole-v1", None, 12, num_envs=3),
        "kept": evaluate("CartPole-v1", actor, 5, keep_trajectories=True, **limited),
        "recurrent": evaluate(
            lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(50)),
            digests.policy_of("recurrent"),
            6,
        ),
        "squashed": evaluate("Pendulum-v1", digests.policy_of("squashed"), 6, **sampled, **limited),
        "workers": evaluate("CartPole-v1", actor, 12, workers=2, num_envs=2),
        "shards": shards,
        "curve": curve,
        "suite": lambda path: Suite.of(SUITE, root).run(path, progress=False),
    }
    found: Found = {}
    for name, run in cases.items():
        run(root / name)
        for file in sorted((root / name).rglob("*")):
            if file.is_file() and file.name not in TIMES:
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                found[file.relative_to(root).as_posix()] = digest
    return found


def main() -> int:
    if len(sys.argv) == 3:
        one, other = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
        names = sorted(one.keys() | other.keys())
        odd = [name for name in names if one.get(name) != other.get(name)]
        found = [f"{n}: {'differs' if n in one and n in other else 'only in one'}" for n in odd]
        print("\n".join(found) or "all is the same")
        return min(len(found), 1)
    output = Path(sys.argv[1]).absolute()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # of no checkout: a manifest names the commit of the one that it is in
        found = files(Path(folder))
        os.chdir(ROOT)
    output.write_text(json.dumps({**found, **batches()}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
