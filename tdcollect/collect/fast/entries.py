"""Transforms that rename, drop or check entries, and those that do nothing to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torchrl.envs import EnvBase
from torchrl.envs import transforms as T
from torchrl.envs.transforms.utils import check_finite

from tdcollect.collect.fast.islands import StepTransform
from tdcollect.collect.step_dict import Key, StepDict


class Changed(StepTransform):
    """Changes the entries of steps and of resets alike.

    Args:
        change: is given them, and whether some may be missing.
    """

    own_pace = anywhere = True

    def __init__(self, change: Callable[[StepDict, bool], None]):
        self._change = change

    def step(self, step: StepDict, following: StepDict) -> None:
        self._change(following, False)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        self._change(begun, True)


class _Rename(Changed):
    """RenameTransform."""

    def __init__(self, transform: T.RenameTransform):
        self._pairs = list(zip(transform.in_keys, transform.out_keys, strict=True))
        outer, inner = transform.out_keys_inv, transform.in_keys_inv
        self._inverse_pairs = list(zip(outer, inner, strict=True))
        self._copies = transform.create_copy
        super().__init__(lambda entries, partly: self._rename(entries, self._pairs, partly))

    def inv(self, step: StepDict) -> None:
        self._rename(step, self._inverse_pairs, False)

    def _rename(self, entries: StepDict, pairs: Iterable[tuple[Key, Key]], partly: bool) -> None:
        for old, new in pairs:
            if old not in entries:
                if partly:
                    continue
                raise KeyError(
                    f"expected an entry {old!r} for RenameTransform, got {list(entries)}; correct "
                    "its in_keys"
                )
            entries[new] = entries[old] if self._copies else entries.pop(old)


def rename(transform: T.RenameTransform) -> StepTransform | str:
    """RenameTransform on StepDicts, or the reason why its own code must run."""
    spec = transform.parent.output_spec
    nodes = {path(key)[1:] for key in spec.keys(True)} - {
        path(key)[1:] for key in spec.keys(True, True)
    }
    for renamed in (
        [*transform.in_keys, *transform.out_keys],
        [*transform.in_keys_inv, *transform.out_keys_inv],
    ):
        paths = [path(key) for key in renamed]
        if nodes.intersection(paths):
            return "renames nested TensorDicts"
        if any(
            one[: len(two)] == two
            for i, one in enumerate(paths)
            for j, two in enumerate(paths)
            if i != j
        ):
            return "renames to names of each other"
    return _Rename(transform)


def path(key: Key) -> tuple[str, ...]:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else key


def _below(key: Key, prefixes: Sequence[tuple[str, ...]]) -> bool:
    names = path(key)
    return any(names[: len(prefix)] == prefix for prefix in prefixes)


def exclude(transform: T.ExcludeTransform) -> StepTransform | str:
    """ExcludeTransform on StepDicts, or the reason why its own code must run."""
    if transform.inverse:
        return "changes what the env is given"
    excluded = [path(key) for key in transform.excluded_keys]

    def drop(entries: StepDict, partly: bool) -> None:
        for key in [key for key in entries if _below(key, excluded)]:
            del entries[key]

    return Changed(drop)


def select(transform: T.SelectTransform) -> StepTransform:
    """SelectTransform on StepDicts."""
    parent = transform.parent
    kept: list[Key] = [*transform.selected_keys, *parent.state_spec.keys(True, True)]
    if transform.keep_reward_keys:
        kept += parent.reward_keys
    if transform.keep_done_keys:
        kept += parent.done_keys
    selected = [path(key) for key in kept]

    def keep(entries: StepDict, partly: bool) -> None:
        for key in [key for key in entries if not _below(key, selected)]:
            del entries[key]

    return Changed(keep)


def check(transform: T.FiniteTensorDictCheck) -> StepTransform:
    """FiniteTensorDictCheck on StepDicts."""

    def check_all(entries: StepDict, partly: bool) -> None:
        for value in entries.values():
            check_finite(value)

    return Changed(check_all)


def device_cast(transform: T.DeviceCastTransform, env: EnvBase) -> StepTransform | str:
    """DeviceCastTransform from the CPU to the CPU, or the reason why its own code must run."""
    devices = (transform.device, transform.orig_device, transform.parent.device, env.device)
    if any(device is not None and device.type != "cpu" for device in devices):
        return "moves tensors between devices"
    if transform.in_keys != transform.out_keys or transform.in_keys_inv != transform.out_keys_inv:
        return "moves entries to new names"
    return nothing()


def nothing() -> StepTransform:
    """A transform that leaves tensors as they are: of empty TensorDicts, say."""
    return Changed(lambda entries, partly: None)
