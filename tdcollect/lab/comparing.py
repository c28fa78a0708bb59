"""The commands of the lab that compare evaluations, plan comparisons, and show curves over runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdcollect.cli import options
from tdcollect.cli.program import WORSE, distinct_names, program, say, tell
from tdcollect.display import number_text

if TYPE_CHECKING:
    from tdcollect.evaluation.comparison import Difference
    from tdcollect.evaluation.result import EvaluationResult

QUANTITIES = ("return", "success")


@program.command(cls=options.MarginCommand)
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR DIR...")
@options.output_dir(help="Directory for a report of the comparison.")
@options.shown("--confidence", type=float, default=0.95, help="Of every interval.")
@click.option(
    options.FAIL_IF_WORSE,
    type=float,
    metavar="[MARGIN]",
    help="End with status 3 if a policy is shown to be worse by more than MARGIN, 0 by default.",
)
@click.option(
    "--require-not-worse",
    type=float,
    metavar="MARGIN",
    help="End with status 3 unless each is shown to be worse by less than MARGIN, if at all.",
)
@click.option(
    "--on",
    metavar="NAME",
    help="What these two are about: return, success, or a metric.  [default: return]",
)
@options.flag("--lower-is-better", help="Of a metric such as a cost.")
@options.flag(
    "--across-envs", help="Compare one policy in envs that differ, on episodes of the same numbers."
)
@options.as_json
def compare(
    directories: tuple[Path, ...],
    output_dir: Path | None,
    confidence: float,
    across_envs: bool,
    on: str | None,
    lower_is_better: bool,
    as_json: bool,
    **margins: float | None,
) -> int:
    """Compare evaluations with the first one, episode by episode.

    All must be of the same episodes; the first may have more. What the interval of a difference
    excludes is shown not to be so. The exit status is 3 if --fail-if-worse or --require-not-worse
    says so.
    """
    wanted = {name: margin for name, margin in margins.items() if margin is not None}
    if (on or lower_is_better) and not wanted:
        name = "--on" if on else "--lower-is-better"
        raise click.UsageError(f"{name} goes with --fail-if-worse or --require-not-worse MARGIN")
    if len(directories) < 2:
        raise click.UsageError("expected two directories or more")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise click.UsageError("expected directories that differ, got one of them twice")
    import tdcollect
    from tdcollect.lab.pages.episode import write_compared
    from tdcollect.pages.evaluation import write_comparison_report

    results = [finished(directory) for directory in directories]
    names = distinct_names(directories)
    comparison = tdcollect.compare(
        *results, names=names, confidence=confidence, across_envs=across_envs
    )
    verdicts = [
        _reason(difference, name, margin, on or "return", lower_is_better)
        for name, margin in wanted.items()
        for difference in comparison.differences
    ]
    reasons = [reason for reason in verdicts if reason is not None]
    report = None
    if output_dir is not None:
        pages = write_compared(output_dir, results, comparison)
        report = write_comparison_report(output_dir, comparison, pages)[-1]
    more = "" if report is None else f"\n\nreport {report}"
    told = {"reasons": reasons} if wanted else {}
    tell(as_json, f"{comparison}{more}", report=report, **comparison.to_dict(), **told)
    for reason in reasons:
        say(f"tdcollect: {reason}", err=True)
    return WORSE if reasons else 0


def finished(directory: Path) -> EvaluationResult:
    """Read an evaluation; refuse one that is unfinished, and a shard."""
    import tdcollect
    from tdcollect.evaluation.ledger import asked_indices, is_finished, read_last

    result = tdcollect.EvaluationResult.load(directory)
    count = len(asked_indices(result.manifest)) - len(result.episodes)
    if count or not is_finished(directory):
        lacks = f"{count} of its episodes" if count else "its results"
        if (shard := read_last(directory)[0]) is not None:
            raise ValueError(
                f"{directory} holds {shard} of an evaluation; make one of all shards "
                "first, tdcollect merge DIR... --output-dir DIR, and compare that"
            )
        raise ValueError(
            f"{directory} is unfinished: it lacks {lacks}; run its evaluation again, which "
            "resumes it"
        )
    return result


def _reason(d: Difference, name: str, margin: float, *on: Any) -> str | None:
    """Return why a difference does not pass an option; None if it does."""
    than = f"worse than {d.baseline} by"
    if name == "fail_if_worse":
        passed, verdict = not d.is_worse(margin, *on), f"shown to be {than} more than {margin:g}"
    else:
        passed = d.is_not_worse(margin, *on)
        verdict = f"not shown to be {than} less than {margin:g}, if at all"
    value, interval = d.measured(on[0])
    told = {"return": "mean returns", "success": "success rates"}.get(on[0], f"mean {on[0]}")
    measured = f"difference of {told} {number_text(value)} {interval or 'without an interval'}"
    return None if passed else f"{d.name} is {verdict}: {measured}"


@program.command()
@click.argument("pilot", nargs=-1, required=True, type=options.FOLDER, metavar="PILOT [PILOT]")
@click.option("--difference", type=float, required=True, help="The difference that matters.")
@options.shown("--power", type=float, default=0.8, help="Chance to find it.")
@options.shown("--confidence", type=float, default=0.95, help="Of the comparison.")
@options.shown(
    "--on", type=click.Choice(QUANTITIES), default="return", help="Mean return or success rate."
)
@click.option(
    "--correlation",
    type=float,
    help="Of the two policies over episodes, for one evaluation as a pilot.  [default: 0]",
)
@click.option("--policy", "policies", multiple=True, help="One of two policies of a suite.")
@options.as_json
def plan(
    pilot: tuple[Path, ...],
    difference: float,
    on: str,
    correlation: float | None,
    policies: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Tell how many episodes a comparison needs, from a small one.

    PILOT is two evaluations of the same episodes, or one, or a suite: then the difference is that
    of mean scores, and training runs are planned, too. Nothing is run.
    """
    from tdcollect.lab.planning import plan as of_evaluations
    from tdcollect.lab.planning import plan_suite
    from tdcollect.lab.results import is_suite, results_of

    if is_suite(pilot[0]):
        if len(pilot) > 1 or on != "return" or correlation is not None:
            raise click.UsageError("a suite is a pilot by itself: without --on and --correlation")
        planned = plan_suite(results_of(pilot[0]), difference, policies or None, **settings)
    elif policies or len(pilot) > 2:
        raise click.UsageError("expected one or two evaluations, or a suite with two --policy")
    else:
        results = [finished(directory) for directory in pilot]
        names = distinct_names(pilot) if len(pilot) == 2 else None
        settings |= {"on": on, "correlation": correlation, "names": names}
        planned = of_evaluations(results, difference, **settings)
    tell(as_json, planned, **planned.to_dict())


