"""The doctor's findings on gymnasium's own envs: the tables of docs/doctor.md.

    python benchmarks/doctor.py            # all that can be made here, into the page
    python benchmarks/doctor.py CartPole-v1 Taxi-v4    # some, as JSON lines

With --keep it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym

from tdcollect.testing import diagnose

PAGE = Path(__file__).parent.parent / "docs" / "doctor.md"
BEGIN, END = "<!-- written by benchmarks/doctor.py -->\n", "<!-- end -->\n"
_COMPATIBILITY = ("GymV21Environment-v0", "GymV26Environment-v0")
_PACKAGES = ("gymnasium", "numpy", "box2d", "mujoco")
_SHOWN = {"passed": "passed", "warned": "warned", "failed": "**failed**", "skipped": "-"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("envs", nargs="*", help="ids; none for all of gymnasium's registry")
    parser.add_argument("--steps", type=int, default=1000, help="the most of an episode")
    parser.add_argument("--keep", type=Path, help="a file of JSON lines to go on with")
    arguments = parser.parse_args()
    envs = arguments.envs or [name for name in gym.registry if name not in _COMPATIBILITY]
    found: dict[str, Any] = {}
    if arguments.keep and arguments.keep.exists():
        lines = arguments.keep.read_text().splitlines()
        found = {one["env"]: one for one in map(json.loads, lines)}
    for name in envs:
        if name not in found:
            found[name] = diagnose(
                name, max_episode_steps=arguments.steps, skip=["speed"]
            ).to_dict()
            line = json.dumps(found[name], default=str)
            if arguments.keep:
                with arguments.keep.open("a") as file:
                    file.write(line + "\n")
            print(line if arguments.envs else name, flush=True)
    if not arguments.envs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        text = tables([found[name] for name in envs], arguments.steps)
        PAGE.write_text(before + BEGIN + text + END + after)


def tables(found: list[dict[str, Any]], steps: int) -> str:
    """Return the tables as Markdown: results, notes, and envs that cannot be made."""
    made = [one for one in found if one["findings"][0]["status"] == "passed"]
    names = [
        finding["name"]
        for finding in made[0]["findings"]
        if finding["name"] not in ("runs", "speed")
    ]
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    lines = [
        f"Python {platform.python_version()}, {versions}; episodes of up to {steps} steps.",
        "",
    ]
    lines += [f"| env | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for one in made:
        status = {finding["name"]: _SHOWN[finding["status"]] for finding in one["findings"]}
        lines.append(f"| {one['env']} | {' | '.join(status[name] for name in names)} |")
    lines += ["", "What was seen where a check did not pass:", ""]
    for one in made:
        for finding in one["findings"]:
            if finding["name"] == "runs" and "; cut at" in finding["evidence"]:
                lines.append(f"- {one['env']}: {finding['evidence']}")
            if finding["status"] in ("warned", "failed"):
                cause = f" Likely cause: {finding['cause']}." if finding["cause"] else ""
                note = f"{finding['evidence']}.{cause}".replace("<", "&lt;")
                lines.append(f"- {one['env']}, {finding['name']} ({finding['status']}): {note}")
    lines += ["", "Not made here:", ""]
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one not in made:
            why = one["findings"][0]["evidence"]
            reasons.setdefault(why.rpartition(" (")[0] or why, []).append(one["env"])
    lines += [f"- {', '.join(envs)}: {why}" for why, envs in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
