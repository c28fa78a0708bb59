"""The size of the package, compared with the limits in ``tests/limits.toml``.

``python tests/sizes.py`` prints the table; ``--files`` the code lines of each file, and
``--functions`` those of each function. Code lines are lines without docstrings, comments and
blanks. An import counts wherever it stands: at the top, in a function, or for types alone.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tdcollect"
LIMITS = ROOT / "tests" / "limits.toml"
TRACE = ROOT / "tests" / "trace.py"
PUBLIC = ("collect", "collectors", "envs", "evaluation", "lab", "testing", "trajectories")
REGISTRY = "registry.py"
"""The one file outside of the lab that names it."""
VAGUE = {"found", "given", "asked", "made", "kept"}
"""Names that say nothing of what they hold."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """The parsed files of the package, by their paths in it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def lines_of(source: str, tree: ast.Module | None = None) -> tuple[set[int], int]:
    """The numbers of a file's code lines, and how many lines of docstrings it has."""
    documented: set[int] = set()
    for node in ast.walk(tree or ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | Functions):
            for part in node.body:
                said = part.value if isinstance(part, ast.Expr) else None
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    documented.update(range(part.lineno, (part.end_lineno or 0) + 1))
    lines = [line.strip() for line in source.splitlines()]
    code = {at for at, line in enumerate(lines, 1) if line and not line.startswith("#")}
    return code - documented, len(documented)


@cache
def lines() -> dict[str, tuple[set[int], int]]:
    """`lines_of` each file; HTML templates are among the files."""
    of = {name: lines_of((PACKAGE / name).read_text(), tree) for name, tree in trees().items()}
    for path in PACKAGE.rglob("*.html"):
        of[path.relative_to(PACKAGE).as_posix()] = (lines_of_template(path), 0)
    return of


def lines_of_template(path: Path) -> set[int]:
    return {at for at, line in enumerate(path.read_text().splitlines(), 1) if line.strip()}


def functions() -> dict[str, int]:
    """The code lines of each function, with the functions in it."""
    return {
        f"{name}:{node.lineno} {node.name}": len(
            lines()[name][0] & {*range(node.lineno, (node.end_lineno or 0) + 1)}
        )
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, Functions)
    }


def module_of(name: str) -> str:
    """The name by which a file is imported."""
    return ".".join(("tdcollect", *Path(name).with_suffix("").parts)).removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each module imports, but for packages' own lists of names."""
    modules = {module_of(name): name for name in trees()}
    targets: dict[str, set[str]] = {module: set() for module in modules}
    for module, file in modules.items():
        if not file.endswith("__init__.py"):
            names = set(imported(trees()[file], module.rpartition(".")[0]))
            targets[module] = {
                name if name in modules else name.rpartition(".")[0] for name in names
            } & modules.keys()
    return targets


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The names that a module of a package imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circles() -> list[list[str]]:
    """The groups of modules that import each other."""
    graph = imports()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = sorted(graph[start])
        while ahead:
            if (name := ahead.pop()) not in seen:
                seen.add(name)
                ahead += sorted(graph[name])
        return seen

    after = {name: reached(name) for name in graph}
    groups = {
        frozenset(other for other in after[name] if name in after[other])
        for name in graph
        if name in after[name]
    }
    return sorted(map(sorted, groups))


def imports_of_lab() -> list[str]:
    """The files outside of the lab that import it, or a module of it by its name as text."""
    return [
        name
        for name, tree in trees().items()
        if name != REGISTRY
        and not name.startswith("lab/")
        and any(target.startswith("tdcollect.lab") for target in named(name, tree))
    ]


def named(name: str, tree: ast.Module) -> Iterator[str]:
    """The modules of the package that a file imports, or whose names it has as text."""
    yield from imports()[module_of(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def classes_in_two_files() -> list[str]:
    """The names of classes that stand in more than one file."""
    names = Counter[str]()
    for tree in trees().values():
        names.update({node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)})
    return sorted(name for name, files in names.items() if files > 1)


def vague_names() -> dict[str, int]:
    """The uses of `VAGUE` as local names or parameters, by file."""
    return {
        file: sum(
            (node.id if isinstance(node, ast.Name) else node.arg) in VAGUE
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.arg)
        )
        for file, tree in trees().items()
    }


def output_of(program: str) -> str:
    """Return the output of a program in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def traced(run: Callable[[str], str] = output_of) -> dict[str, int]:
    """The files and functions that a step, a batch and an episode enter; ``run`` runs a program."""
    program = (
        "import runpy, warnings; warnings.resetwarnings();"
        f"runpy.run_path({str(TRACE)!r}, run_name='__main__')"
    )
    return dict(json.loads(run(program).splitlines()[-1]))


def measured() -> dict[str, int]:
    """Each size that is read from the files, under its name in the file of limits."""
    code = {name: len(numbers) for name, (numbers, _) in lines().items()}
    packages = ["tdcollect", *(f"tdcollect.{name}" for name in PUBLIC)]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    return {
        "code lines": sum(code.values()),
        "code lines outside of lab/": sum(
            size for name, size in code.items() if not name.startswith("lab/")
        ),
        "code lines of the longest file": max(code.values()),
        "code lines of the longest function": max(functions().values()),
        "docstring lines": sum(documented for _, documented in lines().values()),
        "Python files": len(trees()),
        "lines under tests": sum(len(text.splitlines()) for text in tests),
        "circles of imports": len(circles()),
        "imports of lab/ from outside": len(imports_of_lab()),
        "names of classes in two files": len(classes_in_two_files()),
        "found, given, asked, made, kept": sum(vague_names().values()),
        "public names": sum(len(importlib.import_module(name).__all__) for name in packages),
    }


def limits() -> dict[str, dict[str, int]]:
    """Of each size the fixed limit, and what it may be until it is below that."""
    return tomllib.loads(LIMITS.read_text())


def above(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that are above what they may be today."""
    most = {name: limit.get("now", limit["limit"]) for name, limit in limits().items()}
    return {name: size for name, size in sizes.items() if size > most[name]}


def table(sizes: dict[str, int]) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'':40}{'is':>8}{'limit':>8}{'now':>8}"
    for name, size in sizes.items():
        limit = limits()[name]
        now = f"{limit['now']:,}" if "now" in limit else ""
        over = "  ABOVE" if size > limit["limit"] else ""
        yield f"{name:40}{size:8,}{limit['limit']:8,}{now:>8}{over}"


def main(arguments: list[str]) -> int:
    """Print sizes beside their limits; return 1 if one is above what it may be today."""
    if "--files" in arguments or "--functions" in arguments:
        code = {name: len(numbers) for name, (numbers, _) in lines().items()}
        of = code if "--files" in arguments else functions()
        for name, size in sorted(of.items(), key=lambda item: -item[1]):
            print(f"{size:6,}  {name}")
        return 0
    sizes = measured() | traced()
    print(*table(sizes), sep="\n")
    for circle in circles():
        print("circle:", *circle)
    print("import lab/:", *imports_of_lab())
    print("names of classes in two files:", *classes_in_two_files())
    print("found, given, ...:", *(f"{name} {n}" for name, n in vague_names().items() if n > 19))
    return int(bool(above(sizes)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
