"""Results of evaluations in files for readers and for other tools."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tdcollect import check
from tdcollect.evaluation.evaluate import EvaluationResult
from tdcollect.evaluation.ledger.records import KEYS, Episode
from tdcollect.evaluation.reports.comparison import Comparison
from tdcollect.evaluation.reports.statistics import in_order
from tdcollect.files import write_atomically
from tdcollect.pages.evaluation import write_comparison_report, write_report
from tdcollect.versions import extra_module

Evaluations = Mapping[int, Sequence[Episode]]


def export(
    results: EvaluationResult | Comparison | Evaluations,
    format: Literal["html", "npz"],
    path: str | os.PathLike[str],
    *,
    drop_failed: bool = False,
) -> Path:
    """Write results for readers or for other tools; the same results give the same bytes.

    Args:
        results: what :func:`tdcollect.evaluate` or :func:`tdcollect.compare` returns. For ``"npz"``
            also the records of several evaluations, by the number of training steps before each;
            a result alone is that of step 0.
        format: ``"html"``: a page that embeds its figures and needs no network, and the figures as
            SVG under ``figures/``. ``"npz"``: ``evaluations.npz``, as Stable-Baselines3's
            ``EvalCallback`` writes it. With K evaluations of E episodes: ``timesteps [K]`` int64,
            ``results [K, E]`` float64 (the returns), ``ep_lengths [K, E]`` int64 and, if the env
            reports it for every episode, ``successes [K, E]`` bool.
        path: the directory of the page; for ``"npz"`` the file.
        drop_failed: leave failed episodes out of an ``"npz"``, which cannot hold them.

    Returns:
        The path of the page or the file.

    Raises:
        ValueError: for another format, or one that these results do not have; for ``"npz"``: no
            evaluation; a failed episode without ``drop_failed``; evaluations that are left with
            different numbers of episodes.
    """
    check.one_of(("html", "npz"), format=format)
    if isinstance(results, EvaluationResult):
        if format == "html":
            how = (results.manifest, results.episodes, results.summary())
            return write_report(path, *how)[-1]
        results = {0: results.episodes}
    if isinstance(results, Comparison) == (format == "npz"):
        raise ValueError(
            f"expected the result of an evaluation for format={format!r}, or "
            f"{'records by step' if format == 'npz' else 'a comparison'}, got "
            f"{type(results).__name__}"
        )
    if isinstance(results, Comparison):
        return write_comparison_report(path, results)[-1]
    kept = _kept(results, drop_failed)
    ledgers = list(kept.values())
    arrays: dict[str, Any] = {
        "timesteps": np.array(list(kept), np.int64),
        "results": np.array([[e.episode_return for e in ledger] for ledger in ledgers], np.float64),
        "ep_lengths": np.array([[e.length for e in ledger] for ledger in ledgers], np.int64),
    }
    if _success_known(kept):
        arrays["successes"] = np.array([[e.success for e in ledger] for ledger in ledgers], bool)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return write_atomically(Path(path), file.getvalue())


def to_pandas(episodes: Sequence[Episode]) -> Any:
    """Return the ledger as a ``pandas.DataFrame``, one row per episode, by index.

    Columns are the ledger's keys. The values that a failed episode lacks are missing (``NaN``,
    ``<NA>``); integers and flags keep their kind, in pandas' nullable dtypes.

    Raises:
        ModuleNotFoundError: without pandas.
    """
    pandas = extra_module("pandas", "to_pandas")
    records = in_order(episodes)
    columns = {key: [getattr(e, name) for e in records] for name, key in KEYS.items()}
    frame = pandas.DataFrame(
        {key: pandas.Series(values, dtype=_dtype(key, values)) for key, values in columns.items()}
    )
    return frame.set_index("index")


_DTYPES = {
    "index": "int64",
    "env_seed": "UInt64",
    "policy_seed": "UInt64",
    "status": "string",
    "restarts": "int64",
    "return": "float64",
    "length": "Int64",
    "terminated": "boolean",
    "truncated": "boolean",
    "success": "boolean",
    "digest": "string",
}


def _dtype(key: str, values: Sequence[Any]) -> str:
    # Python's ints are unbounded, and an env may be given any seed.
    too_large = _DTYPES[key] == "UInt64" and any(value >= 2**64 for value in values)
    return "object" if too_large else _DTYPES[key]


def _kept(evaluations: Evaluations, drop_failed: bool) -> dict[int, list[Episode]]:
    """Return the completed episodes of each evaluation, in order of training steps."""
    if not evaluations:
        raise ValueError("expected at least one evaluation, as {0: episodes}, got none")
    kept = {}
    for steps in sorted(evaluations):
        records = in_order(evaluations[steps])
        kept[steps] = [episode for episode in records if episode.completed]
        failed = len(records) - len(kept[steps])
        if failed and not drop_failed:
            raise ValueError(
                f"expected completed episodes, which is all that evaluations.npz can hold; got "
                f"{failed} failed of {len(records)} at step {steps}: pass drop_failed=True to "
                "leave them out, and say so where you show the numbers"
            )
    counts = {steps: len(ledger) for steps, ledger in kept.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"expected the same number of episodes in each evaluation, which evaluations.npz holds "
            f"as one array, got, by step, {counts}"
        )
    return kept


def _success_known(kept: Mapping[int, Sequence[Episode]]) -> bool:
    said = [episode.success is not None for ledger in kept.values() for episode in ledger]
    return bool(said) and all(said)
