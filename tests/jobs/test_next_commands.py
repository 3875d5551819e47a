"""The commands that a session names at its end."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import next_commands as commands
from jobs import regenerate
from pipeline.report.status import run_status
from pipeline.store.folder import LocalFolder
from schemas.progress import RunStatus
from tests.fakes.example_run import write_example_run


def given(*words: str) -> Namespace:
    return regenerate.argument_parser().parse_args(["my run.yaml", *words])


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStatus:
    """Status of a run of 80 rows that is done."""
    monkeypatch.setattr("sys.orig_argv", [".venv/bin/python3", "-m", "jobs.regenerate"])
    folder = LocalFolder(tmp_path)
    write_example_run(folder, num_parts=10, rows_total=80, state="done")
    status = run_status(folder, now_s=0.0)
    return replace(status, folder="/o ut", rows_done=80, rows_failed=0, rows_error=0)


EXPORT = ".venv/bin/python3 -m jobs.export '/o ut' --to '/o ut-export'"
RESUME = ".venv/bin/python3 -m jobs.regenerate 'my run.yaml'"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(EXPORT, "write the data set for training")]),
        (
            {"rows_error": 2},
            [
                (f"{RESUME} --retry-errors", "generate the 2 error rows again"),
                (EXPORT, "write the data set for training"),
            ],
        ),
        (
            {"rows_done": 70, "rows_failed": 3},
            [(RESUME, "resume: 10 rows are open, 3 of them failed")],
        ),
        (
            {"rows_done": 79, "rows_error": 1},
            [
                (RESUME, "resume: 1 rows are open"),
                (f"{RESUME} --retry-errors", "generate the 1 error rows again"),
            ],
        ),
    ],
)
def test_next_is_to_resume_to_retry_or_to_export(
    done: RunStatus, changes: dict[str, int], expected: list[tuple[str, str]]
) -> None:
    status = replace(done, **changes)  # type: ignore[arg-type]
    found = commands.next_commands(status, given())
    assert [(each["command"], each["why"]) for each in found] == expected


@pytest.mark.usefixtures("done")
def test_resume_repeats_the_flags_that_it_needs_and_no_others() -> None:
    arguments = given(
        *("--set", "a.b=1", "--set", "c=x y", "--accept-drift", "--accept-errors", "--json"),
        *("--log-format", "json", "--retry-errors", "--retry-flagged", "--accept-canary"),
    )
    assert commands.resume_command(arguments) == (
        f"{RESUME} --set a.b=1 --set 'c=x y' --accept-drift --accept-errors --json "
        "--log-format json"
    )
    assert commands.resume_command(given()) == RESUME


@pytest.mark.usefixtures("done")
def test_failed_canary_names_its_three_ways_on() -> None:
    found = commands.canary_commands(given("--set", "a=1"), "/o")
    assert [each["command"] for each in found] == [
        ".venv/bin/python3 -m jobs.canary /o",
        f"{RESUME} --set a=1 --retry-flagged",
        f"{RESUME} --set a=1 --accept-canary",
    ]


@pytest.mark.parametrize(
    ("folder", "export"),
    [
        ("/o/", "/o-export"),
        ("s3://b/run", "s3://b/run-export"),
        ("s3://b/run?region=x", "s3://b/run-export?region=x"),
    ],
)
def test_export_goes_beside_the_run(folder: str, export: str) -> None:
    assert commands.beside(folder, "-export") == export
