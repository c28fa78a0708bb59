"""The commands. Each imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import click

from tdcollect.cli import (
    options,
    suite,  # noqa: F401, which adds its commands
    view,  # noqa: F401, likewise
)
from tdcollect.cli.output import distinct_names, print_json, say, say_result
from tdcollect.cli.program import program, resumable


@program.command()
@click.argument("env")
@click.option("--policy", required=True, type=options.PolicyName(), help=options.POLICY)
@click.option("--checkpoint", metavar="FILE", help=options.CHECKPOINT)
@click.option("--vecnormalize", metavar="FILE", help=options.VECNORMALIZE)
@click.option(
    "--episodes", type=int, help="Number of episodes.  [default: 100, or one per --env-seeds]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Root seed.")
@click.option(
    "--env-seeds",
    callback=options.int_list,
    metavar="INT,...",
    help="Seeds of the envs, one per episode, instead of those that follow from --seed.",
)
@click.option("--num-envs", type=int, help="Number of slots.  [default: 16]")
@options.workers
@options.ray_workers
@options.ray_address
@click.option(
    "--output-dir",
    type=options.FOLDER,
    help="Directory for ledger and report. Resumes the evaluation found there.",
)
@options.env_kwargs
@options.env_parts
@click.option("--backend", help=options.BACKEND)
@click.option(
    "--exploration-type",
    type=click.Choice(options.EXPLORATION),
    default="deterministic",
    show_default=True,
)
@click.option("--max-episode-steps", type=int, help="Truncate episodes at this length.")
@click.option(
    "--reward-keys",
    callback=options.names,
    metavar="KEY,...",
    help="Reward entries that the return is made of, such as agents/reward.  [default: all]",
)
@click.option(
    "--inference-batch-size",
    type=int,
    default=16,
    show_default=True,
    help="Batch size that the policy always runs at.",
)
@click.option(
    "--inference-threads",
    type=int,
    default=1,
    show_default=True,
    help="Number of torch's threads that the policy always runs with.",
)
@click.option(
    "--eval-mode/--no-eval-mode",
    default=True,
    show_default=True,
    help="Run the policy in eval mode, or keep the modes of its modules.",
)
@click.option("--device", help="Device that the policy runs on.")
@click.option(
    "--shard",
    callback=options.shard_of,
    metavar="I/N",
    help="Run shard I of N alone, I from 0; `tdcollect merge` makes one evaluation of them.",
)
@options.allow_mixed
@options.retry_lost
@options.no_recheck
@click.option("--keep-trajectories", is_flag=True, help="Keep the episodes' data in --output-dir.")
@click.option(
    "--on-env-error",
    type=click.Choice(["restart", "raise"]),
    default="restart",
    show_default=True,
    help="Restart an episode whose env raises, or stop.",
)
@click.option(
    "--max-restarts",
    type=int,
    default=2,
    show_default=True,
    help="Restarts of an episode before it counts as failed.",
)
@click.option("--quiet", is_flag=True, help="Show no progress and no table.")
@options.as_json
def evaluate(
    env: str,
    policy: str,
    checkpoint: str | None,
    vecnormalize: str | None,
    episodes: int | None,
    env_seeds: list[int] | None,
    output_dir: Path | None,
    env_kwargs: dict[str, Any],
    wrappers: list[Any] | None,
    transforms: list[Any] | None,
    env_state: str | None,
    backend: str | None,
    exploration_type: str,
    device: str | None,
    keep_trajectories: bool,
    shard: Any,
    allow_mixed: bool,
    retry_lost: bool,
    no_recheck: bool,
    quiet: bool,
    as_json: bool,
    workers: int | None,
    ray_workers: int | None,
    ray_address: str | None,
    **settings: Any,
) -> int:
    """Run test episodes.

    ENV is a gymnasium id, or MODULE:CALLABLE or FILE.py:CALLABLE of a function that makes an env.
    The exit status is 3 if episodes were lost with their workers; else 1 if episodes failed.
    """
    if retry_lost and output_dir is None:
        raise click.UsageError(
            "--retry-lost needs the directory of the evaluation: --output-dir DIR"
        )
    if keep_trajectories and output_dir is None:
        raise click.UsageError("--keep-trajectories needs a directory: --output-dir DIR")
    if shard is not None and output_dir is None:
        raise click.UsageError("--shard needs a directory to merge from: --output-dir DIR")
    if episodes == 0:
        raise ValueError("expected --episodes to be positive, got 0: there is nothing to report")
    with (
        redirect_stdout(sys.stderr),  # for what the user's own code prints
        resumable(output_dir),
        ExitStack() as stack,
    ):
        crew = options.crew_of(stack, workers, ray_workers, ray_address)
        from torchrl.envs.utils import ExplorationType

        import tdcollect
        from tdcollect.evaluation.ledger.directory import check_directory
        from tdcollect.evaluation.request import Request

        if output_dir is not None:
            check_directory(output_dir)  # before an env is made for the policy
        request = Request(
            env,
            policy,
            checkpoint,
            vecnormalize,
            env_kwargs,
            backend,
            device,
            wrappers or [],
            transforms or [],
            env_state,
            directory=os.getcwd(),
        )
        made_env, made_policy = request.make()
        if episodes is None:
            episodes = 100 if env_seeds is None else len(env_seeds)
        result = tdcollect.evaluate(
            made_env,
            made_policy,
            episodes,
            env_seeds=env_seeds,
            output_dir=output_dir,
            env_kwargs=env_kwargs or None,
            backend=backend,
            exploration_type=ExplorationType[exploration_type.upper()],
            device=device,
            keep_trajectories=keep_trajectories,
            progress=not quiet,
            request=None if output_dir is None else request,
            workers=crew,
            shard=shard,
            allow_mixed=allow_mixed,
            retry_lost=retry_lost,
            recheck=not no_recheck,
            **settings,
        )
    return say_result(result, output_dir, as_json=as_json, quiet=quiet, shard=shard)


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR...")
@click.option(
    "--output-dir", type=options.FOLDER, required=True, help="Directory of the merged evaluation."
)
@click.option(
    "--allow-mixed",
    is_flag=True,
    help="Merge shards whose versions, platform or device differ; the manifest tells.",
)
@click.option("--quiet", is_flag=True, help="Show no table.")
@options.as_json
def merge(
    directories: tuple[Path, ...], output_dir: Path, allow_mixed: bool, quiet: bool, as_json: bool
) -> int:
    """Merge the shards of an evaluation into one, as one process would have written it.

    The shards must be of one evaluation, complete together and unaltered. The exit status is 3 if
    episodes were lost with their workers; else 1 if episodes failed.
    """
    with resumable(output_dir):
        import tdcollect

        result = tdcollect.merge(directories, output_dir, allow_mixed=allow_mixed)
    return say_result(result, output_dir, as_json=as_json, quiet=quiet)


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR DIR...")
@click.option("--output-dir", type=options.FOLDER, help="Directory for a report of the comparison.")
@options.as_json
def compare(directories: tuple[Path, ...], output_dir: Path | None, as_json: bool) -> None:
    """Compare evaluations with the first one, episode by episode.

    All must be of the same episodes.
    """
    if len(directories) < 2:
        raise click.UsageError("expected two directories or more")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise click.UsageError("expected directories that differ, got one of them twice")
    import tdcollect
    from tdcollect.evaluation.ledger.reading import (
        is_finished,
        number_of_episodes,
        read_shard,
    )
    from tdcollect.evaluation.reports.comparison_page import write_comparison_report

    results = []
    for directory in directories:
        result = tdcollect.EvaluationResult.load(directory)
        count = number_of_episodes(result.manifest) - len(result.episodes)
        if count or not is_finished(directory):
            lacks = f"{count} of its episodes" if count else "its results"
            if (shard := read_shard(directory)) is not None:
                raise ValueError(
                    f"{directory} holds {shard.shard} of an evaluation; make one of all shards "
                    "first, tdcollect merge DIR... --output-dir DIR, and compare that"
                )
            raise ValueError(
                f"{directory} is unfinished: it lacks {lacks}; run its evaluation again, which "
                "resumes it"
            )
        results.append(result)
    found = tdcollect.compare(*results, names=distinct_names(directories))
    report = None if output_dir is None else write_comparison_report(output_dir, found)[-1]
    if as_json:
        print_json(report=report, **found.to_dict())
        return
    say(found)
    if report is not None:
        say(f"\nreport {report}")


@program.command()
@click.argument("directory", type=options.FOLDER)
@click.argument("index", type=click.IntRange(min=0))
@click.option(
    "--video", type=options.FOLDER, metavar="FILE", help="Write a video of the episode, as .mp4."
)
@click.option("--env", help="ENV of evaluate; the options below are likewise those of evaluate.")
@click.option("--policy", help=options.POLICY)
@click.option("--checkpoint", metavar="FILE", help=options.CHECKPOINT)
@click.option("--vecnormalize", metavar="FILE", help=options.VECNORMALIZE)
@click.option(
    "--env-kwargs", metavar="JSON", callback=options.json_object, help="Arguments of the env."
)
@options.env_parts
@click.option("--backend", help=options.BACKEND)
@click.option("--device", help="Device that the policy runs on.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run the code that the directory names, unless named here. It may be any code.",
)
@options.as_json
def replay(
    directory: Path, index: int, video: Path | None, trust: bool, as_json: bool, **typed: Any
) -> None:
    """Run episode INDEX of an evaluation again, and check that it is the same to the bit.

    This runs the env and the policy that --env and --policy name. Code that the directory names is
    printed, and runs only with --trust.
    """
    with redirect_stdout(sys.stderr):
        import tdcollect
        from tdcollect.cli.trust import wanted

        # Refuse a wrong directory or episode before anything is made.
        tdcollect.EvaluationResult.load(directory).record(index)
        request = wanted(directory, index, typed, trust)
        # In a directory that somebody sent, a module may have the name of one that was meant.
        look = trust or not Path.cwd().is_relative_to(directory.resolve())
        made_env, made_policy = request.make(look)
        result = tdcollect.EvaluationResult.load(
            directory,
            made_env,
            made_policy,
            env_kwargs=request.env_kwargs or None,
            backend=request.backend,
            device=request.device,
        )
        record = result.replayed(index, video).record
    if as_json:
        print_json(**json.loads(record.to_json()), same=True, video=video)
        return
    say(
        f"episode {index}: return {record.episode_return:.6g}, {record.length} steps; the same to "
        f"the bit as in the ledger (digest {record.digest})"
    )
    if video is not None:
        say(f"video {video}")


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR...")
@options.as_json
def verify(directories: tuple[Path, ...], as_json: bool) -> int:
    """Check evaluations without running them: files, seeds, digests, statistics, kept data.

    The exit status is 1 if there is a problem, or an evaluation or a shard is unfinished.
    """
    import tdcollect
    from tdcollect.evaluation.ledger.reading import Problem
    from tdcollect.evaluation.verification import Verification

    found = []
    for directory in directories:
        try:
            found.append(tdcollect.verify(directory))
        except FileNotFoundError:
            problem = Problem(directory, "expected the directory of an evaluation, got none")
            found.append(Verification(directory, 0, 0, (problem,)))
    if as_json:
        print_json(evaluations=[checked.to_dict() for checked in found])
    else:
        say("\n".join(map(str, found)))
    return 0 if all(checked.passed for checked in found) else 1


@program.command()
@click.argument("env")
@click.option("--backend", type=click.Choice(["envpool"]), help="If ENV is an EnvPool id.")
@options.env_kwargs
@click.option(
    "--max-episode-steps",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Steps that an episode is played at most.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="First seed to try.")
@click.option("--skip", multiple=True, metavar="NAME", help="A check to skip, such as speed.")
@options.as_json
def doctor(env: str, as_json: bool, **settings: Any) -> int:
    """Tell whether an env is fit for collecting and testing.

    ENV is a gymnasium id, an EnvPool id, or MODULE:CALLABLE or FILE.py:CALLABLE of a function that
    makes an env. The exit status is 1 if a check fails.
    """
    with redirect_stdout(sys.stderr):
        from tdcollect.evaluation.imports import is_named, load_named
        from tdcollect.testing import diagnose

        made = load_named(env, Path.cwd()) if is_named(env) else env
        found = diagnose(made, **settings)
    if as_json:
        print_json(**found.to_dict())
    else:
        say(found)
    return found.exit_code
