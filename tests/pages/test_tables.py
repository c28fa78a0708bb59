"""Numbers of tables and sentences: one choice of decimals for all of a column."""

from __future__ import annotations

import pytest

from tdcollect.display import number_columns, number_texts
from tdcollect.pages.build import Cell, Column, DataTable

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([32.57, 29.502, 5.9837], ["32.57", "29.50", "5.98"]),
        ([500.0, 9.0], ["500", "9"]),
        ([1.5, 2.0], ["1.5", "2.0"]),
        ([99.996, 3.0], ["100.00", "3.00"]),  # which is not 100
        ([0.1 + 0.2, 0.25], ["0.30", "0.25"]),
        ([4975.31, 4975.78, 12.5], ["4975.3", "4975.8", "12.5"]),
        ([-63.727, 0.003, 103.0], ["-63.73", "0.003", "103.00"]),  # no tie
        ([3.25, -0.0, -1e-9], ["3.250", "0.000", "-1e-09"]),
        ([1e-9, 2e-9], ["1e-09", "2e-09"]),
        ([1e300, 2.5, NAN, -INFINITE, None], ["1e+300", "2.5", "nan", "-inf", "-"]),
        ([0.0], ["0"]),
        ([], []),
    ],
)
def test_numbers_have_the_same_decimals(values: list[float | None], texts: list[str]) -> None:
    assert number_texts(values) == texts


def test_each_column_has_decimals_of_its_own() -> None:
    rows = [["a", 1.0, (0.25, 10.0), 3], ["b", 2.0, None, 2.5], ["c", None, "-", "x"]]
    assert number_columns(rows) == [
        ["a", "1", "[0.25, 10.00]", "3.0"],
        ["b", "2", "-", "2.5"],
        ["c", "-", "-", "x"],
    ]
    assert number_columns([]) == []


def test_a_table_shows_numbers_beside_texts_and_links() -> None:
    table = DataTable(
        [Column("policy", [Cell("ppo", "ppo.html"), "a", "b"]), Column("", [29.502, 5.9837, None])]
    )
    assert [number for _, number in table.rows()] == ["29.50", "5.98", "-"]
