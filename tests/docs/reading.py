"""Reads the README and the pages of docs/: fenced blocks, command lines, links and headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.console.commands import CONSOLE_SCRIPT

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_MODULE = re.compile(r"jobs\.\w+")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0][:60]}"


def blocks() -> list[Block]:
    """Return the fenced blocks of all pages, without their indentation."""
    found = []
    for page in PAGES:
        for indent, language, body in _FENCE.findall(page.read_text()):
            lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
            found.append(Block(page, language, "".join(lines)))
    return found


def shell_lines(block: Block) -> Iterator[str]:
    """Yield the command lines of a block; one that ends in a backslash goes on."""
    if block.language not in ("", "console"):
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        yield line.removeprefix("$ ").strip()


def command_words(line: str) -> tuple[str, list[str]] | None:
    """Return the module of `jobs` that a line runs, and its words; None for other programs."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    if words[:1] == [CONSOLE_SCRIPT]:
        module = "jobs.regenerate" if words[1] == "run" else f"jobs.{words[1]}"
        return module, words[2:]
    for place, word in enumerate(words):
        if word == "-m" and _MODULE.fullmatch(words[place + 1]):
            return words[place + 1], words[place + 2 :]
    return None


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(_CODE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = [re.sub(r"[^\w\- ]", "", head).strip().lower() for head in _HEADING.findall(text)]
    return {head.replace(" ", "-") for head in heads}
