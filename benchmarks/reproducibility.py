"""Check which conditions change the bits of a test episode on this machine.

    python benchmarks/reproducibility.py

Prints the tables of docs/reproducibility.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from networks import Float
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType
from torchrl.modules import NormalParamExtractor, OneHotCategorical, ProbabilisticActor, TanhNormal

import tdcollect

STOCHASTIC = ExplorationType.RANDOM


def policy(env_id: str, cells: int = 64) -> ProbabilisticActor:
    """An untrained actor, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        env = tdcollect.make_env(env_id)
        spec, inputs = env.action_spec, env.observation_spec["observation"].shape[-1]
        env.close()
        continuous = spec.dtype.is_floating_point
        outputs = spec.shape[-1] * (2 if continuous else 1)
        layers = [Float(), nn.Linear(inputs, cells), nn.Tanh(), nn.Linear(cells, cells), nn.Tanh()]
        net = nn.Sequential(*layers, nn.Linear(cells, outputs))
    keys = ["loc", "scale"] if continuous else ["logits"]
    if continuous:
        net.append(NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        in_keys=keys,
        spec=spec,
        distribution_class=TanhNormal if continuous else OneHotCategorical,
    )


def evaluate(env: Any, tested: Any, episodes: Any, **options: Any) -> tdcollect.EvaluationResult:
    return tdcollect.evaluate(env, tested, episodes, progress=False, **options)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


def ways(env_id: str, tested: Any, count: int, exploration: ExplorationType) -> list[str]:
    """Digests of the same episodes, run in every way that must not matter."""
    run = partial(evaluate, tested=tested, exploration_type=exploration, max_episode_steps=50)
    found = [run(env_id, episodes=count, num_envs=slots).digest for slots in (1, 2, 7, 16, 64)]
    found.append(run(env_id, episodes=list(reversed(range(count)))).digest)
    # AsyncVectorEnv forks, which hangs where MuJoCo has been used in the process before.
    for kind in ("sync",) if env_id == "HalfCheetah-v5" else ("sync", "async"):
        mode = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
        vector = gym.make_vec(env_id, 4, kind, vector_kwargs=mode)
        env = tdcollect.make_env(vector)
        found.append(run(env, episodes=count).digest)
        env.close()
    found.append(run(env_id, episodes=count, backend="process", num_envs=4).digest)
    return found


def invariance(count: int) -> None:
    rows = []
    for env_id in ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v5"):
        for name, exploration in [("most likely", ExplorationType.MODE), ("sampled", STOCHASTIC)]:
            if env_id == "HalfCheetah-v5" and exploration is ExplorationType.MODE:
                exploration = ExplorationType.DETERMINISTIC
            found = ways(env_id, policy(env_id), count, exploration)
            rows.append((env_id, name, len(found), len(set(found))))
    table(["env", "actions", f"ways to run {count} episodes", "different ledgers"], rows)


def changed(first: tdcollect.EvaluationResult, other: tdcollect.EvaluationResult) -> str:
    pairs = list(zip(first.episodes, other.episodes, strict=True))
    bits = sum(a.digest != b.digest for a, b in pairs)
    most = max(abs((a.episode_return or 0) - (b.episode_return or 0)) for a, b in pairs)
    return f"{bits} of {len(pairs)} | {most:.2g}"


def batch_sizes(count: int) -> None:
    rows = []
    for env_id in ("CartPole-v1", "HalfCheetah-v5"):
        tested = policy(env_id)
        run = partial(evaluate, env_id, tested, count, max_episode_steps=200)
        reference = run()
        for size in (1, 4, 8, 32, 64):
            rows.append((env_id, size, changed(reference, run(inference_batch_size=size))))
    table(
        ["env", "batch size", "episodes that differ from size 16", "largest change of a return"],
        rows,
    )


