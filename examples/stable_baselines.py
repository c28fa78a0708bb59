"""Evaluate two models of Stable-Baselines3, PPO and A2C, on the same numbered test episodes.

    pip install stable-baselines3
    python examples/stable_baselines.py --frames 20000 --output-dir runs/sb3

Their own ``predict`` chooses the actions. The same in the shell, once the models are saved:

    tdcollect evaluate CartPole-v1 --policy sb3 --checkpoint runs/sb3/ppo.zip \\
        --output-dir runs/sb3/ppo
"""

import argparse
from pathlib import Path

from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env

import tdcollect
from tdcollect.evaluation import export
from tdcollect.evaluation.sb3 import load_policy

ENV = "CartPole-v1"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/sb3"))
    parser.add_argument("--frames", type=int, default=50_000, help="frames to train each for")
    parser.add_argument("--episodes", type=int, default=100, help="number of test episodes")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    args = parser.parse_args(argv)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    env = tdcollect.make_env(ENV, num_envs=16)
    results = {}
    for algorithm in (A2C, PPO):
        name = algorithm.__name__.lower()
        model = algorithm("MlpPolicy", make_vec_env(ENV, 8, seed=args.seed), seed=args.seed)
        model.learn(args.frames)
        model.save(args.output_dir / name)
        policy = load_policy(args.output_dir / f"{name}.zip", env)
        results[name] = tdcollect.evaluate(
            env, policy, args.episodes, output_dir=args.output_dir / name
        )
        print(f"{name}\n{results[name].summary()}\n")

    # Episode by episode: both have played the same ones.
    comparison = tdcollect.compare(results["a2c"], results["ppo"], names=["A2C", "PPO"])
    print(comparison)
    print(export(comparison, "html", args.output_dir / "comparison"))


if __name__ == "__main__":
    main()
