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

from tdcollect.cli import main
from tdcollect.testing import Report, diagnose, doctor
from tdcollect.testing.checks import Divergence, select
from tdcollect.testing.doctor import GROUP
from tdcollect.testing.examination import Examination, Leak

from . import envs

ENVS = Path(__file__).with_name("envs.py")
SLOW = ("batches",)  # which starts processes


def quickly(env: Any, **kwargs: Any) -> Report:
    return diagnose(env, **{"max_episode_steps": 100, "skip": SLOW, **kwargs})


def check(report: Report, failed: set[str] = frozenset(), warned: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """These checks failed and warned, with advice, and no other."""
    found = {finding.name: finding.status for finding in report.findings}
    assert {name for name in found if found[name] == "failed"} == failed, report
    assert {name for name in found if found[name] == "warned"} == warned, report
    assert all(report[name].advice for name in failed | warned)
    assert report.passed == (not failed)


@pytest.mark.parametrize("env", [envs.Sound, envs.InfoAtTheEnd, envs.WithText, "Blackjack-v1"])
def test_sound_env(env: Any) -> None:
    report = quickly(env)
    check(report)
    assert {f.name for f in report.findings if f.status == "skipped"} == set(SLOW)


def test_batches_of_an_env_with_text_are_compared() -> None:
    report = quickly(envs.WithText, skip=())
    check(report)
    assert report["batches"].status == "passed"


def limited() -> Any:
    return gym.wrappers.TimeLimit(envs.NeverEnds(), 20)


def normalised() -> Any:
    return gym.wrappers.NormalizeObservation(gym.make("CartPole-v1"))


SEED, RANDOM = {"seed"}, {"seed", "global-random"}
HISTORY = "resumable='history' brings it back"
TOLD = [
    (envs.OwnGenerator, "failed", SEED, "of the env's own that reset(seed=) does not seed"),
    (envs.SumsInAnyOrder, "failed", SEED, "of rounding: sums in another order, as that of a set"),
    (envs.IgnoresSeed, "failed", SEED, "the env ignores its seed"),
    (envs.DrawsFromNumpy, "failed", RANDOM, "np.random: the runs agree once that"),
    (envs.DrawsFromPython, "failed", RANDOM, "Python's random: the runs agree once"),
    (envs.DrawsFromTorch, "failed", RANDOM, "torch: the runs agree once that global"),
    (envs.SeedsNumpy, "failed", {"global-random"}, "drawn from or seeded: np.random at reset"),
    (envs.SeedsHeld, "failed", {"global-random"}, "drawn from or seeded: tests.testing.envs.HELD"),
    (envs.Leaks, "failed", {"leaks"}, "seeded reset leaves these unlike: Leaks.wind (0 and"),
    (envs.LeaksInside, "failed", {"leaks"}, "state that the first observation does not show"),
    (envs.LeaksALittle, "failed", {"leaks"}, "a difference of the size of rounding"),
    (normalised, "failed", {"leaks"}, "leaves these unlike: NormalizeObservation.obs_rms.mean["),
    (envs.RaisesLater, "failed", {"leaks"}, "ZeroDivisionError: no seed 4"),
    (envs.FlagsAreInts, "failed", {"ends"}, "seed 0, step 1: terminated is int 0"),
    (envs.OutOfBounds, "failed", {"space"}, "is not in [-2.0, 2.0]"),
    (envs.NaNReward, "failed", {"numbers"}, "seed 0, step 1: nan"),
    (envs.ReusesItsBuffer, "failed", {"aliasing"}, "step 0: the observation was changed after"),
    (envs.GivesItsState, "failed", {"aliasing"}, "step 1: writing zeros into observations"),
    (envs.ChangesItsAction, "failed", {"actions"}, "clip into a new array"),
    (envs.RaisesUnseeded, "failed", {"seed"}, "ValueError: no seed"),
    (envs.Sound, "passed", {"resumes"}, "resumable=True brings it back"),
    (envs.InnerGenerator, "passed", {"resumes"}, HISTORY),
    (limited, "passed", {"ends"}, "7 were truncated; a time limit of 20 steps"),
    (envs.BadSnapshot, "warned", {"resumes"}, "nor does resumable='history': its snapshot()"),
    (envs.DrawsWhenMade, "warned", {"global-random"}, "np.random at construction"),
    (envs.ReplacesSeed, "warned", {"runs"}, "action_space.seed is 2, no method any more"),
    (envs.NeverEnds, "warned", {"ends"}, "no episode ended in 100 steps, and there is no"),
    (envs.EndsAtALimit, "warned", {"ends"}, "perhaps a time limit that is reported as"),
    (envs.WithoutChance, "warned", {"seed"}, "seeds 0 to 3 give one and the same episode"),
    (envs.RestartsItself, "warned", {"final"}, "an env that restarts itself"),
    (envs.GivesInfinity, "warned", {"numbers"}, "observation[1] is inf"),
    (envs.InfoChangesType, "warned", {"infos"}, "'speed' is a number at seed 0, step 0, and str"),
    (envs.InfoComesAndGoes, "warned", {"infos"}, "info 'right' is there at"),
]


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # noqa: NPY002


@pytest.mark.parametrize(
    ("env", "status", "names", "told"), TOLD, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_told_of_an_env(env: Any, status: str, names: set[str], told: str) -> None:
    before = global_states()
    report = quickly(env)
    assert global_states() == before
    check(report, **({} if status == "passed" else {status: names}))
    findings = [report[name] for name in names]
    assert {finding.status for finding in findings} == {status}
    texts = [" ".join((found.evidence, found.cause, found.advice)) for found in findings]
    assert sum(told in text for text in texts) == 1, report
    assert ("make_env(..., resumable='history')" in texts[0]) == (told == HISTORY)


# What is found is not told again by questions whose answer it would change.
ALL = [*select(GROUP)]
ONCE = [
    (envs.AllAge, "neighbours", ["leaks", "resumes", "batches"], "state that outlives the envs"),
    (envs.DrawsSeldom, "seed", ["leaks", "neighbours", "resumes", "batches"], "now and then"),
    (envs.SeedsAndDraws, "global-random", ["neighbours", "resumes", "batches"], "np.random at"),
    (envs.SharesState, "neighbours", ["resumes", "batches"], "state that envs share"),
    (envs.OtherDtype, "space", ["batches"], "expected float32, got float64"),
    (envs.GivesNaN, "numbers", ["space", "batches"], "observation[1] is nan"),
    (envs.TellsItsProcess, "batches", [], "'mission' differs"),
    (envs.RaisesWhenMade, "runs", ALL, "RuntimeError: no licence (envs.py, line"),
    (envs.RaisesInStep, "runs", ALL, "ZeroDivisionError: a step too far (envs.py, line"),
    (envs.FourValues, "runs", ALL, "step gave 4 values, expected (observation, reward, terminated"),
    (envs.the_same_env, "runs", ALL, "the callable gave the same env twice"),
    (envs.not_an_env, "runs", ALL, "expected a gymnasium.Env, got int"),
]


@pytest.mark.parametrize(
    ("env", "name", "unasked", "told"), ONCE, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_is_told_once(
    env: Any, name: str, unasked: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs.AllAge, "life_of_all", [0])
    monkeypatch.setattr(envs.DrawsSeldom, "left", 400)
    report = quickly(env, skip=())
    check(report, {name})
    assert told in f"{report[name].evidence} {report[name].cause}"
    for other in unasked:
        assert report[other].status == "skipped", other
        assert report[other].evidence.endswith(f"(see {name})")


@pytest.mark.parametrize("left", [150, 200])
def test_no_generator_is_blamed_that_was_not_drawn_from(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that differ once by chance agree by chance as well, however they are seeded."""
    monkeypatch.setattr(envs.DrawsSeldom, "left", left)
    report = quickly(envs.DrawsSeldom, skip=set(select(GROUP)) - {"seed"})
    check(report, {"seed"})
    assert "of the env's own that reset(seed=) does not seed" in report["seed"].cause


@pytest.mark.parametrize("other", ["leaks", "aliasing"])
def test_chance_is_a_fault_of_the_seed_alone(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a used env differs by rounding twice, as new ones do now and then."""
    before = doctor.rules.no_aliasing

    def and_then_chance(*args: Any) -> Any:
        monkeypatch.setattr(envs.DrawsSeldom, "left", 10)
        small = Divergence(0, 0, 7, "reward", 1.0, 1.0 + 1e-15, 1e-15)
        return Leak(small, 8, 800, True, []) if other == "leaks" else before(*args)

    place = (Examination, "_leak") if other == "leaks" else (doctor.rules, "no_aliasing")
    monkeypatch.setattr(envs.DrawsSeldom, "scale", 1e-6)
    monkeypatch.setattr(envs.DrawsSeldom, "left", 10**6)
    monkeypatch.setattr(*place, and_then_chance)
    report = quickly(envs.DrawsSeldom, skip={*select(GROUP)} - {"seed", other})
    check(report, {"seed"})
    assert ": seed 0, episode 0, step 10: observation" in report["seed"].evidence
    assert "of the size of rounding" in report["seed"].cause
    assert report[other].evidence == "runs differ by chance (see seed)"


def test_a_change_late_in_life_is_found_within_twice_the_steps() -> None:
    finding = quickly(envs.Ages, max_episode_steps=200)["leaks"]
    assert "after a life of 400 steps" in finding.evidence
    finding = quickly(envs.Ages, max_episode_steps=600)["leaks"]
    assert finding.status == "failed"
    assert finding.data["lifetime"] == 1200
    assert "Ages.life (0 and " in finding.cause
    assert "evaluate(..., fresh_envs=True)" in finding.advice


def test_slow_env_is_played_for_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdcollect.testing.examination.PLAY_SECONDS", 0.1)
    evidence = quickly(envs.Slow, skip=tuple(select(GROUP)))["runs"].evidence
    assert "to bound time or memory" in evidence


def test_batches_are_those_of_a_plain_loop_on_each_backend() -> None:
    others = set(select(GROUP)) - {"batches"}
    report = diagnose(envs.Nested, max_episode_steps=40, skip=others)
    check(report)
    assert "serial: 200 rows" in report["batches"].evidence
    assert "process: 200 rows" in report["batches"].evidence
    for env in (envs.Process, envs.Ordered):
        report = diagnose(env, max_episode_steps=40, skip=others)
        check(report, {"batches"})
        assert "backend='process' and a plain loop: slot 0, step 0" in report["batches"].evidence
        assert "the order of a set of strings" in report["batches"].cause


def test_envpool() -> None:
    pytest.importorskip("envpool")
    report = diagnose("CartPole-v1", backend="envpool", max_episode_steps=100)
    check(report)
    assert "new pools for seeded resets" in report["leaks"].evidence
    assert "envpool: 200 rows" in report["batches"].evidence
    with pytest.raises(ValueError, match=r"an id of envpool.list_all_envs\(\), got 'NoSuchEnv-v0'"):
        diagnose("NoSuchEnv-v0", backend="envpool")


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="expected a gymnasium id or a callable that makes a new"):
        diagnose(envs.Sound())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected backend to be None or 'envpool', got 'process'"):
        diagnose("CartPole-v1", backend="process")
    with pytest.raises(TypeError, match="backend='envpool' expects an EnvPool id"):
        diagnose(envs.Sound, backend="envpool")
    with pytest.raises(ValueError, match="expected max_episode_steps to be a positive int, got 0"):
        diagnose("CartPole-v1", max_episode_steps=0)
    with pytest.raises(ValueError, match=r"checks to skip to be of .*seed.*leaks.*got \['wind'\]"):
        diagnose("CartPole-v1", skip=["wind"])
    with pytest.raises(gym.error.NameNotFound, match="Did you mean: `CartPole`"):
        diagnose("CartPol-v1")


# --- the command, the page, the benchmark -----------------------------------------------------


def command(*arguments: str) -> int:
    short = ("--max-episode-steps", "60", "--skip", "batches")
    return main(["doctor", *arguments, *short])


def test_command_prints_the_table_or_json_and_exits_by_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("CartPole-v1", "--env-kwargs", '{"max_episode_steps": 9}') == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CartPole-v1: passed (13 passed, 1 skipped)\n\n  passed  ")
    assert "a time limit of 9 steps" in " ".join(printed.split())
    assert command(f"{ENVS}:Leaks", "--seed", "3", "--skip", "infos", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["env"], told["passed"]) == ("Leaks", False)
    (leak,) = [finding for finding in told["findings"] if finding["status"] == "failed"]
    assert leak["name"] == "leaks"
    assert (leak["data"]["seed"], leak["data"]["episode"], leak["data"]["step"]) == (4, 0, 1)
    assert leak["data"]["size"] == abs(leak["data"]["first"] - leak["data"]["second"])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (f"{ENVS}:Missing", "envs.py to have 'Missing', which it has not"),
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


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
CONSOLES = dict(re.findall(r"^```console\n\$ tdcollect (doctor .*)\n((?:.*\n)*?)```", PAGE, re.M))


@pytest.mark.parametrize("typed", CONSOLES)
def test_page_shows_what_is_printed(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status = main(typed.split())
    printed = capsys.readouterr().out
    assert printed == CONSOLES[typed]
    assert status == (0 if ": passed (" in printed else 1)
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M) == [*select("runs"), *select(GROUP)]


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
