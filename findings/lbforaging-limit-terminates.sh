#!/usr/bin/env bash
# lbforaging 2.0.0: an episode that is stopped by its limit of steps is reported as terminated.
#
# Versions: lbforaging 2.0.0, gymnasium 1.4.0, numpy 2.4.6.
# Input: Foraging-8x8-2p-1f-v3, made by gymnasium.make with its defaults; both agents do nothing.
# Expected: after 50 steps truncated=True and terminated=False, as food is left and nobody has won or
#   lost. Gymnasium's Env.step says that a time limit is a truncation, and learners that bootstrap
#   take the value of a terminated state for zero.
# Seen: terminated=True, truncated=False, with the food on the field.
# Source: lbforaging/foraging/environment.py, step: `self._game_over = (self.field.sum() == 0 or
#   self._max_episode_steps <= self.current_step)`, and `truncated = False`. The ids give their limit
#   to this class, not to gymnasium's TimeLimit.
# Output seen, on Linux, Python 3.11:
#   step 50: terminated=True truncated=False, food left: 2
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about a minute.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet lbforaging==2.0.0 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
import lbforaging  # noqa: F401

env = gym.make("Foraging-8x8-2p-1f-v3")
env.reset(seed=0)
nothing = (0,) * len(env.action_space)
assert env.action_space.contains(nothing)
for step in range(1, 1000):
    _, _, terminated, truncated, _ = env.step(nothing)
    if terminated or truncated:
        break
food = int(env.unwrapped.field.sum())
print(f"step {step}: terminated={bool(terminated)} truncated={bool(truncated)}, food left: {food}")
assert step == 50 and food > 0
if truncated and not terminated:
    sys.exit("not shown: the limit truncates")
assert terminated and not truncated
print("shown")
PYTHON
