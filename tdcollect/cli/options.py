"""Options that commands share: how their texts are read, and their help."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click

shown = partial(click.option, show_default=True)
flag = partial(click.option, is_flag=True)
FOLDER = click.Path(path_type=Path)
output_dir = partial(click.option, "--output-dir", type=FOLDER)
EXPLORATION = ("deterministic", "random", "mode", "median", "mean")


def read_by(read: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Return a type of options: texts that a function reads, refused as no ``expected`` ones."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, TypeError, RecursionError) as error:
            place = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
            raise click.BadParameter(f"expected {expected}, got {text!r}{place}") from error

    return value


json_object = read_by(lambda text: {**json.loads(text)}, "a JSON object")
int_list = read_by(lambda text: [*map(int, text.split(","))], "ints with commas between")
step_limit = read_by(
    lambda text: math.inf if text == "inf" else int(text), "a number of steps, or inf"
)


def by_name(context: Any, parameter: Any, texts: tuple[str, ...]) -> dict[str, str] | None:
    """Return the values of NAME=VALUE by name; None if there are none."""
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value or name in values:
            raise click.BadParameter(f"expected NAME=VALUE, each name once, got {text!r}")
        values[name] = value
    return values or None


def _shard(text: str) -> Any:
    from tdcollect.evaluation.ledger import Shard

    match = re.fullmatch("([0-9]+)/([0-9]+)", text)
    return Shard.of((int(match[1]), int(match[2])) if match else None)


shard_of = read_by(_shard, "i/n with i from 0 to n - 1, such as 0/4 for the first of four shards")
shard = partial(click.option, "--shard", type=shard_of, metavar="I/N")


def some(context: Any, parameter: Any, given: tuple[str, ...]) -> tuple[str, ...] | None:
    return given or None


def names(text: str) -> list[str]:
    return text.split(",")


env_kwargs = click.option(
    "--env-kwargs", default="{}", metavar="JSON", type=json_object, help="Arguments of ENV."
)


def together(*options: Any) -> Any:
    """Return options as one decorator; a command shows them in this order."""
    return lambda command: reduce(
        lambda decorated, option: option(decorated), reversed(options), command
    )


FILM = "Film these episodes: worst:3, failed, or indices such as 1,5. The films go to films/ in "
film = partial(click.option, "--film", metavar="EPISODES")
crew = together(
    click.option(
        "--workers",
        type=click.IntRange(min=0),
        help="Number of processes that run the episodes, each on slots of its own.",
    ),
    click.option(
        "--ray-workers",
        type=click.IntRange(min=1),
        help="Number of actors of a Ray cluster that run the episodes, instead of --workers.",
    ),
    click.option(
        "--ray-address",
        metavar="HOST:PORT",
        help="The Ray cluster.  [default: $RAY_ADDRESS, or the one of this machine]",
    ),
)
BACKEND = "Backend of make_env: serial, process, envpool."
episode = together(
    env_kwargs,
    click.option("--backend", help=BACKEND),
    shown("--exploration-type", type=click.Choice(EXPLORATION), default="deterministic"),
    click.option(
        "--max-episode-steps",
        type=step_limit,
        metavar="INT",
        help="Truncate episodes at this length. Without it, one of a million steps is an error; "
        "with inf it is not.",
    ),
    click.option(
        "--reward-keys",
        type=names,
        metavar="KEY,...",
        help="Reward entries that the return is made of, such as agents/reward.  [default: all]",
    ),
    click.option(
        "--metric",
        "metrics",
        callback=by_name,
        multiple=True,
        metavar="NAME=METRIC",
        help="A number of each episode: info:NAME for the sum of an info over its steps, "
        "info:NAME:last, info:NAME:max, or MODULE:FUNCTION of its data. Repeatable.",
    ),
    click.option(
        "--episode-options",
        metavar="FILE",
        help="JSON file with the reset options of each episode: a list, or an object by index.",
    ),
    shown("--inference-batch-size", default=16, help="Batch size that the policy always runs at."),
    shown(
        "--inference-threads",
        default=1,
        help="Number of torch's threads that the policy always runs with.",
    ),
    shown(
        "--eval-mode/--no-eval-mode",
        default=True,
        help="Run the policy in eval mode, or keep the modes of its modules.",
    ),
    click.option("--device", help="Device that the policy runs on."),
    shown(
        "--on-env-error",
        type=click.Choice(["restart", "raise"]),
        default="restart",
        help="Restart an episode whose env raises, or stop.",
    ),
    shown("--max-restarts", default=2, help="Restarts of an episode before it counts as failed."),
)
"""The options that decide an episode, and those for making envs and for their failures."""
recheck = flag(
    "--no-recheck",
    "recheck",
    callback=lambda context, parameter, given: not given,
    help="Do not run the shortest episode once more at the end; results.json tells.",
)


_named = partial(click.option, metavar="NAME", multiple=True, callback=some)
selection = together(
    _named("--task", "tasks", help="A task, or a pattern of names."),
    _named("--policy", "policies", help="A policy, or a pattern of names."),
)
size = together(
    click.option(
        "--episodes", type=click.IntRange(min=1), help="Number of episodes, in place of the file's."
    ),
    click.option(
        "--limit", type=click.IntRange(min=1), help="At most so many episodes each, to try it out."
    ),
)
as_json = flag("--json", "as_json", help="Print one JSON object.")
POLICY = (
    "MODULE:FACTORY or FILE.py:FACTORY, called with an env if it has a parameter without default; "
    "or 'random'; 'sb3' for a model file of Stable-Baselines3; 'lerobot' for a model of LeRobot."
)


class PolicyName(click.types.StringParamType):
    """The name of a policy; what it may be is said where it is missing."""

    def get_missing_message(self, param: click.Parameter, ctx: Any = None) -> str:
        return "Name a function that makes it, FILE.py:FUNCTION, or pass --policy random"


VECNORMALIZE = "VecNormalize statistics that an SB3 model was saved with."
CHECKPOINT = "File with the policy's state_dict, the SB3 model file, or LeRobot's folder."
