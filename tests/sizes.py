"""The size of the package, compared with the limits in ``tests/limits.toml``.

``python tests/sizes.py`` prints the table; ``--files`` the code lines of each file.
Code lines are lines without docstrings, comments and blanks.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tdcollect"
LIMITS = ROOT / "tests" / "limits.toml"
PUBLIC = ("collect", "collectors", "envs", "evaluation", "lab", "testing", "trajectories")

ENTRY_POINTS = {
    "make_env": "tdcollect.make_env('CartPole-v1', 2)",
    "Collector": (
        "tdcollect.Collector(tdcollect.make_env('CartPole-v1', 2), None,"
        " frames_per_batch=8, total_frames=8)"
    ),
    "evaluate": "tdcollect.evaluate('CartPole-v1', None, 2, progress=False)",
}
"""Programs whose modules are counted; to import the name alone would load less than to use it."""


def lines_of(source: str) -> tuple[int, int]:
    """The code lines of a file, and its lines of docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in node.body:
                said = part.value if isinstance(part, ast.Expr) else None
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    documented.update(range(part.lineno, (part.end_lineno or 0) + 1))
    lines = [line.strip() for line in source.splitlines()]
    code = {at for at, line in enumerate(lines, 1) if line and not line.startswith("#")}
    return len(code - documented), len(documented)


def lines() -> dict[str, tuple[int, int]]:
    """Of each file, the lines of code and of docstrings; HTML templates are among the files."""
    found = {path: lines_of(path.read_text()) for path in PACKAGE.rglob("*.py")}
    for path in PACKAGE.rglob("*.html"):
        found[path] = (sum(bool(line.strip()) for line in path.read_text().splitlines()), 0)
    return {path.relative_to(PACKAGE).as_posix(): counts for path, counts in found.items()}


def imports() -> dict[str, set[str]]:
    """The modules that each module imports, in functions too, but not for types alone."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = set(imported(ast.parse(path.read_text()), package))
        found[name] = {
            target if target in modules else target.rpartition(".")[0] for target in named
        } & modules.keys() - {name}
    return found


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """The names that a module of a package imports."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from imported(child, package)


def circle() -> list[str]:
    """Modules of which each imports the one before it, and the first the last; or none."""
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def output_of(program: str) -> str:
    """Return the output of a program in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def modules_loaded(name: str, run: Callable[[str], str]) -> int:
    """The modules of the package that a first use of a name loads."""
    program = (
        f"import sys, tdcollect; {ENTRY_POINTS[name]};"
        "print(sum(name.startswith('tdcollect') for name in sys.modules))"
    )
    return int(run(program).split()[-1])


def measured(run: Callable[[str], str] = output_of) -> dict[str, int]:
    """Each size, under its name in the file of limits; ``run`` runs programs."""
    code, documented = zip(*lines().values(), strict=True)
    packages = ["tdcollect", *(f"tdcollect.{name}" for name in PUBLIC)]
    kept = [path.read_bytes() for path in (ROOT / "benchmarks").rglob("*.json")]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return {
        "code lines": sum(code),
        "code lines of the longest file": max(code),
        "Python files": len([*PACKAGE.rglob("*.py")]),
        "docstring lines": sum(documented),
        **{f"modules loaded by {name}": modules_loaded(name, run) for name in ENTRY_POINTS},
        "public names": sum(len(importlib.import_module(name).__all__) for name in packages),
        "circles of imports": int(bool(circle())),
        "lines under tests": sum(len(text.splitlines()) for text in tests),
        "lines of JSON under benchmarks": sum(text.count(b"\n") for text in kept),
        "bytes of JSON under benchmarks": sum(len(text) for text in kept),
    }


def limits() -> dict[str, int]:
    """The limit of each size."""
    return {name: int(limit) for name, limit in tomllib.loads(LIMITS.read_text()).items()}


def main(arguments: list[str]) -> int:
    """Print sizes beside their limits; return 1 if one is above its limit."""
    if "--files" in arguments:
        for name, (code, _) in sorted(lines().items(), key=lambda item: -item[1][0]):
            print(f"{code:6,}  {name}")
        return 0
    allowed, above = limits(), False
    print(f"{'':40}{'now':>8}{'at most':>9}")
    for name, size in measured().items():
        over = size > allowed[name]
        above |= over
        print(f"{name:40}{size:8,}{allowed[name]:9,}{'  ABOVE' if over else ''}")
    if found := circle():
        print("circle:", " ".join(found))
    return int(above)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
