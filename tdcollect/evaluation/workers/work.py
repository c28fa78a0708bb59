"""One of the evaluations that share the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tdcollect.display import one_line
from tdcollect.evaluation.workers.job import Job, Pickled


class Work:
    """One of the evaluations that share the workers.

    Args:
        make_job: returns its job; called when the first worker is free for it.
        keep: yield the data of episodes too.
        weights: pickled weights by model id, where the job's own are not meant.

    Attributes:
        manifest: the manifest of the evaluation, of the first worker that was ready.
        let_in: is given the manifest of a worker that differs, before it runs an episode.
        errors: the last error of each failed episode, by index, as text.
        env: the env as text.
        threads: the number of torch's threads of its workers.
    """

    def __init__(
        self,
        make_job: Callable[[], Job],
        keep: bool = False,
        weights: Mapping[str, bytes] | None = None,
    ):
        self._make_job = make_job
        self.keep = keep
        self.weights = weights
        self.number = -1
        self.manifest: dict[str, Any] = {}
        self.let_in: Callable[[Mapping[str, Any]], None] = lambda manifest: None
        self.errors: dict[int, str] = {}
        self.env = ""
        self.threads = 0
        self.begun = False
        # The weight of workers lost as they made the env, by rank; None: as they probed it.
        self.died: Counter[int | None] = Counter()
        self.skipped = 0  # groups of seeds that the probe leaves out, as they end workers
        self.unlike: list[Mapping[str, Any]] = []  # manifests of workers that are let in
        self._pickled: Pickled | None = None

    @property
    def pickled(self) -> Pickled:
        """The job, pickled; made when it is first asked for."""
        if self._pickled is None:
            job = self._make_job()
            self.seeds = job.settings.seed_schedule()
            self._pickled = job.pickled()
            if self.weights is not None:  # in place of the job's, which stay where it is held
                self._pickled = self._pickled._replace(key=f"{self._pickled.key}, with weights")
        return self._pickled

    @property
    def key(self) -> str:
        """Tells its messages from those of others, which may have an equal job."""
        return f"{self.pickled.key}, {self.number}"

    def release(self) -> None:
        """Let go of the job."""
        self._pickled = None

    def __repr__(self) -> str:
        return one_line(self, self.env or "not opened")
