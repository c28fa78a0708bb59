"""A directory that somebody sent runs no code that its reader did not name."""

from __future__ import annotations

import html
import importlib
import json
import pickle
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcollect
from tdcollect import registry
from tdcollect.cli import main
from tdcollect.cli import program as printing
from tdcollect.display import visible
from tdcollect.evaluation import Request
from tdcollect.evaluation.ledger import sha256
from tdcollect.evaluation.sb3.model import _read_normalization
from tdcollect.pages.evaluation import named_in
from tdcollect.states import unpack

from .ledgers import Payload, alter, pickled

PAYLOAD = """
import pathlib
pathlib.Path({mark!r}).touch()

def make(*args, **kwargs):
    pathlib.Path({mark!r}).touch()
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that only a payload makes."""
    return tmp_path / "mark"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # for the manifest's commit is that of where one stands
        tdcollect.evaluate(
            "CartPole-v1", None, 4, keep_trajectories=True, output_dir=path, progress=False
        )
    return path


@pytest.fixture
def sent(finished: Path, here: Path, mark: Path) -> Path:
    """A finished evaluation with a payload in every place that has one."""
    run = here / "sent"
    shutil.copytree(finished, run)
    source = PAYLOAD.format(mark=str(mark))
    for name in ("payload", "sitecustomize", "scipy", "imageio_ffmpeg", "conftest"):
        (run / f"{name}.py").write_text(source)
    for file in ("policy.pt", "model.zip", "norm.pkl", "other.pickle"):
        (run / file).write_bytes(pickle.dumps(Payload(mark)))
    pickled(run / "trajectories" / "000000.npz", mark)
    return run


def ask(run: Path, **entries: Any) -> None:
    """Make the directory name these."""
    usual = {"env": "CartPole-v1", "policy": "random"}
    (run / "run.json").write_text(json.dumps([{"request": {**usual, **entries}}]))


NAMED = [
    {"policy": "payload:make"},
    {"policy": "subprocess:getoutput", "checkpoint": "policy.pt"},
    {"env": "payload.py:make"},
    {"env": "payload:make"},
    {"env": "payload:CartPole-v1"},
    {"env": "CartPole-v1", "env_kwargs": {"render_mode": "human"}},
    {"policy": "sb3", "checkpoint": "model.zip", "vecnormalize": "norm.pkl"},
    {"policy": "payload.py:make", "checkpoint": "policy.pt"},
]


@pytest.mark.parametrize("named", NAMED, ids=lambda named: " ".join(map(str, named.values())))
def test_replay_runs_nothing_that_a_directory_names(
    sent: Path, mark: Path, monkeypatch, capsys, named: dict[str, Any]
) -> None:
    """It says how the evaluation was run, as text."""
    ask(sent, **named)
    before = list(sys.path)
    for folder, shown in [(sent.parent, "sent"), (sent, ".")]:
        monkeypatch.chdir(folder)
        assert main(["replay", shown, "0"]) == 1
        out, err = capsys.readouterr()
        assert not out
        assert not mark.exists()
        assert sys.path == before
        assert "payload" not in sys.modules
        assert f"tdcollect replay {shown} 0 --env " in err
        for name, value in named.items():
            text = value if isinstance(value, str) else shlex.quote(json.dumps(value))
            assert f"--{name.replace('_', '-')} {text}" in err


def test_a_module_is_not_taken_from_the_directory_that_one_stands_in(
    sent, mark, monkeypatch, capsys
) -> None:
    """The user meant a module of their own, by the name of one that somebody sent."""
    monkeypatch.chdir(sent)
    assert main(["replay", ".", "1", "--env", "CartPole-v1", "--policy", "payload:make"]) == 1
    assert "No module named 'payload'" in capsys.readouterr().err
    assert not mark.exists()
    assert main(["replay", ".", "1", "--env", "CartPole-v1", "--policy", "payload.py:make"]) == 1
    assert mark.exists()  # now it was named


