"""The examples at small size, and the code of the README, run as a user would run them."""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import tdcollect
from tdcollect import cli

from ..forkserver import Ended, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
README_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
README_COMMANDS = re.findall(r"^tdcollect (evaluate|compare|replay)( .*)$", README + OVERVIEW, re.M)


def run(name: str, out: Path, **flags: int | str) -> Ended:
    """Run an example in a process of its own."""
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    done = run_script(EXAMPLES / name, f"--output-dir={out}", *arguments, cwd=out)
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert not [line for line in warned if "/torchrl/" not in line]  # a newer tensordict's, to it
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    out = tmp_path_factory.mktemp("ppo")
    return run("ppo.py", out, env="CartPole-v1", frames=10_240, episodes=5, root=3), out


def test_ppo_prints_what_comes_and_what_it_has_measured_and_ends_with_its_pages(ppo) -> None:
    done, out = ppo
    first, *_, last = done.stdout.strip().splitlines()  # there is no terminal
    assert first == "PPO trains on CartPole-v1 for 10,240 frames, with test episodes beside it."
    assert f"It takes about half a minute. All goes to {out}.\n" in done.stdout
    halfway, trained = (tdcollect.EvaluationResult.load(out / n) for n in ("halfway", "trained"))
    for result in (halfway, trained):
        seeds = [tdcollect.env_seed(3, i) for i in range(5)]
        assert [episode.env_seed for episode in result.episodes] == seeds
    assert str(trained.summary()) in done.stdout
    compared = tdcollect.compare(halfway, trained, names=["halfway", "trained"])
    assert str(compared) in done.stdout
    assert trained.returns.mean() > 30  # of random actions: 22
    assert done.returncode == 0
    index = out / "pages" / "index.html"
    assert re.fullmatch(rf"All of it on pages, after \d+ s. Open {index}", last)
    links = {*re.findall('href="./(.*?)"', index.read_text())}
    pages = [f"{name}/report.html" for name in ("halfway", "trained")]
    assert links == {
        f"pages/{p}" for p in [*pages, "comparison/comparison.html", "curve/curve.html"]
    }


def test_ppo_draws_a_curve_of_test_episodes_and_names_the_best_checkpoint(ppo) -> None:
    done, out = ppo
    lines = (out / "curve" / "curve.csv").read_text().splitlines()[1:]
    means = {int(line.split(",")[0]): float(line.split(",")[3]) for line in lines}
    assert [*means] == list(range(1024, 10_241, 1024))
    for step, mean in means.items():
        assert f"{step:>9,} frames: mean return of test episodes {mean:.1f}\n" in done.stdout
    best = max(means, key=lambda step: means[step])
    assert f"Best checkpoint: {best:,} frames, mean return {means[best]:.1f}, {out}" in done.stdout
    weights = torch.load(out / "curve" / "best.pt", weights_only=True)
    actor = runpy.run_path(str(EXAMPLES / "ppo.py"))["actor"]
    policy = actor(tdcollect.make_env("CartPole-v1", 8))
    policy.load_state_dict(weights)
    again = tdcollect.evaluate("CartPole-v1", policy, 20, seed=1, progress=False)
    assert again.digest == lines[[*means].index(best)].split(",")[-1]


def test_ppo_leaves_weights_that_the_command_line_reads(ppo, capsys) -> None:
    _, out = ppo
    again = ["--env=CartPole-v1", f"--policy={EXAMPLES}/ppo.py:actor"]
    again.append(f"--checkpoint={out}/trained.pt")
    assert cli.main(["replay", f"{out}/trained", "2", *again]) == 0
    assert "the same to the bit" in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_on_ray_learns(tmp_path: Path) -> None:
    done = run("ray_ppo.py", tmp_path, frames=20_480, episodes=20)
    trained = tdcollect.EvaluationResult.load(tmp_path / "trained")
    assert trained.returns.mean() > 100
    assert done.returncode == 1 or "misses" not in done.stderr


@pytest.mark.behaviour(22)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("dqn.py", {"frames": 1536, "episodes": 3}),
        ("recurrent.py", {"frames": 1024}),
        ("recurrent_dqn.py", {"frames": 1280}),
    ],
)
def test_an_example_trains(name: str, flags: dict[str, int], tmp_path: Path) -> None:
    done = run(name, tmp_path, **flags)
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0
    if name == "dqn.py":
        assert len(results["test returns"]) == 3
        assert 0 < sum(results["training returns"]) <= 1536
        assert f"mean return of 3 test episodes: {results['mean test return']:.1f}" in done.stdout
    else:
        assert results["frames"] == flags["frames"]
        assert results["mean return of the last 50 episodes"] >= 8
        assert "mean return of the last 50 episodes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "flags"),
    [
        ("sac.py", "mujoco", "--frames 512 --episodes 2"),
        ("ppo_atari.py", "ale_py", "--frames 1024 --episodes 2 --max-steps 50"),
        ("multi_agent.py", "vmas", "--frames 6000 --episodes 2"),
        ("stable_baselines.py", "stable_baselines3", "--frames 256 --episodes 2"),
        ("cleanrl_agent.py", "gymnasium", "--frames 2048 --episodes 2"),
    ],
)
def test_an_example_compares_two_policies(
    name: str, needs: str, flags: str, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    code = (EXAMPLES / name).read_text()
    if name == "ppo_atari.py":  # the import stands in for torchvision where that is missing
        code = code.replace("import torch\n", "import benchmarks.torchrl_scripts\nimport torch\n")
    (tmp_path / name).write_text(code)
    done = run_script(tmp_path / name, *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r" minus .* on the same 2 episodes\n", done.stdout)


@pytest.mark.parametrize("block", range(len(README_BLOCKS)))
def test_readme_code_runs(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(README_BLOCKS[block], f"README.md, block {block}", "exec"), {})
    if block == 0:
        assert f"```\n{printed.getvalue()}```" in README
        pictures = re.findall('(?:src|srcset)="(.*?)"', README)  # in light and dark
        assert [(ROOT / path).is_file() for path in pictures] == [True] * 4


def test_readme_commands_run_as_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, from a clone in which `make demo` has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    actor = runpy.run_path(str(EXAMPLES / "ppo.py"))["actor"]
    weights = actor(tdcollect.make_env("Acrobot-v1", 8)).state_dict()
    torch.save(weights, tmp_path / "runs" / "demo" / "trained.pt")
    assert len(README_COMMANDS) >= 5
    for command in README_COMMANDS:
        assert cli.main(shlex.split("".join(command))) == 0, capsys.readouterr().err
    for page in ("lean/report.html", "random/report.html", "comparison/comparison.html"):
        assert (tmp_path / "runs" / page).is_file()
    lean = tdcollect.EvaluationResult.load("runs/lean")
    assert (len(lean.episodes), lean.manifest["seeds"]) == (100, {"root": 0})
