"""Serve a policy: copy this file to the machine where the model is, and change `Agent`.

    python policy_server.py --port 8000
    tdcollect evaluate CartPole-v1 --policy http://127.0.0.1:8000

It needs NumPy alone. Only programs of this machine can reach it: from another one, open a tunnel,
`ssh -L 8000:127.0.0.1:8000 MACHINE`. Nobody is asked for a password, and `--host` lets others in.
"""

import argparse
import base64
import hashlib
import json
import threading
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

WEIGHTS = np.array([0.0, 0.5, 3.0, 1.0])
ABOUT = {
    "protocol": "tdcollect-policy/1",
    "name": "lean",
    "version": "1",  # yours: another one is another evaluation, as is another digest
    "digest": hashlib.sha256(WEIGHTS.tobytes()).hexdigest(),
}
SESSIONS = 256  # the most episodes at once


class Agent:
    """Plays one episode. For a function of an observation, leave `reset` empty."""

    def reset(self, seed):
        self.random = np.random.default_rng(seed)  # draws belong to their episode

    def act(self, observation):
        leans = observation @ WEIGHTS > 0
        return int(leans) if self.random.random() > 0.1 else int(self.random.integers(2))


class Server(ThreadingHTTPServer):
    """Keeps an agent for each session, with the number and the answer of its latest request."""

    daemon_threads = True

    def __init__(self, address, make=Agent, about=ABOUT):
        super().__init__(address, Handler)
        self.make, self.about = make, about
        self.sessions, self.lock = OrderedDict(), threading.Lock()

    def handle_error(self, *of):
        """Print nothing for a client that has gone."""

    def answer(self, request):
        """The status and the answer of a request; of one that came before, what it was then."""
        name, number = request.get("session"), request.get("number")
        with self.lock:  # agents act one at a time
            if "about" in request:
                return 200, {"about": self.about}
            if "end" in request:
                return 200, {"ended": self.sessions.pop(name, None) is not None}
            if number == 0 and name not in self.sessions:
                agent = self.make()
                agent.reset(request["seed"])
                self.sessions[name] = [agent, -1, {"about": self.about}]
                if len(self.sessions) > SESSIONS:
                    self.sessions.popitem(last=False)
            if name not in self.sessions:
                return 410, {"error": "the session is lost"}
            self.sessions.move_to_end(name)
            agent, latest, answer = self.sessions[name]
            if number == latest + 1:
                action = agent.act(decoded(request["observation"]))
                kept = answer if number == 0 else {}
                answer = {**kept, "number": number, "action": encoded(action)}
                self.sessions[name] = [agent, number, answer]
            return 200, answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection stays for an episode
    disable_nagle_algorithm = True

    def do_POST(self):
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = self.server.answer(request)
        except Exception as error:  # tdcollect shows it
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Print no line for each request."""


def encoded(value):
    """An action as plain data."""
    if isinstance(value, dict):
        return {name: encoded(part) for name, part in value.items()}
    value = np.asarray(value)
    data = base64.b64encode(value.tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": value.shape, "data": data}


def decoded(value):
    """An observation: an array, or a dict or a list of arrays."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value.get("dtype"), str):
        return {name: decoded(part) for name, part in value.items()}
    data = base64.b64decode(value["data"])
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for any machine")
    options = parser.parse_args()
    with Server((options.host, options.port)) as server:
        print(f"serving {ABOUT['name']} at http://{options.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
