"""What is settled before a collector runs: where it is made, and what its policy needs."""

from __future__ import annotations

from typing import Any

from tensordict import unravel_key
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase

from tdcollect._upstream.collector import (
    CollectorMeta,
    normalize_env_functions,
    service_backend,
)
from tdcollect.collect.arguments import check_arguments, check_one
from tdcollect.collect.fast.policy import unknown_class
from tdcollect.collect.options import refuse_elsewhere
from tdcollect.collect.step_dict import Key
from tdcollect.keys import IS_INIT


class Dispatch(CollectorMeta):
    """Send ``backend=`` and ``num_collectors=`` where TorchRL's own constructor sends them.

    TorchRL dispatches for its own class only. Here the workers of every other backend run
    tdcollect's collector.
    """

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        check_arguments(args, kwargs)
        chosen = backend or service_backend()
        if chosen is None:
            chosen = "direct" if num_collectors is None else "process"
        if chosen != "direct":
            if isinstance(cls.__base__, Dispatch):
                raise TypeError(
                    f"backend, num_collectors and sync are for Collector itself, not for its "
                    f"subclass {cls.__name__}; pass collector_class={cls.__name__} in the "
                    "backend_options of Collector(..., backend=...)"
                )
            if kwargs.get("reward_shaping") is not None:
                raise ValueError(
                    "reward_shaping is for backend='direct': workers are not given it; name a "
                    "subclass that passes it on as collector_class in the backend_options"
                )
            refuse_elsewhere(kwargs, chosen)
            options = {"collector_class": cls, **(backend_options or {})}
            return TorchRLCollector(
                *args,
                backend=backend,
                backend_options=options,
                num_collectors=num_collectors,
                sync=sync,
                **kwargs,
            )
        if num_collectors not in (None, 1) or sync is not None or backend_options:
            raise ValueError(
                "backend='direct' is one collector in this process: expected num_collectors=1 and "
                f"no sync and no backend_options, got num_collectors={num_collectors}, "
                f"sync={sync}, backend_options={backend_options}; choose backend='process'"
            )
        check_one(args, kwargs)
        args, kwargs = normalize_env_functions(cls, args, kwargs)
        return super().__call__(*args, **kwargs)


def check_writes_action(policy: Any, env: EnvBase) -> None:
    """Raise ValueError for a policy that says that it writes no action of the env."""
    if unknown_class(policy) is not None:
        return  # its out_keys may not be all that it writes
    out_keys = [unravel_key(key) for key in policy.out_keys]
    # An entry that holds the action, nested, counts too.
    actions = map(_as_tuple, env.action_keys)
    written = {key[:n] for key in actions for n in range(1, len(key) + 1)}
    if written and not written & set(map(_as_tuple, out_keys)):
        raise ValueError(
            f"expected the policy to write an action entry of the env, one of {env.action_keys}, "
            f"got a policy with out_keys={out_keys}; name its output accordingly"
        )


def _as_tuple(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def needs_state(policy: Any) -> bool:
    """Whether a policy carries a hidden state, or asks where episodes begin."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(
        hasattr(type(module), "make_tensordict_primer") or hasattr(module, "is_init_key")
        for module in modules
    ) or any(_as_tuple(key)[-1] == IS_INIT for key in getattr(policy, "in_keys", None) or ())
