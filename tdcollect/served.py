"""Policies on a server: observations out, actions back, over HTTP, as plain data."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from tdcollect import check
from tdcollect.display import visible

PROTOCOL = "tdcollect-policy/1"
_HERE = "127.0.0.1"
_URL = r"(https?)://((?:[\w.-]+|\[[\da-fA-F:]+\])(?::\d+)?)(/[\w./-]*)?"  # no user, no query
_GONE = 410  # the status of a server that has lost a session
_PAUSE = 0.5  # seconds before a request is sent once more
_SHOWN = 300  # characters of an answer that an error shows
_NO_ANSWER = (OSError, OverflowError, http.client.HTTPException)  # the second: of a large port


class SessionLost(RuntimeError):
    """The server does not know the session of an episode any more."""


class Server:
    """A policy server, with the limits of what is sent and received.

    Attributes:
        url: of the server.
        timeout: the seconds that an answer may take.
        largest: the most bytes of a message.
        said: the server's words about itself, as :meth:`check` found them.
    """

    def __init__(self, url: str | int, timeout: float, largest: int):
        self.url = f"http://{_HERE}:{url}" if isinstance(url, int) else str(url)
        found = re.fullmatch(_URL, self.url)
        if found is None:
            raise ValueError(
                "expected the port of a policy server on this machine, or the url of one, such as "
                f"http://{_HERE}:8000, got {url!r}; reach a machine that asks for a password "
                "through a tunnel, ssh -L 8000:127.0.0.1:8000 MACHINE"
            )
        check.seconds(timeout=timeout)
        check.positive_int(largest=largest)
        self.scheme, self.address, self.path = found.groups("/")
        self.timeout, self.largest = timeout, largest
        self.said: dict[str, str | None] = {}

    def check(self) -> None:
        """Ask the server what it serves."""
        session, self.said = Session(self), {}
        try:
            self.said = self.about(session.asked({"about": PROTOCOL}))
        finally:
            session.close()

    def about(self, answer: Mapping[str, Any]) -> dict[str, str | None]:
        """The server's words about itself, out of an answer.

        Raises:
            ValueError: for others than name, version and digest, or than those of the check.
        """
        said = answer.get("about")
        found = said if isinstance(said, Mapping) else {}
        about = {name: found.get(name) for name in ("name", "version", "digest")}
        texts = [text for text in about.values() if text is not None]
        fit = about["name"] and all(isinstance(text, str) for text in texts)
        fit = fit and re.fullmatch("[0-9a-f]{64}", about["digest"] or 64 * "0")
        if not fit or max(map(len, texts)) > _SHOWN or found.get("protocol") != PROTOCOL:
            raise self.unfit(
                f"to say what it is, {{'protocol': {PROTOCOL!r}, 'name': a text, 'version': a text "
                "or None, 'digest': a SHA-256 in hexadecimal or None}",
                said,
            )
        if self.said not in ({}, about):
            raise self.unfit(f"to serve {self.said} until the evaluation ends", about)
        return about

    def silent(self, error: Exception) -> ConnectionError:
        """The error for a server that gives no answer."""
        return ConnectionError(
            f"expected an answer of the policy server at {self.url} within {self.timeout:g} "
            f"seconds, got {type(error).__name__}: {visible(str(error))}; start it "
            "(examples/policy_server.py is one), or pass another url, or a longer "
            "from_server(url, timeout=...)"
        )

    def unfit(self, expected: str, got: Any) -> ValueError:
        """The error for an answer that is none."""
        text = visible(got if isinstance(got, str) else repr(got))
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return ValueError(
            f"expected the policy server at {self.url} {expected}, got {text}; correct the server, "
            "as examples/policy_server.py does it"
        )


class Session:
    """A connection, and one episode, of which the server hears with its first observation."""

    def __init__(self, server: Server, seed: int = 0):
        https = server.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        self._server, self._line = server, kind(server.address, timeout=server.timeout)
        self._line.response_class = _Timely
        self._message: dict[str, Any] = {"session": uuid.uuid4().hex, "seed": seed, "number": -1}
        self._waits = False  # for an answer

    def see(self, observation: Any) -> None:
        """Send an observation, for which the server begins to choose an action."""
        number = self._message["number"] + 1
        self._message.update(number=number, observation=packed(observation))
        with suppress(*_NO_ANSWER):  # it is sent once more
            self._send(self._message)

    def act(self) -> Any:
        """Return the action at the observation."""
        server, number = self._server, self._message["number"]
        answer = self._answer()
        if number == 0:
            server.about(answer)
        try:
            if answer["number"] != number:
                raise ValueError(f"it is of request {answer['number']}")
            return unpacked(answer["action"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise server.unfit(
                f"to answer with 'number' {number} and 'action', numbers or {{'dtype': '<f4', "
                f"'shape': [2], 'data': base64}} ({type(error).__name__}: {error})",
                answer.get("action"),
            ) from error

    def end(self, tell: bool = True) -> None:
        """Close the connection; first tell the server that the episode ends, if it is not busy."""
        if tell and self._message["number"] >= 0 and not self._waits:
            with suppress(ConnectionError, SessionLost, ValueError):
                self.asked({"session": self._message["session"], "end": True})
        self.close()

    def close(self) -> None:
        """Close the connection; it opens again with the next message."""
        self._line.close()

    def asked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and receive the answer; ConnectionError if there is none."""
        try:
            self._send(message)
            return self._received()
        except _NO_ANSWER as error:
            raise self._server.silent(error) from error

    def _answer(self) -> dict[str, Any]:
        if self._waits:
            with suppress(*_NO_ANSWER):
                return self._received()
        # The answer, or the request, is lost: a server that has acted on it answers as before.
        self.close()
        time.sleep(_PAUSE)
        return self.asked(self._message)

    def _send(self, message: Mapping[str, Any]) -> None:
        body, largest = json.dumps(message).encode(), self._server.largest
        if len(body) > largest:
            raise ValueError(
                f"expected a message of at most {largest:,} bytes to the policy server, got "
                f"{len(body):,}; pass a larger from_server(url, largest=...)"
            )
        if self._line.sock is not None:
            self._line.sock.settimeout(self._server.timeout)
        headers = {"Content-Type": "application/json"}
        self._line.request("POST", self._server.path, body, headers)
        self._waits = True

    def _received(self) -> dict[str, Any]:
        server, largest = self._server, self._server.largest
        answer = self._line.getresponse()
        body = answer.read(largest + 1)
        if len(body) > largest:
            raise server.unfit(
                f"to answer with at most {largest:,} bytes (from_server(url, largest=...))",
                f"{answer.getheader('Content-Length', 'more')} bytes",
            )
        if answer.length:  # the rest was cut off
            raise http.client.IncompleteRead(body, answer.length)
        if answer.status == _GONE:
            raise SessionLost(
                f"the policy server at {server.url} has lost the sessions of episodes; have it "
                "keep as many as there are slots"
            )
        self._waits = False
        text = body.decode(errors="replace")
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            if isinstance(found, dict) and answer.status == http.client.OK:
                return found
        raise server.unfit(
            "to answer with a JSON object and status 200", f"{answer.status}: {text}"
        )


def packed(value: Any) -> Any:
    """Return an observation as plain data: arrays with dtype, shape and bytes in base64."""
    if isinstance(value, Mapping):
        return {name: packed(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [packed(part) for part in value]
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected observations that are numbers, got {array!r}")
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def unpacked(value: Any) -> Any:
    """Return an action out of plain data.

    Raises:
        ValueError, TypeError, KeyError: for anything but numbers that are numbers, in any nesting.
    """
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if isinstance(value, dict):
        if not isinstance(value.get("dtype"), str):
            return {name: unpacked(part) for name, part in value.items()}
        data = base64.b64decode(value["data"], validate=True)
        value = np.frombuffer(data, value["dtype"]).reshape(value["shape"])
    if np.asarray(value).dtype.kind not in "biuf" or not np.isfinite(value).all():
        raise ValueError("it is no number, or not finite")
    return value


class _Timely(http.client.HTTPResponse):
    """An answer that comes within its time as a whole, however slowly its bytes come."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock))


class _Reader(io.RawIOBase):
    def __init__(self, raw: Any, sock: Any):
        self._raw, self._sock = raw, sock
        self._until = time.monotonic() + sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
