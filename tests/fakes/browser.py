"""Pages opened in a real Chromium, without network: what they load, log and how they are laid out.

The browser is the one that `make test` installs beside the packages, or the system's.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from tests.fakes.page_reading import Figure

NO_BROWSER = "no Chromium here: make test installs one where npm is, or apt-get install chromium"
_INSTALLED = Path(sys.prefix) / "browser"
_FAULTS = Path(__file__).with_name("layout_faults.js")
_ADDRESS = "http://report.test/"
_HEIGHT = 900

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


def chromium() -> Path | None:
    """Return the program to start, if there is one."""
    if (_INSTALLED / "chromium").exists():
        return _INSTALLED / "chromium"
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next((Path(path) for name in names if (path := shutil.which(name))), None)


@contextmanager
def started() -> Iterator[Browser]:
    """Start the browser; it takes a second."""
    program = chromium()
    assert program is not None, NO_BROWSER
    environment: dict[str, str | float | bool] = {**os.environ}
    with TemporaryDirectory() as own, sync_playwright() as playwright:
        if program.parent == _INSTALLED:
            environment["LD_LIBRARY_PATH"] = str(_INSTALLED / "lib")
            environment["FONTCONFIG_FILE"] = str(_font_settings(Path(own)))
        browser = playwright.chromium.launch(
            executable_path=program,
            env=environment,
            args=["--disable-gpu"],
            chromium_sandbox=False,
        )
        with browser:
            yield browser


def _font_settings(own: Path) -> Path:
    """Name the installed font alone, so that the pages are equally wide everywhere.

    The paths are those of this moment: a virtual environment can be moved.
    """
    settings = own / "fonts.conf"
    settings.write_text(
        f"<fontconfig><dir>{_INSTALLED / 'fonts'}</dir><cachedir>{own}</cachedir></fontconfig>"
    )
    return settings


@dataclass(slots=True, kw_only=True)
class OpenedPage:
    """A page in the browser, and what it has asked for and logged since it was opened."""

    page: Page
    requests: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    def show(self, *, width: int, scheme: Scheme = "light") -> None:
        """Lay the page out anew."""
        self.page.set_viewport_size({"width": width, "height": _HEIGHT})
        self.page.emulate_media(color_scheme=scheme)

    def unfold(self) -> None:
        """Open all `details`."""
        self.page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")

    def figures(self) -> list[Figure]:
        """Return the elements with data-figure. Fails if one is not shown."""
        return [Figure(**values) for values in self.page.evaluate(_FIGURES)]

    def bars(self) -> list[dict[str, Any]]:
        """Return the parts of each bar, as shares of its width."""
        bars: list[dict[str, Any]] = self.page.evaluate(_BARS)
        return bars

    def width(self) -> int:
        """Return the width that the page needs."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth")
        return width

    def faults(self) -> dict[str, list[str]]:
        """Return what is wrong with the layout, by kind of fault; empty lists if nothing is."""
        found: dict[str, list[str]] = self.page.evaluate(_FAULTS.read_text())
        return found


@contextmanager
def opened(browser: Browser, page: str, *, width: int = 1280) -> Iterator[OpenedPage]:
    """Open the text of a page in a window of this width; whatever else it requests is refused."""
    context = browser.new_context(viewport={"width": width, "height": _HEIGHT})
    shown = OpenedPage(page=context.new_page())

    def answer(route: Route) -> None:
        if route.request.url == _ADDRESS:
            route.fulfill(body=page, content_type="text/html; charset=utf-8")
        else:
            shown.requests.append(route.request.url)
            route.abort()

    def note(message: ConsoleMessage) -> None:
        shown.logged.append(message.text)

    context.route("**/*", answer)
    shown.page.on("console", note)
    shown.page.on("pageerror", lambda error: shown.logged.append(str(error)))
    shown.page.goto(_ADDRESS)
    try:
        yield shown
    finally:
        context.close()


_FIGURES = """() => [...document.querySelectorAll("[data-figure]")].map(element => {
  if (!element.getClientRects().length) throw Error(`${element.dataset.figure} is not shown`);
  const holder = element.closest("[data-option]");
  return {
    option: holder && holder.dataset.option, path: element.dataset.figure, text: element.innerText,
  };
})"""

_BARS = """() => [...document.querySelectorAll("[data-bar]")].map(element => {
  const bar = element.querySelector(".bar"), whole = bar.getBoundingClientRect();
  const shares = mark => {
    const part = bar.querySelector(mark)?.getBoundingClientRect();
    const share = x => (x - whole.left) / whole.width;
    return part && [share(part.left), share(part.right)];
  };
  return {
    option: element.closest("[data-option]")?.dataset.option, path: element.dataset.bar,
    solid: shares(".fill"), band: shares(".band"), tick: shares(".tick"),
  };
})"""
