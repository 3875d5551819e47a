"""Readers of a page: Python's own parser, and a headless Chromium.

Both return figures as `Figure`, so that the same checks compare them with the JSON.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_VOID = {"meta", "link", "br", "wbr", "img", "input", "hr", "base", "source", "embed"}
# Tags that do not separate words.
_INLINE = {"span", "b", "small", "i", "mark"}
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Element with data-figure: its option, path and text."""

    option: str | None
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """Start tag."""

    tag: str
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Parsed page."""

    elements: tuple[Element, ...]
    figures: tuple[Figure, ...]
    text: str


class _Reader(HTMLParser):
    """Parser that tracks the open elements around each text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Element] = []
        self.elements: list[Element] = []
        self.figures: list[Figure] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag=tag, attributes={name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in _INLINE:
            self.text.append(" ")
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(
            Element(tag=tag, attributes={name: value or "" for name, value in attrs})
        )

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.tag == tag, f"</{tag}> closes <{closed.tag}>"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1].tag == "style":
            return
        self.text.append(data)
        if "data-figure" in self.open[-1].attributes:
            options = [
                e.attributes["data-option"] for e in self.open if "data-option" in e.attributes
            ]
            self.figures.append(
                Figure(
                    option=options[-1] if options else None,
                    path=self.open[-1].attributes["data-figure"],
                    text=data,
                )
            )


def parsed(page: str) -> Reading:
    """Parse a page with html.parser. Fails for a tag that is left open or closes another."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open, f"<{reader.open[-1].tag}> is left open"
    return Reading(
        elements=tuple(reader.elements),
        figures=tuple(reader.figures),
        text=" ".join("".join(reader.text).split()),
    )


# --- the browser ------------------------------------------------------------------------------

# Runs in a page of our own around the frames, because the page itself allows no script.
_SCRIPT = """
window.onload = () => {
  const shares = (bar, mark) => {
    const whole = bar.getBoundingClientRect();
    if (!bar.querySelector(mark)) return null;
    const part = bar.querySelector(mark).getBoundingClientRect();
    return [(part.left - whole.left) / whole.width, (part.right - whole.left) / whole.width];
  };
  const frames = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const option = element => {
      const holder = element.closest("[data-option]");
      return holder && holder.dataset.option;
    };
    const isBroken = heading => {
      const text = heading.firstChild;
      return [...text.data.matchAll(/\\S+/g)].some(word => {
        const range = page.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        return range.getClientRects().length > 1;
      });
    };
    return {
      broken_headings: [...page.querySelectorAll("th")].filter(isBroken).map(e => e.innerText),
      inner_width: frame.contentWindow.innerWidth,
      scroll_width: root.scrollWidth,
      title: page.title,
      scripts: page.scripts.length,
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
      figures: [...page.querySelectorAll("[data-figure]")].map(e => ({
        option: option(e), path: e.dataset.figure, text: e.innerText,
        shown: e.getClientRects().length > 0,
      })),
      bars: [...page.querySelectorAll("[data-bar]")].map(e => ({
        option: option(e), path: e.dataset.bar,
        solid: shares(e.querySelector(".bar"), ".fill"),
        band: shares(e.querySelector(".bar"), ".band"),
        tick: shares(e.querySelector(".bar"), ".tick"),
      })),
    };
  });
  document.getElementById("report").textContent = JSON.stringify(frames);
};
"""


def browsed(pages: Sequence[tuple[str, int]], folder: Path) -> list[dict[str, Any]]:
    """Show each page in a frame of its width, with one start of the browser."""
    assert CHROMIUM is not None
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" width="{width}" style="border:0"></iframe>'
        for page, width in pages
    )
    around = folder / "frames.html"
    around.write_text(
        f'<!doctype html><meta charset="utf-8">{frames}<pre id="report"></pre>'
        f"<script>{_SCRIPT}</script>",
        encoding="utf-8",
    )
    ended = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions",
            "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,900",
            "--dump-dom", around.as_uri(),
        ],
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
    )  # fmt: skip
    report = re.search(r'<pre id="report">(.*?)</pre>', ended.stdout, re.DOTALL)
    reported = html.unescape(report[1]) if report else ""
    assert reported, f"the browser reports nothing: {ended.stderr[-2000:]}"
    frames_read: list[dict[str, Any]] = json.loads(reported)
    return frames_read
