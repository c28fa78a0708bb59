"""This process's connection to a Ray cluster, and the room that the cluster has."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tdcollect.cleanup import ended_on_error

_SECONDS = 5.0  # for a cluster to accept a connection; Ray tries for minutes
_users: Counter[str] = Counter()
"""The number of users of a connection that was made here; it ends with the last of them."""


def connect(address: str | None) -> str:
    """Connect this process to Ray, unless it is connected; return a name of the connection.

    Ray starts on this machine if there is no address and none is running.

    Raises:
        ConnectionError: if nothing listens at the address.
        ValueError: for an address that cannot be honoured.
    """
    import ray

    if not ray.is_initialized():
        _start(address)
        _users[current()] = 0
    elif _is_client():
        _refuse_client("this process is connected as a Ray client")
    elif address not in (None, "auto") and _resolved(str(address)) != _resolved(_gcs_address()):
        raise ValueError(
            f"expected the address of the Ray cluster that this process is connected to, "
            f"{_gcs_address()}, got {address}; leave it out, or call ray.shutdown() first"
        )
    name = current()
    if name in _users:
        _users[name] += 1
    return name


def disconnect(name: str) -> None:
    """Let go of a connection; this ends it, and the Ray that was started for it, if nobody else
    uses it and it was made here."""
    if name not in _users:
        return
    _users[name] -= 1
    if not _users[name]:
        del _users[name]
        if current() == name:
            import ray

            ray.shutdown()


def current() -> str:
    """Return the name of the present connection; empty if there is none.

    Without one, a call of Ray would start another Ray, or end this process.
    """
    import ray

    if not ray.is_initialized() or _is_client():
        return ""
    # A fork has a copy of the connection that it must not touch.
    return f"{_gcs_address()} {ray.get_runtime_context().get_job_id()} {os.getpid()}"


def address() -> str | None:
    """Return the address of the cluster that this process is connected to, if it is."""
    return _gcs_address() if current() else None


def room(needs: dict[str, float]) -> float:
    """The number of actors with these needs that the cluster has room for, if it is empty."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(
        min((node.get(kind, 0) // amount for kind, amount in needs.items()), default=float("inf"))
        for node in nodes
    )


def in_words(amounts: dict[str, float]) -> str:
    """Return amounts of CPUs and GPUs as text."""
    parts = [f"{amount:g} {kind}{'s' * (amount != 1)}" for kind, amount in amounts.items()]
    return " and ".join(parts)


def _start(address: str | None) -> None:
    import ray

    wanted = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if wanted and "://" in wanted:
        _refuse_client(f"got {wanted}")
    host, colon, port = (wanted or "").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"expected a Ray cluster at {wanted}, got {error}; start one with `ray start "
                "--head`, or leave the address out"
            ) from error
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
    # Whatever it has begun to start is ended if the rest fails.
    with _as_it_was(), quiet, ended_on_error(ray.shutdown):
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Have Ray send no usage statistics, and put the handler of SIGTERM back that it replaces."""
    name, main = "RAY_USAGE_STATS_ENABLED", threading.current_thread() is threading.main_thread()
    before, handler = os.environ.get(name), signal.getsignal(signal.SIGTERM)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _refuse_client(why: str) -> None:
    raise ValueError(
        f"expected a process of the Ray cluster, but {why}, which cannot read streams; run it on a "
        "machine of the cluster, for example with `ray job submit`"
    )


def _is_client() -> bool:
    from ray.util.client import ray as client

    return bool(client.is_connected())


def _gcs_address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def _resolved(address: str) -> Any:
    """Return host and port, with one name for each host; the text itself if it is another form."""
    import ray

    host, _, port = address.rpartition(":")
    try:
        host = socket.gethostbyname(host)
    except OSError:
        return address
    return (ray.util.get_node_ip_address() if host.startswith("127.") else host), port
