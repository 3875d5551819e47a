"""What a page shows, read back by Python's own parser."""

from dataclasses import dataclass
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "wbr", "img", "input", "hr", "base", "source", "embed"}
# Tags that do not separate words.
_INLINE = {"span", "b", "small", "i", "mark"}


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
