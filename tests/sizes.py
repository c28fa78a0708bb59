"""The size of the package, compared with the limits in ``tests/limits.toml``.

``python tests/sizes.py`` prints the table; ``--files`` the code lines of each file.
Code lines are lines without docstrings, comments and blanks.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tdcollect"
LIMITS = ROOT / "tests" / "limits.toml"
PUBLIC = (
    "tdcollect",
    "tdcollect.collect",
    "tdcollect.collectors",
    "tdcollect.envs",
    "tdcollect.evaluation",
    "tdcollect.suites",
    "tdcollect.testing",
    "tdcollect.trajectories",
)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

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
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and isinstance(part.value.value, str)
                ):
                    documented.update(range(part.lineno, (part.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented), len(documented)


def code_lines() -> dict[str, int]:
    """The code lines of each file, HTML templates among them."""
    found = {_name(path): lines_of(path.read_text())[0] for path in PACKAGE.rglob("*.py")}
    for path in PACKAGE.rglob("*.html"):
        found[_name(path)] = sum(bool(line.strip()) for line in path.read_text().splitlines())
    return found


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports() -> dict[str, set[str]]:
    """The modules that each module imports, in functions too, but not for types alone."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = set(imported(path.read_text(), package))
        found[name] = {
            target if target in modules else target.rpartition(".")[0] for target in named
        } & modules.keys() - {name}
    return found


def imported(source: str, package: str) -> Iterator[str]:
    """The names that a module of a package imports."""
    return _imported(ast.parse(source), package)


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported(child, package)


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""
    edges = imports()
    reached = {name: _reach(name, edges) for name in edges}
    groups = {
        tuple(sorted({name} | {other for other in reached[name] if name in reached[other]}))
        for name in edges
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reach(name: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [name]
    while left:
        for target in edges[left.pop()] - found:
            found.add(target)
            left.append(target)
    return found


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


def public_names() -> int:
    """The names in the ``__all__`` of the package and of its public packages."""
    return sum(len(importlib.import_module(package).__all__) for package in PUBLIC)


def measured(run: Callable[[str], str] = output_of) -> dict[str, int]:
    """Each size, under its name in the file of limits; ``run`` runs programs."""
    code = code_lines()
    documented = sum(lines_of(path.read_text())[1] for path in PACKAGE.rglob("*.py"))
    kept = [path.read_bytes() for path in (ROOT / "benchmarks").rglob("*.json")]
    return {
        "code lines": sum(code.values()),
        "code lines of the longest file": max(code.values()),
        "Python files": sum(name.endswith(".py") for name in code),
        "docstring lines": documented,
        **{f"modules loaded by {name}": modules_loaded(name, run) for name in ENTRY_POINTS},
        "public names": public_names(),
        "circles of imports": len(circles()),
        "lines under tests": sum(
            len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
        ),
        "lines of JSON under benchmarks": sum(text.count(b"\n") for text in kept),
        "bytes of JSON under benchmarks": sum(len(text) for text in kept),
    }


def limits() -> dict[str, int]:
    """The limit of each size."""
    return {name: int(limit) for name, limit in tomllib.loads(LIMITS.read_text()).items()}


def main(arguments: list[str]) -> int:
    """Print sizes beside their limits; return 1 if one is above its limit."""
    if "--files" in arguments:
        for name, lines in sorted(code_lines().items(), key=lambda item: -item[1]):
            print(f"{lines:6,}  {name}")
        return 0
    allowed, above = limits(), False
    print(f"{'':40}{'now':>8}{'at most':>9}")
    for name, size in measured().items():
        over = size > allowed[name]
        above |= over
        print(f"{name:40}{size:8,}{allowed[name]:9,}{'  ABOVE' if over else ''}")
    for circle in circles():
        print("circle:", " ".join(circle))
    return int(above)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
