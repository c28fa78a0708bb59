"""The command ``tdcollect view``."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

from tdcollect.cli import options
from tdcollect.cli.output import print_json, say
from tdcollect.cli.program import program
from tdcollect.display import count_text
from tdcollect.pages.html import content_policy

HOST = "127.0.0.1"


@program.command()
@click.argument("directory", type=options.FOLDER, metavar="DIR")
@click.option(
    "--output-dir",
    type=options.FOLDER,
    default="pages",
    show_default=True,
    help="Folder for the pages; new, empty, or with pages of this command, which are replaced.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace pages that lie in DIR, too, and all that is beside them.",
)
@click.option(
    "--serve",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=0,
    metavar="[PORT]",
    help=f"Serve the pages on {HOST}, at a free port unless one is named, until interrupted.",
)
@options.as_json
def view(
    directory: Path, output_dir: Path, overwrite: bool, serve: int | None, as_json: bool
) -> None:
    """Write the pages of all evaluations, learning curves and suites below DIR, with an index.

    The pages are static files that need no network. They are made anew from the ledgers, which are
    read as data: nothing that DIR names is run.
    """
    from tdcollect.view import view as write

    index, found = write(directory, output_dir, overwrite)
    server = None if serve is None else server_of(output_dir, serve)
    address = None if server is None else f"http://{HOST}:{server.server_port}/"
    if as_json:
        print_json(index=index, address=address, found=[one.to_dict() for one in found])
    else:
        pages = sum(one.page is not None for one in found)
        say(f"{count_text(pages, 'page')} of {len(found)} found below {directory}\nindex {index}")
        for one in found:
            if one.page is None:
                say(f"tdcollect: {one.path}: {one.status}", err=True)
        if address is not None:
            say(f"serving {address} until interrupted (Ctrl-C)")
    if server is not None:
        with server:
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                say("stopped", err=True)


def server_of(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of the pages that a folder holds now, for this machine alone."""
    pages = {f"/{file.relative_to(folder).as_posix()}" for file in folder.rglob("*.html")}
    handler = type("Handler", (_Handler,), {"pages": pages | {"/"}})
    return ThreadingHTTPServer((HOST, port), partial(handler, directory=str(folder)))


class _Handler(SimpleHTTPRequestHandler):
    """Answers requests to this machine by its own names, quietly, with pages that it knows."""

    pages: Set[str]

    def send_head(self) -> Any:
        """Refuse other names: a page of somebody else may have resolved its own name to here."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (HOST, "localhost"):
            self.send_error(403, "only for this machine")
        elif unquote(self.path.partition("?")[0]) not in self.pages:
            self.send_error(404)
        else:
            return super().send_head()
        return None

    def end_headers(self) -> None:
        """Have the policy of pages hold for every answer."""
        self.send_header("Content-Security-Policy", content_policy())
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
