#!/usr/bin/env bash
# dm_control 1.0.50 with MuJoCo 4.0.0: no task of the suite can be loaded.
#
# Versions: dm-control 1.0.50, mujoco 4.0.0 and 3.17.0. `pip install dm-control` installs MuJoCo
#   4.0.0 with it, as it asks for mujoco>=3.17.0.
# Input: suite.load("cartpole", "balance").
# Expected: an environment, as with MuJoCo 3.17.0.
# Seen: AttributeError: 'MjModel' object has no attribute 'flex_vertedge'.
# Source: dm_control/mujoco/wrapper/mjbindings/sizes.py lists the arrays of a model by name, and the
#   index of names (dm_control/mujoco/index.py) reads all of them; MuJoCo 4.0.0 has no flex_vertedge.
# Output seen, on Linux, Python 3.11:
#   mujoco 3.17.0: loaded
#   mujoco 4.0.0: AttributeError: 'MjModel' object has no attribute 'flex_vertedge'
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about two minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/loaded.py" <<'PYTHON'
import mujoco
from dm_control import suite

try:
    suite.load("cartpole", "balance")
    print(f"mujoco {mujoco.__version__}: loaded")
except AttributeError as error:
    print(f"mujoco {mujoco.__version__}: AttributeError: {error}")
PYTHON
for version in 3.17.0 4.0.0; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet dm-control==1.0.50 "mujoco==$version"
    (cd "$folder" && MUJOCO_GL=disable "$folder/$version/bin/python" loaded.py 2>"$folder/log")
done | tee "$folder/seen"
if [ "$(cat "$folder/seen")" != "mujoco 3.17.0: loaded
mujoco 4.0.0: AttributeError: 'MjModel' object has no attribute 'flex_vertedge'" ]; then
    echo "not shown: this has changed" >&2
    exit 1
fi
echo shown
