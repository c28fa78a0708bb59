"""The versions of TorchRL and tensordict that tdcollect works with; an import refuses others."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

# From the first, and below the second; pyproject.toml has the same ranges. tdcollect leans on
# private names of both, which change with their minor versions.
SUPPORTED = {"torchrl": ("0.14.1", "0.15"), "tensordict": ("0.14.3", "0.15")}


def check_versions() -> None:
    """Check the installed versions by their metadata, without importing the packages.

    Raises:
        ImportError: if a package is missing or its version is outside the range.
    """
    for name, (oldest, end) in SUPPORTED.items():
        version = _installed(name)
        if version is None or not _release(oldest) <= _release(version) < _release(end):
            needed = f"{name}>={oldest},<{end}"
            raise ImportError(
                f"expected {needed}, got {version or 'none'}; do: pip install '{needed}'", name=name
            )


def own_version() -> str:
    """Return the version of tdcollect, also of a checkout that is not installed."""
    version = _installed("tdcollect")
    project = Path(__file__).parent.parent / "pyproject.toml"
    if version is None and project.is_file():
        version = str(tomllib.loads(project.read_text())["project"]["version"])
    return version or "unknown"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 14, 1) of "0.14.1+cpu" and of "0.14.1.dev7".

    So a build of one's own counts as the release that it is built for, and a pre-release of the
    end of a range is outside it, as pip sees it.
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
