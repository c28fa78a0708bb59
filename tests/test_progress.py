"""Progress of a run: bars where possible, lines otherwise, or nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tdcollect import evaluate
from tdcollect.progress import Lines, progress_bar, seconds_text

Clock = Callable[[float], None]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def each_look_takes(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets how many seconds pass between two looks at the clock."""
    clock = SimpleNamespace(now=0.0, step=0.0)

    def monotonic() -> float:
        clock.now += clock.step
        return clock.now

    monkeypatch.setattr("tdcollect.progress.time", SimpleNamespace(monotonic=monotonic))
    return lambda step: setattr(clock, "step", step)


def evaluated(**options: Any) -> None:
    evaluate("CartPole-v1", None, 12, max_episode_steps=3, **options)


def test_a_log_gets_a_line_every_30_seconds(
    each_look_takes: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    each_look_takes(10)  # 120 seconds in all
    evaluated(progress=True)
    lines = capsys.readouterr().err.splitlines()
    expected = ["30 s, about 90 s left", "60 s, about 60 s left"]
    expected += ["90 s, about 30 s left", "2 min, about 0 s left"]
    counted = [
        f"tdcollect: {3 * n} of 12 test episodes, {text}" for n, text in enumerate(expected, 1)
    ]
    assert [", ".join(line.split(", ")[:3]) for line in lines] == counted


def test_a_short_run_in_a_log_and_any_without_progress_are_silent(
    each_look_takes: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    each_look_takes(2)
    evaluated(progress=True)
    assert capsys.readouterr() == ("", "")
    each_look_takes(100)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    evaluated(progress=False)
    assert screen.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    evaluated(progress=True)
    assert "/12 [" in screen.getvalue()
    assert "\r" in screen.getvalue()


def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_bar(3, "episodes"), Lines)  # pytest's stderr is no terminal
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(3, "episodes") as bar:
        assert type(bar).__module__.startswith("tqdm")
    shell.config = {}  # IPython in a terminal that is none
    assert isinstance(progress_bar(3, "episodes"), Lines)


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert isinstance(progress_bar(3, "episodes"), Lines)


def test_lines_tell_what_is_known(
    each_look_takes: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    each_look_takes(40)
    with Lines(10, "frames") as lines:
        lines.set_postfix({"return": "21.5"})
        lines.update(3)
        monkeypatch.setattr(sys, "stderr", None)
        lines.update(3)  # which is told nowhere
    assert capsys.readouterr() == (
        "",
        "tdcollect: 3 of 10 frames, 40 s, about 93 s left, return 21.5\n",
    )


def test_durations() -> None:
    texts = {12.34: "12.3 s", 0: "0 s", 119.4: "119 s", 150: "2 min", 9000: "2.5 h"}
    assert {seconds: seconds_text(seconds) for seconds in texts} == texts
