#!/usr/bin/env bash
# TorchRL 0.14.1: MinariExperienceReplay gives zeros in place of the data of a local Minari data set.
#
# Versions: torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0, minari 0.5.4, gymnasium 1.4.0.
# Input: a data set of two episodes, written by Minari's create_dataset_from_buffers; Minari
#   reads it back as it was written.
# Expected: MinariExperienceReplay(..., load_from_local_minari=True) holds the same values.
# Seen: the right shapes and dtypes, and zeros everywhere: observations, actions, rewards, flags.
#   No error and no warning.
# Source: torchrl/data/datasets/minari_data.py, _download_and_preproc: the entries are filled in
#   memory, and then `td_data = td_data.memmap_like(self.data_path_root)` makes empty files of the
#   same shapes, which are returned; nothing copies the values into them. (The branch that downloads
#   runs the same lines; only the local one was run here, as it needs no network.)
# Output seen, on Linux, Python 3.11:
#   minari:  rewards [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] observations 1.0 to 32.0
#   torchrl: rewards [0.0, 0.0, 0.0, 0.0, 0.0, 0.0] observations 0.0 to 0.0
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about three minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 torchrl==0.14.1 tensordict==0.14.3 \
    'minari[hdf5]==0.5.4' gymnasium==1.4.0 numpy==2.4.6 h5py==3.16.0 pillow==13.0.0
cd "$folder"
export MINARI_DATASETS_PATH="$folder/minari" RL_LOGGING_LEVEL=WARNING
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' \
    || { status=$?; tail -n 5 "$folder/log" >&2; exit "$status"; }
import sys

import gymnasium as gym
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer
from torchrl.data.datasets import MinariExperienceReplay

numbers = np.arange(1, 33, dtype=np.float32).reshape(2, 4, 4)
episodes = [
    EpisodeBuffer(
        observations=numbers[at],
        actions=np.array([1, 0, 1]),
        rewards=np.array([1.0, 2.0, 3.0]) + 3 * at,
        terminations=np.array([False, False, True]),
        truncations=np.array([False, False, False]),
    )
    for at in range(2)
]
minari.create_dataset_from_buffers(
    "local/counted-v0",
    episodes,
    observation_space=gym.spaces.Box(0, 32, (4,), np.float32),
    action_space=gym.spaces.Discrete(2),
    env="CartPole-v1",
    algorithm_name="counted",
    author="anyone",
    author_email="anyone@example.org",
    code_permalink="https://example.org",
    description="known numbers",
)
there = [*minari.load_dataset("local/counted-v0")]
right = [reward for episode in there for reward in episode.rewards.tolist()]
seen = np.stack([episode.observations for episode in there])
print("minari:  rewards", right, "observations", seen.min(), "to", seen.max())
assert right == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and np.array_equal(seen, numbers)

data = MinariExperienceReplay(
    "local/counted-v0", batch_size=6, root="torchrl", load_from_local_minari=True
)[:]
rewards, observations = data["next", "reward"].flatten().tolist(), data["observation"]
lowest, highest = observations.min().item(), data["next", "observation"].max().item()
print("torchrl: rewards", rewards, "observations", lowest, "to", highest)

assert data["action"].shape == (6,) and observations.shape == (6, 4)
if rewards == right:
    sys.exit("not shown: the values are right")
assert rewards == [0.0] * 6 and lowest == highest == 0
assert not data["action"].any() and not data["next", "terminated"].any()
print("shown")
PYTHON
