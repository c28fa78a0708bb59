#!/usr/bin/env bash
# TorchRL 0.14.1: GymWrapper takes a Tuple observation space of unlike parts, and cannot reset it.
#
# Versions: torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6.
# Input: gymnasium's Blackjack-v1, whose observation is a Tuple of Discrete spaces of 32, 11 and 2.
#   Envs of popgym and gym-electric-motor have Tuples of unlike parts, too.
# Expected: observations, as for a Tuple of like parts; or an error as the env is made that says that
#   such spaces are not supported.
# Seen: the env is made and has an observation spec, and reset raises NotImplementedError: This is a
#   placeholder that needs to be set during construction.
# Source: torchrl/envs/libs/gym.py stacks the specs of the parts lazily, and
#   torchrl/envs/gym_like.py, _read_obs_eager, calls encode of the result, whose body in
#   torchrl/data/tensor_specs.py is that placeholder.
# Output seen, on Linux, Python 3.11:
#   Tuple(Discrete(32), Discrete(11), Discrete(2)) is made: Stacked
#   reset: NotImplementedError: This is a placeholder that needs to be set during construction
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about three minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 torchrl==0.14.1 tensordict==0.14.3 \
    gymnasium==1.4.0 numpy==2.4.6
cd "$folder"
RL_LOGGING_LEVEL=ERROR "$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
from torchrl.envs import GymWrapper

env = gym.make("Blackjack-v1")
observation, _ = env.reset(seed=0)
assert env.observation_space.contains(observation)
wrapped = GymWrapper(env)
print(env.observation_space, "is made:", type(wrapped.observation_spec["observation"]).__name__)
try:
    wrapped.reset()
except NotImplementedError as error:
    print("reset: NotImplementedError:", error)
    assert "placeholder" in str(error)
else:
    sys.exit("not shown: it was reset")
print("shown")
PYTHON
