"""A plugin of pytest: a file of tests that imports a package that is missing is skipped by name."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Turn the error of such a file into a skip."""
    report = yield
    if report.failed:
        error: BaseException | None = report.call.excinfo.value
        while error is not None and not isinstance(error, ModuleNotFoundError):
            error = error.__cause__ or error.__context__
        if error is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: {error.name} is not installed")
    return report
