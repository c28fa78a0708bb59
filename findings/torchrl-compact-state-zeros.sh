#!/usr/bin/env bash
# TorchRL 0.14.1: with compact_obs=True, batches hold zeros in place of a hidden state.
#
# Versions: torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6.
# Input: gymnasium's CartPole-v1 with an InitTracker and the primer of a GRUModule, which writes
#   ("next", "recurrent_state") at each step.
# Expected: compact_obs "drops the observation and state keys" of "next", as it is documented: the
#   entry is absent, or else it has the policy's values.
# Seen: it is absent with use_buffers=False. By default it is there, and zero in all rows, where the
#   states that the next rows begin with are not. The observation is absent in both.
# Source: torchrl/collectors/_single.py, _maybe_make_final_rollout: the entries are taken out of the
#   preallocated batch, and then those that the policy writes are put into it, ("next",
#   "recurrent_state") too. rollout takes the entry out of each step before it stacks them into that
#   batch, so nothing overwrites its zeros.
# Output seen, on Linux, Python 3.11:
#   use_buffers=False: observation absent, state absent
#   use_buffers=None: observation absent, state zero in all rows; next rows begin with others
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

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, QValueActor


def collect(use_buffers):
    torch.manual_seed(0)
    memory = GRUModule(input_size=4, hidden_size=3, in_key="observation", out_key="memory")
    env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    env = env.append_transform(memory.make_tensordict_primer())
    head = QValueActor(nn.Linear(3, 2), in_keys=["memory"], spec=env.action_spec)
    policy = TensorDictSequential(memory, head)
    collector = Collector(
        env,
        policy,
        frames_per_batch=16,
        total_frames=16,
        compact_obs=True,
        use_buffers=use_buffers,
    )
    (batch,) = collector
    return batch


bare, batch = collect(False), collect(None)
assert bare["recurrent_state"].any()
assert not {"observation", "recurrent_state"} & set(bare["next"].keys())
print("use_buffers=False: observation absent, state absent")
assert "observation" not in batch["next"].keys()
if "recurrent_state" not in batch["next"].keys():
    sys.exit("not shown: the state is absent")
assert not batch["next", "recurrent_state"].any()
goes_on = ~batch["next", "done"][:-1, 0]
assert batch["recurrent_state"][1:][goes_on].flatten(1).any(-1).all()
print("use_buffers=None: observation absent, state zero in all rows; next rows begin with others")
print("shown")
PYTHON
