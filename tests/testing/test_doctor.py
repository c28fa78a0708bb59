"""The doctor: each fault fails its check, and a sound env passes all."""

from __future__ import annotations

import json
import random
import re
import runpy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdcollect import keys, make_env
from tdcollect.cli import main
from tdcollect.envs.differences import Row, first_divergence
from tdcollect.testing import Divergence, Finding, Report, diagnose
from tdcollect.testing.checks import select
from tdcollect.testing.doctor import GROUP, _compare_with_plain_loop
from tdcollect.testing.examination import Examination

from . import doctor_envs as envs

ENVS = Path(__file__).with_name("doctor_envs.py")
SLOW = ("batches", "speed")  # they start processes, and measure


def quickly(env: Any, **kwargs: Any) -> Report:
    return diagnose(env, **{"max_episode_steps": 100, "skip": SLOW, **kwargs})


def by_status(report: Report, status: str) -> set[str]:
    return {finding.name for finding in report.findings if finding.status == status}


# --- findings --------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [envs.Sound, envs.InfoAtTheEnd, envs.WithText, envs.Composite])
def test_sound_env(env: Any) -> None:
    report = quickly(env)
    assert by_status(report, "failed") == by_status(report, "warned") == set(), report
    assert by_status(report, "skipped") == set(SLOW)
    assert report.passed
    assert report.exit_code == 0
    report.raise_if_failed()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "Blackjack-v1"])
def test_sound_gymnasium_env(env_id: str) -> None:
    report = quickly(env_id)
    assert by_status(report, "failed") == by_status(report, "warned") == set(), report


BROKEN = [
    (envs.OwnGenerator, {"seed"}, "a generator of the env's own that reset(seed=) does not seed"),
    (envs.IgnoresSeed, {"seed"}, "the env ignores its seed"),
    (envs.DrawsFromNumpy, {"seed", "global-random"}, "np.random: the runs agree once that"),
    (envs.DrawsFromPython, {"seed", "global-random"}, "Python's random: the runs agree once"),
    (envs.DrawsFromTorch, {"seed", "global-random"}, "torch: the runs agree once that global"),
    (envs.SeedsNumpy, {"global-random"}, "drawn from or seeded: np.random at reset"),
    (envs.Leaks, {"leaks"}, "the same seeded reset leaves these unlike: Leaks.wind (0 and"),
    (envs.LeaksInside, {"leaks"}, "state that the first observation does not show"),
    (envs.LeaksALittle, {"leaks"}, "a difference of the size of rounding"),
    (envs.SharesState, {"neighbours"}, "state that envs share"),
    (envs.FlagsAreInts, {"ends"}, "seed 0, step 1: terminated is int 0"),
    (envs.OtherDtype, {"space"}, "seed 0, step 1: expected float32, got float64"),
    (envs.WithOtherText, {"space"}, "step 0, 'mission': 'go right' is not in Text"),
    (envs.OutOfBounds, {"space"}, "is not in [-2.0, 2.0]"),
    (envs.GivesNaN, {"numbers"}, "observation[1] is nan"),
    (envs.NaNReward, {"numbers"}, "seed 0, step 1: nan"),
    (envs.BoolReward, {"numbers"}, "seed 0, step 1: bool True"),
    (envs.ReusesItsBuffer, {"aliasing"}, "step 0: the observation was changed after it was given"),
    (envs.GivesItsState, {"aliasing"}, "step 1: writing zeros into observations given out changes"),
    (envs.ChangesItsAction, {"actions"}, "clip into a new array"),
]


