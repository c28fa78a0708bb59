"""The command ``tdcollect view``."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click

from tdcollect.cli import options
from tdcollect.cli.output import print_json, say
from tdcollect.cli.program import program
from tdcollect.display import count_text

HOST = "127.0.0.1"


@program.command()
@click.argument("directory", type=options.FOLDER, metavar="DIR")
@click.option(
    "--output-dir",
    type=options.FOLDER,
    default="pages",
    show_default=True,
    help="Folder for the pages; new, empty, or with pages of this command.",
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
def view(directory: Path, output_dir: Path, serve: int | None, as_json: bool) -> None:
    """Write the pages of all evaluations and learning curves below DIR, with an index.

    The pages are static files that need no network. They are made anew from the ledgers, which are
    read as data: nothing that DIR names is run.
    """
    from tdcollect.view import view as write

    index, found = write(directory, output_dir)
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
    """Return a server of the files of a folder, for this machine alone."""
    return ThreadingHTTPServer((HOST, port), partial(_Handler, directory=str(folder)))


class _Handler(SimpleHTTPRequestHandler):
    """Answers requests to this machine by its own names, quietly."""

    def send_head(self) -> Any:
        """Refuse other names: a page of somebody else may have resolved its own name to here."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (HOST, "localhost"):
            self.send_error(403, "only for this machine")
            return None
        return super().send_head()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
