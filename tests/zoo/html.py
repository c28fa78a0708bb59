"""Pages of HTML as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The parts of a page, and whether its elements are closed in order."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.tags: list[str] = []
        self.words, self.text = "", text
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.words += " "

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"style", "script"} & {*self.open}:
            return
        self.words += data
        if "th" in self.open or "td" in self.open:
            self.tables[-1][-1][-1] += data

    def values(self, tag, name):
        return [value for *found, value in self.attributes if found == [tag, name]]
