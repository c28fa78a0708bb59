"""Whole episodes out of the blocks of the loop by episodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tdcollect.collect.episodes import Block, Piece
from tdcollect.collect.step_dict import Key, by_slot


def gather(blocks: Iterable[Block], batch_size: torch.Size) -> dict[Key, torch.Tensor]:
    """The steps of all episodes, contiguous, in the order of their numbers.

    Pieces of an episode whose env failed, and which started again under its number, are left out.

    Args:
        blocks: of a loop that ran to its end.
        batch_size: the env's.

    Returns:
        The entries, ``[sum of lengths, ...]`` each.
    """
    parts: list[dict[Key, torch.Tensor]] = []
    numbers: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    failed: list[int] = []
    for columns, pieces in blocks:
        if not pieces:
            continue
        steps = torch.cat([torch.arange(piece.first, piece.stop) for piece in pieces])
        slots = _each(pieces, [piece.slot for piece in pieces])
        numbers.append(_each(pieces, [piece.start.number for piece in pieces]))
        ids.append(_each(pieces, [piece.start.traj_id for piece in pieces]))
        failed += [piece.start.traj_id for piece in pieces if piece.error is not None]
        parts.append(
            {key: _rows(column, batch_size, slots, steps) for key, column in columns.items()}
        )
    order = torch.cat(numbers).argsort(stable=True)
    if failed:
        order = order[~torch.isin(torch.cat(ids)[order], torch.tensor(failed))]
    return {
        key: torch.cat([part[key] for part in parts])[_on(order, parts[0][key])] for key in parts[0]
    }


def _rows(
    column: torch.Tensor, batch_size: torch.Size, slots: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """The steps of the slots, out of an entry ``[*batch, t, ...]``."""
    flat = by_slot(column, batch_size)
    return flat[_on(slots, flat), _on(steps, flat)]


def _each(pieces: list[Piece], values: list[int]) -> torch.Tensor:
    """One value a piece, as one a step."""
    lengths = torch.tensor([piece.stop - piece.first for piece in pieces])
    return torch.tensor(values).repeat_interleave(lengths)


def _on(indices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return indices.to(like.device)
