"""Seeds of slots and episodes: protocol 2, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcollect import env_seed, policy_seed, slot_seed
from tdcollect.seeding import EVALUATION_PROTOCOL, slot_seeds

roots = st.integers(0, 2**63)
episodes = st.integers(0, 2**31)


def spawned(root: int, episode: int, stream: int) -> np.random.SeedSequence:
    """The sequence of the protocol by another way: children are spawned, not addressed."""
    child = np.random.SeedSequence(root).spawn(episode + 1)[episode]
    return child.spawn(stream + 1)[stream]


def test_seeds_are_those_of_spawned_sequences_and_do_not_change() -> None:
    for root, episode in ((0, 0), (1, 7), (12345, 100), (2**64 + 1, 1)):
        word = int(spawned(root, episode, 0).generate_state(1)[0])
        assert env_seed(root, episode) == word // 2
        low, high = map(int, spawned(root, episode, 1).generate_state(2))
        assert policy_seed(root, episode) == low + (high << 32)
    assert EVALUATION_PROTOCOL == 2
    # Written down once: a result published with a root must be reproducible with it.
    assert [env_seed(0, i) for i in range(3)] == [2044266242, 1976665982, 980756183]
    assert policy_seed(0, 0) == 14898058564793133489


def test_10_000_episodes_differ() -> None:
    # 31 bits leave 10,000 draws a 2 percent chance of one collision: this root has none.
    assert len({env_seed(0, i) for i in range(10_000)}) == 10_000
    assert len({policy_seed(0, i) for i in range(10_000)}) == 10_000


@given(roots, roots, episodes)
@settings(max_examples=50)
def test_roots_differ_and_seeds_are_such_as_libraries_take(root: int, other: int, i: int) -> None:
    assert (policy_seed(root, i) == policy_seed(other, i)) is (root == other)
    assert 0 <= env_seed(root, i) < 2**31
    assert 0 <= policy_seed(root, i) < 2**64
    assert type(env_seed(root, i)) is type(policy_seed(root, i)) is int


def test_an_int_gives_slot_0_itself_and_the_others_seeds_that_do_not_change() -> None:
    for root, slot in ((0, 1), (7, 3), (2**64 + 1, 100)):
        assert slot_seed(root, slot) == int(spawned(root, slot, 6).generate_state(1)[0]) // 2
        assert slot_seeds(root, [0, slot]) == [root, slot_seed(root, slot)]
    assert slot_seeds(np.int64(0), range(4)) == [0, 117767107, 1774837835, 1672253589]


def test_slots_of_roots_in_a_row_and_test_episodes_share_no_seed() -> None:
    roots = range(50)
    slots = [slot_seed(root, slot) for root in roots for slot in range(64)]
    tested = [env_seed(root, episode) for root in roots for episode in range(64)]
    assert len({*slots, *tested}) == len(slots) + len(tested)


def test_one_seed_a_slot_is_taken_as_it_is() -> None:
    for seeds in ([5, 3], (5, 3), np.array([5, 3])):
        result = slot_seeds(seeds, [0, 2])
        assert result == [5, 3]
        assert all(type(seed) is int for seed in result)
    with pytest.raises(ValueError, match=r"one seed for each of the 2 slots .*got 3 seeds; pass 2"):
        slot_seeds([1, 2, 3], range(2))


INT, INTS = "expected a seed that is an int or one int per slot", "expected seeds that are ints"


@pytest.mark.parametrize(
    ("seeds", "error", "said"),
    [
        *((seeds, ValueError, "expected seeds that are not negative") for seeds in (-1, [3, -1])),
        *((seeds, TypeError, INT) for seeds in (1.0, True, "12", b"12", None, {1, 2})),
        *((seeds, TypeError, INTS) for seeds in ([1, 2.0], [True, 2], np.array([0.0, 1.0]))),
    ],
    ids=repr,
)
def test_other_seeds_are_refused(seeds: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        slot_seeds(seeds, range(2))
