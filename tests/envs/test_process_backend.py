"""The ``process`` backend: ``serial``'s data to the bit, and what happens when an env fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcollect import make_env
from tdcollect.envs.backends import SerialBackend
from tdcollect.envs.process import backend as pool
from tdcollect.envs.process.backend import ProcessBackend, WorkerLost, usable_cores
from tdcollect.envs.slots import Backend, SlotError, Stepper
from tdcollect.envs.spaces import SlotBuffers

from ..testing.envs import Ordered
from ..workers.test_process_exit import runs
from ..zoo.process_envs import Drawn, Odd


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessBackend]]:
    """Makes process backends, closed at the end; forked, as that is quick."""
    made = []

    def build(factories: Sequence[Any], **options: Any) -> ProcessBackend:
        options = {"start_method": "fork", "num_workers": min(2, len(factories)), **options}
        made.append(ProcessBackend(factories, **options))
        return made[-1]

    yield build
    for backend in made:
        backend._pool.end()


def buffers(backend: Backend) -> SlotBuffers:
    return Stepper(backend).allocate(1)[0].raw


def arrays(out: SlotBuffers) -> list[np.ndarray]:
    return [*out.observation, *out.info, out.reward, out.terminated, out.truncated]


def actions(backend: Backend, value: int = 0) -> list[np.ndarray]:
    return [
        np.full((backend.num_envs, *leaf.shape), value, leaf.dtype)
        for leaf in backend.action.leaves
    ]


def pids(backend: ProcessBackend) -> list[int]:
    return [process.pid for process in backend._pool.processes]


def test_workers_hash_strings_alike(make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for seed in (None, None, "7"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        backend = make([Ordered] * 2, start_method="spawn")
        out = buffers(backend)
        backend.reset({0: 0, 1: 0}, None, out)
        seen.append(out.observation[0].tolist())
        assert seen[-1][0] == seen[-1][1]
    assert seen[0] == seen[1] != seen[2]


# --- the same data as serial -------------------------------------------------------------------

small = spaces.Box(-1, 1, (2,), np.float64)
OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (3,)),
    "scalar": spaces.Box(-1, 1, ()),
    "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "widened": spaces.Box(0, 60_000, (2,), np.uint16),
    "discrete": spaces.Discrete(5, start=-2),
    "many": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "even": spaces.MultiDiscrete([3, 3]),
    "bits": spaces.MultiBinary((2, 2)),
    "tuple": spaces.Tuple([small, spaces.Discrete(3)]),
    "stacked": spaces.Tuple([small, small]),
    "dict": spaces.Dict(a=small, b=spaces.Dict(c=spaces.Discrete(4), d=spaces.Tuple([small]))),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-1, 1, (2,)),
    "scalar": spaces.Box(-1, 1, (), np.float64),
    "many": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict(turn=spaces.Discrete(3), push=spaces.Tuple([small, small])),
}


def apply(backend: Backend, calls: Any, out: SlotBuffers) -> list[list[np.ndarray]]:
    """The contents of the buffers after each call; other slots keep theirs."""
    seen = []
    rng = np.random.default_rng(0)
    backend.reset({slot: slot for slot in range(backend.num_envs)}, None, out)
    for verb, slots, flag, left in calls:
        if verb == "reset":
            starts = {slot: slot + 5 if flag else None for slot in slots}
            backend.reset(starts, {"left": left} if left else None, out)
        else:
            draw = [rng.normal(size=(backend.num_envs, *e.shape)) for e in backend.action.leaves]
            given = [
                (3 * d).astype(np.float64 if flag and e.dtype.kind == "f" else e.dtype)
                for d, e in zip(draw, backend.action.leaves, strict=True)
            ]
            for entry in given:
                if entry.dtype.kind == "i":  # any pattern of 0 and 1 decodes to an action
                    entry[...] = entry > 0
            backend.step(given, slots if len(slots) < backend.num_envs else None, out)
        seen.append([array.copy() for array in arrays(out)])
    return seen


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, Any]:
    slots = draw(st.integers(1, 5))
    some = st.sets(st.integers(0, slots - 1), min_size=1).map(sorted)
    every = st.just(list(range(slots)))
    call = st.tuples(
        st.sampled_from(["step", "step", "reset"]), some | every, st.booleans(), st.integers(0, 3)
    )
    return slots, draw(st.integers(1, min(slots, 3))), draw(st.lists(call, min_size=1, max_size=12))


@settings(max_examples=20, deadline=None)
@given(plans(), st.sampled_from(list(OBSERVATIONS)), st.sampled_from(list(ACTIONS)), st.booleans())
def test_any_calls_give_what_serial_gives_to_the_bit(
    plan: Any, observation: str, action: str, categorical: bool
) -> None:
    slots, workers, calls = plan
    factories = [partial(Drawn, OBSERVATIONS[observation], ACTIONS[action])] * slots
    ours = ProcessBackend(factories, categorical, num_workers=workers, start_method="fork")
    try:
        backends = (ours, SerialBackend(factories, categorical))
        seen = []
        for backend in backends:
            backend.read_info({"left": 0, "noise": np.zeros(2), "sometimes": 0.0})
            seen.append(apply(backend, calls, buffers(backend)))
    finally:
        ours.close()
    for got, expected in zip(*seen, strict=True):
        for array, other in zip(got, expected, strict=True):
            assert array.dtype == other.dtype
            assert array.tobytes() == other.tobytes()


class Slow(Odd):
    """Takes so long for a call."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def reset(self, **given: Any) -> Any:
        time.sleep(self.seconds)
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


