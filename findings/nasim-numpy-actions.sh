#!/usr/bin/env bash
# nasim 0.12.0: envs with flat actions refuse the actions that their own action space samples.
#
# Versions: nasim 0.12.0, gymnasium 1.4.0, numpy 2.4.6.
# Input: Tiny-v0, made by gymnasium.make, and an action from env.action_space.sample(), or the same
#   action as a Python int.
# Expected: a step, as action_space.contains(action) is true of both.
# Seen: AssertionError for the sampled action, and a step for the Python int. So loops that play
#   random actions, and policies whose actions are NumPy integers, do not run.
# Source: nasim/envs/action.py, FlatActionSpace.get_action: `assert isinstance(action_idx, int)`.
#   Discrete.sample gives np.int64, which is no int in Python 3.
# Output seen, on Linux, Python 3.11:
#   int 15 is in Discrete(18): a step
#   int64 15 is in Discrete(18): AssertionError: When using flat action space, action must be an
#     integer or an Action object: 15 is invalid
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about two minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet nasim==0.12.0 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
MPLBACKEND=agg "$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
import nasim  # noqa: F401

env = gym.make("nasim:Tiny-v0")
env.reset(seed=0)
env.action_space.seed(0)
sampled = env.action_space.sample()
assert env.action_space.contains(sampled) and env.action_space.contains(int(sampled))
outcomes = []
for action in (int(sampled), sampled):
    try:
        env.step(action)
        outcomes.append("a step")
    except AssertionError as error:
        outcomes.append(f"AssertionError: {error}")
    print(f"{type(action).__name__} {action} is in {env.action_space}: {outcomes[-1]}")
assert outcomes[0] == "a step"
if outcomes[1] == "a step":
    sys.exit("not shown: both actions are taken")
assert "action must be an integer" in outcomes[1]
print("shown")
PYTHON
