"""Names of the entries that tdcollect reads and writes, and the axis letters of its docstrings.

Every module takes its entry names from here; they are TorchRL's own.

Axis letters: **N** env slots, **T** steps, **B** trajectories, **L** longest trajectory,
**E** episodes.
"""

from __future__ import annotations

OBSERVATION = "observation"
PIXELS = "pixels"
ACTION = "action"
REWARD = "reward"
EXACT_REWARD = "_exact_reward"  # under "next": in float64, for the ledger's returns alone
RAW_REWARD = "raw_reward"  # under "next": the env's, where learners are shown a shaped one
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"
FLAGS = (DONE, TERMINATED, TRUNCATED)
NEXT = "next"

COLLECTOR = "collector"
TRAJ_IDS = (COLLECTOR, "traj_ids")
SLOT = (COLLECTOR, "slot")  # of each row, where rows come as they arrive
MASK = "mask"  # beside the trajectory ids
LOOKBACK = "lookback"  # beside the trajectory ids
NEXT_DONE = (NEXT, DONE)
TIME = "time"
FULL_ACTION_SPEC = "full_action_spec"  # of an env's input_spec

RESET = "_reset"
STEP = "_step"

STEP_COUNT = "step_count"
EPISODE_REWARD = "episode_reward"
IS_INIT = "is_init"
ENV_ERROR = "env_error"  # under "next": the step failed, and the env was built anew
POLICY_VERSION = "policy_version"
LOG_PROB = "log_prob"  # after the name of a sample, and an underscore

RESERVED = frozenset(
    {
        ACTION,
        REWARD,
        EXACT_REWARD,
        DONE,
        TERMINATED,
        TRUNCATED,
        NEXT,
        COLLECTOR,
        RESET,
        STEP,
    }
)
"""Names that an observation or info entry cannot take, since the batch uses them already."""
