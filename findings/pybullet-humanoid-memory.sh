#!/usr/bin/env bash
# pybullet-envs-gymnasium 0.6.0: an episode of the humanoid depends on what else the memory holds.
#
# Versions: pybullet-envs-gymnasium 0.6.0, pybullet 3.2.7, gymnasium 1.4.0, numpy 2.4.6.
# Input: HumanoidFlagrunHarderBulletEnv-v0, made 60 times and more in one process, reset with seed 1 and
#   played with the same 30 actions each time; before each, some bytearrays are allocated or freed.
# Expected: one episode, as seed and actions decide it, and an env is new each time.
# Seen: most runs agree to the bit. Now and then one goes apart: by 1e-7 in the eighth step, and
#   further from there on. Without other allocations in the process, 45 of 45 agreed.
# Source: the env and its robot draw from self.np_random alone, which reset seeds, and set
#   deterministicOverlappingPairs=1 (env_bases.py, reset), so what differs is in the Bullet engine,
#   which is compiled into pybullet. Where in it was not narrowed down.
# Output seen, on Linux, Python 3.11 (the counts vary; pybullet adds lines):
#   85 runs: 2 versions of one episode (84, 1)
#   step 8: 1.8e-07 apart; step 30: 1.8e-05
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about three minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet pybullet-envs-gymnasium==0.6.0 pybullet==3.2.7 \
    gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import random
import sys
from collections import Counter

import gymnasium as gym
import numpy as np
import pybullet_envs_gymnasium  # noqa: F401

draw, held, kept, seen = random.Random(1), [], [], Counter()
MOST = 1000
for run in range(MOST):
    held.append([bytearray(draw.choice([16, 24, 40, 100, 1000, 5000])) for _ in range(draw.randrange(200))])
    if len(held) > 10:
        held.pop(draw.randrange(10))
    env = gym.make("HumanoidFlagrunHarderBulletEnv-v0")
    env.action_space.seed(1)
    rows = [env.reset(seed=1)[0].astype(np.float64)]
    for _ in range(30):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        rows.append(np.append(observation.astype(np.float64), reward))
    env.close()
    seen[b"".join(row.tobytes() for row in rows)] += 1
    if len(seen) > len(kept):
        kept.append(rows)
    if run >= 59 and len(seen) > 1:
        break
counts = ", ".join(map(str, seen.values()))
print(f"{run + 1} runs: {len(seen)} versions of one episode ({counts})")
if len(seen) == 1:
    sys.exit("not shown: all runs agree")
first, second, *_ = kept
apart = [float(abs(one - other).max()) for one, other in zip(first, second, strict=True)]
at = next(step for step, distance in enumerate(apart) if distance)
print(f"step {at}: {apart[at]:.1e} apart; step 30: {apart[30]:.1e}")
assert apart[0] == 0 and max(seen.values()) > run // 2
print("shown")
PYTHON
