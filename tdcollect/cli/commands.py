"""The commands. Each imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

_FOLDER = click.Path(path_type=Path)
_EXPLORATION = ("deterministic", "random", "mode", "median", "mean")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tdcollect")
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
def program(traceback: bool) -> None:
    """Test episodes for TorchRL policies, the same to the bit however they are run."""


def _json_object(context: Any, parameter: Any, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"expected a JSON object, got {text!r}")
    return value


def _int_list(context: Any, parameter: Any, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected ints with commas between, got {text!r}") from error


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_POLICY_HELP = (
    "MODULE:FACTORY or FILE.py:FACTORY, called with the env if it has a parameter without default; "
    "or 'random'; or 'sb3' for a model file of Stable-Baselines3."
)
_CHECKPOINT_HELP = "The policy's state_dict, or the model file."


@program.command()
@click.argument("env")
@click.option("--policy", required=True, help=_POLICY_HELP)
@click.option("--checkpoint", metavar="FILE", help=_CHECKPOINT_HELP)
@click.option("--vecnormalize", metavar="FILE", help="Statistics that an SB3 model was saved with.")
@click.option("--episodes", type=int, help="How many; 100, or one for each of --seeds.")
@click.option("--seed", type=int, default=0, show_default=True, help="The root seed.")
@click.option("--seeds", callback=_int_list, metavar="INT,...", help="The envs' own seeds instead.")
@click.option("--num-envs", type=int, help="How many run at a time; 16.")
@click.option("--out", type=_FOLDER, help="Directory for ledger and report; goes on where it was.")
@click.option("--env-kwargs", default="{}", metavar="JSON", callback=_json_object, help="For ENV.")
@click.option("--backend", help="How envs are run: serial, envpool, ...")
@click.option(
    "--exploration", type=click.Choice(_EXPLORATION), default="deterministic", show_default=True
)
@click.option("--max-steps", type=int, help="Truncate episodes at this length.")
@click.option(
    "--inference-batch-size",
    type=int,
    default=16,
    show_default=True,
    help="The policy always runs at this batch size.",
)
@click.option(
    "--inference-threads",
    type=int,
    default=1,
    show_default=True,
    help="The policy always runs with so many of torch's threads.",
)
@click.option(
    "--eval-mode/--no-eval-mode",
    default=True,
    show_default=True,
    help="Run the policy in eval mode, or in the mode that it is made in.",
)
@click.option("--device", help="Where the policy runs.")
@click.option("--keep", is_flag=True, help="Keep the episodes' data in --out.")
@click.option(
    "--on-error", type=click.Choice(["retry", "raise"]), default="retry", show_default=True
)
@click.option("--retries", type=int, default=2, show_default=True, help="Of an env that raises.")
@click.option("--quiet", is_flag=True, help="Show no progress and no table.")
@_as_json
def evaluate(
    env: str,
    policy: str,
    checkpoint: str | None,
    vecnormalize: str | None,
    episodes: int | None,
    seeds: list[int] | None,
    out: Path | None,
    env_kwargs: dict[str, Any],
    backend: str | None,
    exploration: str,
    device: str | None,
    keep: bool,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Run numbered test episodes.

    ENV is a gymnasium id, or MODULE:CALLABLE or FILE.py:CALLABLE for what makes an env. The
    status is 1 where episodes failed.
    """
    if keep and out is None:
        raise click.UsageError("--keep needs a directory: --out DIR")
    if episodes == 0:
        raise ValueError("expected --episodes to be positive, got 0: there is nothing to report")
    with redirect_stdout(sys.stderr):  # whatever the user's own code prints
        from torchrl.envs.utils import ExplorationType

        import tdcollect
        from tdcollect.evaluation.directory import check_directory
        from tdcollect.evaluation.request import Request

        if out is not None:
            check_directory(out)  # before an env is made for the policy
        request = Request(
            env,
            policy,
            checkpoint,
            vecnormalize,
            env_kwargs,
            backend,
            device,
            directory=os.getcwd(),
        )
        made_env, made_policy = request.make()
        if episodes is None:
            episodes = 100 if seeds is None else len(seeds)
        result = tdcollect.evaluate(
            made_env,
            made_policy,
            episodes,
            seeds=seeds,
            out=out,
            env_kwargs=env_kwargs or None,
            backend=backend,
            exploration_type=ExplorationType[exploration.upper()],
            device=device,
            keep=keep,
            progress=not quiet,
            **settings,
        )
        summary = result.summary()
        report = None
        if out is not None:
            from tdcollect.evaluation.report import REPORT

            request.write(out)
            report = out / REPORT
    if as_json:
        _print_json(
            env=result.manifest["env"]["id"],
            policy=result.manifest["policy"]["class"],
            ledger=result.digest,
            report=report,
            **summary.to_dict(),
        )
    elif not quiet:
        click.echo(f"{result.manifest['env']['id']}, {result.manifest['policy']['class']}\n")
        click.echo(summary)
        click.echo(f"\nledger {result.digest}")
        if report is not None:
            click.echo(f"report {report}")
    if summary.failed:
        click.echo(f"tdcollect: {summary.failed} of {summary.episodes} episodes failed", err=True)
    return 1 if summary.failed else 0


