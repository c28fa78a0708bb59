"""The commands. Each imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tdcollect.cli import options
from tdcollect.cli import program as terminal
from tdcollect.cli.program import print_json, program, running, say, tell
from tdcollect.display import visible

if TYPE_CHECKING:
    from tdcollect.evaluation.request import Request


@program.command()
@click.argument("env")
@click.option("--policy", required=True, type=options.PolicyName(), help=options.POLICY)
@click.option("--checkpoint", metavar="FILE", help=options.CHECKPOINT)
@click.option("--vecnormalize", metavar="FILE", help=options.VECNORMALIZE)
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    help="Number of episodes.  [default: 100, or one per --env-seeds]",
)
@options.shown("--seed", type=int, default=0, help="Root seed.")
@click.option(
    "--env-seeds",
    type=options.int_list,
    metavar="INT,...",
    help="Seeds of the envs, one per episode, instead of those that follow from --seed.",
)
@click.option("--num-envs", type=int, help="Number of slots.  [default: 16]")
@options.crew
@options.output_dir(help="Directory for ledger and report. Resumes the evaluation found there.")
@options.episode
@click.option(
    "--episodes-per-slot",
    type=click.IntRange(min=1),
    help="For simulators that seed all slots together: the episodes of each slot in a batch.",
)
@options.shard(
    help="Run shard I of N alone, I from 0; `tdcollect merge` makes one evaluation of them."
)
@options.recheck
@options.flag("--keep-trajectories", help="Keep the episodes' data in --output-dir.")
@options.film(help=f"{options.FILM}--output-dir.")
@options.flag("--quiet", help="Show no progress and no table.")
@options.as_json
def evaluate(
    env: str,
    policy: str,
    episodes: int | None,
    output_dir: Path | None,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Run test episodes.

    ENV is a gymnasium id, or MODULE:CALLABLE or FILE.py:CALLABLE of a function that makes an env.
    The exit status is 3 if episodes were lost with their workers; else 1 if episodes failed.
    """
    for name in ("keep_trajectories", "shard", "film"):
        if settings[name] and output_dir is None:
            raise click.UsageError(
                f"--{name.replace('_', '-')} needs a directory: --output-dir DIR"
            )
    with running(output_dir, settings) as crew:
        import tdcollect
        from tdcollect.evaluation.directory import check_directory
        from tdcollect.evaluation.ledger import indices_of

        if output_dir is not None:
            check_directory(output_dir)  # before an env is made for the policy
        film = settings.pop("film")
        indices_of(film or "failed")  # refuses other texts
        request = request_of(env, policy, settings)
        made_env, made_policy = request.make()
        episodes = episodes or len(settings["env_seeds"] or range(100))
        settle(settings)
        result = tdcollect.evaluate(
            made_env,
            made_policy,
            episodes,
            output_dir=output_dir,
            progress=not quiet,
            request=None if output_dir is None else request,
            workers=crew,
            **settings,
        )
        if film is not None:
            result.film(film)
    return terminal.say_result(result, output_dir, as_json, quiet, settings["shard"])


def request_of(env: str, policy: str, settings: dict[str, Any], **own: Any) -> Request:
    """Return env and policy by name, out of the options; takes those out that are only its own."""
    from tdcollect.evaluation.request import Request

    names = ("env_kwargs", "backend", "device")
    named = {name: settings[name] for name in names if name in settings} | own
    for name in ("checkpoint", "vecnormalize"):
        if (value := settings.pop(name, None)) is not None:
            named[name] = value
    request = Request(env, policy, **named, directory=os.getcwd())
    request.check()
    return request


def _look(directory: Path) -> bool:
    """Return whether modules are looked for here: not where somebody may have sent one."""
    return not Path.cwd().is_relative_to(directory.resolve())


def settle(settings: dict[str, Any]) -> None:
    """Make the options that decide an episode the arguments of ``evaluate``."""
    from torchrl.envs.utils import ExplorationType

    from tdcollect.evaluation.request import named_metrics

    settings["exploration_type"] = ExplorationType[settings["exploration_type"].upper()]
    settings["env_kwargs"] = settings["env_kwargs"] or None
    settings["metrics"] = settings["metrics"] and named_metrics(settings["metrics"], Path.cwd())


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR...")
@options.output_dir(required=True, help="Directory of the merged evaluation.")
@options.flag("--quiet", help="Show no table.")
@options.as_json
def merge(directories: tuple[Path, ...], output_dir: Path, quiet: bool, as_json: bool) -> int:
    """Merge the shards of an evaluation into one, as one process would have written it.

    The shards must be of one evaluation, complete together and unaltered. The exit status is 3 if
    episodes were lost with their workers; else 1 if episodes failed.
    """
    with terminal.resumable(output_dir):
        import tdcollect

        result = tdcollect.merge(directories, output_dir)
    return terminal.say_result(result, output_dir, as_json, quiet)


