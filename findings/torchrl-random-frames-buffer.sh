#!/usr/bin/env bash
# TorchRL 0.14.1: a Collector with init_random_frames and a replay buffer raises KeyError once a
#   policy acts that writes more than the action.
#
# Versions: torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6.
# Input: gymnasium's CartPole-v1, a ProbabilisticActor, which writes logits beside the action, and 20
#   random frames before it acts, in batches of 20.
# Expected: 100 rows in the buffer, as without init_random_frames; without a buffer, the same
#   collector has zeros for the logits of random frames.
# Seen: the random frames go into the buffer, and the next batch raises KeyError: key "logits" not
#   found in TensorDict.
# Source: torchrl/collectors/_single.py: with a replay buffer no batch is preallocated (use_buffers),
#   and rollout calls env.rand_action for random frames, which writes the action alone. The storage
#   is made by the first batch, and set in torchrl/data/replay_buffers/storages/tensor.py calls its
#   update_at_, which raises for entries that the first batch lacked.
# Output seen, on Linux, Python 3.11:
#   rows without init_random_frames, and without a buffer: 100 100
#   rows with both: KeyError: key "logits" not found in TensorDict with key
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

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor


def collect(init_random_frames, with_buffer):
    env = GymEnv("CartPole-v1")
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(
        net, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4) if with_buffer else None
    collector = Collector(
        env,
        policy,
        frames_per_batch=20,
        total_frames=100,
        init_random_frames=init_random_frames,
        replay_buffer=buffer,
    )
    rows = 0
    for batch in collector:
        rows = len(buffer) if with_buffer else rows + batch.numel()
    return rows


rows = collect(0, True), collect(20, False)
print("rows without init_random_frames, and without a buffer:", *rows)
assert rows == (100, 100)
try:
    collect(20, True)
except KeyError as error:
    print("rows with both: KeyError:", str(error.args[0])[:45])
    assert "logits" in str(error)
else:
    sys.exit("not shown: they were collected")
print("shown")
PYTHON
