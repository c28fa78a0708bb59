"""Trust: replay runs code that the user names; code that a directory names needs ``--trust``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import click

from tdcollect.display import visible
from tdcollect.evaluation.imports import with_file
from tdcollect.evaluation.request import Request, typed_option, with_call


class UntrustedError(click.ClickException):
    """The directory names code that was not typed: it is printed, and not run."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message, which has lines of its own."""
        click.echo(visible(self.message, lines=True), file, err=True)


def wanted(directory: Path, index: int, typed: Mapping[str, Any], trust: bool) -> Request:
    """Return the env and the policy to run again: as typed, or with ``trust`` as kept there.

    Args:
        directory: the directory of the evaluation.
        index: the episode's index, for messages.
        typed: the options of ``tdcollect replay`` that are fields of a request; None if not
            typed.
        trust: take what was not typed from the directory.

    Raises:
        UntrustedError: if something is not typed, and the directory names it.
        ValueError: if something is not typed, and the directory does not name it either.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    enough = "env" in given and "policy" in given
    if enough and not trust:
        return Request(directory=os.getcwd(), **given)  # nothing of the directory is even read
    kept = Request.read(directory)
    if kept is None:
        if enough:
            return Request(directory=os.getcwd(), **given)
        raise ValueError(
            f"{directory} does not say how to make its env and its policy, as no finished "
            "`tdcollect evaluate` wrote it; say it: --env ENV --policy MODULE:FACTORY "
            "[--checkpoint FILE]"
        )
    for name in given.keys() & {"env", "policy"}:
        given[name] = with_file(given[name], os.path.abspath)
    for name in given.keys() & {"wrappers", "transforms"}:
        given[name] = [with_call(item, os.path.abspath) for item in given[name]]
    for name in given.keys() & {"checkpoint", "vecnormalize", "env_state"}:
        given[name] = os.path.abspath(given[name])
    request = replace(kept, **given)
    if not trust:
        raise UntrustedError(_ways(directory, index, request, typed))
    return request


def _ways(directory: Path, index: int, request: Request, typed: Mapping[str, Any]) -> str:
    """Return the message with what the directory names, and how to go on."""
    named = {name: value for name, value in asdict(request).items() if value}
    lines = "\n".join(
        f"  {_option(name):<13} {visible(str(one))}"
        for name, value in named.items()
        for one in (value if isinstance(value, list) else [value])
    )
    command = request.command(index, directory, os.getcwd())
    trusting = ["tdcollect", "replay", os.fspath(directory), str(index), "--trust"]
    for name, value in typed.items():
        trusting += typed_option(f"--{_option(name)}", value)
    return (
        "tdcollect: replay runs what you name, and what a directory names only with --trust, as it "
        f"may be any code. Nothing was run. {visible(str(directory))} names\n\n{lines}\n\n"
        "Is the directory your own, or do you trust who wrote it?\n\n"
        f"  {visible(shlex.join(trusting))}\n\n"
        "Otherwise name all that is to be run; as the directory has it:\n\n"
        f"  {visible(command)}"
    )


def _option(name: str) -> str:
    """Return the option of a request's field."""
    return {"wrappers": "wrapper", "transforms": "transform"}.get(name, name.replace("_", "-"))
