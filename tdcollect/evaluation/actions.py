"""Check that the actions of a policy are those of the env's action spec.

An env would take the argmax of whatever stands where a one-hot action belongs, logits for one: a
policy that forgot to draw from its distribution would be evaluated as another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrl.data import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase

from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.step_dict import StepDict


class ActionCheck:
    """Checks the action entries: their shapes, dtypes, and values where the spec lists them.

    Floats must be asked for by the spec. Bounds of continuous actions are not checked: TorchRL and
    gymnasium let envs clip them.

    Args:
        env: the env with its transforms.
    """

    def __init__(self, env: EnvBase):
        spec = env.full_action_spec_unbatched
        self._specs = {key: spec[key] for key in env.action_keys}
        self._dims = len(env.batch_size)

    def first(self, rows: StepDict) -> None:
        """Check the outputs ``[B, ...]`` of a policy's first call.

        Raises:
            ValueError: naming the entry, and what was expected and came.
        """
        for key, spec in self._specs.items():
            values = rows.get(key)
            if values is None:
                continue  # the env tells it
            floats = values.is_floating_point() and not spec.dtype.is_floating_point
            if values.shape[1:] != spec.shape or floats or values.is_complex():
                raise ValueError(_told(key, spec, values[0]))
            _check_values(key, spec, values)

    def block(self, block: Block) -> None:
        """Check all actions of the episodes in a block.

        Raises:
            ValueError: as :meth:`first` does.
        """
        for key, spec in self._specs.items():
            column = block.entries.get(key)
            if column is not None and isinstance(spec, _LISTED):
                _check_values(key, spec, self._of(column, block.pieces))

    def _of(self, column: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """The rows of episodes ``[B, ...]``, out of a column ``[*batch, t, ...]``."""
        column = column.flatten(0, self._dims - 1) if self._dims else column.unsqueeze(0)
        return torch.cat([column[p.slot, p.begin : p.stop] for p in pieces] or [column[0, :0]])


_LISTED = (OneHot, MultiOneHot, Categorical, MultiCategorical, Binary)


def _check_values(key: Any, spec: TensorSpec, values: torch.Tensor) -> None:
    fits = _fitting(spec, values)
    if fits is not None and not fits.all():
        rows = fits.reshape(len(values), -1).all(-1)
        raise ValueError(_told(key, spec, values[int(rows.logical_not().nonzero()[0])]))


def _fitting(spec: TensorSpec, values: torch.Tensor) -> torch.Tensor | None:
    """Mark the values ``[B, *shape]`` that the spec lists; None where it lists none."""
    # Subclasses come before their bases.
    if isinstance(spec, MultiOneHot):
        blocks = values.split([box.n for box in spec.space], -1)
        return torch.stack([_one_hot(block) for block in blocks], -1)
    if isinstance(spec, OneHot):
        return _one_hot(values)
    if isinstance(spec, Binary):
        return (values == 0) | (values == 1)
    if isinstance(spec, MultiCategorical):
        return (values >= 0) & (values < spec.nvec.to(values.device))
    if isinstance(spec, Categorical):
        most = spec.space.n
        return (values >= 0) & (values < most) if most >= 0 else None
    return None


def _one_hot(values: torch.Tensor) -> torch.Tensor:
    return ((values == 0) | (values == 1)).all(-1) & (values.sum(-1) == 1)


def _told(key: Any, spec: TensorSpec, row: torch.Tensor) -> str:
    """Say what is wrong with an action, and what to do."""
    what = "actions"
    advice = "write what env.action_spec.rand() gives"
    if isinstance(spec, (OneHot, MultiOneHot)):
        what = "one-hot rows"
        advice = (
            "draw from the logits with ProbabilisticActor(distribution_class=OneHotCategorical), "
            "or write torch.nn.functional.one_hot(logits.argmax(-1), n)"
        )
        if row.shape == spec.shape and bool(_fitting(spec, row[None]).all()):  # type: ignore[union-attr]
            advice = (
                "write integers: torchrl.modules.OneHotCategorical draws them, and action.long() "
                "makes them of floats"
            )
    elif isinstance(spec, Binary):
        what = "bits"
        advice = "write integers or bools that are 0 or 1"
    elif isinstance(spec, (Categorical, MultiCategorical)):
        what = "numbers of choices"
        advice = "draw from the logits with a Categorical, or write logits.argmax(-1)"
    shape, dtype = tuple(spec.shape), str(spec.dtype).removeprefix("torch.")
    shown = str(row.detach().cpu().tolist())
    return (
        f"expected {what} of shape {shape} and dtype {dtype} in the policy's entry {key!r}, as the "
        f"env's action spec says, got {str(row.dtype).removeprefix('torch.')} of shape "
        f"{tuple(row.shape)}: {shown if len(shown) <= 80 else shown[:80] + '...'}; {advice}"
    )
