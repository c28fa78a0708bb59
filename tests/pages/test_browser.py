"""The pages in a real browser: nothing overflows, nothing loads, nothing of a ledger runs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tdcollect.pages.build import Column, DataTable, Page

from .made import EPISODES, EVIL

KINDS = ["evaluation", "comparison", "curve", "curves", "suite", "episode"]


class Opened(NamedTuple):
    """A page in the browser, and all that it asked for and said."""

    page: Any
    requests: list[str]
    said: list[str]


def opened(browser: Any, path: Path, **options: Any) -> Opened:
    page = browser.new_context(**options).new_page()
    requests: list[str] = []
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.route(
        "**/*",
        lambda route: (
            route.continue_() if route.request.url.startswith("file:///") else route.abort()
        ),
    )
    page.goto(path.as_uri())
    return Opened(page, requests, said)


@pytest.fixture(scope="module")
def table(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """The page of an evaluation, on a desktop."""
    page = opened(browser, pages["evaluation"]).page
    yield page
    page.context.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_loads_nothing_and_can_be_read(
    browser: Any, pages: dict[str, Path], kind: str
) -> None:
    """On a desktop, on a phone and in print, in light and in dark."""
    found = opened(browser, pages[kind])
    page = found.page
    papers = set()
    for width, height in ((1280, 800), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(OUTSIDE) == []
            low = [text for *text, ratio in page.evaluate(CONTRASTS) if ratio < 4.5]
            assert low == []
            papers.add(page.evaluate(PAPER))
    assert len(papers) == 2
    assert page.evaluate(UNNAMED) == []
    assert found.requests == [pages[kind].as_uri()]
    assert found.said == []
    assert "run" not in page.title()[:3]
    assert page.evaluate("document.querySelectorAll('img, script:not(:last-of-type)').length") == 0
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(SCROLLING) == []
    assert page.evaluate(PAPER) == "rgb(255, 255, 255)"
    assert not page.locator(".tools").first.is_visible()
    page.context.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole_without_its_script(
    browser: Any, pages: dict[str, Path], kind: str
) -> None:
    found = opened(browser, pages[kind], java_script_enabled=False)
    page = found.page
    assert page.locator("button, input").count() == 0
    words = re.sub(r"<(style|script)>.*?</\1>", "", pages[kind].read_text(), flags=re.S)
    inside = page.locator("table").last.locator("tbody tr")
    assert inside.count() == words.rpartition("<tbody>")[2].count("<tr>")
    assert inside.last.is_visible()
    if kind == "evaluation":
        assert page.locator(".command code").inner_text().startswith("tdcollect replay DIR ")
    assert found.said == []
    page.context.close()


def test_numbers_sort_as_numbers_and_missing_ones_last(table: Any) -> None:
    episodes = table.locator("table").nth(1)
    head = episodes.locator("thead th", has_text="length")
    for order, lengths in [("ascending", [10, 11, 12, 13]), ("descending", [1000, 49, 48, 47])]:
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == order
        shown = episodes.locator("tbody td:nth-child(3)").all_inner_texts()
        assert [int(text) for text in shown[:4]] == lengths
        assert shown[-1] == "-"  # of the episode that failed
    assert episodes.locator("[aria-sort]").count() == 1


def test_tables_sort_by_keyboard(table: Any) -> None:
    episodes = table.locator("table").nth(1)
    button = episodes.get_by_role("button", name="env seed")
    button.focus()
    table.keyboard.press("Enter")
    seeds = episodes.locator("tbody td:nth-child(8)").all_inner_texts()
    assert [int(seed) for seed in seeds] == sorted(int(seed) for seed in seeds)
    table.keyboard.press("Space")
    assert button.locator("..").get_attribute("aria-sort") == "descending"


def test_tables_filter(table: Any) -> None:
    field = table.get_by_role("searchbox").first
    field.focus()
    rows = table.locator("table").nth(1).locator("tbody tr")
    found = {"truncated": 1, "TERMINATED yes": 13, "length>=48": 3, "failed": 1, "zzz": 0}
    for text, count in found.items():
        table.keyboard.type(text)
        assert rows.count() == count
        assert table.locator("output").first.inner_text() == f"{count} of {EPISODES} rows"
        field.fill("")
        assert rows.count() == EPISODES


def test_a_long_table_shows_the_first_rows_until_it_is_asked_for_all(
    browser: Any, tmp_path: Path
) -> None:
    numbers = [str(place) for place in range(1200)]
    rests = [str(place % 7) for place in range(1200)]
    found = DataTable([Column("a", numbers, "n"), Column("b", rests, "n")])
    (tmp_path / "long.html").write_bytes(Page("long", "", "", [("rows", [found])]).html())
    page = opened(browser, tmp_path / "long.html").page
    shown = page.locator("tbody tr")
    assert shown.count() == 500
    assert page.locator("output").inner_text() == "1,200 rows, the first 500 shown"
    page.get_by_role("button", name="a", exact=True).click(click_count=2)
    assert shown.first.inner_text().split() == ["1199", "2"]  # of all rows, not of those shown
    page.get_by_role("searchbox").fill("b=3")
    assert shown.count() == len(range(3, 1200, 7))
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="show all 1,200").click()
    assert shown.count() == 1200
    page.reload()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.count() == 1200
    page.context.close()


def test_the_command_of_an_episode_is_copied(table: Any, pages: dict[str, Path]) -> None:
    table.context.grant_permissions(["clipboard-read", "clipboard-write"])
    table.get_by_role("button", name="Copy the command that runs episode 12 again").click()
    copied = table.evaluate("navigator.clipboard.readText()")
    text = pages["evaluation"].read_text()
    (halves,) = re.findall('data-before="(.*?)" data-after="(.*?)"', text, re.S)
    assert copied == html.unescape("12".join(halves))
    assert copied.startswith("tdcollect replay DIR 12 --env CartPole-v1 --policy '")


def test_a_film_plays_in_its_page(browser: Any, pages: dict[str, Path]) -> None:
    pytest.importorskip("imageio_ffmpeg")
    page = opened(browser, pages["episode"]).page
    films = page.evaluate(PLAYED)
    assert films == [[64, 48, 2, True]] * 2
    page.context.close()


def test_a_figure_by_itself_follows_light_and_dark(browser: Any, pages: dict[str, Path]) -> None:
    path = pages["comparison"].parent / "figures" / "returns.svg"
    found = opened(browser, path)
    colours = set()
    for scheme in ("light", "dark"):
        found.page.emulate_media(color_scheme=scheme)
        colours.add(found.page.evaluate("getComputedStyle(document.querySelector('rect')).fill"))
    assert len(colours) == 2
    assert EVIL[:20] in found.page.evaluate("document.querySelector('desc').textContent")
    assert (found.requests, found.said) == ([path.as_uri()], [])
    found.page.context.close()


PLAYED = """() => Promise.all([...document.querySelectorAll('video')].map(async (film) => {
  await film.play();
  await new Promise((done) => film.addEventListener('timeupdate', done, { once: true }));
  return [film.videoWidth, film.videoHeight, Math.round(film.duration), film.error === null];
}))"""

PAPER = "getComputedStyle(document.body).backgroundColor"

# Elements that reach out of the window, without those in a box that scrolls by itself.
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter((element) => {
  if (element.closest('.wide') && !element.matches('.wide')) return false;
  const box = element.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map((element) => element.outerHTML.slice(0, 80))"""

SCROLLING = """() => [...document.querySelectorAll('*')].filter((element) =>
  !element.closest('svg') && element !== document.documentElement
  && ['auto', 'scroll', 'hidden'].some((kind) =>
    [getComputedStyle(element).overflowX, getComputedStyle(element).overflowY].includes(kind))
).map((element) => element.outerHTML.slice(0, 80))"""

UNNAMED = """() => [
  ...document.querySelectorAll('.plot, img, input, button, [role=region]')
].filter((element) => !(element.getAttribute('aria-label') || element.textContent.trim()
    || element.closest('label'))).map((element) => element.outerHTML.slice(0, 80))"""

# Each text with the contrast of its colour to the background behind it, by WCAG 2.
CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest('script, style')) continue;
    const style = getComputedStyle(element);
    const colour = parse(element.closest('svg') ? style.fill : style.color);
    const paper = behind(element);
    const key = [colour, paper].join();
    if (seen.has(key)) continue;
    seen.add(key);
    const [low, high] = [light(colour), light(paper)].sort((a, b) => a - b);
    found.push([walker.currentNode.textContent.slice(0, 40), key, (high + 0.05) / (low + 0.05)]);
  }
  return found;
}"""
