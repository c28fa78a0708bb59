"""Bad input: errors say what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from tdcollect import keys
from tdcollect.trajectories import (
    TrajectoryAssembler,
    TrajectoryIndex,
    discounted_returns,
    flatten_time,
    join_trajectories,
    returns,
    segment_sum,
    split_trajectories,
    unflatten_time,
    unpad,
)

from .batches import MASK, NEXT_DONE, make

DONE = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
SPLIT: Any = split_trajectories  # with arguments that its types forbid
JOIN: Any = join_trajectories
INDEX = TrajectoryIndex.of(make(DONE))


def having(key: Any, value: Any, **options: Any) -> TensorDictBase:
    batch = make(DONE, **options)
    batch[key] = value
    return batch


def fed(batch: TensorDictBase, *before: TensorDictBase, **options: Any) -> TensorDict:
    assembler = TrajectoryAssembler(**options)
    for one in before:
        assembler.feed(one)
    return assembler.feed(batch)


def of_unlike_shapes() -> TensorDictBase:
    rows = [TensorDict({"observation": torch.zeros(n), "done": torch.ones(1)}) for n in (1, 2)]
    return LazyStackedTensorDict(*rows, stack_dim=0)


IDS_OF_TWO = TensorDict({"traj_ids": torch.zeros(2, 4, 2, dtype=int)}, [2, 4])
NO_TIME = r"time dimension, \[\*N, T\], got batch_size \[\].*unsq"
OTHER_COUNT = "expected the 4 trajectories of the index, 8 steps"
SLOTS = "expected slots to divide the 8 steps"
FLAT = unpad(SPLIT(make(DONE)))
NO_ENTRIES = r"ids in .*'traj_ids'.* or done flags in .*'done'.*observ"
OTHER_IDS = r"'traj_ids'\) of shape \[2, 4\] or \[2, 4, 1\].*\[2, 4, 2"
OTHER_INDEX = r"batch of size \[2, 4\], as the index has it, got \[2, 3"
OTHER_VALUES = r"values of shape \[2, 4, '...'\].*batch size of the index.*got \[2, 3\]"
TWO_ORIGINS = "expected index= or trajectory_key= and done_key=, got both"
WITHOUT_IDS = make(DONE, ids=False)
NO_MASK = r"expected a mask in .*'mask'.*name the entry with mask_key="
CASES: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (ValueError, lambda: SPLIT(make(DONE)[0, 0]), NO_TIME),
    (ValueError, lambda: returns(make(DONE)[0, 0]), NO_TIME),
    (KeyError, lambda: SPLIT(WITHOUT_IDS.exclude(NEXT_DONE)), NO_ENTRIES),
    (KeyError, lambda: SPLIT(make(DONE), trajectory_key="m"), "entry 'm' with trajectory ids, got"),
    (KeyError, lambda: SPLIT(make(DONE), done_key="m"), "entry 'm' with done flags, got"),
    (KeyError, lambda: returns(make(DONE), key="mine"), "expected rewards in 'mine'.*name the en"),
    (ValueError, lambda: SPLIT(having(keys.COLLECTOR, IDS_OF_TWO)), OTHER_IDS),
    (
        ValueError,
        lambda: SPLIT(having(NEXT_DONE, torch.zeros(2, 4, 3, dtype=torch.bool), ids=False)),
        r"'done'\) of shape.*got \[2, 4, 3\]: name another",
    ),
    (TypeError, lambda: SPLIT(make(DONE, ids=torch.rand(2, 4))), r"integer ids .*torch\.float32"),
    (
        TypeError,
        lambda: SPLIT(having(NEXT_DONE, DONE.float().unsqueeze(-1), ids=False)),
        r"done flags of dtype torch\.bool, got torch\.float32",
    ),
    (ValueError, lambda: SPLIT(make(DONE), layout="a"), "'padded', 'jagged', 'flat' or 'list', go"),
    (ValueError, lambda: SPLIT(make(DONE), as_nested=True, layout="flat"), "as_nested or layout"),
    (TypeError, lambda: SPLIT({}), r"expected a TensorDict .* got dict"),
    (TypeError, lambda: JOIN({}), "a TensorDict or a list of TensorDicts, got dict"),
    (ValueError, lambda: SPLIT(make(DONE[:, :3]), index=INDEX), OTHER_INDEX),
    (ValueError, lambda: SPLIT(make(DONE), index=INDEX, done_key=NEXT_DONE), TWO_ORIGINS),
    (ValueError, lambda: segment_sum(torch.zeros(2, 3), INDEX), OTHER_VALUES),
    (ValueError, lambda: JOIN(make(DONE)), r"got batch_size \[2, 4\].*flatten_time\(batch\)"),
    (ValueError, lambda: JOIN([]), "at least one trajectory, got an empty list"),
    (ValueError, lambda: JOIN([make(DONE)]), r"of batch size \[length\], got \[2, 4\] at 0"),
    (ValueError, lambda: JOIN(SPLIT(make(~DONE)), INDEX), OTHER_COUNT),
    (ValueError, lambda: JOIN(SPLIT(make(~DONE), layout="list"), INDEX), OTHER_COUNT),
    (ValueError, lambda: JOIN(FLAT[:5], INDEX), "expected the 8 steps of the index, got 5"),
    (ValueError, lambda: returns(SPLIT(make(DONE), layout="jagged")), "got a nested tensor: make"),
    (KeyError, lambda: unpad(make(DONE)), NO_MASK),
    (TypeError, lambda: unpad(having(MASK, torch.ones(2, 4))), r"mask of dtype torch\.bool, got"),
    (ValueError, lambda: unflatten_time(FLAT, 3), SLOTS),
    (ValueError, lambda: unflatten_time(FLAT, (2, 3)), SLOTS),
    (ValueError, lambda: unflatten_time(make(DONE), 2), r"flat batch .*got batch_size \[2, 4\]"),
    (ValueError, lambda: discounted_returns(make(DONE), float("nan")), "between 0 and 1, got nan"),
    (ValueError, lambda: flatten_time(of_unlike_shapes()), r"of one shape .* lazily.*exclude"),
    (ValueError, lambda: fed(make(DONE), match="name"), "match to be 'slot' or 'id', got 'name'"),
    (ValueError, lambda: fed(make(DONE), lookback=-1), "lookback to be None or at least 0, got -1"),
    (RuntimeError, lambda: TrajectoryAssembler().chunks, "expected lookback= at construction"),
    (RuntimeError, lambda: TrajectoryAssembler(lookback=1).chunks, "expected a batch fed before"),
    (KeyError, lambda: fed(make(DONE).exclude(NEXT_DONE)), r"flags in .*'done'.*got .*done_key="),
    (KeyError, lambda: fed(WITHOUT_IDS, match="id"), "for match='id', got none"),
    (ValueError, lambda: fed(make(DONE[:1]), make(DONE)), "2 slots, as in the batch before, got 1"),
]


@pytest.mark.parametrize(("error", "call", "text"), CASES, ids=[text for *_, text in CASES])
def test_it_is_refused(error: type[Exception], call: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
