"""The Python snippets of every page run, page by page, in their order.

A block that no test can run (other libraries, a GPU, a cluster) is fenced as ```py, and the text
around it shows why.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdcollect
from tdcollect.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Tests that also compare what is printed.
ELSEWHERE = {
    "README.md": "docs/test_examples.py",
    "docs/conformance.md": "testing/test_check_env.py",
    "docs/statistics.md": "evaluation/test_docs.py",
}


def blocks_of(page: str, language: str = "python") -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


PAGES = sorted(
    page
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*.md")]
    if (page := path.relative_to(ROOT).as_posix()) not in ELSEWHERE and blocks_of(page)
)
SLOW = ["docs/many-agents.md", "docs/many-checkpoints.md"]


def write_configs(page: str) -> None:
    """Write the YAML blocks of a page that begin with the name of a file."""
    for block in blocks_of(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", block):
            Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(named[1]).write_text(block)


def run_blocks(page: str, blocks: list[str]) -> dict[str, Any]:
    """Run blocks as the cells of a notebook, which may await; return their names."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        name = f"{page}, block {number}"
        code = compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, space)
        if inspect.iscoroutine(running):
            asyncio.run(running)
    return space


def test_the_env_of_a_file_on_a_page_fits_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (ROOT / "docs" / "evaluating.md").read_text()
    (block,) = (b for b in blocks_of("docs/evaluating.md") if "torch.save(tr" in b)
    exec(block, {"torch": torch, "tdcollect": tdcollect})
    (of_file,) = (b for b in blocks_of("docs/evaluating.md") if b.startswith("# envs.py"))
    Path("envs.py").write_text(of_file)
    (typed,) = re.findall(r"^tdcollect (evaluate envs.py:.*)$", page, re.M)
    assert main([*shlex.split(typed), "--episodes", "2", "--quiet"]) == 0
    del sys.modules["envs"]  # else the next envs.py would be refused


@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in PAGES]
)
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "hydra": "hydra",
        "stable-baselines3": "stable_baselines3",
        "single-episodes": "minari",
    }
    for name, needed in needs.items():
        if name in page:
            pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_configs(page)
    run_blocks(page, [block for block in blocks_of(page) if "RayWorkers" not in block])


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_other_tests_run_the_snippets_of_their_pages(page: str, test: str) -> None:
    text = (ROOT / "tests" / test).read_text()
    assert blocks_of(page)
    assert Path(page).name in text
    assert "```python" in text


def test_python_is_fenced_in_one_way() -> None:
    """As the pattern above finds it."""
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.M)
        odd = {name for name in fences if re.match(r"(?i)\s*(python|pycon|py)", name)}
        assert odd <= {"python", "py"}, page


def test_migration_shows_both_sides_for_each_system() -> None:
    _, *sections = (DOCS / "migration.md").read_text().split("\n## ")
    for name in ("Tianshou", "RLlib", "Stable-Baselines3", "torch-ac", "ilpyt"):
        (section,) = (text for text in sections if text.startswith(name))
        assert "There:\n\n```py\n" in section
        assert "Here:\n\n```python\n" in section
        assert "| there | here |" in section


def test_a_trainer_of_hydra_trains_the_same_with_both_collectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/hydra.md says: where the env's own seed is used, and not the trainer's."""
    hydra = pytest.importorskip("hydra")
    from torchrl.trainers.algorithms import configs  # noqa: F401

    monkeypatch.chdir(tmp_path)
    write_configs("docs/hydra.md")
    overrides = ["trainer.total_frames=2048", "trainer.progress_bar=false", "trainer.logger=null"]
    overrides += ["trainer.seed=null", "+training_env.seed=0"]

    def trained(target: str) -> Any:
        with hydra.initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
            config = hydra.compose("ppo", [*overrides, f"collector._target_={target}"])
        torch.manual_seed(0)
        trainer = hydra.utils.instantiate(config.trainer)
        trainer.train()
        return trainer

    ours, theirs = map(trained, ("tdcollect.Collector", "torchrl.collectors.Collector"))
    assert type(ours.collector) is tdcollect.Collector
    weights = ours.loss_module.state_dict()
    assert_close(weights, dict(theirs.loss_module.state_dict()), rtol=0, atol=0)
    assert ours.collector.stats.lifetime.steps == 2048
    # The collector's policy is another object, which the trainer keeps up to date.
    acting, learnt = ours.collector.policy, ours.loss_module.actor_network_params
    assert_close(dict(acting.state_dict()), learnt.flatten_keys(".").to_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_the_shell_loop_over_checkpoints(tmp_path: Path) -> None:
    """docs/many-checkpoints.md: the commands in a shell leave the files of the loop in Python."""
    first, *_ = blocks_of("docs/many-checkpoints.md")
    (tmp_path / "ppo.py").write_text(first.split("\n\n\nPath(")[0])
    subprocess.run([sys.executable, "-c", first], cwd=tmp_path, check=True)
    (loop,) = blocks_of("docs/many-checkpoints.md", "bash")
    program = shutil.which("tdcollect", path=Path(sys.executable).parent)
    assert program is not None
    loop = loop.replace("tdcollect ", f"{program} ")
    subprocess.run(["bash", "-e", "-c", loop], cwd=tmp_path, check=True)
    assert len([*tmp_path.glob("runs/shell/step-*/report.html")]) == 6
    assert (tmp_path / "runs" / "comparison" / "comparison.html").is_file()


@pytest.mark.slow
def test_the_page_on_jupyter_runs_in_a_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(block) for block in blocks_of("docs/jupyter.md")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.execute(notebook, cwd=str(tmp_path), timeout=200)
    shown = [{*output.get("data", ())} for cell in cells for output in cell.outputs]
    assert sum("text/html" in kinds for kinds in shown) == 4
