#!/usr/bin/env bash
# gymnasium-robotics 1.4.2 with MuJoCo 4.0.0: the Fetch, hand and kitchen envs cannot be made.
#
# Versions: gymnasium-robotics 1.4.2, gymnasium 1.4.0, mujoco 4.0.0 and 3.8.0, numpy 2.4.6. pip
#   installs them together: gymnasium-robotics asks for no more than mujoco>=2.3.3.
# Input: gym.make of FetchReach-v4, HandReach-v3 and FrankaKitchen-v1.
# Expected: an env, as with MuJoCo 3.8.0.
# Seen: AssertionError without a message, with 3.17.0 too. PointMaze, AntMaze and AdroitHandDoor are
#   made.
# Source: gymnasium_robotics/utils/mujoco_utils.py, set_joint_qpos and get_joint_qpos:
#   `assert joint_type in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)`, where
#   joint_type is a NumPy integer. Since then a member of an enum equals a Python integer, but no
#   NumPy integer that stands on the right of ==, which is where `in` puts it.
# Output seen, on Linux, Python 3.11:
#   mujoco 3.8.0: hinge == int32(3): True; made: FetchReach-v4 HandReach-v3 FrankaKitchen-v1
#   mujoco 4.0.0: hinge == int32(3): False; AssertionError: FetchReach-v4 HandReach-v3 FrankaKitchen-v1
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about two minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/made.py" <<'PYTHON'
import warnings

import gymnasium as gym
import gymnasium_robotics
import mujoco
import numpy as np

warnings.simplefilter("ignore")
gym.register_envs(gymnasium_robotics)
same = mujoco.mjtJoint.mjJNT_HINGE == np.int32(3)
outcomes = {}
for name in ("FetchReach-v4", "HandReach-v3", "FrankaKitchen-v1"):
    try:
        gym.make(name).close()
        outcomes.setdefault("made", []).append(name)
    except AssertionError:
        outcomes.setdefault("AssertionError", []).append(name)
text = "; ".join(f"{outcome}: {' '.join(names)}" for outcome, names in outcomes.items())
print(f"mujoco {mujoco.__version__}: hinge == int32(3): {same}; {text}")
PYTHON
for version in 3.8.0 4.0.0; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet gymnasium-robotics==1.4.2 \
        gymnasium==1.4.0 "mujoco==$version" numpy==2.4.6
    (cd "$folder" && MUJOCO_GL=disable "$folder/$version/bin/python" made.py 2>"$folder/log" | tail -n 1)
done | tee "$folder/seen"
all="FetchReach-v4 HandReach-v3 FrankaKitchen-v1"
if [ "$(cat "$folder/seen")" != "mujoco 3.8.0: hinge == int32(3): True; made: $all
mujoco 4.0.0: hinge == int32(3): False; AssertionError: $all" ]; then
    echo "not shown: this has changed" >&2
    exit 1
fi
echo shown