def outputs(cells: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    net = policy("HalfCheetah-v5", cells)[0].module
    with torch.no_grad():
        return net(torch.randn(64, 17, generator=generator)[:rows])[0]


def rounding() -> None:
    rows = []
    for cells in (64, 256, 1024):
        tested, before = policy("HalfCheetah-v5", cells), torch.get_num_threads()
        threads, ledgers = 0.0, set()
        torch.set_num_threads(1)
        whole = outputs(cells, 16)
        sizes = max((outputs(cells, n) - whole[:n]).abs().max().item() for n in (1, 2, 4, 8, 15))
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            threads = max(threads, (outputs(cells, 16) - whole).abs().max().item())
            ledgers.add(evaluate("HalfCheetah-v5", tested, 2, max_episode_steps=20).digest)
        torch.set_num_threads(before)
        rows.append((f"{cells} x {cells}", f"{sizes:.1g}", f"{threads:.1g}", len(ledgers)))
    head = ["network", "largest difference at other batch sizes", "with 1, 2, 4 threads"]
    table([*head, "different ledgers with 1, 2, 4 threads outside"], rows)


def instructions(count: int) -> None:
    """Compare instruction sets of this CPU, which stand for other CPUs."""
    found = {}
    for name, settings in [
        ("all of this CPU's", {}),
        (
            "torch: none, oneDNN and MKL: AVX2",
            {
                "ATEN_CPU_CAPABILITY": "default",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
                "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            },
        ),
    ]:
        code = [sys.executable, __file__, "--one", str(count)]
        done = subprocess.run(code, capture_output=True, text=True, env={**os.environ, **settings})
        found[name] = json.loads(done.stdout)
    first, *others = found.items()
    rows = []
    for name, ledgers in others:
        for env_id, digests in ledgers.items():
            same = sum(a == b for a, b in zip(digests, first[1][env_id], strict=True))
            rows.append((env_id, name, f"{len(digests) - same} of {len(digests)}"))
    table(["env", "instructions", "episodes that differ"], rows)


def one(count: int) -> None:
    """Print the digests of a few evaluations, for another process to read."""
    found = {}
    for env_id in ("CartPole-v1", "HalfCheetah-v5"):
        result = evaluate(env_id, policy(env_id), count, max_episode_steps=200)
        found[env_id] = [episode.digest for episode in result.episodes]
    print(json.dumps(found))


def trials(count: int) -> None:
    rows = []
    for env_id in ("CartPole-v1", "LunarLander-v3", "BipedalWalker-v3", "HalfCheetah-v5"):
        result = evaluate(env_id, policy(env_id), count, max_episode_steps=200)
        carries = result.manifest.get("fresh_envs")
        rows.append((env_id, "a new env for each episode" if carries else "none"))
    table(["env", "requirement"], rows)


def leak(count: int) -> None:
    """Compare episodes of a plain gymnasium loop: one env reused, and a new env for each."""
    rows = []
    for env_id in ("LunarLander-v3", "BipedalWalker-v3"):
        reused = gym.make(env_id)
        moved = sum(played(reused, seed) != played(gym.make(env_id), seed) for seed in range(count))
        rows.append((env_id, f"{moved} of {count}"))
    table(["env", "episodes that depend on those before them"], rows)


def played(env: gym.Env[Any, Any], seed: int) -> list[bytes]:
    """The observations of 200 random steps, as bytes."""
    actions = gym.make(env.spec).action_space
    actions.seed(seed)
    shown = [env.reset(seed=seed)[0].tobytes()]
    for _ in range(200):
        observation, _, terminated, truncated, _ = env.step(actions.sample())
        shown.append(observation.tobytes())
        if terminated or truncated:
            break
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=20, help="episodes per evaluation")
    parser.add_argument("--one", type=int, metavar="EPISODES", help="print digests as JSON")
    given = parser.parse_args()
    if given.one:
        one(given.one)
        return
    rounding()
    batch_sizes(given.episodes)
    instructions(given.episodes)
    trials(given.episodes)
    leak(given.episodes)
    invariance(given.episodes)


if __name__ == "__main__":
    main()
