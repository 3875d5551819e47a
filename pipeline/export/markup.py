"""Texts that others chose, as plain text or code of the card's Markdown."""

import re

# Longest name in the card; the longest release known, of a build of SGLang, has about 60.
_MAX_NAME = 120
# Letters that begin markup, or a cell.
_MARKUP = re.compile(r"[\\`*\[\]|~#!]")


def plain_name(text: object) -> str:
    """Format a name that a server, a model or a user chose, as plain text of the card.

    It stays on its line and in its cell, whatever it contains, and is not read as markup.
    """
    plain = "".join(letter if letter.isprintable() else " " for letter in str(text))
    short = plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 1]}…"
    return _MARKUP.sub(r"\\\g<0>", short).replace("&", "&amp;").replace("<", "&lt;")


def code(text: str) -> str:
    """Format a value as code, between more backticks than it has in a row."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"{fence}{plain}{fence}" if len(fence) == 1 else f"{fence} {plain} {fence}"
