"""Audits: each kind of a made-up row is found, and no honest one is blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from scipy.stats import hypergeom
from torchrl.envs import TransformedEnv
from torchrl.envs import transforms as T

import tdcollect
from benchmarks.audits import SWITCHES, Product
from tdcollect.evaluation.ledger import Episode, sha256
from tdcollect.evaluation.replay import APART, CLOSE, EQUAL, FALSE, _bound
from tdcollect.evaluation.step_files import _write_block, read_block

from .envs import Leaking, Walk
from .ledgers import alter

pytestmark = pytest.mark.usefixtures("small_reports")
quiet = partial(tdcollect.evaluate, progress=False)
every = partial(tdcollect.audit, sample=None, seed=0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    quiet("CartPole-v1", None, 6, output_dir=tmp_path / "run")
    return tmp_path / "run"


def forge(run: Path, change: Callable[[dict[int, Episode], dict[int, Any]], Any]) -> None:
    """Change records and steps as a forger would, with all digests made anew."""
    lines, block = (run / "episodes.jsonl").read_text().splitlines(), run / "steps" / "000000.npz"
    records = {record.index: record for record in map(Episode.from_json, lines)}
    change(records, steps := {index: one.copy() for index, one in read_block(block).items()})
    _write_block(block, steps)
    text = "".join(record.to_json() + "\n" for record in records.values())
    (run / "episodes.jsonl").write_text(text)
    digests = {"ledger": sha256(run / "episodes.jsonl"), "manifest": sha256(run / "manifest.json")}
    alter(run / "results.json", {**digests, "steps": {block.name: sha256(block)}})


def raised(records: Any, steps: Any) -> None:
    records[2] = replace(records[2], episode_return=500.0)


def raised_in_steps(records: Any, steps: Any) -> None:
    raised(records, steps)
    steps[2]["reward/reward"][-1] += 500 - steps[2]["reward/reward"].sum()
    records[2] = replace(records[2], digest="0" * 64)


def longer(records: Any, steps: Any) -> None:
    records[2] = replace(records[2], episode_return=500.0, length=500, digest="0" * 64)
    steps[2] = np.resize(steps[2], 500)


def of_another_episode(records: Any, steps: Any) -> None:
    steps[2]["action/action"] = np.resize(steps[4]["action/action"], (len(steps[2]), 2))


def of_another_policy(records: Any, steps: Any) -> None:
    records[2] = replace(records[4], index=2, env_seed=records[2].env_seed,
                         policy_seed=records[2].policy_seed)  # fmt: skip


def a_success(records: Any, steps: Any) -> None:
    records[2] = replace(records[2], success=True, truncated=True)


FRAUDS = [raised, raised_in_steps, longer, of_another_episode, of_another_policy, a_success]


@pytest.mark.parametrize("fraud", FRAUDS)
def test_a_row_that_was_made_up_is_found(run: Path, fraud: Any) -> None:
    """And no other one is blamed."""
    forge(run, fraud)
    (audit,) = every(run)
    assert audit.verdicts == {**dict.fromkeys(range(6), EQUAL), 2: FALSE}
    assert audit.wrong == [2]
    assert "episode 2 is not what the ledger says: " in str(audit)
    assert audit.bound == 1 / 6


def test_the_command_tells(run: Path, typed, here) -> None:
    status, out, _ = typed(f"audit {run} --sample 3 --audit-seed 5")
    assert status == 0
    assert "3 episodes of 6 ran again by their actions (audit seed 5), 3 equal to the bit" in out
    forge(run, raised_in_steps)
    status, out, _ = typed(f"audit {run} --all --env CartPole-v1 --json")
    assert status == 1
    assert json.loads(out)["audits"][0]["verdicts"]["2"] == FALSE
    assert "at step" in json.loads(out)["audits"][0]["texts"][1]
    for command in (f"audit {run} --env Acro-v9", "audit nowhere", f"audit {run} --sample 0"):
        assert typed(command)[0] == 2
    (run / "steps" / "000000.npz").unlink()
    status, _, err = typed(f"audit {run}")
    assert (status, "steps/000000.npz: it is missing" in " ".join(err.split())) == (2, True)


def test_the_draw_follows_its_seed(run: Path) -> None:
    drawn = [[*tdcollect.audit(run, sample=2, seed=seed)[0].verdicts] for seed in range(9)]
    assert drawn[0] == [*tdcollect.audit(run, sample=2, seed=0)[0].verdicts]
    assert len({*map(tuple, drawn)}) > 1


@pytest.mark.parametrize(
    ("units", "drawn", "wrong"), [(50, 20, 0), (50, 20, 3), (7, 7, 1), (9, 1, 0)]
)
def test_the_bound_is_exact(units: int, drawn: int, wrong: int) -> None:
    likely = [n for n in range(wrong, units - drawn + wrong + 1)
              if hypergeom.cdf(wrong, units, n, drawn) > 0.05]  # fmt: skip
    assert _bound(units, drawn, wrong) == max(likely) / units


def turned(gain: float) -> Product:
    """The same products by another routine of BLAS, which rounds otherwise."""
    env = Product(gain=gain)
    env.weights = np.asfortranarray(env.weights)
    return env


@pytest.mark.parametrize(("gain", "verdict"), [(0.5, CLOSE), (4.0, APART)])
def test_rounding_is_told_from_a_false_row(tmp_path: Path, gain: float, verdict: str) -> None:
    """By the size of the first difference, where the outcome agrees; else it cannot be told."""
    env, other = partial(Product, gain=gain), partial(turned, gain)
    quiet(env, None, 3, output_dir=tmp_path / "run")
    assert {*every(tmp_path / "run", env)[0].verdicts.values()} == {EQUAL}
    (audit,) = every(tmp_path / "run", other)
    assert {*audit.verdicts.values()} == {verdict}
    says = {CLOSE: "ends as in the ledger, up to rounding", APART: "is not what the ledger says"}
    for index in range(3):
        assert audit.texts[index + 1].startswith(f"{verdict}: episode {index} {says[verdict]}: ")
    forge(tmp_path / "run", raised_in_steps)
    assert every(tmp_path / "run", other)[0].verdicts[2] in (FALSE, APART)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("switch", SWITCHES)
def test_other_instructions_blame_nobody(tmp_path: Path, switch: str) -> None:
    """Nor of an env with a matrix product by BLAS in each step."""
    quiet("CartPole-v1", None, 5, output_dir=tmp_path / "own")
    quiet(Product, None, 3, max_episode_steps=100, output_dir=tmp_path / "product")
    program = (
        "import sys, tdcollect; from benchmarks.audits import Product; _, own, product = sys.argv; "
        f"assert {{*tdcollect.audit(own)[0].verdicts.values()}} == {{{EQUAL!r}}}; "
        "assert not tdcollect.audit(product, Product)[0].wrong"
    )
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        program,
        tmp_path / "own",
        tmp_path / "product",
    ]
    subprocess.run(command, env=dict(os.environ, **dict([switch.split("=")])), check=True)


def scaled(*more: Any) -> Any:
    return TransformedEnv(tdcollect.make_env("Pendulum-v1"), T.Compose(T.ActionScaling(), *more))


def test_transforms_are_left_out_or_are_the_same(tmp_path: Path) -> None:
    """The env gets what it got below them, and what they may change is not compared."""
    run = tmp_path / "run"
    quiet(scaled, None, 4, max_episode_steps=9, output_dir=run)
    for env in (None, "Pendulum-v1", scaled):
        (audit,) = every(run, env)
        assert {*audit.verdicts.values()} == {EQUAL}
        assert ("no observations are compared" in str(audit)) == (env is not scaled)
    with pytest.raises(
        ValueError, match=r"got Pendulum-v1 under \['ActionScaling\([0-9a-f]+\)', 'R"
    ):
        every(run, partial(scaled, T.RewardSum()))
    forge(run, raised_in_steps)
    assert every(run)[0].wrong == [2]
    limited = partial(scaled, T.RewardScaling(0.0, 2.0), T.StepCounter(7))
    quiet(limited, None, 4, output_dir=tmp_path / "limited")
    (audit,) = every(tmp_path / "limited", "Pendulum-v1")
    assert {*audit.verdicts.values()} == {EQUAL}
    assert "no observations and rewards are compared" in str(audit)


def test_what_the_env_needs_is_in_the_manifest(tmp_path: Path) -> None:
    """Its arguments, and whether each episode had a new env; an env of another's must be named."""
    kwargs = {"sutton_barto_reward": True}
    quiet("CartPole-v1", None, 3, env_kwargs=kwargs, output_dir=tmp_path / "own")
    assert every(tmp_path / "own")[0].wrong == []
    quiet(Leaking, None, 5, output_dir=tmp_path / "leaking", num_envs=1)
    assert every(tmp_path / "leaking", Leaking)[0].wrong == []
    with pytest.raises(ValueError, match=r"expected --env ENV .*as Leaking is not gymnasium's own"):
        every(tmp_path / "leaking")
    walk: Any = lambda space: Walk(space)  # noqa: E731
    space = {"space": gym.spaces.Discrete(3)}
    metrics = {"first": lambda data: data["observation"][0, 0], "won": "info:is_success:last"}
    quiet(walk, None, 3, env_kwargs=space, metrics=metrics, output_dir=tmp_path / "other")
    assert every(tmp_path / "other", partial(walk, **space))[0].wrong == []


def test_batches_are_audited_whole(tmp_path: Path) -> None:
    vmas = pytest.importorskip("torchrl.envs.libs.vmas")
    if not vmas._has_vmas:
        pytest.skip("VMAS is not installed")

    def make() -> Any:
        return vmas.VmasEnv("balance", num_envs=3, n_agents=2)

    run = tmp_path / "run"
    quiet(make, None, 6, episodes_per_slot=1, max_episode_steps=5, output_dir=run)
    (audit,) = tdcollect.audit(run, make, sample=1, seed=0)
    assert [*audit.verdicts] in ([0, 1, 2], [3, 4, 5])
    assert ({*audit.verdicts.values()}, audit.bound) == ({EQUAL}, 0.5)