def test_a_request_does_not_look_for_modules_wherever_the_process_goes(
    sent, mark, monkeypatch
) -> None:
    """It looks in the directory that was the working one, and not in one that is entered later."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    Request("gymnasium.envs.classic_control:CartPoleEnv", "random").make()
    monkeypatch.chdir(sent)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("payload")
    assert not mark.exists()


def test_reading_runs_nothing(finished, sent, mark, typed) -> None:
    ask(sent, policy="payload.py:make", env="payload:make")
    result = tdcollect.EvaluationResult.load(sent)
    result.summary()
    assert len(result.trajectory(1)) == result.lengths[1]
    with pytest.raises(ValueError, match="is no plain array"):
        result.trajectory(0)
    shutil.copytree(finished, "mine")
    (sent / "films").mkdir()
    (sent / "films" / "000003.mp4").write_bytes(pickle.dumps(Payload(mark)))
    assert typed("compare sent mine --output-dir compared")[0] == 0
    assert typed("view sent --output-dir pages --episodes 0,3")[0] == 0
    for index, told in [(0, "is no plain array"), (3, "to be an MP4 file")]:
        assert told in Path("pages", "pages", "episodes", f"{index:06d}.html").read_text()
    assert typed("compare mine sent --json")[0] == 0
    status, out, _ = typed("verify mine sent")
    assert status == 1
    assert "is no plain array" in " ".join(out.split())
    assert not mark.exists()


def test_merging_it_and_going_on_in_it_run_nothing_of_it(sent, mark, typed) -> None:
    ask(sent, policy="payload.py:make", env="payload:make")
    with pytest.raises(ValueError, match="is no plain array"):
        tdcollect.merge([sent], "merged")
    shutil.rmtree(sent / "trajectories")
    tdcollect.merge([sent], "merged")
    assert named_in(Path("merged")) == named_in(sent) != {}
    assert typed("replay merged 1")[0] == 1
    told = typed("evaluate CartPole-v1 --policy random --episodes 4 --output-dir sent --quiet")
    assert told == (0, "", "")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["episodes.jsonl", "trajectories", "figures", "report.html"])
def test_going_on_in_it_writes_through_no_link(sent, here, typed, name: str) -> None:
    """It is refused, or a file replaces the link."""
    (sent / "results.json").unlink()
    (sent / "trajectories" / "000000.npz").unlink()
    mine = here / "mine"
    (sent / name).rename(mine)
    (sent / name).symlink_to(mine)
    lines = (sent / "episodes.jsonl").read_text().splitlines(keepends=True)
    (sent / "episodes.jsonl").write_text("".join(lines[1:]))
    before = [path.read_bytes() for path in (mine, *mine.rglob("*")) if path.is_file()]
    again = "evaluate CartPole-v1 --policy random --episodes 4 --output-dir sent --quiet"
    status, _, err = typed(f"{again} --keep-trajectories")
    if name == "report.html":
        assert (status, (sent / name).is_symlink()) == (0, False)
    else:
        assert status == 1
        assert f"sent/{name} to be no link, and behind none, as what is wr" in err
    assert [path.read_bytes() for path in (mine, *mine.rglob("*")) if path.is_file()] == before


def test_what_is_made_of_it_is_written_through_no_link(finished, sent, here, typed) -> None:
    shutil.copytree(finished, "two")
    (here / "mine").mkdir()
    (here / "mine.mp4").write_text("mine")
    (sent / "figures").rename(here / "figures")
    (sent / "figures").symlink_to(here / "mine")
    (sent / "film.mp4").symlink_to(here / "mine.mp4")
    replay = "replay sent 1 --env CartPole-v1 --policy random --video sent/film.mp4"
    for command in ("compare sent two --output-dir sent", replay):
        status, _, err = typed(command)
        assert status == 1
        assert "to be no link" in err
    assert not [*(here / "mine").iterdir()]
    assert (here / "mine.mp4").read_text() == "mine"


def test_a_checkpoint_holds_weights_and_nothing_else(sent, mark, typed) -> None:
    named = "--env CartPole-v1 --policy @:net --checkpoint sent/policy.pt"
    status, _, err = typed(f"replay sent 1 {named}")
    assert status == 1
    assert "policy.pt is no state_dict of TensorDictModule" in err
    with pytest.raises(ValueError, match=r"expected .*policy\.pt to be as save_checkpoint"):
        tdcollect.load_checkpoint(sent / "policy.pt")
    torch.save(pickle.loads, sent / "policy.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        tdcollect.load_checkpoint(sent / "policy.pt")
    assert not mark.exists()


def test_files_of_stable_baselines3_run_code(here, mark) -> None:
    """As docs/safe-to-open.md warns: a name of the user's own."""
    pytest.importorskip("stable_baselines3")
    (here / "norm.pkl").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ValueError, match="holds another object"):
        _read_normalization(here / "norm.pkl")
    assert mark.exists()


def test_a_state_that_was_saved_runs_nothing_as_it_is_read() -> None:
    """Collectors' state dicts: tensors and one string."""
    raw = torch.zeros(8, dtype=torch.uint8)
    for form in (["array", "O", [1], 0], ["array", "|O8", [1], 0], ["tensor", [[1], "load"]]):
        with pytest.raises((TypeError, ValueError)):
            unpack({"form": json.dumps(form), "0": raw})


