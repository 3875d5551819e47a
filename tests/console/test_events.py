"""The table of events, held against the sources."""

import re
import string
from pathlib import Path

from pipeline.console.events import EVENTS

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"event=([a-z_]+)(\{verdict\})?")


def logged() -> set[str]:
    """Return every event that the sources log."""
    names = set()
    for folder in ("pipeline", "jobs"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for name, has_verdict in _NAME.findall(text):
                names |= {f"{name}{end}" for end in ("passed", "failed")} if has_verdict else {name}
    # Names in descriptions of the grammar.
    return names - {"kind"}


def test_every_event_has_a_sentence_and_every_sentence_an_event() -> None:
    assert logged() == set(EVENTS)


def test_no_event_is_listed_twice() -> None:
    source = (ROOT / "pipeline" / "console" / "events.py").read_text()
    names = re.findall(r'^    "([a-z_]+)": EventKind', source, re.MULTILINE)
    assert len(names) == len(set(names)) == len(EVENTS)


def test_sentences_name_fields_and_no_positions() -> None:
    for name, kind in EVENTS.items():
        for _, field, _, _ in string.Formatter().parse(kind.sentence):
            assert field is None or field.isidentifier(), name