# --- how it starts -----------------------------------------------------------------------------


def test_there_are_as_many_workers_as_asked_for(make: Any) -> None:
    backend = make([Odd] * 5, num_workers=3)
    assert [list(p.slots) for p in backend._pool.processes] == [[0], [1, 2], [3, 4]]
    assert repr(backend) == "ProcessBackend(5 slots in 3 workers, fork)"
    # By default there is one a core, and no more than slots.
    assert usable_cores() == len(os.sched_getaffinity(0))
    for slots in (1, 64):
        backend = make([Odd] * slots, num_workers=None)
        assert len(pids(backend)) == min(slots, usable_cores())


def test_workers_and_parent_sleep_while_there_is_nothing_to_do(make: Any) -> None:
    def seconds(pid: int) -> float:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    backend = make([partial(Slow, 0.2)])
    out = buffers(backend)
    backend.reset(dict.fromkeys(range(1)), None, out)
    everyone = [os.getpid(), *pids(backend)]
    before = [seconds(pid) for pid in everyone]
    backend.step(actions(backend), None, out)
    time.sleep(0.2)
    assert [seconds(pid) - s < 0.13 for pid, s in zip(everyone, before, strict=True)] == [True] * 2


def test_forked_workers_draw_apart_from_global_random_states(make: Any) -> None:
    class Global(Odd):
        def reset(self, **_: Any) -> Any:
            return np.random.uniform(size=2), {}  # noqa: NPY002

    backend = make([Global] * 2)
    out = buffers(backend)
    backend.reset(dict.fromkeys(range(2)), None, out)
    assert not (out.observation[0][0] == out.observation[0][1]).all()