@pytest.mark.parametrize(("env", "names", "told"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_broken_env(env: Any, names: set[str], told: str) -> None:
    report = quickly(env)
    assert by_status(report, "failed") == names, report
    assert by_status(report, "warned") == set()
    texts = [" ".join((v.evidence, v.cause, v.advice)) for v in report.failures]
    assert any(told in text for text in texts), report
    assert all(finding.advice for finding in report.failures)
    assert report.exit_code == 1


# What is found is not told again by questions whose answer it would change.
ONCE = [
    (envs.AllAge, "neighbours", ["leaks", "resumes", "batches"], "state that outlives the envs"),
    (envs.DrawsSeldom, "leaks", ["neighbours", "resumes", "batches"], "drawn now and then"),
    (envs.SeedsAndDraws, "global-random", ["neighbours", "resumes", "batches"], "np.random at"),
    (envs.SharesState, "neighbours", ["resumes", "batches"], "state that envs share"),
    (envs.OtherDtype, "space", ["batches"], "expected float32, got float64"),
    (envs.GivesNaN, "numbers", ["space", "batches"], "observation[1] is nan"),
    (envs.RaisesLater, "leaks", ["batches"], "ZeroDivisionError: no seed 4"),
    (envs.WithText, "batches", ["speed"], "mission'] is a Text space, which has no fixed-size"),
]


@pytest.mark.parametrize(
    ("env", "name", "unasked", "told"), ONCE, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_is_told_once(
    env: Any, name: str, unasked: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs.AllAge, "life_of_all", [0])
    monkeypatch.setattr(envs.DrawsSeldom, "left", 400)
    report = diagnose(env, max_episode_steps=100, skip=() if name == "batches" else ["speed"])
    assert by_status(report, "failed") == {name}, report
    assert by_status(report, "warned") == set()
    finding = report[name]
    assert told in f"{finding.evidence} {finding.cause}"
    for other in unasked:
        assert report[other].status == "skipped", other
        assert report[other].evidence.endswith(f"(see {name})")


def test_what_raises_is_told_once() -> None:
    report = quickly(envs.RaisesUnseeded)
    assert by_status(report, "failed") == {"seed"}, report
    assert str(report).count("ValueError: no seed") == 1, report


def test_a_change_late_in_life_is_found_within_twice_the_steps() -> None:
    finding = quickly(envs.Ages, max_episode_steps=200)["leaks"]
    assert "after a life of 400 steps" in finding.evidence
    finding = quickly(envs.Ages, max_episode_steps=600)["leaks"]
    assert finding.status == "failed"
    assert finding.data["lifetime"] == 1200
    assert "Ages.life (0 and " in finding.cause
    assert "evaluate(..., fresh_envs=True)" in finding.advice


RESUMABLE = [
    (envs.Sound, "passed", "resumable=True brings it back", ""),
    (envs.InnerGenerator, "passed", "resumable='history' brings it back", "resumable='history'"),
    (envs.Leaks, "passed", "resumable='history' brings it back", "resumable='history'"),
    (envs.BadSnapshot, "warned", "nor does resumable='history': its snapshot()", "snapshot()"),
]


@pytest.mark.parametrize(
    ("env", "status", "told", "advice"), RESUMABLE, ids=lambda v: getattr(v, "__name__", "")
)
def test_how_an_env_is_resumed_is_told(env: Any, status: str, told: str, advice: str) -> None:
    finding = quickly(env)["resumes"]
    assert finding.status == status
    assert told in finding.evidence
    assert advice in finding.advice


WARNED = [
    (envs.DrawsWhenMade, "global-random", "np.random at construction"),
    (envs.NeverEnds, "ends", "no episode ended in 100 steps, and the env has no time limit"),
    (envs.EndsAtALimit, "ends", "perhaps a time limit that is reported as terminated, or a game"),
    (envs.WithoutChance, "seed", "seeds 0 to 3 give one and the same episode"),
    (envs.RestartsItself, "final", "an env that restarts itself"),
    (envs.GivesInfinity, "numbers", "observation[1] is inf"),
    (envs.InfoChangesType, "infos", "info 'speed' is a number at seed 0, step 0, and str at seed"),
    (envs.InfoComesAndGoes, "infos", "info 'right' is there at"),
]


@pytest.mark.parametrize(("env", "name", "told"), WARNED, ids=lambda v: getattr(v, "__name__", ""))
def test_env_to_mind(env: Any, name: str, told: str) -> None:
    report = quickly(env)
    assert by_status(report, "failed") == set(), report
    assert by_status(report, "warned") == {name}, report
    finding = report[name]
    assert told in f"{finding.evidence} {finding.cause}"
    assert finding.advice
    assert report.exit_code == 0


RAISING = [
    (envs.RaisesWhenMade, "RuntimeError: no licence (doctor_envs.py, line"),
    (envs.RaisesInStep, "ZeroDivisionError: a step too far (doctor_envs.py, line"),
    (envs.FourValues, "step gave 4 values, expected (observation, reward, terminated"),
    (envs.the_same_env, "the callable gave the same env twice"),
    (envs.not_an_env, "expected a gymnasium.Env, got int"),
]


@pytest.mark.parametrize(("env", "told"), RAISING, ids=lambda v: getattr(v, "__name__", ""))
def test_env_that_does_not_run(env: Any, told: str) -> None:
    report = quickly(env, skip=())
    assert by_status(report, "failed") == {"runs"}
    assert told in report["runs"].evidence
    assert len(by_status(report, "skipped")) == len(report.findings) - 1


def test_env_that_raises_later() -> None:
    report = quickly(envs.RaisesLater)
    assert by_status(report, "failed") == {"leaks"}
    assert "ZeroDivisionError: no seed 4" in report["leaks"].evidence


def test_bipedal_walker_leaks() -> None:
    report = quickly("BipedalWalker-v3", max_episode_steps=200)
    assert by_status(report, "failed") == {"leaks"}, report
    found = report["leaks"].data
    # The evidence holds: a plain loop shows the same difference.
    fresh, used = (gym.make("BipedalWalker-v3") for _ in range(2))
    actions = fresh.action_space
    used.reset(seed=0)
    actions.seed(0)
    for _ in range(200):
        if any(used.step(actions.sample())[2:4]):
            break
    played = []
    for env in (fresh, used):
        if env is used:  # as the doctor did: an episode left unfinished in between
            env.reset(seed=1)
            actions.seed(0)
            for _ in range(2):
                env.step(actions.sample())
        rows = [env.reset(seed=found["seed"])[0]]
        actions.seed(0)
        rows += [env.step(actions.sample())[0] for _ in range(found["step"])]
        played.append(rows)
        env.close()
    assert (played[0][-1] != played[1][-1]).any()
    assert all((a == b).all() for a, b in zip(*[rows[:-1] for rows in played], strict=True))


def test_time_limit_of_a_wrapper_is_told() -> None:
    report = quickly(lambda: gym.wrappers.TimeLimit(envs.NeverEnds(), 20))
    assert report["ends"].status == "passed"
    assert "7 were truncated; a time limit of 20 steps" in report["ends"].evidence


def test_slow_env_is_played_for_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdcollect.testing.examination.PLAY_SECONDS", 0.3)
    evidence = quickly(envs.Slow, skip=tuple(select(GROUP)))["runs"].evidence
    assert "to bound time or memory" in evidence


def test_global_random_numbers_are_put_back() -> None:
    for env in (envs.DrawsFromNumpy, envs.DrawsFromPython, envs.DrawsFromTorch, envs.SeedsNumpy):
        states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
        quickly(env)
        assert torch.equal(states[0], torch.get_rng_state())
        assert (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
        assert states[2] == random.getstate()


def test_another_seed_tries_other_episodes() -> None:
    assert quickly(envs.Leaks, seed=7)["leaks"].data["seed"] == 8
    assert "seeds 7 to 10" in quickly(envs.Sound, seed=7)["seed"].evidence


# --- in tdcollect's hands --------------------------------------------------------------------


def test_batches_are_those_of_a_plain_loop_on_each_backend() -> None:
    finding = diagnose(envs.Sound, max_episode_steps=40, skip=["speed"])["batches"]
    assert finding.status == "passed"
    assert "serial: 200 rows" in finding.evidence
    assert "process: 200 rows" in finding.evidence


def test_actions_in_parts_reach_the_plain_loop_as_the_space_has_them() -> None:
    exam = Examination(envs.Composite, None, {}, 40, 0)
    _, found = _compare_with_plain_loop(exam, make_env(envs.Composite, 2), 40)
    exam.close()
    assert found == ""


def test_env_that_depends_on_its_process() -> None:
    report = diagnose(envs.Process, max_episode_steps=40, skip=["speed"])
    assert by_status(report, "failed") == {"batches"}
    assert "backend='process' and a plain loop: slot 0, step 0" in report["batches"].evidence


def test_speed_recommends_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdcollect.testing.doctor._MEASURED_SECONDS", 0.05)
    names = set(by_status(quickly(envs.Sound), "passed")) - {"runs"}
    finding = diagnose("CartPole-v1", max_episode_steps=50, skip=[*names, "batches"])["speed"]
    assert finding.status == "passed"
    figures = finding.data["frames_per_second"]
    assert [(f["backend"], f["num_envs"]) for f in figures] == [
        ("serial", 1),
        ("serial", 8),
        ("serial", 32),
        ("process", 8),
        ("process", 32),
    ]
    best = max(figure["frames_per_second"] for figure in figures)
    chosen = finding.data["recommended"]
    (rate,) = [f["frames_per_second"] for f in figures if chosen.items() <= f.items()]
    assert rate * 1.1 >= best
    assert f"num_envs={chosen['num_envs']}, backend={chosen['backend']!r}" in finding.advice
    assert 0 < finding.data["step_us"] < 10_000


def test_envpool() -> None:
    pytest.importorskip("envpool")
    report = diagnose("CartPole-v1", backend="envpool", max_episode_steps=100, skip=["speed"])
    assert by_status(report, "failed") == set(), report
    assert "new pools for seeded resets" in report["leaks"].evidence
    assert "envpool: 200 rows" in report["batches"].evidence
    with pytest.raises(ValueError, match=r"an id of envpool.list_all_envs\(\), got 'NoSuchEnv-v0'"):
        diagnose("NoSuchEnv-v0", backend="envpool")


# --- the first divergence --------------------------------------------------------------------


def row(observation: Any, reward: float = 0.0, terminated: bool = False) -> Row:
    values = observation, reward, terminated, False
    names = keys.OBSERVATION, keys.REWARD, keys.TERMINATED, keys.TRUNCATED
    return Row(dict(zip(names, values, strict=True)))


def test_first_divergence_names_episode_step_entry_and_size() -> None:
    first = [[row(np.zeros(3)), row(np.ones(3))], [row(np.zeros(3)), row(np.array([1.0, 2, 3]))]]
    second = [[row(np.zeros(3)), row(np.ones(3))], [row(np.zeros(3)), row(np.array([1.0, 2.5, 5]))]]
    found = first_divergence(4, first, second)
    assert found == Divergence(4, 1, 1, "observation[2]", 3.0, 5.0, 2.0)
    assert str(found) == "seed 4, episode 1, step 1: observation[2] is 3 and 5 (2 apart)"


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            row({"a": (np.zeros(1), 1)}),
            row({"a": (np.zeros(1), 3)}),
            "observation['a'][1] is 1 and",
        ),
        (row(np.zeros(2)), row(np.zeros(3)), "the shape of observation is [2] and [3]"),
        (row("up"), row("down"), "observation is 'up' and 'down'"),
        (row(1, 2.0), row(1, 2.5), "reward is 2 and 2.5 (0.5 apart)"),
        (row(1, 2.0, True), row(1, 2.0), "terminated is True and False (1 apart)"),
        (row(np.array([np.nan])), row(np.zeros(1)), "observation[0] is nan and 0 (inf apart)"),
    ],
)
def test_first_divergence_of_any_entry(first: Row, second: Row, told: str) -> None:
    assert f"seed 0, episode 0, the reset: {told}" in str(
        first_divergence(0, [[first]], [[second]])
    )


def test_runs_of_other_lengths_diverge_where_one_ends() -> None:
    found = first_divergence(0, [[row(1), row(1)]], [[row(1), row(1), row(1)]])
    assert found == Divergence(0, 0, 1, "length", 1, 2, 1.0)


numbers = st.floats(allow_nan=True, width=32)


@given(st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1), st.data())
def test_first_divergence_is_the_first(values: list[list[float]], data: Any) -> None:
    run = [[row(np.array(value, np.float32)) for value in values]]
    assert first_divergence(0, run, run) is None
    at = data.draw(st.integers(0, len(values) - 1))
    changed = [[*run[0]]]
    for later in range(at, len(values)):
        other = values[later][1]
        changed[0][later] = row(
            np.array([values[later][0], 1.0 if other != 1 else 2.0], np.float32)
        )
    found = first_divergence(0, run, changed)
    assert found is not None
    assert (found.step, found.entry) == (at, "observation[1]")


