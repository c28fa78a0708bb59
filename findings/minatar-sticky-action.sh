#!/usr/bin/env bash
# MinAtar 1.0.15: the last action of an episode may be repeated in the first step of the next one.
#
# Versions: MinAtar 1.0.15, gymnasium 1.4.0, numpy 2.4.6.
# Input: MinAtar/Breakout-v1 as registered, whose actions are sticky: with probability 0.1 the
#   action before is played again. An env that is new, and one that has made a single step with the
#   action "left" or "right"; both are reset with the same seed and make one step with "no move".
# Expected: the same observation, as reset(seed=...) begins an episode that seed and actions decide.
# Seen: with 12 of a hundred seeds it is another one, in which the paddle has moved by the action of
#   the episode before.
# Source: minatar/environment.py: Environment.act keeps `self.last_action = a`, and neither reset nor
#   seed sets it back to 0, as __init__ does.
# Output seen, on Linux, Python 3.11:
#   after an episode that ends with left: 12 of 100 seeds differ; seed 3: paddle at 4 in a new env, at 3 in a used one
#   after an episode that ends with right: 12 of 100 seeds differ; seed 3: paddle at 4 in a new env, at 5 in a used one
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about a minute.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-deps MinAtar==1.0.15 gymnasium==1.4.0 \
    numpy==2.4.6 cloudpickle==3.1.2 farama-notifications==0.0.6 typing-extensions==4.15.0
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
from minatar.gym import register_envs

register_envs()
STILL, LEFT, RIGHT = 0, 1, 2  # of the minimal actions, which v1 has


def paddle(env, seed):
    """The paddle's place after a reset with this seed and one step that does not move it."""
    env.reset(seed=seed)
    observation = env.step(STILL)[0]
    return int(observation[9, :, 0].argmax())


moved = {}
for before, name in ((LEFT, "left"), (RIGHT, "right")):
    differ = []
    for seed in range(100):
        new, used = gym.make("MinAtar/Breakout-v1"), gym.make("MinAtar/Breakout-v1")
        used.reset(seed=1000)
        used.step(before)
        places = paddle(new, seed), paddle(used, seed)
        if places[0] != places[1]:
            differ.append((seed, *places))
    moved[name] = differ
    print(f"after an episode that ends with {name}: {len(differ)} of 100 seeds differ;", end=" ")
    print("; ".join(f"seed {s}: paddle at {a} in a new env, at {b} in a used one" for s, a, b in differ[:1]))
if not any(moved.values()):
    sys.exit("not shown: a used env repeats the episodes of a new one")
assert all(0 < len(differ) < 30 for differ in moved.values())
assert all(a == 4 and b == 3 for _, a, b in moved["left"])
assert all(a == 4 and b == 5 for _, a, b in moved["right"])
print("shown")
PYTHON