def test_a_callable_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be pickled \(.*lock.*use start_method='fork'"):
        make_env(lambda: lock and Odd(), 2, backend="process")


class Short(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)


@pytest.mark.parametrize(
    ("factories", "said"),
    [
        *(([*[Odd] * odd, Short, Odd], "the same action_space in every slot") for odd in (2, 3)),
        ([dict] * 2, "a callable that makes a single gymnasium.Env, got one that returned dict"),
        ([partial(gym.make_vec, "CartPole-v1")] * 2, "a callable that makes a single gymnasium"),
    ],
)
def test_what_serial_refuses_is_refused_in_its_words(make: Any, factories: Any, said: str) -> None:
    told = []
    for build in (make, SerialBackend):
        with pytest.raises((TypeError, ValueError), match=f"^expected {said}") as raised:
            build(factories)
        told.append((raised.type, str(raised.value).split(" at 0x")[0]))
    assert told[0] == told[1]


def test_an_env_that_cannot_be_made_raises_its_own_error_and_leaves_nothing(tmp_path: Any) -> None:
    log = tmp_path / "log"

    def fail() -> gym.Env:
        raise OSError("no more")

    factories = [partial(Odd, marker=str(log)), fail]
    with pytest.raises(OSError, match="no more") as raised:
        ProcessBackend(factories, num_workers=1, start_method="fork")
    assert "in fail\n" in str(raised.value.__cause__)
    assert log.read_text() == "closed\n"


def test_a_worker_that_dies_while_it_makes_its_env_is_told(make: Any) -> None:
    with pytest.raises(WorkerLost, match="the worker of slot 1 ended with exit code 9 while slot"):
        make([Odd, partial(os._exit, 9)])


# --- envs that fail ----------------------------------------------------------------------------


def second_step(backend: Backend, slots: Sequence[int] | None = None) -> SlotBuffers:
    """Two steps, in the second of which an :class:`Odd` env misbehaves."""
    out = buffers(backend)
    backend.reset({s: 10 + s for s in range(backend.num_envs)}, None, out)
    backend.step(actions(backend), None, out)
    try:
        backend.step(actions(backend), slots, out)
    except Exception as error:
        error.buffers = out  # type: ignore[attr-defined]
        raise
    return out


def odd_one(what: str, at: int = 1, of: int = 4) -> list[Any]:
    factories: list[Any] = [Odd] * of
    factories[at] = partial(Odd, what)
    return factories


def test_an_env_that_raises_is_named_with_its_seed_and_its_own_traceback(make: Any) -> None:
    with pytest.raises(SlotError, match=r"step\(\) of slot 1: ZeroDivisionError: the pole") as info:
        second_step(make(odd_one("raise_")))
    assert list(info.value.causes) == [1]
    cause = info.value.causes[1]
    assert type(cause) is ZeroDivisionError
    assert info.value.__cause__ is cause
    told = str(cause.__cause__)
    assert told.startswith("in the worker of slot 1, last reset with seed 11:\n\nTraceback")
    assert 'raise ZeroDivisionError("the pole' in told
    assert "worker.py" not in told


def test_exceptions_that_cannot_travel_are_told_in_words(make: Any) -> None:
    with pytest.raises(SlotError) as info:
        second_step(make([partial(Odd, "raise unpicklable"), partial(Odd, "raise exotic")]))
    for slot, (kind, text) in enumerate([("Stubborn", "cannot leave"), ("TwoArguments", "one")]):
        assert f"slot {slot}: RuntimeError: {kind}: {text}" in str(info.value)
        assert kind in str(info.value.causes[slot].__cause__)


# --- workers that are lost ---------------------------------------------------------------------


def test_a_worker_that_ends_is_noticed_at_once_and_its_slots_stay_lost(make: Any) -> None:
    backend, how = make(odd_one("leave")), "ended with exit code 7"
    expected = r"step\(\) of slot 0: WorkerLost: went with .* slot 1: WorkerLost: the worker of "
    with pytest.raises(SlotError, match=f"{expected}slots 0 to 1 {how} while slot 1 was") as info:
        second_step(backend)
    assert list(info.value.causes) == [0, 1]
    assert info.value.buffers.reward.tolist() == [1, 1, 2, 2]  # type: ignore[attr-defined]
    out = buffers(backend)
    calls = (
        lambda: backend.reset(dict.fromkeys(range(4)), None, out),
        lambda: backend.step(actions(backend), None, out),
    )
    for call in calls:
        with pytest.raises(SlotError, match=f"slots 0 to 1 {how}") as info:
            call()
        assert list(info.value.causes) == [0, 1]
    backend.step(actions(backend), [2, 3], out)
    assert out.reward.tolist() == [0, 0, 2, 2]
    backend.close()


def test_an_idle_worker_that_is_killed_is_noticed_at_the_next_call(make: Any) -> None:
    backend = make([Odd] * 4)
    out = buffers(backend)
    backend.reset(dict.fromkeys(range(4)), None, out)
    os.kill(pids(backend)[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(SlotError, match="slots 2 to 3 was killed by SIGKILL") as info:
        backend.step(actions(backend), None, out)
    assert time.monotonic() - start < 10
    assert list(info.value.causes) == [2, 3]
    assert out.reward.tolist() == [1, 1, 0, 0]


def test_an_env_that_hangs_is_ended_after_the_timeout(make: Any) -> None:
    backend = make(odd_one("hold the lock"), timeout=0.2)
    start = time.monotonic()
    expected = r"slots 0 to 1 was ended, as step\(\) took more than 0.2 s while slot 1 was at work"
    with pytest.raises(SlotError, match=expected):
        second_step(backend)
    assert time.monotonic() - start < 30
    assert [runs(pid) for pid in pids(backend)] == [False, True]


def test_many_slow_calls_are_no_hang(make: Any) -> None:
    backend = make([partial(Slow, 0.3)] * 4, num_workers=1, timeout=1.0)  # 1.2 s a step of all
    assert second_step(backend).reward.tolist() == [2, 2, 2, 2]


# --- slots built anew --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "lost"), [("spawn", True), ("fork", False)])
def test_slots_can_be_built_anew(make: Any, method: str, lost: bool) -> None:
    backend = make(odd_one("die" if lost else "raise_"), start_method=method)
    backend.read_info({"count": 0})
    with pytest.raises(SlotError) as info:
        second_step(backend)
    failed = list(info.value.causes)
    assert backend.rebuild([1]) == failed == ([0, 1] if lost else [1])
    out = buffers(backend)
    backend.reset(dict.fromkeys(failed), None, out)
    backend.step(actions(backend), None, out)
    assert out.observation[0][:, 0].tolist() == [1 if s in failed else 3 for s in range(4)]
    assert out.info[0].tolist() == [1 if s in failed else 3 for s in range(4)]


def test_an_env_with_other_spaces_is_no_replacement(make: Any, tmp_path: Path) -> None:
    def changing() -> gym.Env:
        first = not (tmp_path / "made").exists()
        (tmp_path / "made").touch()
        return Odd() if first else Short()

    backend = make([changing])
    with pytest.raises(ValueError, match="expected the same action_space in every slot"):
        backend.rebuild([0])


# --- interrupts and ends -----------------------------------------------------------------------


class Interrupt(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises, as Ctrl-C does."""

    def ring(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_a_step_that_is_interrupted_leaves_the_env_usable(make: Any) -> None:
    # A reset takes time, too: the answer to the step comes first, and is none to the reset.
    backend = make([partial(Slow, 0.1)] * 4)
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # amid the second step
    with pytest.raises(Interrupt):
        second_step(backend)
    out = buffers(backend)
    backend.reset(dict.fromkeys(range(4)), None, out)
    assert (out.observation[0] == 0).all()
    backend.step(actions(backend), None, out)
    assert (out.observation[0] == 1).all()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_closing_closes_each_env_ends_each_worker_and_leaves_no_descriptor(
    method: str, tmp_path: Any
) -> None:
    log = tmp_path / "log"

    def once() -> None:
        factories = [partial(Odd, marker=str(log))] * 2
        backend = ProcessBackend(factories, num_workers=1 + (method == "fork"), start_method=method)
        backend.read_info({"count": 0})
        second_step(backend)
        backend.close()
        assert not any(map(runs, pids(backend)))
        backend.close()

    once()
    assert log.read_text() == "closed\n" * 2
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_env_that_fails_to_close_raises_once_all_have_ended(make: Any) -> None:
    backend = make(odd_one("raise at close"))
    with pytest.raises(OSError, match="cannot close"):
        backend.close()
    assert not any(map(runs, pids(backend)))


def test_an_env_that_hangs_in_close_is_ended(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 0.3)
    backend = make(odd_one("hang at close"), grace=0.3)
    backend.close()
    assert not any(map(runs, pids(backend)))


def test_an_env_that_is_forgotten_ends_its_workers(tmp_path: Any) -> None:
    log = tmp_path / "log"
    factories = [partial(Odd, marker=str(log))] * 2
    backend = ProcessBackend(factories, num_workers=2, start_method="fork")
    workers = pids(backend)
    del backend
    assert not any(map(runs, workers))
    assert log.read_text() == "closed\n" * 2


def test_a_fork_of_the_parent_neither_ends_nor_keeps_its_workers(make: Any) -> None:
    backend = make([Odd] * 2)
    child = os.fork()
    if not child:
        backend._pool.end()  # as at the end of a program
        time.sleep(600)
    try:
        assert second_step(backend).reward.tolist() == [2, 2]
        start = time.monotonic()
        backend.close()
        assert time.monotonic() - start < pool.GRACE
        assert not any(map(runs, pids(backend)))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