# run.json


@pytest.mark.parametrize(
    "text", ["", "{}", "[3]", "[" * 100_000, '[{"request": 3}]', '[{"request": {"env": null}}]']
)
def test_other_names_in_a_directory_are_shown_or_left_out(sent, typed, text: str) -> None:
    (sent / "run.json").write_text(text)
    status, out, err = typed("replay sent 0")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "expected --env ENV and --policy POLICY" in err
    assert typed("replay sent 1 --env CartPole-v1 --policy random")[0] == 0
    assert typed("view sent --output-dir pages")[0] == 0


def test_an_evaluation_by_python_can_be_named(here) -> None:
    with pytest.raises(TypeError, match="expected request to be a Request, got str"):
        tdcollect.evaluate("CartPole-v1", None, 1, output_dir="run", request="random")
    with pytest.raises(ValueError, match="an output_dir, which keeps the names of request"):
        tdcollect.evaluate("CartPole-v1", None, 1, request=Request("CartPole-v1", "random"))
    request = Request("CartPole-v1", "random", directory=str(here))
    tdcollect.evaluate("CartPole-v1", None, 1, output_dir="run", progress=False, request=request)
    text = (here / "run" / "report.html").read_text()
    assert "<code>tdcollect replay DIR 0 --env CartPole-v1 --policy random</code>" in text
    assert str(here) not in text + (here / "run" / "run.json").read_text()


def test_the_call_of_a_page_works_as_typed(here) -> None:
    def env(**kwargs: Any) -> Any:
        import gymnasium as gym

        return gym.make("CartPole-v1", **kwargs)

    def policy(td: Any) -> Any:
        return td.set("action", td["observation"].new_ones(*td.shape, 2).long() * 0 + 1)

    env_kwargs = {"max_episode_steps": 5}
    names = {"tdcollect": tdcollect, "env": env, "policy": None, "env_kwargs": env_kwargs}
    tdcollect.evaluate(env, None, 1, output_dir="run", env_kwargs=env_kwargs, progress=False)
    (call,) = re.findall("<code>(.*?)</code>", (here / "run" / "report.html").read_text())
    assert call.endswith(").replay(0)")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("run")
        assert len(eval(html.unescape(call), names)) == 5


# Text


UNSEEN = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
EVIL = "a\x1b]0;title\x07\x9b2J\u202eb\u2066\r\x7f <script>"
WRITTEN = r"a\x1b]0;title\x07\x9b2J\u202eb\u2066\r\x7f <script>"


def test_the_commands_print_nothing_but_visible_text() -> None:
    """And text that no terminal takes is written out."""
    modules = (*registry.load(registry.COMMANDS), printing)
    source = "".join(Path(module.__file__).read_text() for module in modules)
    printed = re.findall(r"(?:click\.s?echo|print)\(.*", source)
    assert printed
    assert all(call.startswith("click.echo(visible(") for call in printed)
    assert visible("a\ud800b\nc\td\u2028") == r"a\ud800b\nc\td\u2028"
    assert visible("a\nc\td", lines=True) == "a\nc\td"
    assert visible("naïve 日本語 👩\u200d🚀 \\x1b") == "naïve 日本語 👩\u200d🚀 \\x1b"


def test_control_characters_reach_no_terminal_and_no_page(sent, typed, capsys) -> None:
    for run in ("sent", "other"):
        if run == "other":
            shutil.copytree(sent, run)
        manifest = Path(run, "manifest.json")
        alter(manifest, {("env", "id"): EVIL, ("versions", EVIL): run})
        alter(Path(run, "results.json"), {"manifest": sha256(manifest)})
    ask(sent, policy=EVIL, checkpoint=f"{EVIL}.pt", env_kwargs={EVIL: EVIL})
    result = tdcollect.EvaluationResult.load("sent")
    outputs = [repr(result), str(tdcollect.compare(result, result, names=[EVIL, f"{EVIL}2"]))]
    commands = ("replay sent 0", "compare sent other --json")
    for command in (*commands, "compare sent other --output-dir compared"):
        outputs.append("".join(typed(command)[1:]))
    for output in outputs:
        seen = output.replace("\\u001b", "\\x1b")
        on_a_line = WRITTEN.replace(r"\r", " ")  # of an error
        assert WRITTEN in seen or on_a_line in seen or '"env": "a\\u001b' in output
        assert not re.search(UNSEEN, output)
    json.loads(outputs[3])
    page = Path("compared", "comparison.html").read_text()
    assert WRITTEN.replace("<", "&lt;").replace(">", "&gt;") in page
    assert not re.search(UNSEEN, page)