# --- the table, JSON, the command --------------------------------------------------------------


def test_table() -> None:
    findings = (
        Finding("seed", "a seed decides", "passed", "4 seeds"),
        Finding("leaks", "nothing leaks", "failed", "at 3", "a wind", "a" * 40 + " " + "b" * 40),
        Finding("final", "final observations", "passed", ""),
    )
    assert str(Report("Windy-v0", findings)).splitlines() == [
        "Windy-v0: failed (2 passed, 1 failed)",
        "",
        "  passed   seed   4 seeds",
        "  failed   leaks  at 3",
        "                  cause: a wind",
        f"                  do: {'a' * 40}",
        f"                    {'b' * 40}",
        "  passed   final  final observations",
    ]
    with pytest.raises(AssertionError, match=r"Windy-v0: failed .*\n  failed +leaks  at 3"):
        Report("Windy-v0", findings).raise_if_failed()
    with pytest.raises(KeyError, match=r"expected one of \['seed', 'leaks', 'final'\], got 'wind'"):
        Report("Windy-v0", findings)["wind"]


def command(*arguments: str) -> int:
    return main(
        ["doctor", *arguments, "--max-episode-steps", "60", "--skip", "batches", "--skip", "speed"]
    )


def test_command_prints_the_table_and_exits_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("CartPole-v1") == 0
    assert capsys.readouterr().out.startswith(
        "CartPole-v1: passed (13 passed, 2 skipped)\n\n  passed  "
    )
    assert command(f"{ENVS}:Leaks") == 1
    assert capsys.readouterr().out.startswith("Leaks: failed (12 passed, 1 failed, 2 skipped)\n")


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"{ENVS}:Leaks", "--seed", "3", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["env"], told["passed"]) == ("Leaks", False)
    (leak,) = [finding for finding in told["findings"] if finding["name"] == "leaks"]
    assert leak["status"] == "failed"
    assert (leak["data"]["seed"], leak["data"]["episode"], leak["data"]["step"]) == (4, 0, 1)
    assert leak["data"]["size"] == abs(leak["data"]["first"] - leak["data"]["second"])


