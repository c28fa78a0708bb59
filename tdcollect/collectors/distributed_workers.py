"""Seeds, statistics and lost workers of the collectors on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torchrl.collectors import Collector as TorchRLCollector

from tdcollect._upstream.distributed import DistributedState
from tdcollect.collect import Collector
from tdcollect.collect.path import Explanation
from tdcollect.collectors import on_worker
from tdcollect.collectors.inner import WorkerFacts, WorkerReport
from tdcollect.collectors.link import LinkedCollector, Links, own_address
from tdcollect.collectors.lost import LostWorker, LostWorkers, WorkerLostError, slots_of
from tdcollect.collectors.merged import MergedStatistics, merged_explanation
from tdcollect.collectors.seeds import following_seed, seedings
from tdcollect.collectors.trajectory_ids import TrajectoryIds
from tdcollect.display import one_line
from tdcollect.workers.child import ending


class DistributedWorkers:
    """The common part of these collectors: their options, seeds, and lost workers."""

    collector_class: type
    collector_kwargs: list[dict[str, Any]]
    frames_per_batch: int
    jobs: list[Any]
    launcher: str
    num_workers: int
    postproc: Any
    split_trajs: bool
    total_frames: float
    _links: Links | None = None

    def _prepare(self, envs: Any, options: dict[str, Any]) -> list[Any]:
        """Set what is to be set before TorchRL starts workers.

        Args:
            envs: functions that make envs, or one of them.
            options: keyword arguments of the constructor; changed here.

        Returns:
            One function per worker.
        """
        self.lost = LostWorkers()
        self._facts: list[WorkerFacts] | None = None
        self._statistics: MergedStatistics | None = None
        self._ended = False
        envs = list(envs) if isinstance(envs, Sequence) else [envs]
        if options.get("collector_class", "single") in ("single", TorchRLCollector, Collector):
            options["collector_class"] = LinkedCollector
        given = options.get("collector_kwargs") or {}
        given = [given] * len(envs) if isinstance(given, Mapping) else given
        kind = options["collector_class"]
        one_env = isinstance(kind, type) and issubclass(kind, TorchRLCollector)
        ids = [
            {"traj_pool": TrajectoryIds(worker)} if one_env else {} for worker in range(len(envs))
        ]
        options["collector_kwargs"] = [
            {**own, **each} for own, each in zip(ids, given, strict=True)
        ]
        return envs

    @property
    def _torchrl(self) -> DistributedState:
        """The private state of the parent."""
        return DistributedState(self)

    def __repr__(self) -> str:
        if self._torchrl.shut_down:
            return one_line(self, "shut down")
        return one_line(self, f"{self.num_workers} workers", f"frames={self.frames_per_batch}")

    def _seed(self, seed: int, static_seed: bool) -> Any:
        """Seed all workers; return the seed for the next env."""
        if self._torchrl.shut_down:
            raise RuntimeError("the collector is shut down; make a new one to collect")
        facts = self._know()
        if not all(one.seeds_in_a_row for one in facts):
            kind = type(self).__name__
            raise ValueError(
                f"expected envs of tdcollect.make_env, whose slots count on from one seed, for a "
                f"seed of {kind}; use them, or RayCollector or MultiSyncCollector"
            )
        given = seedings(seed, [one.slots for one in facts], static_seed)
        self._ask(on_worker.seeded, *zip(*given, strict=True))
        return following_seed(seed, len(facts), static_seed)

    def _know(self) -> list[WorkerFacts]:
        """Facts about the workers, which are asked once."""
        if self._facts is None:
            self._facts = self._ask(on_worker.facts)
        return self._facts

    @property
    def stats(self: Any) -> Any:
        """Statistics merged over the workers; called, TorchRL's dict of counters."""
        if self._statistics is None:
            self._statistics = MergedStatistics(
                self._reports,
                lambda: [one.slots for one in self._know()],
                super().stats,  # type: ignore[misc]
            )
        return self._statistics

    def explain(self) -> Explanation:
        """The parts of the workers' collections, and whether several workers pay."""
        return merged_explanation(self._reports(), [one.slots for one in self._know()])

    def _reports(self) -> list[WorkerReport]:
        if self._torchrl.shut_down:
            raise RuntimeError("the collector is shut down; ask a live one")
        return self._ask(on_worker.report)

    # ------------------------------------------------------------------------------ lost workers

    def _raise_if_lost(self, error: BaseException | None = None, patience: float = 1.0) -> None:
        """End the collection if a worker is lost, with an error that names it.

        Args:
            error: that followed from the loss, if one did.
            patience: how long a worker may take to end after the error, in seconds.
        """
        lost = self._find_lost(0.0 if error is None else patience)
        if lost is None:
            return
        self.lost = LostWorkers((*self.lost, lost))
        self._end()
        advice = "make a new collector; RayCollector can put another worker in its place"
        raise WorkerLostError(lost, advice) from error

    def _end_construction(self, error: BaseException) -> None:
        """End all that was started; raise if it was a worker that has died."""
        if self._torchrl.started:
            self._raise_if_lost(error, patience=5.0)
        self._ended = True
        self._end()

    def _find_lost(self, patience: float) -> LostWorker | None:
        jobs = self.jobs if self.launcher == "mp" else []
        for worker in self._disconnected():
            if not jobs:
                return self._lost_worker(worker, "has ended its connection")
            jobs[worker].join(1.0)
        for worker, job in enumerate(jobs):
            job.join(patience)
            if not job.is_alive():
                return self._lost_worker(worker, ending(job.exitcode))
        return None

    def _any_failed(self) -> bool:
        """Tell whether a worker will not answer, and has not ended as it should."""
        local = self.launcher == "mp"
        return any(job.exitcode for job in self.jobs) if local else self._find_lost(0.0) is not None

    def _lost_worker(self, worker: int, how: str) -> LostWorker:
        pid = self.jobs[worker].pid if self.launcher == "mp" else "unknown"
        facts = self._facts
        slots = slots_of(worker, [one.slots for one in facts]) if facts else range(0)
        frames = self._torchrl.frames_per_worker
        return LostWorker(worker, pid, how, slots, frames, replaced=False)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the workers. A second call does nothing."""
        if not self._ended and self._torchrl.started:
            self._ended = True
            if not self._torchrl.shut_down and self._any_failed():
                self._end()
            super().shutdown(timeout)  # type: ignore[misc]
        self._close_links()

    def _end(self) -> None:
        """End all that is left, without a word to the workers: one of them would not answer."""
        self._torchrl.shut_down = True
        local = self.jobs if self._torchrl.started and self.launcher == "mp" else []
        for job in local:
            job.kill()
        for scheme in (self._torchrl.schemes or {}).values():
            with suppress(Exception):
                scheme.shutdown()
        if torch.distributed.is_initialized():
            with suppress(Exception):
                torch.distributed.destroy_process_group()
        for job in local:
            job.join(5.0)
        self._close_links()

    # ------------------------------------------------------------ connections beside TorchRL's

    def _link(self, envs: Any, options: dict[str, Any], begins_when_told: bool) -> list[Any]:
        """Prepare, and open the connections that workers make."""
        envs = self._prepare(envs, options)
        if issubclass(options["collector_class"], LinkedCollector):
            local = options.get("launcher") == "mp"
            host = "localhost" if local else own_address()
            self._links = Links(host, len(envs), begins_when_told)
            for own, address in zip(
                options["collector_kwargs"], self._links.addresses, strict=True
            ):
                own["link"] = address
        return envs

    def _accept(self) -> None:
        if self._links is not None:
            self._links.accept(self._raise_if_lost)
            self._know()

    def _ask(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        if self._links is None:
            raise ValueError(
                f"expected a collector_class that is a LinkedCollector, got "
                f"{self.collector_class.__name__}, which answers no calls; derive it from "
                "tdcollect.collectors.LinkedCollector"
            )
        try:
            return self._links.call(function, *arguments)
        except EOFError as error:
            self._raise_if_lost(error)
            raise

    def _disconnected(self) -> list[int]:
        return [] if self._links is None else self._links.lost()

    def _close_links(self) -> None:
        if self._links is not None:
            self._links.close()
