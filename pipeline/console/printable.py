"""Text of others, such as a server's error or a row's id, as a terminal and a log may show it."""

import json
import re

# Control characters but line feed and tab, among them ESC and BEL; marks that reorder or hide text;
# other separators of lines, which would forge lines of a log; halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: object) -> str:
    """Escape what would steer a terminal or forge a line, as JSON writes it: `\\u001b`.

    JSON stays the same JSON. Line feeds stay: who prints one line replaces them.
    """
    return _UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], str(text))


def on_one_line(text: object) -> str:
    """Escape line feeds too."""
    return printable(text).replace("\n", "\\n")
