#!/usr/bin/env bash
# pickomino-env 1.4.1: reset(seed=...) decides the rolls up to the end of the first turn only.
#
# Versions: pickomino-env 1.4.1, gymnasium 1.4.0, numpy 2.4.6.
# Input: Pickomino-v0, made ten times, each reset with seed 42 and played by the same rule for ten
#   steps: collect the face with the most dice of those not collected yet, and roll again until six
#   dice are collected.
# Expected: the same episode each time. The docstring of reset says of seed: "Random seed for
#   reproducible episodes".
# Seen: the same rolls until a turn ends, and other ones after it.
# Source: pickomino_env/pickomino.py: reset makes `Game(random_generator=self.np_random)`, whose dice
#   draw from it; when a turn ends, _end_of_turn_reset puts `self._game.dice = Dice()` in their place, and
#   pickomino_env/modules/dice.py makes `np.random.default_rng()` for dice without a generator.
# Output seen, on Linux, Python 3.11 (the last five numbers vary):
#   versions of each roll, of ten episodes: 1 1 1 1 1 10 10 10 9 10
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about a minute.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet pickomino-env==1.4.1 gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
SDL_VIDEODRIVER=dummy PYGAME_HIDE_SUPPORT_PROMPT=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
import numpy as np
import pickomino_env  # noqa: F401

episodes = []
for _ in range(10):
    env = gym.make("Pickomino-v0")
    observation, _ = env.reset(seed=42)
    rolls = []
    for _ in range(10):
        rolls.append(tuple(int(count) for count in observation["dice_rolled"]))
        left = np.where(observation["dice_collected"] == 0, observation["dice_rolled"], -1)
        action = np.array([left.argmax(), int(observation["dice_collected"].sum() >= 6)])
        assert env.action_space.contains(action)
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    episodes.append(rolls)
    env.close()
same = [len({episode[place] for episode in episodes if len(episode) > place}) for place in range(10)]
print("versions of each roll, of ten episodes:", *same)
assert same[:5] == [1] * 5  # the first turn
if max(same) == 1:
    sys.exit("not shown: all episodes agree")
assert max(same[5:]) > 2
print("shown")
PYTHON
