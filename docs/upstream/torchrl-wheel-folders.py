"""The wheels of torchrl and tensordict put folders of their repositories into site-packages."""

import importlib.util
import sys
from importlib.metadata import files


def main() -> int:
    extra = {}
    for package in ("torchrl", "tensordict"):
        tops = {path.parts[0] for path in files(package) or () if len(path.parts) > 1}
        extra[package] = sorted(
            top for top in tops if not top.startswith((package, "..")) and "dist-info" not in top
        )
    importable = [name for name in ("benchmarks", "scripts") if importlib.util.find_spec(name)]
    print("expected: the folders torchrl and tensordict, and no others")
    print("got:     ", extra)
    print("          modules that any program can import:", importable)
    return int(any(extra.values()))


if __name__ == "__main__":
    sys.exit(main())
