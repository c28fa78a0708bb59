#!/usr/bin/env bash
# bbrl-gymnasium 1.0.1 with NumPy 2.4: CartPoleContinuous-v0 takes no action of its action space.
#
# Versions: bbrl-gymnasium 1.0.1, gymnasium 1.4.0, numpy 2.3.5 and 2.4.6.
# Input: CartPoleContinuous-v0, reset with seed 0, and a step with an action that its action space
#   Box(-1.0, 1.0, (1,), float64) samples.
# Expected: a step, as with NumPy 2.3.5.
# Seen: TypeError: only 0-dimensional arrays can be converted to Python scalars.
# Source: bbrl_gymnasium/envs/continuous_cartpole.py, step: `float(action)` of an array of shape
#   (1,). NumPy 1.25 deprecated the conversion of arrays with more than 0 dimensions, and NumPy 2.4
#   ended it.
# Output seen, on Linux, Python 3.11:
#   numpy 2.3.5: a step to 0.0132
#   numpy 2.4.6: TypeError: only 0-dimensional arrays can be converted to Python scalars
#   shown
#
# Exit status: 0 if this is shown, and another one if it has changed. It takes about two minutes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/stepped.py" <<'PYTHON'
import warnings

import numpy as np
import gymnasium as gym

warnings.simplefilter("ignore")
import bbrl_gymnasium  # noqa: F401

env = gym.make("CartPoleContinuous-v0")
env.reset(seed=0)
env.action_space.seed(0)
action = env.action_space.sample()
assert env.action_space.contains(action) and action.shape == (1,)
try:
    observation, *_ = env.step(action)
    outcome = f"a step to {observation[0]:.4f}"
except TypeError as error:
    outcome = f"TypeError: {error}"
print(f"numpy {np.__version__}: {outcome}")
PYTHON
for version in 2.3.5 2.4.6; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet bbrl-gymnasium==1.0.1 gymnasium==1.4.0 \
        "numpy==$version"
    (cd "$folder" && "$folder/$version/bin/python" stepped.py 2>"$folder/log" | tail -n 1)
done | tee "$folder/seen"
if [ "$(cat "$folder/seen")" != "numpy 2.3.5: a step to 0.0132
numpy 2.4.6: TypeError: only 0-dimensional arrays can be converted to Python scalars" ]; then
    echo "not shown: this has changed" >&2
    exit 1
fi
echo shown
