#!/usr/bin/env bash
# gym-pusht 0.1.8: the reward of one and the same episode differs in its last bit from env to env.
#
# Versions: gym-pusht 0.1.8, gymnasium 1.4.0, pymunk 6.11.1, shapely 2.2.0, numpy 2.4.6.
# Input: PushT-v0, made forty times in one process, reset with seed 0 and played with the same 100
#   actions each time.
# Expected: the same rewards, as seed and actions decide the episode.
# Seen: two versions of the rewards. All observations are the same; the rewards of some steps are
#   apart by one unit in the last place. A digest of an episode, or a test on equal returns, fails
#   now and then.
# Source: gym_pusht/envs/pusht.py, _get_coverage: it makes polygons of `self.block.shapes`, which
#   pymunk gives as a set of objects (pymunk/body.py, `return set(self._shapes)`). Its order follows
#   their addresses in memory, and shapely's intersection and area add up in this order.
# Output seen, on Linux, Python 3.11 (the counts vary):
#   40 runs: 1 version of the observations, 2 of the rewards (32, 8)
#   step 10: 0.43279919784770954 and 0.43279919784770965
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about a minute.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet gym-pusht==0.1.8 gymnasium==1.4.0 pymunk==6.11.1 \
    shapely==2.2.0 numpy==2.4.6
cd "$folder"
SDL_VIDEODRIVER=dummy PYGAME_HIDE_SUPPORT_PROMPT=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
from collections import Counter

import gym_pusht  # noqa: F401
import gymnasium as gym

observations, rewards = Counter(), Counter()
kept = []  # so that later envs have other addresses
for _ in range(40):
    env = gym.make("gym_pusht/PushT-v0")
    kept.append([object() for _ in range(len(kept))])
    env.action_space.seed(0)
    env.reset(seed=0)
    steps = [env.step(env.action_space.sample()) for _ in range(100)]
    observations[b"".join(step[0].tobytes() for step in steps)] += 1
    rewards[tuple(float(step[1]) for step in steps)] += 1
    env.close()
counts = ", ".join(map(str, rewards.values()))
print(f"40 runs: {len(observations)} version of the observations, {len(rewards)} of the rewards ({counts})")
if len(rewards) == 1:
    sys.exit("not shown: the rewards agree")
first, second, *_ = rewards
at = next(i for i, (one, other) in enumerate(zip(first, second)) if one != other)
print(f"step {at}: {first[at]} and {second[at]}")
assert len(observations) == 1 and abs(first[at] - second[at]) < 1e-14
print("shown")
PYTHON
