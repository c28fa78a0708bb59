"""Exports: Stable-Baselines3's own files, a pandas DataFrame."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdcollect import EvaluationResult, evaluate
from tdcollect.cli import main
from tdcollect.evaluation import export, summarize
from tdcollect.evaluation.lerobot import load_policy

from ..docs.test_docs import blocks_of
from .ledgers import ledger, manifest

# pandas


def test_pandas_reads_a_ledger(tmp_path: Path) -> None:
    """To the last digit, as docs/evaluating.md says, without tdcollect."""
    pandas = pytest.importorskip("pandas")
    result = evaluate("CartPole-v1", None, 4, output_dir=tmp_path / "one", progress=False)
    read = pandas.read_json(tmp_path / "one" / "episodes.jsonl", lines=True).set_index("index")
    for record in result.episodes:
        for name, value in json.loads(record.to_json()).items():
            assert name in ("index", "success") or read.loc[record.index, name] == value


def test_a_result_is_a_table_of_a_notebook() -> None:
    result = evaluate("CartPole-v1", None, 3, max_episode_steps=5, progress=False)
    shown = result._repr_html_()
    assert result.summary()._repr_html_() in shown
    assert f"digest {result.digest[:16]}" in shown
    nothing = evaluate("CartPole-v1", None, 0, progress=False)
    assert "0 episodes" in nothing._repr_html_()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    told = r"a bootstrap interval needs the scipy package: pip install '\.\[evaluate\]' in a clone"
    with pytest.raises(ModuleNotFoundError, match=told):
        summarize(ledger([1.0, 2.0]))


# The card of a model hub


def test_the_head_of_a_card_is_yaml_with_the_mean_and_the_deviation(tmp_path: Path) -> None:
    """As docs/evaluating.md has it; the hub's own reader is the oracle where it is installed."""
    out = tmp_path / "lean"
    result = evaluate("CartPole-v1", None, 5, max_episode_steps=9, output_dir=out, progress=False)
    space: dict[str, Any] = {}
    exec(blocks_of("docs/evaluating.md")[-1].replace("\nprint(", "\n# "), space)
    _, text, end = space["card"](out).split("---")
    head = pytest.importorskip("yaml").safe_load(text)
    assert (head, end) == (json.loads(text), "")
    (of,) = head["model-index"][0]["results"]
    assert head["model-index"][0]["name"] == "random actions"
    value = f"{result.returns.mean():.2f} +/- {result.returns.std(ddof=1):.2f}"
    assert (of["dataset"]["name"], of["metrics"][0]["value"]) == ("CartPole-v1", value)
    if importlib.util.find_spec("huggingface_hub"):
        from huggingface_hub import ModelCardData

        (read,) = ModelCardData(**head).eval_results
        assert (read.metric_type, read.metric_value) == ("mean_reward", value)


def test_other_results_and_formats_are_refused(tmp_path: Path) -> None:
    result: Any = EvaluationResult(manifest(), ledger([1.0, 2.0]))
    with pytest.raises(ValueError, match="expected format to be 'html', got 'npz'"):
        export(result, "npz", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a comparison, got list; pass what evaluate"):
        export(result.episodes, "html", tmp_path)
    assert export(result, "html", tmp_path / "page").exists()


# LeRobot

RECIPE: dict[str, Any] = {}
exec(blocks_of("docs/robots.md")[0], RECIPE)
eval_info = RECIPE["eval_info"]


def test_lerobots_report_has_the_averages_over_episodes() -> None:
    """Of tasks, of groups and overall; LeRobot's own writer is the oracle in tests/robots."""
    tasks = [
        EvaluationResult(manifest(), ledger(rewards, success=dict(enumerate(said)), failed=failed))
        for rewards, said, failed in (
            ([1.0, 2.0, 4.0], [True, False, True], [1]),
            ([3.0], [False], []),
            ([7.0, 9.0], [True, True], []),
        )
    ]
    for task in tasks:
        task.episodes[0] = replace(task.episodes[0], metrics={"max_reward": 0.5})
    info = eval_info({"easy": tasks[:2], "hard": tasks[2:]})
    lists = [task["metrics"] for task in info["per_task"]]
    assert [task["task_id"] for task in info["per_task"]] == [0, 1, 0]
    np.testing.assert_equal(lists[0]["sum_rewards"], [1.0, np.nan, 4.0])
    np.testing.assert_equal(lists[0]["max_rewards"], [0.5, np.nan, np.nan])
    assert lists[0]["successes"] == [True, False, True]
    easy, overall = info["per_group"]["easy"], info["overall"]
    assert (easy["avg_sum_reward"], easy["avg_max_reward"], easy["pc_success"]) == (8 / 3, 0.5, 50)
    assert (overall["avg_sum_reward"], overall["n_episodes"]) == (24 / 5, 6)


def test_lerobots_models_need_lerobot_and_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "CartPole-v1", "--policy", "lerobot"]) == 1
    assert "expected a checkpoint with the policy 'lerobot'" in capsys.readouterr().err
    if importlib.util.find_spec("lerobot") is None:
        with pytest.raises(ModuleNotFoundError, match="needs the lerobot package: pip install ler"):
            load_policy("pretrained_model")
