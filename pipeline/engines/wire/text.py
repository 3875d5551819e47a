"""Texts of a server as columns, logs and JSON can hold them."""

_CAUSE_LENGTH = 300


def unicode_text(text: str) -> str:
    """Replace unpaired surrogates, which no file can hold, with question marks."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """Cut a text to one short line."""
    line = unicode_text(" ".join(text[: 4 * _CAUSE_LENGTH].split()))
    return line if len(line) <= _CAUSE_LENGTH else line[: _CAUSE_LENGTH - 3] + "..."
