"""Construction: where a collector is made, its options, and the needs of its policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from tensordict import unravel_key
from torch import nn
from torchrl.envs import EnvBase

from tdcollect._upstream.collector import (
    CollectorMeta,
    backend_of_alias,
    normalize_env_functions,
    service_backend,
)
from tdcollect.collect.arguments import check_arguments, check_one, explaining
from tdcollect.collect.policies import unknown_class
from tdcollect.collect.step_dict import Key
from tdcollect.keys import IS_INIT

HERE_ONLY: dict[str, Any] = {
    "statistics": True,
    "stats_window": 100,
    "timers": False,
    "hooks": None,
    "by_arrival": False,
    "progress": False,
}
"""Options of a collector that runs in the user's own process, with their defaults."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Dispatch(CollectorMeta):
    """Send ``backend=`` and ``num_collectors=`` to ``tdcollect.collectors``.

    TorchRL dispatches for its own class only, and to its own classes.
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
        if len(args) > 2:
            raise TypeError(
                f"expected create_env_fn and policy as the only positional arguments, got "
                f"{len(args)}; pass the others by name"
            )
        check_arguments(args, kwargs)
        chosen = service_backend() if backend is None else backend_of_alias(backend)
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
            options = dict(backend_options or {})
            if options.get("collector_class") in (None, "single"):
                options["collector_class"] = cls
            # A later stage, imported where it is asked for.
            later = import_module("tdcollect.collectors.dispatch")
            return later.collector_of_workers(
                args,
                kwargs,
                backend=chosen,
                options=options,
                num_collectors=num_collectors,
                sync=sync,
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


@contextmanager
def refusing(
    collector: Any, explain: Callable[[Exception], None] = lambda error: None
) -> Iterator[None]:
    """Close the env that a collector made if its constructor raises.

    Args:
        collector: the collector.
        explain: called with the error; may raise a better one.
    """
    try:
        with explaining(explain):
            yield
    except Exception:
        if collector._made_env:
            collector.env.close()
        raise


def check_writes_action(policy: Any, env: EnvBase) -> None:
    """Raise ValueError for a policy whose ``out_keys`` have no action of the env."""
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
    """Tell whether a policy carries a hidden state, or reads where episodes begin."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(
        hasattr(type(module), "make_tensordict_primer") or hasattr(module, "is_init_key")
        for module in modules
    ) or any(_as_tuple(key)[-1] == IS_INIT for key in getattr(policy, "in_keys", None) or ())


def extends(parent: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show a function that hands ``*args, **kwargs`` on with the parameters that these may hold.

    Args:
        parent: the function that they are handed on to.
    """

    def with_signature(function: Function) -> Function:
        own = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        signature = inspect.signature(parent)
        names = {parameter.name for parameter in own}
        theirs = [p for p in signature.parameters.values() if p.name not in names]
        # Before **kwargs, where the parent's ends with one.
        last = len(theirs) - (theirs[-1].kind is inspect.Parameter.VAR_KEYWORD)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*theirs[:last], *own, *theirs[last:]]
        )
        return function

    return with_signature


def refuse_elsewhere(options: dict[str, Any], backend: str) -> None:
    """Take options with their defaults out; raise for others.

    Args:
        options: are given to a collector that runs in other processes.
        backend: that runs it.

    Raises:
        ValueError: for an option that is heeded only in the user's own process.
    """
    for name, default in HERE_ONLY.items():
        value = options.pop(name, default)
        if value is not default and value != default:
            raise ValueError(
                f"expected no {name} with backend={backend!r}, whose collectors run in other "
                f"processes, got {name}={value!r}; leave it out, or choose backend='direct'"
            )