@program.command()
@click.argument("directories", nargs=-1, required=True, type=_FOLDER, metavar="DIR DIR...")
@click.option("--out", type=_FOLDER, help="Directory for a report of the comparison.")
@_as_json
def compare(directories: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Compare evaluations with the first one, episode by episode.

    They must be on the same episodes.
    """
    if len(directories) < 2:
        raise click.UsageError("expected two directories or more")
    import tdcollect
    from tdcollect.evaluation.report import write_comparison_report

    results = []
    for directory in directories:
        result = tdcollect.EvaluationResult.load(directory)
        if result.missing:
            raise ValueError(
                f"{directory} is unfinished: it lacks {len(result.missing)} of its episodes; run "
                "its evaluation again, which goes on where it was"
            )
        results.append(result)
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    found = tdcollect.compare(*results, names=names)
    report = None if out is None else write_comparison_report(out, found)[-1]
    if as_json:
        _print_json(report=report, **found.to_dict())
        return
    click.echo(found)
    if report is not None:
        click.echo(f"\nreport {report}")


@program.command()
@click.argument("directory", type=_FOLDER)
@click.argument("index", type=int)
@click.option("--video", type=_FOLDER, metavar="FILE", help="Write a video of it, as .mp4.")
@click.option("--env", help="Where the directory does not say it: as evaluate took it.")
@click.option("--policy", help="Likewise.")
@click.option("--checkpoint", metavar="FILE", help="Likewise.")
@_as_json
def replay(
    directory: Path,
    index: int,
    video: Path | None,
    env: str | None,
    policy: str | None,
    checkpoint: str | None,
    as_json: bool,
) -> None:
    """Run episode INDEX of an evaluation again, and check that it is the same to the bit."""
    with redirect_stdout(sys.stderr):
        import tdcollect

        tdcollect.EvaluationResult.load(directory)  # is one, before anything is made
        request = _request(directory, env, policy, checkpoint)
        made_env, made_policy = request.make()
        result = tdcollect.EvaluationResult.load(
            directory,
            made_env,
            made_policy,
            env_kwargs=request.env_kwargs or None,
            backend=request.backend,
            device=request.device,
        )
        result.replay(index, video)
        (record,) = (episode for episode in result.episodes if episode.index == index)
    if as_json:
        _print_json(**json.loads(record.to_json()), same=True, video=video)
        return
    click.echo(
        f"episode {index}: return {record.episode_return:.6g}, {record.length} steps; the same to "
        f"the bit as in the ledger (digest {record.digest})"
    )
    if video is not None:
        click.echo(f"video {video}")


@program.command()
@click.argument("env")
@click.option("--backend", type=click.Choice(["envpool"]), help="Where ENV is an EnvPool id.")
@click.option("--env-kwargs", default="{}", metavar="JSON", callback=_json_object, help="For ENV.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="The most that an episode is played for.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The first that is tried.")
@click.option("--skip", multiple=True, metavar="NAME", help="A question to leave out: speed, say.")
@_as_json
def doctor(env: str, as_json: bool, **settings: Any) -> int:
    """Tell whether an env is fit for collecting and testing.

    ENV is a gymnasium id, an EnvPool id, or MODULE:CALLABLE or FILE.py:CALLABLE for what makes an
    env. The status is 1 where something is broken.
    """
    with redirect_stdout(sys.stderr):
        from tdcollect.evaluation.named import is_named, load_named
        from tdcollect.testing import diagnose

        made = load_named(env, Path.cwd()) if is_named(env) else env
        found = diagnose(made, **settings)
    if as_json:
        _print_json(**found.to_dict())
    else:
        click.echo(found)
    return found.exit_code


def _request(directory: Path, env: str | None, policy: str | None, checkpoint: str | None) -> Any:
    """What to run again: what the directory says, with what was typed in its place."""
    from dataclasses import replace

    from tdcollect.evaluation.named import absolute
    from tdcollect.evaluation.request import Request

    typed: dict[str, Any] = {
        "env": env and absolute(env),
        "policy": policy and absolute(policy),
        "checkpoint": checkpoint and os.path.abspath(checkpoint),
    }
    given = {name: value for name, value in typed.items() if value is not None}
    kept = Request.read(directory)
    if kept is not None:
        return replace(kept, **given)
    if env is None or policy is None:
        raise ValueError(
            f"{directory} does not say how to make its env and its policy, as no finished "
            "`tdcollect evaluate` wrote it; say it: --env ENV --policy MODULE:FACTORY "
            "[--checkpoint FILE]"
        )
    return Request(directory=os.getcwd(), **given)


def _print_json(**fields: Any) -> None:
    click.echo(json.dumps(fields, indent=1, default=str))
