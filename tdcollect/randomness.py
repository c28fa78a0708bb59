"""The global random states of torch, NumPy and Python: read and set."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def global_states() -> dict[str, Any]:
    """The states, by ``"torch"``, ``"cuda"`` (one per device, none where CUDA is not in use)..."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [state.cpu() for state in torch.cuda.get_rng_state_all()] if in_use else [],
        "numpy": np.random.get_state(),  # noqa: NPY002  envs may draw from it
        "python": random.getstate(),
    }


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set the states to what :func:`global_states` gave, for the devices that are here."""
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state.cpu(), device)
    np.random.set_state(states["numpy"])  # noqa: NPY002
    random.setstate(states["python"])
