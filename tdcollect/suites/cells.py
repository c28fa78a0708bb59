"""Cells: the evaluations of a suite, one for each task, policy and training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdcollect.display import one_line
from tdcollect.suites.tables import HOW, Call, Policy, Task, filled

if TYPE_CHECKING:
    from tdcollect.evaluation.request import Request
    from tdcollect.evaluation.settings import EvaluationSettings

EVALUATIONS = "evaluations"
"""The folder of the cells' directories."""


@dataclass(frozen=True, repr=False)
class Cell:
    """One evaluation of a suite.

    Attributes:
        task: its task.
        policy: its policy.
        run: the training run of the policy.
        episodes: the number of episodes.
        seed: the root seed.
        start: the directory that relative paths start from.
    """

    task: Task
    policy: Policy
    run: str
    episodes: int
    seed: int
    start: str

    @property
    def name(self) -> str:
        """Task, policy and run, as ``task/policy/run``."""
        return f"{self.task.name}/{self.policy.name}/{self.run}"

    @property
    def path(self) -> Path:
        """Its directory, relative to that of the suite."""
        return Path(EVALUATIONS, self.task.name, self.policy.name, self.run)

    @property
    def files(self) -> dict[str, Path]:
        """The files that it reads, by the attribute of the policy that names them."""
        texts = {
            name: self._filled(getattr(self.policy, name))
            for name in ("checkpoints", "env_state", "vecnormalize")
        }
        return {name: Path(self.start, text) for name, text in texts.items() if text is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its episodes, as the suite's file has them."""
        return {**self.task.settings, **self.policy.settings}

    def request(self) -> Request:
        """Return its env and policy by name."""
        from tdcollect.evaluation.request import Request

        return Request(
            self.task.env,
            self._filled(self.policy.factory) or "",
            self._filled(self.policy.checkpoints),
            self._filled(self.policy.vecnormalize),
            dict(self.task.env_kwargs),
            self.settings.get("backend"),
            self.settings.get("device"),
            wrappers=_calls(self.task.wrappers),
            transforms=_calls([*self.task.transforms, *self.policy.transforms]),
            env_state=self._filled(self.policy.env_state),
            directory=self.start,
        )

    def evaluation_settings(self) -> EvaluationSettings:
        """Return the settings of its episodes.

        Raises:
            TypeError, ValueError: if a setting cannot be honoured, naming task and policy.
        """
        try:
            return self._evaluation_settings()
        except (TypeError, ValueError) as error:
            where = f"task {self.task.name} with policy {self.policy.name}"
            raise type(error)(f"{where}: {error}") from error

    def _evaluation_settings(self) -> EvaluationSettings:
        from torchrl.envs.utils import ExplorationType

        from tdcollect.evaluation.settings import EvaluationSettings

        settings = dict(self.settings)
        name = settings.pop("exploration", "deterministic")
        known = [kind.name.lower() for kind in ExplorationType]
        if name not in known:
            raise ValueError(f"expected exploration to be one of {', '.join(known)}, got {name!r}")
        return EvaluationSettings(
            self.episodes,
            self.seed,
            exploration_type=ExplorationType[name.upper()],
            env_kwargs=dict(self.task.env_kwargs) or None,
            **settings,
        )

    def definition(self) -> dict[str, dict[str, Any]]:
        """Return all that decides its episodes, as plain values: of the task, and of the policy."""
        task, policy = self.task, self.policy
        return {
            "task": {
                "env": task.env,
                "env_kwargs": task.env_kwargs,
                "wrappers": list(task.wrappers),
                "transforms": list(task.transforms),
                "presets": task.presets,
                "settings": _deciding(task.settings),
            },
            "policy": {
                "factory": policy.factory,
                "transforms": list(policy.transforms),
                "settings": _deciding(policy.settings),
            },
        }

    def _filled(self, text: str | None) -> str | None:
        if text is None:
            return None
        return filled(text, task=self.task.name, policy=self.policy.name, run=self.run)

    def __repr__(self) -> str:
        return one_line(self, self.name)


def _calls(calls: Sequence[Call]) -> list[str | dict[str, Any]]:
    return [call if isinstance(call, str) else dict(call) for call in calls]


def _deciding(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in HOW}
