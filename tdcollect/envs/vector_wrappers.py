"""gymnasium's wrappers of vector envs: those that break the contract are refused.

The contract asks for resets of single slots, and in SAME_STEP for final observations that are
transformed like all others. gymnasium refuses some combinations itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

_MODULES = "gymnasium.wrappers.vector."

_REFUSED = {
    "DictInfoToList": "gives infos as a list, and final observations are read from infos as a "
    "dict; leave it out: make_env(..., info_keys=[...]) collects infos",
    "NormalizeObservation": "takes no reset of single slots; use gymnasium.wrappers."
    "NormalizeObservation around each env, or torchrl.envs.VecNormV2 around make_env's",
    "NumpyToTorch": "gives tensors, infos included; leave it out: make_env's entries are tensors",
    "JaxToTorch": "gives tensors, infos included; use gymnasium.wrappers.vector.JaxToNumpy",
}


def check_wrappers(env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> bool:
    """Check the wrappers of a vector env; returns whether single slots can be reset through them.

    Raises:
        ValueError: for wrappers that cannot keep the contract in this autoreset mode.
    """
    resets_subset = True
    for layer in _layers(env):
        ours = {c.__name__ for c in type(layer).__mro__ if c.__module__.startswith(_MODULES)}
        for name in sorted(ours & _REFUSED.keys()):
            raise ValueError(f"expected no {name} around the vector env: it {_REFUSED[name]}")
        if "NormalizeReward" in ours:
            # Its reset forgets the running returns of all slots, whichever are reset.
            if mode != AutoresetMode.SAME_STEP:
                raise ValueError(
                    f"expected no NormalizeReward in AutoresetMode.{mode.name}: a reset of one "
                    "slot makes it forget the running returns of all. Make the vector env with "
                    "autoreset_mode=AutoresetMode.SAME_STEP, or use torchrl.envs.VecNormV2"
                )
            resets_subset = False
        unchanged = getattr(type(layer), "step", None) is VectorObservationWrapper.step
        if mode == AutoresetMode.SAME_STEP and unchanged:
            raise ValueError(
                f"expected no {type(layer).__name__} in AutoresetMode.SAME_STEP: it changes "
                "observations, but not the final ones in info['final_obs']. Make the vector env "
                "with AutoresetMode.DISABLED or NEXT_STEP, or wrap each env instead"
            )
    return resets_subset


def share_no_options(env: VectorEnv[Any, Any, Any]) -> None:
    """Have ``RecordEpisodeStatistics`` pass on a copy of its reset options.

    gymnasium's vector envs pop the mask of slots from the options. The wrapper looks for the mask
    afterwards, in the same dict, and would reset the sums of all slots.
    """
    for layer in _layers(env):
        if isinstance(layer, RecordEpisodeStatistics) and not isinstance(layer.env, _OwnOptions):
            layer.env = _OwnOptions(layer.env)


class _OwnOptions(VectorWrapper):  # without type arguments: gymnasium takes them from 1.4 on
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=None if options is None else dict(options))


def _layers(env: VectorEnv[Any, Any, Any]) -> Iterator[VectorWrapper[Any, Any, Any, Any, Any]]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env