@program.command()
@click.argument("directory", type=options.FOLDER)
@click.argument("index", type=click.IntRange(min=0), required=False)
@click.option(
    "--video", type=options.FOLDER, metavar="FILE", help="Write a video of the episode, as .mp4."
)
@options.film(help=f"{options.FILM}DIRECTORY. Instead of INDEX.")
@click.option("--env", help="ENV of evaluate; the options below are likewise those of evaluate.")
@click.option("--policy", help=options.POLICY)
@click.option("--checkpoint", metavar="FILE", help=options.CHECKPOINT)
@click.option("--vecnormalize", metavar="FILE", help=options.VECNORMALIZE)
@options.env_kwargs
@click.option("--backend", help=options.BACKEND)
@click.option("--device", help="Device that the policy runs on.")
@options.as_json
def replay(
    directory: Path,
    index: int | None,
    video: Path | None,
    film: str | None,
    env: str | None,
    policy: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Run episode INDEX of an evaluation again, and check that it is the same to the bit.

    This runs the env and the policy that --env and --policy name, and nothing that the directory
    names.
    """
    if (index is None) == (film is None) or (film is not None and video is not None):
        raise click.UsageError("expected INDEX, with --video FILE or without; or --film EPISODES")
    with terminal.others_on_stderr():
        import tdcollect
        from tdcollect.evaluation.ledger import indices_of
        from tdcollect.pages.evaluation import again_of

        # Refuse a wrong directory or episode before anything is made.
        result = tdcollect.EvaluationResult.load(directory)
        for at in indices_of(film or "", result.episodes) if index is None else [index]:
            result.record(at)
        if env is None or policy is None:
            which = str(index) if film is None else f"--film {film}"
            again = again_of(result.manifest, directory, Path(), "this directory").of_row(which)
            typed = again.replace(" DIR ", f" {shlex.quote(os.fspath(directory))} ", 1)
            raise ValueError(
                "expected --env ENV and --policy POLICY, as replay runs only what you name, got "
                f"{'no --env' if env is None else 'no --policy'}; the evaluation was run as in: "
                f"{typed} (it may name any code)"
            )
        made_env, made_policy = request_of(env, policy, how).make(_look(directory))
        how["env_kwargs"] = how["env_kwargs"] or None
        result = tdcollect.EvaluationResult.load(directory, made_env, made_policy, **how)
        if index is None:
            films = result.film(film or "")
        else:
            record = result.replayed(index, video).record
    if index is None:
        pages = f"tdcollect view {shlex.quote(os.fspath(directory))}"
        lines = [f"film {os.path.relpath(path)}" for path in films] or ["no film"]
        tell(as_json, "\n".join([*lines, f"pages {pages}"]), films=[*map(str, films)])
        return
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
@click.argument("directory", type=options.FOLDER, metavar="DIR")
@click.option("--env", help="ENV of evaluate.  [default: DIR's, if it is gymnasium's own]")
@options.shown("--sample", type=click.IntRange(min=1), default=20, help="Episodes to draw.")
@options.flag("--all", "every", help="Run all episodes again.")
@click.option(
    "--audit-seed",
    "seed",
    type=click.IntRange(min=0),
    help="Seed of the draw.  [default: a new one]",
)
@options.as_json
def audit(
    directory: Path, env: str | None, sample: int, every: bool, seed: int | None, as_json: bool
) -> int:
    """Run episodes again by the actions that were kept of them, without their policy.

    This runs the env alone, and no code of DIR. The exit status is 1 if outcomes do not agree, and
    2 if an evaluation could not be audited.
    """
    with terminal.others_on_stderr():
        import tdcollect

        try:
            made = None if env is None else request_of(env, "random", {}).make(_look(directory))[0]
            audits = tdcollect.audit(directory, made, sample=None if every else sample, seed=seed)
        except Exception as error:
            raise click.UsageError(visible(str(error))) from error
    tell(as_json, "\n".join(map(str, audits)), audits=[one.to_dict() for one in audits])
    return 1 if any(one.wrong for one in audits) else 2 * any(not one.verdicts for one in audits)


@program.command()
@click.argument("directories", nargs=-1, required=True, type=options.FOLDER, metavar="DIR...")
@options.as_json
def verify(directories: tuple[Path, ...], as_json: bool) -> int:
    """Check evaluations without running them: files, seeds, digests, statistics, kept data.

    The exit status is 1 if there is a problem, or an evaluation or a shard is unfinished.
    """
    import tdcollect
    from tdcollect.evaluation.ledger import Problem
    from tdcollect.evaluation.verification import Verification

    checks = []
    for directory in directories:
        try:
            checks.append(tdcollect.verify(directory))
        except FileNotFoundError:
            problem = Problem(directory, "expected the directory of an evaluation, got none")
            checks.append(Verification(directory, 0, 0, (problem,)))
    text = "\n".join(map(str, checks))
    tell(as_json, text, evaluations=[checked.to_dict() for checked in checks])
    return 0 if all(checked.passed for checked in checks) else 1


@program.command()
@click.argument("env")
@click.option("--backend", type=click.Choice(["envpool"]), help="If ENV is an EnvPool id.")
@options.env_kwargs
@options.shown(
    "--max-episode-steps",
    type=click.IntRange(min=1),
    default=1000,
    help="Steps that an episode is played at most.",
)
@options.shown("--seed", type=int, default=0, help="First seed to try.")
@click.option("--skip", multiple=True, metavar="NAME", help="A check to skip, such as batches.")
@options.as_json
def doctor(env: str, as_json: bool, **settings: Any) -> int:
    """Tell whether an env is fit for collecting and testing.

    ENV is a gymnasium id, an EnvPool id, or MODULE:CALLABLE or FILE.py:CALLABLE of a function that
    makes an env. The exit status is 1 if a check fails.
    """
    with terminal.others_on_stderr():
        from tdcollect.evaluation.request import is_named, load_named
        from tdcollect.testing import diagnose

        subject = load_named(env, Path.cwd()) if is_named(env) else env
        report = diagnose(subject, **settings)
    tell(as_json, report, **report.to_dict())
    return int(not report.passed)
