"""Faults drawn at random, to see that some test fails on each.

``python tests/mutate.py draw --seed 27 --count 60`` prints the faults. With ``run`` in place of
``draw``, each is put into a copy of the checkout, and the tests that call the changed function run,
the quickest first, until one fails. Which tests call which functions is found out once, by a run of
all tests under a profiler (``--calls FILE`` keeps it).

A fault that no test catches is printed with its line: it changes nothing that anybody can see, or a
test is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tdcollect"
MOST_TESTS = 300
SECONDS = 600

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


class Fault(NamedTuple):
    """One changed expression or statement: the file, where it stands, and its new text."""

    file: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.file}:{self.line} ({self.function}): {old}  ->  {new}"


def faults(path: Path) -> list[Fault]:
    """All faults that a file can get, in functions; type annotations and messages are left out."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = path.relative_to(ROOT).as_posix()
    found = []
    for function, node in _nodes(ast.parse(source), ""):
        if (new := _changed(node)) is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old = source[start:end].decode()
            found.append(Fault(name, function, node.lineno, start, end, old, new))
    return found


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, Any]]:
    """Every expression and statement in functions, with the qualified name of its function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments | ast.JoinedStr | ast.Raise):
            continue
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{function}.{child.name}" if function else child.name
            yield from _nodes(ast.Module(child.body, []), name)
            continue
        if isinstance(child, ast.AnnAssign):
            child = ast.Module([] if child.value is None else [child.value], [])  # type: ignore[list-item]
        elif function and isinstance(child, ast.expr | ast.stmt):
            yield function, child
        yield from _nodes(child, function)


def _changed(node: Any) -> str | None:
    """The text that an expression or a statement may be replaced by, or None."""
    new = copy.copy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in _OTHER:
            new.ops = [_OTHER[type(node.ops[0])](), *node.ops[1:]]
        case ast.BoolOp() | ast.BinOp() if type(node.op) in _OTHER:
            new.op = _OTHER[type(node.op)]()
        case ast.UnaryOp(ast.Not()):
            new = node.operand
        case ast.Constant(bool()):
            new = ast.Constant(not node.value)
        case ast.Constant(int()):
            new = ast.Constant(node.value + 1)
        case ast.IfExp():
            new = node.orelse
        case ast.Return(value) if not (value is None or ast.unparse(value) == "None"):
            return "return None"
        case ast.Expr(ast.Call()) | ast.Break():
            return "pass"
        case ast.Continue():
            return "break"
        case _:
            return None
    return f"({ast.unparse(new)})"


def draw(seed: int, count: int) -> list[Fault]:
    """Faults of the whole package, each as likely as any other."""
    every = [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path)]
    return random.Random(seed).sample(every, count)


class Calls:
    """A plugin of pytest that notes which functions of the package each test calls."""

    def __init__(self, out: Path):
        self.out = out
        self.tests: dict[str, Any] = {}
        self.called: set[str] = set()

    def note(self, frame: Any, event: str, argument: Any) -> None:
        """Note a call."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            name = code.co_qualname.replace(".<locals>", "")
            self.called.add(f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{name}")

    def pytest_runtest_setup(self) -> None:
        sys.setprofile(self.note)  # a test before may have set its own
        threading.setprofile(self.note)

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "calls": []})
        test["seconds"] += report.duration
        test["calls"] = sorted({*test["calls"], *self.called})
        self.called.clear()

    def pytest_sessionfinish(self) -> None:
        sys.setprofile(None)
        self.out.write_text(json.dumps(self.tests))


def callers(calls: Path) -> dict[str, list[str]]:
    """The tests that call each function, the quickest first."""
    if not calls.exists():
        calls.parent.mkdir(parents=True, exist_ok=True)
        program = (
            "import sys, pytest; from pathlib import Path; from tests.mutate import Calls;"
            "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider'],"
            " plugins=[Calls(Path(sys.argv[1]))]))"
        )
        subprocess.run([sys.executable, "-c", program, str(calls)], cwd=ROOT, check=False)
    found: dict[str, list[str]] = {}
    tests = json.loads(calls.read_text())
    for name in sorted(tests, key=lambda name: tests[name]["seconds"]):
        for function in tests[name]["calls"]:
            found.setdefault(function, []).append(name)
    return found


def caught_by(fault: Fault, checkout: Path, tests: list[str]) -> str | None:
    """The first test that fails on a fault, or None."""
    file = checkout / fault.file
    source = file.read_bytes()
    file.write_bytes(source[: fault.start] + fault.new.encode() + source[fault.end :])
    (chosen := checkout / "chosen.txt").write_text("\n".join(tests))  # too long for a command line
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"@{chosen}"]
    how: Any = {"cwd": checkout, "env": {**os.environ, "PYTHONPATH": str(checkout)}}
    try:
        ended = subprocess.run(
            command, **how, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        file.write_bytes(source)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return None if ended.returncode == 0 else [*lines, f"exit status {ended.returncode}"][0]


def run(drawn: list[Fault], calls: Path) -> int:
    """Try each fault; return how many no test caught."""
    tests = callers(calls)
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "site", "__pycache__", ".*cache")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        for fault in drawn:
            chosen = tests.get(f"{fault.file}:{fault.function}", [])[:MOST_TESTS]
            caught = caught_by(fault, checkout, chosen) if chosen else None
            survived += caught is None
            print(f"{'caught' if caught else 'SURVIVED'}  {fault}", flush=True)
            print(f"          {caught or f'of {len(chosen)} tests that call it, none'}", flush=True)
    print(f"{len(drawn) - survived} of {len(drawn)} faults were caught")
    return survived


def main() -> int:
    """Draw faults, and try them if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["draw", "run"])
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--calls", type=Path, default=ROOT / "runs" / "calls.json")
    options = parser.parse_args()
    drawn = draw(options.seed, options.count)
    if options.command == "run":
        return min(run(drawn, options.calls), 1)
    print("\n".join(map(str, drawn)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
