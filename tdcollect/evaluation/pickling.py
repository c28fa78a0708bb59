"""Arguments that travel to other processes, pickled one by one, so that errors name them."""

from __future__ import annotations

from typing import Any

import cloudpickle

_ADVICE = {
    "env": "pass a function that makes it, lambda: make_env()",
    "policy": "make it without such parts; an Evaluator takes a function that makes it, "
    "policy_factory=",
}


def pickled_part(name: str, value: Any) -> bytes:
    """Pickle an argument, functions of any kind included.

    Raises:
        TypeError: if it cannot be, naming the argument.
    """
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever a class's own __reduce__ raises
        advice = _ADVICE.get(name, "let it refer to nothing that is bound to this process")
        of = value[0] if name == "env" else value
        text = " ".join(f"{type(of).__name__} {of}".split())
        raise TypeError(
            f"expected {name} to be picklable, as episodes run in processes of their own, got "
            f"{text[:120]} ({type(error).__name__}: {error}); {advice}"
        ) from error
    return dumped
