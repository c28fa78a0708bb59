"""The doctor's findings on gymnasium's own envs: the tables of docs/doctor.md.

    python benchmarks/doctor.py                        # all envs, written into the page
    python benchmarks/doctor.py CartPole-v1 Taxi-v4    # some envs, printed as JSON lines

With --results it resumes an interrupted run.
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
    parser.add_argument("envs", nargs="*", help="env ids; by default all of gymnasium's registry")
    parser.add_argument("--max-episode-steps", type=int, default=1000, help="longest episode")
    parser.add_argument(
        "--results", type=Path, help="file of JSON lines to write, and to resume from"
    )
    arguments = parser.parse_args()
    envs = arguments.envs or [name for name in gym.registry if name not in _COMPATIBILITY]
    found: dict[str, Any] = {}
    if arguments.results and arguments.results.exists():
        lines = arguments.results.read_text().splitlines()
        found = {one["env"]: one for one in map(json.loads, lines)}
    for name in envs:
        if name not in found:
            found[name] = diagnose(name, max_episode_steps=arguments.max_episode_steps).to_dict()
            line = json.dumps(found[name], default=str)
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(line + "\n")
            print(line if arguments.envs else name, flush=True)
    if not arguments.envs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        text = tables([found[name] for name in envs], arguments.max_episode_steps)
        PAGE.write_text(before + BEGIN + text + END + after)


def tables(found: list[dict[str, Any]], steps: int) -> str:
    """Markdown: the table of findings, notes, and envs that cannot be made."""
    made = [one for one in found if one["findings"][0]["status"] == "passed"]
    names = [finding["name"] for finding in made[0]["findings"] if finding["name"] != "runs"]
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    lines = [
        f"Python {platform.python_version()}, {versions}; episodes of up to {steps} steps.",
        "",
    ]
    lines += [f"| env | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for one in made:
        status = {finding["name"]: _SHOWN[finding["status"]] for finding in one["findings"]}
        lines.append(f"| {one['env']} | {' | '.join(status[name] for name in names)} |")
    lines += ["", "Evidence for the checks that did not pass:", ""]
    for one in made:
        for finding in one["findings"]:
            if finding["name"] == "runs" and "; cut at" in finding["evidence"]:
                lines.append(f"- {one['env']}: {finding['evidence']}")
            if finding["status"] in ("warned", "failed"):
                cause = f" Likely cause: {finding['cause']}." if finding["cause"] else ""
                note = f"{finding['evidence']}.{cause}".replace("<", "&lt;")
                lines.append(f"- {one['env']}, {finding['name']} ({finding['status']}): {note}")
    lines += ["", "Envs that could not be made here:", ""]
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one not in made:
            why = one["findings"][0]["evidence"]
            reasons.setdefault(why.rpartition(" (")[0] or why, []).append(one["env"])
    lines += [f"- {', '.join(envs)}: {why}" for why, envs in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
