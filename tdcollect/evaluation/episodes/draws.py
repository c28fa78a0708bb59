"""Random numbers of a policy: each row draws from the stream of its own episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tdcollect._upstream.torchrl import TorchDispatchMode, schema_of
from tdcollect.collect.step_dict import sent
from tdcollect.randomness import NotReproducibleError

_CPU = torch.device("cpu")


def stream(seed: int) -> torch.Generator:
    """Return a generator for one episode, from a seed in ``[0, 2**64)``."""
    return torch.Generator().manual_seed(seed)


class RowNoise:
    """Draws for the samplers of a policy, each row from its own stream; a ``Noise``."""

    def __init__(self, by_row: DrawByRow):
        self._by_row = by_row
        # Draws, and their rows: each is written over the one before, which no sampler keeps.
        self._memory: dict[Any, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        return self._drawn(like, torch.Tensor.exponential_)

    def standard_normal(self, like: torch.Tensor) -> torch.Tensor:
        return self._drawn(like, torch.Tensor.normal_)

    def _drawn(self, like: torch.Tensor, draw: Any) -> torch.Tensor:
        key = (draw, like.shape, like.stride(), like.dtype)
        if (memory := self._memory.get(key)) is None:
            layout = torch.contiguous_format if draw is torch.Tensor.normal_ else None
            values = torch.ones_like(like, device=_CPU, memory_format=layout)
            memory = self._memory[key] = values, values.unbind(0)
        for row, generator in zip(memory[1], self._by_row.streams, strict=True):
            if generator is not None:
                draw(row, generator=generator)
        return memory[0] if like.is_cpu else sent(memory[0], like.device)


class DrawByRow(TorchDispatchMode):
    """Runs random operations row by row, each with one of ``streams``; None for no episode.

    Attributes:
        draws: the number of random operations.
        picks: True once rows were picked by their values: how many then depends on the batch.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.streams: Sequence[torch.Generator | None] = [None] * rows
        self.draws, self.picks = 0, False
        self._unused = stream(0)  # for rows of no episode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            if torch.Tag.dynamic_output_shape in func.tags:
                by_number = func is torch.ops.aten.index.Tensor
                self.picks |= not by_number or getattr(args[1][0], "dtype", None) == torch.bool
            return func(*args, **kwargs)
        self.draws += 1
        schema = schema_of(func)
        arguments = _by_name(schema, args, kwargs)
        tensor = next((v for v in arguments.values() if isinstance(v, torch.Tensor)), None)
        home = torch.device(arguments.get("device") or _CPU) if tensor is None else tensor.device
        on_cpu = arguments if home == _CPU else _on_cpu(schema, arguments)
        split = self._split(func, on_cpu)
        takes_generator = "generator" in arguments
        results = []
        for row, own in enumerate(self.streams):
            generator = own or self._unused
            of_row = {**on_cpu, **{name: parts[row] for name, parts in split.items()}}
            if takes_generator:
                of_row["generator"] = generator
            results.append(_call(func, of_row, None if takes_generator else generator))
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if written:
            for name in written if home != _CPU else ():
                arguments[name].copy_(sent(on_cpu[name], home))
            return arguments[written[0]]
        if isinstance(results[0], tuple):
            return tuple(sent(_joined(parts), home) for parts in zip(*results, strict=True))
        return sent(_joined(results), home)

    def _split(self, func: Any, arguments: dict[str, Any]) -> dict[str, list[Any]]:
        """Split the arguments that have the batch as their first dimension into rows.

        A multiple of the batch size is a batch that was flattened, several elements per row.
        """
        rows = len(self.streams)
        if rows == 1:  # all is of this row
            return {}
        tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        most = max((value.ndim for value in tensors.values()), default=0)
        split: dict[str, list[Any]] = {
            name: list(value.split(len(value) // rows))
            for name, value in tensors.items()
            if value.ndim == most > 0 and len(value) > 0 and len(value) % rows == 0
        }
        size = arguments.get("size")
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


# The ends of names of operations that have the tag of random ones, and draw nothing.
_DRAWS_NEVER = ("backward", "sdp_choice", "softmax_with_shape", "no_dropout_inplace")


def draws(
    func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return whether a call of an operation draws random numbers, as its tag alone does not say.

    Recurrent layers, attention and dropout draw in training alone, at a dropout that is not zero.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = schema_of(func)
    values = _by_name(schema, args, kwargs)
    if values.get("train", values.get("training")) is False or schema.name.endswith(_DRAWS_NEVER):
        return False
    names = ["dropout", "dropout_p", *["p"] * ("dropout" in schema.name)]
    rates = [values[name] for name in names if name in values]
    return not rates or any(rates)


def _by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return {**values, **dict(zip(values, args, strict=False)), **kwargs}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows; a single one may have no dimensions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _call(func: Any, arguments: dict[str, Any], generator: torch.Generator | None) -> Any:
    if generator is None:
        return func(**arguments)
    # The operation takes no generator: set the default one to this one's state meanwhile.
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(**arguments)
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def _on_cpu(schema: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    fills = len(tensors) == 1 and any(
        a.name == tensors[0] and a.alias_info and a.alias_info.is_write for a in schema.arguments
    )
    # Values that the operation does not read stay where they are: bringing them would wait.
    unread = fills or schema.name.endswith("like")
    moved: dict[str, Any] = {
        name: torch.empty_like(arguments[name], device=_CPU) if unread else arguments[name].cpu()
        for name in tensors
    }
    if arguments.get("device") is not None:
        moved["device"] = _CPU
    return {**arguments, **moved}
