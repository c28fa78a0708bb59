"""Models of Stable-Baselines3: policies to evaluate, and evaluations beside their training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tdcollect.evaluation.sb3.model import SB3Policy, load_policy
from tdcollect.packages import extra_module

if TYPE_CHECKING:
    from tdcollect.evaluation.sb3.callback import EvalCallback


def __getattr__(name: str) -> Any:
    """Import the callback late: it derives from a class of Stable-Baselines3."""
    if name != "EvalCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra_module("stable_baselines3", "tdcollect.evaluation.sb3.EvalCallback")
    from tdcollect.evaluation.sb3.callback import EvalCallback

    return EvalCallback


__all__ = ["EvalCallback", "SB3Policy", "load_policy"]
