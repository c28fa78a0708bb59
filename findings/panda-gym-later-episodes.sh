#!/usr/bin/env bash
# panda-gym 3.0.7: reset(seed=...) decides one episode, and those after it are others in every run.
#
# Versions: panda-gym 3.0.7, gymnasium 1.4.0, pybullet 3.2.7, numpy 2.4.6.
# Input: PandaReach-v3, made twice, each reset with seed 0 and then twice without a seed.
# Expected: the same three goals from both. Gymnasium's Env.reset says of seed=None: if the env has a
#   generator already, it is not seeded again; so a training run that resets once with a seed and
#   then without repeats itself.
# Seen: the same first goal, and other ones after it.
# Source: panda_gym/envs/core.py, RobotTaskEnv.reset: `self.task.np_random, seed =
#   seeding.np_random(seed)`, which takes fresh entropy from the system where seed is None.
# Output seen, on Linux, Python 3.11 (the second and third number vary; pybullet adds lines):
#   env 1: 0.0411 0.1219 0.1017
#   env 2: 0.0411 -0.1158 -0.0967
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about a minute.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet panda-gym==3.0.7 gymnasium==1.4.0 \
    pybullet==3.2.7 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
import panda_gym  # noqa: F401

runs = []
for number in (1, 2):
    env = gym.make("PandaReach-v3")
    goals = [float(env.reset(seed=seed)[0]["desired_goal"][0]) for seed in (0, None, None)]
    print(f"env {number}:", *(f"{goal:.4f}" for goal in goals))
    runs.append(goals)
    env.close()
first, second = runs
assert first[0] == second[0]
if first == second:
    sys.exit("not shown: later episodes agree")
assert first[1] != second[1] and first[2] != second[2]
print("shown")
PYTHON
