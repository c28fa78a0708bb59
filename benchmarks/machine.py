"""The machine of a run, and the versions of what it compares."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from bench import processor

PACKAGES = (
    "tdcollect",
    "torch",
    "torchrl",
    "tensordict",
    "numpy",
    "gymnasium",
    "mujoco",
    "envpool",
    "stable-baselines3",
    "tianshou",
)


def machine() -> dict[str, Any]:
    """CPU model, cores, memory, system and load of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_GiB": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def device() -> dict[str, Any] | None:
    """The GPU and its software; None without one.

    Raises:
        RuntimeError: if there is one that this process cannot use.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    torch.zeros(1, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_GiB": round(properties.total_memory / 2**30, 1),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages compared."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
