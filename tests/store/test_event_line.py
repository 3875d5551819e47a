"""The grammar of log lines."""

import pytest

from pipeline.store.event_line import EventLine, event_line


@pytest.mark.parametrize(
    ("line", "kind", "fields", "text"),
    [
        ("the same command resumes", None, {}, "the same command resumes"),
        ("12:00 event=x", None, {}, "12:00 event=x"),
        ("event=leases_lost", "leases_lost", {}, ""),
        (
            "event=x a=1 b=-2.5 c=1.2.3 d=7/9",
            "x",
            {"a": 1, "b": -2.5, "c": "1.2.3", "d": "7/9"},
            "",
        ),
        # Quoted numbers are text.
        ("event=x a='1'", "x", {"a": "1"}, ""),
        (r"event=x why='it\'s k=v' worker=w3", "x", {"why": "it's k=v", "worker": "w3"}, ""),
        ('event=x why="it\'s" b=2', "x", {"why": "it's", "b": 2}, ""),
        # Fields end at the first other word; what looks like one after it is text.
        ("event=warning the file a=b is gone", "warning", {}, "the file a=b is gone"),
        ("event=stopped by=SIGTERM nothing was", "stopped", {"by": "SIGTERM"}, "nothing was"),
        # Only the worker of an engine's line is added after text.
        ("event=warning x: bad worker=w1r2", "warning", {"worker": "w1r2"}, "x: bad"),
        ("event=x 'torn", "x", {}, "'torn"),
        ("event=x a='torn", "x", {"a": "'torn"}, ""),
    ],
)
def test_line_is_kind_fields_and_text(
    line: str, kind: str | None, fields: dict[str, object], text: str
) -> None:
    assert event_line(line) == EventLine(kind=kind, fields=fields, text=text)  # type: ignore[arg-type]
