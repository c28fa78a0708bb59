"""Numbered episodes from a plain gymnasium loop, without torch, TorchRL or tdcollect.

    python examples/other_producer.py runs/other
    tdcollect verify runs/other
    tdcollect audit runs/other
    tdcollect merge runs/other --output-dir runs/other-report

It follows docs/protocol.md: the second command checks the files, the third runs episodes again by
the actions that were kept of them, and the last one writes a report.
"""

import argparse
import hashlib
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np

ENV = "CartPole-v1"
WEIGHTS = np.array([0.0, 0.0, 1.0, 0.0], np.float32)


def policy(observation: np.ndarray) -> int:
    """Push to the side that the pole leans to."""
    return int(observation @ WEIGHTS > 0)


def seeds(root: int, index: int) -> tuple[int, int]:
    """The seeds of an episode's env and policy; this policy draws no random numbers."""
    env, of_policy = (np.random.SeedSequence(root, spawn_key=(index, k)) for k in (0, 1))
    env_seed = int(env.generate_state(1, np.uint32)[0]) >> 1
    return env_seed, int(of_policy.generate_state(1, np.uint64)[0])


def digest(entries: list[tuple[str, np.ndarray | list[str], np.ndarray | str | None]]) -> str:
    """SHA-256 over the digests of entries: name, rows [L, ...], and the row after the last step.

    Rows of this env are numbers; a list of strings is an entry of texts.
    """
    whole = hashlib.sha256()
    for name, rows, last in entries:
        if isinstance(rows, list):
            entry = hashlib.sha256(f"{name} str ()\n".encode())
            for text in [*rows, *([] if last is None else [last])]:
                utf8 = text.encode("utf-8", "surrogatepass")
                entry.update(len(utf8).to_bytes(8, "little") + utf8)
        else:
            entry = hashlib.sha256(f"{name} {rows.dtype.str} {rows.shape[1:]}\n".encode())
            entry.update(rows.tobytes() + (b"" if last is None else last.tobytes()))
        whole.update(entry.digest())
    return whole.hexdigest()


def sketch(rows: np.ndarray) -> np.ndarray:
    """One number of each row: equal ones are equal rows but by a rare chance."""
    words = np.random.SeedSequence(0, spawn_key=(7,)).generate_state(rows.shape[1], np.uint32)
    return (rows * (words * 2.0**-31 - 1)).sum(-1)


def play(env: gym.Env, root: int, index: int) -> tuple[dict, dict]:
    """Play one episode; return its record and its steps, which an audit reads."""
    env_seed, policy_seed = seeds(root, index)
    observation, info = env.reset(seed=env_seed)
    observations, actions, rewards, ends = [observation], [], [], []
    while not (ends and any(ends[-1])):
        actions.append(policy(observations[-1]))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        observations.append(observation)
        rewards.append(float(reward))
        ends.append((terminated, truncated))
    flags = np.array(ends, bool)
    one_hot = np.eye(env.action_space.n, dtype=np.int64)[actions]
    steps = {
        "episode": np.full(len(rewards), index),
        "observation/observation": sketch(np.stack(observations[:-1])),
        "action/action": one_hot,
        "reward/reward": np.array(rewards, np.float64)[:, None],
    }
    record = {
        "index": index,
        "env_seed": env_seed,
        "policy_seed": policy_seed,
        "status": "completed",
        "restarts": 0,
        "return": math.fsum(rewards),
        "length": len(rewards),
        "terminated": bool(flags[-1, 0]),
        "truncated": bool(flags[-1, 1]),
        "success": info.get("is_success"),
        "digest": digest(
            [
                ("observation", np.stack(observations[:-1]), observations[-1]),
                ("action", one_hot, None),
                ("next/reward", np.array(rewards, np.float32)[:, None], None),
                ("next/terminated", flags[:, :1], None),
                ("next/truncated", flags[:, 1:], None),
            ]
        ),
    }
    return record, steps


def manifest(env: gym.Env, episodes: int, root: int) -> dict:
    """The manifest: all that decides the episodes."""
    return {
        "format": 3,
        "protocol": 2,
        "env": {
            "id": ENV,
            "kwargs": {},
            "wrappers": [f"TimeLimit({env.spec.max_episode_steps})", env.spec.entry_point],
            "observation_space": repr(env.observation_space),
            "action_space": repr(env.action_space),
            "transforms": [],
        },
        "entries": {"observation": ["observation"], "action": ["action"]},
        "episodes": episodes,
        "seeds": {"root": root},
        "max_episode_steps": None,
        "policy": {
            "class": "other_producer.policy",
            "code": None,
            "digest": hashlib.sha256(WEIGHTS.tobytes()).hexdigest(),
            "exploration": "deterministic",
            "mode": None,
        },
        "inference_batch_size": 1,
        "inference_threads": 1,
        "device": "cpu",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("gymnasium", "numpy")},
        },
        "platform": {"system": platform.system(), "machine": platform.machine()},
        "git": None,
    }


def main() -> None:
    """Play the episodes, and write the directory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    env = gym.make(ENV)
    options.output_dir.mkdir(parents=True)
    described = json.dumps(manifest(env, options.episodes, options.seed), indent=1) + "\n"
    (options.output_dir / "manifest.json").write_text(described)
    played = [play(env, options.seed, index) for index in range(options.episodes)]
    lines = "".join(json.dumps(record) + "\n" for record, _ in played)
    (options.output_dir / "episodes.jsonl").write_text(lines)
    (options.output_dir / "steps").mkdir()
    written = {}
    for first in range(0, options.episodes, 1000):  # a file for each thousand
        part = [steps for _, steps in played[first : first + 1000]]
        file = options.output_dir / "steps" / f"{first:06d}.npz"
        np.savez(file, **{name: np.concatenate([one[name] for one in part]) for name in part[0]})
        written[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    digests = {
        "ledger": hashlib.sha256(lines.encode()).hexdigest(),
        "manifest": hashlib.sha256(described.encode()).hexdigest(),
    }
    mark = json.dumps({"shard": [0, 1], **digests, "steps": written, "witness": None}) + "\n"
    (options.output_dir / "shard.json").write_text(mark)


if __name__ == "__main__":
    main()