def test_command_passes_env_kwargs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("CartPole-v1", "--env-kwargs", '{"max_episode_steps": 9}') == 0
    assert "a time limit of 9 steps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (f"{ENVS}:Missing", "doctor_envs.py to have 'Missing', which it has not"),
        (f"{ENVS}:A_NUMBER", "as new envs are compared with used ones, got 5"),
        ("no_such_module:make", "there is no module no_such_module in"),
        ("no_such_module:Env-v0", "No module named 'no_such_module'"),
        ("CartPol-v1", "Environment `CartPol` doesn't exist. Did you mean: `CartPole`?"),
        ("CartPole-v9", "It provides versioned environments: [ `v0`, `v1` ]."),
        ("No id", "Malformed environment ID: No id."),
    ],
)
def test_an_env_that_is_not_there_is_told_in_one_line(
    typed: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo says nothing about an env."""
    assert command(typed) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tdcollect: ")
    assert told in captured.err
    assert captured.err.count("\n") == 1


def test_an_unknown_id_raises() -> None:
    with pytest.raises(gym.error.NameNotFound, match="Did you mean: `CartPole`"):
        diagnose("CartPol-v1")


ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / page).read_text() for page in ("README.md", "docs/doctor.md")]
SHOWN = re.compile(r"^```console\n\$ tdcollect (doctor .*)\n((?:.*\n)*?)```", re.M)
CONSOLES = dict(found for page in PAGES for found in SHOWN.findall(page))


@pytest.mark.parametrize("typed", CONSOLES)
def test_docs_show_what_is_printed(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status = main(typed.split())
    printed = capsys.readouterr().out
    assert printed == CONSOLES[typed]
    assert status == (0 if ": passed (" in printed else 1)


def test_docs_show_a_sound_and_a_broken_env_and_name_each_check() -> None:
    assert len(CONSOLES) == 2
    names = [finding.name for finding in quickly(envs.RaisesWhenMade).findings]
    assert re.findall(r"^\| `([\w-]+)` \|", PAGES[1], re.M) == names


def test_bad_arguments() -> None:
    with pytest.raises(
        TypeError, match="expected a gymnasium id or a callable that makes a new env"
    ):
        diagnose(envs.Sound())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected backend to be None or 'envpool', got 'process'"):
        diagnose("CartPole-v1", backend="process")
    with pytest.raises(TypeError, match="backend='envpool' expects an EnvPool id"):
        diagnose(envs.Sound, backend="envpool")
    with pytest.raises(ValueError, match="expected max_episode_steps to be a positive int, got 0"):
        diagnose("CartPole-v1", max_episode_steps=0)
    with pytest.raises(ValueError, match=r"checks to skip to be of .*seed.*leaks.*got \['wind'\]"):
        diagnose("CartPole-v1", skip=["wind"])


def test_nested_observations() -> None:
    report = diagnose(envs.Nested, max_episode_steps=60, skip=["speed"])
    assert by_status(report, "failed") == by_status(report, "warned") == set(), report


def test_script_writes_a_table_of_what_it_is_given() -> None:
    tables = runpy.run_path(str(ROOT / "benchmarks" / "doctor.py"))["tables"]
    given = (envs.Sound, envs.Leaks, envs.RaisesWhenMade)
    text = tables([quickly(env).to_dict() for env in given], 100)
    row = next(line for line in text.splitlines() if line.startswith("| env |"))
    assert row.split(" | ")[1:4] == ["seed", "leaks", "global-random"]
    assert "\n| Sound | passed | passed | passed |" in text
    assert "\n| Leaks | passed | **failed** | passed |" in text
    assert "\n- Leaks, leaks (failed): a new env, and one used before" in text
    assert text.endswith(
        "Envs that could not be made here:\n\n- RaisesWhenMade: RuntimeError: no licence\n"
    )
