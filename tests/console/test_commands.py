"""Commands as their user would type them."""

import pytest

from pipeline.console.commands import command


def test_command_has_the_interpreter_as_it_was_called_and_quotes_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.orig_argv", [".venv/bin/python3", "-m", "jobs.regenerate"])
    assert command("jobs.status", "/o ut", "--watch") == (
        ".venv/bin/python3 -m jobs.status '/o ut' --watch"
    )


def test_interpreter_that_was_not_called_by_name_is_named_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.orig_argv", ["ray", "x"])
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert command("jobs.canary") == "/usr/bin/python3 -m jobs.canary"
