"""Random numbers of a policy, drawn row by row from the streams of the episodes.

Each row of a batch belongs to an episode, which has its own generator. A random operation on the
batch runs once per row, with that row's generator, so an episode's draws do not depend on the
episodes that run beside it.

All numbers are drawn on the CPU, also for a policy on a GPU: they are the same there, whatever the
GPU, and cross together, where drawing on the GPU would take a kernel per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcollect._upstream.modules import TorchDispatchMode, schema_of
from tdcollect.collect.step_dict import sent
from tdcollect.evaluation.episodes.isolation import NotReproducibleError

_CPU = torch.device("cpu")
_RANDOM = torch.Tag.nondeterministic_seeded


class Streams:
    """One generator per row of the batch that the policy runs on.

    Args:
        rows: the size of the batch.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.current: Sequence[torch.Generator | None] = [None] * rows
        self._unused = stream(0)  # for rows of no episode

    def of_row(self, row: int) -> torch.Generator:
        """The generator that a row draws from."""
        return self.current[row] or self._unused


def stream(seed: int) -> torch.Generator:
    """Return a generator for one episode, from a seed in ``[0, 2**64)``."""
    return torch.Generator().manual_seed(seed)


class RowNoise:
    """Draws for the samplers of a policy, each row from its own stream; a ``Noise``.

    Args:
        streams: the rows' streams.
    """

    def __init__(self, streams: Streams):
        self._streams = streams

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the exponential distribution of rate 1, of the shape and dtype given."""
        drawn = torch.ones_like(like, device=_CPU)
        for row, generator in zip(drawn.unbind(0), self._streams.current, strict=True):
            if generator is not None:
                row.exponential_(1, generator=generator)
        return sent(drawn, like.device)

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        """Draws from the standard normal distribution, of the shape and dtype given."""
        drawn = torch.zeros(like.shape, dtype=like.dtype)
        for row, generator in zip(drawn.unbind(0), self._streams.current, strict=True):
            if generator is not None:
                row.normal_(generator=generator)
        return sent(drawn, like.device)


class DrawByRow(TorchDispatchMode):
    """Runs every random operation row by row.

    Args:
        streams: the rows' streams.

    Attributes:
        draws: the number of operations that it has run so.

    Raises:
        NotReproducibleError: if the draws of an operation cannot be assigned to rows.
    """

    def __init__(self, streams: Streams):
        super().__init__()
        self._streams = streams
        self.draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _RANDOM not in func.tags:
            return func(*args, **kwargs)
        self.draws += 1
        schema = schema_of(func)
        names = [argument.name for argument in schema.arguments]
        asked = {**dict(zip(names, args, strict=False)), **kwargs}
        home = _device(asked)
        given = asked if home == _CPU else _on_cpu(schema, asked)
        split = self._split(func, given)
        takes_generator = "generator" in names
        results = []
        for row in range(self._streams.rows):
            mine = {**given, **{name: parts[row] for name, parts in split.items()}}
            generator = self._streams.of_row(row)
            if takes_generator:
                mine["generator"] = generator
            results.append(_call(func, schema, mine, None if takes_generator else generator))
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if written:
            for name in written if home != _CPU else ():
                asked[name].copy_(sent(given[name], home))
            return asked[written[0]]
        if isinstance(results[0], tuple):
            return tuple(sent(_joined(parts), home) for parts in zip(*results, strict=True))
        return sent(_joined(results), home)

    def _split(self, func: Any, given: dict[str, Any]) -> dict[str, list[Any]]:
        """Split the arguments that have the batch as their first dimension into rows.

        A multiple of the batch size is a batch that was flattened, several elements per row.
        """
        rows = self._streams.rows
        if rows == 1:  # all is of this row
            return {}
        tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
        most = max((value.ndim for value in tensors.values()), default=0)
        split: dict[str, list[Any]] = {
            name: list(value.split(len(value) // rows))
            for name, value in tensors.items()
            if value.ndim == most > 0 and len(value) > 0 and len(value) % rows == 0
        }
        size = given.get("size")
        if size and size[0] and size[0] % rows == 0:
            split["size"] = [[size[0] // rows, *size[1:]]] * rows
        if not split:
            shapes = [list(value.shape) for value in tensors.values()]
            shape = list(size) if size is not None else next(iter(shapes), "unknown")
            raise NotReproducibleError(
                f"the policy draws random numbers of shape {shape} ({func}), which cannot be "
                f"assigned to rows: expected a batch of {rows} rows in front, one per episode. "
                "Draw for each row of the observations, or evaluate a policy without this draw"
            )
        return split


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows; a single one may have no dimensions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _call(func: Any, schema: Any, given: dict[str, Any], generator: torch.Generator | None) -> Any:
    args = [given[a.name] for a in schema.arguments if a.name in given and not a.kwarg_only]
    kwargs = {a.name: given[a.name] for a in schema.arguments if a.name in given and a.kwarg_only}
    if generator is None:
        return func(*args, **kwargs)
    # The operation takes no generator: set the default one to this one's state meanwhile.
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _device(given: dict[str, Any]) -> torch.device:
    for value in given.values():
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(given.get("device") or _CPU)


def _on_cpu(schema: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a random operation, on the CPU."""
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    fills = len(tensors) == 1 and any(
        a.name == tensors[0] and a.alias_info and a.alias_info.is_write for a in schema.arguments
    )
    # Values that the operation does not read stay where they are: bringing them would wait.
    unread = fills or schema.name.endswith("like")
    moved: dict[str, Any] = {
        name: torch.empty_like(given[name], device=_CPU) if unread else given[name].cpu()
        for name in tensors
    }
    if given.get("device") is not None:
        moved["device"] = _CPU
    return {**given, **moved}