@program.command()
@click.argument("runs", nargs=-1, required=True, type=options.FOLDER, metavar="RUN...")
@options.shown("--on", default="return", help="return, success, or the name of a metric.")
@click.option("--threshold", type=float, help="Count the steps to a mean of at least this.")
@options.flag("--lower-is-better", help="To a mean of at most the threshold, as of a cost.")
@options.shown("--confidence", type=float, default=0.95, help="Of every interval.")
@options.output_dir(help="Directory for a page of the curves.")
@options.as_json
def curves(runs: tuple[Path, ...], output_dir: Path | None, as_json: bool, **settings: Any) -> None:
    """Show the learning curves of several training runs together.

    RUN is the directory of an Evaluator, one of each run, tested on the same episodes. At each step
    that all have: the interquartile mean over runs and its interval. Nothing is run.
    """
    if settings["lower_is_better"] and settings["threshold"] is None:
        raise click.UsageError("--lower-is-better goes with --threshold")
    if len({run.resolve() for run in runs}) < len(runs):
        raise click.UsageError("expected directories that differ, got one of them twice")
    from tdcollect.lab.curves import over_runs
    from tdcollect.lab.pages.curves import write_curves_page

    names = distinct_names(runs) if len(runs) > 1 else [runs[0].resolve().name]
    together = over_runs(dict(zip(names, runs, strict=True)), **settings)
    report = None if output_dir is None else write_curves_page(output_dir, together)[-1]
    more = "" if report is None else f"\n\nreport {report}"
    tell(as_json, f"{together}{more}", report=report, **together.to_dict())
