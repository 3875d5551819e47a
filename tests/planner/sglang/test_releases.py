"""SGLang releases, in any spelling, and the rules of each."""

from datetime import date, timedelta

import pytest

from pipeline.planner.sglang.releases import no_stages, rules_for, runs_in_stages


@pytest.mark.parametrize(
    ("version", "label"),
    [
        (None, "0.5.23"),
        (" ", "0.5.23"),
        ("0.5.12.post1", "0.5.12"),
        ("v0.5.14", "0.5.14"),
        ("lmsysorg/sglang:v0.5.16-cu130", "0.5.16"),
        ("0.5.9", "0.5.9"),
        ("0.4.6", "0.4.6"),
        ("main 2026-05-22", "0.5.12"),
        ("nightly 202609", "0.5.21"),
        ("main @1cf2b8c 2026-08-21", "0.5.19"),
        ("lmsysorg/sglang:nightly-dev-cu13-20260628-da802ddc", "0.5.15"),
        ("main 2027-01-01", "0.5.23"),
        ("main 2026-13-40", "0.5.23"),
        ("some custom build", "0.5.23"),
        ("0.6.1", "0.5.23"),
    ],
)
def test_release_is_read_from_tags_and_dates(version: str | None, label: str) -> None:
    assert rules_for(version)[0].label == label


@pytest.mark.parametrize(
    ("day", "label", "next_label"),
    [
        ("2025-04-30", "0.4.6", "0.5.1"), ("2025-08-31", "0.5.1", "0.5.7"),
        ("2025-12-31", "0.5.7", "0.5.9"), ("2026-03-01", "0.5.9", "0.5.10"),
        ("2026-04-08", "0.5.10", "0.5.11"), ("2026-05-01", "0.5.11", "0.5.12"),
        ("2026-05-23", "0.5.12", "0.5.13"), ("2026-06-15", "0.5.13", "0.5.14"),
        ("2026-06-26", "0.5.14", "0.5.15"), ("2026-07-14", "0.5.15", "0.5.16"),
        ("2026-07-26", "0.5.16", "0.5.17"), ("2026-08-08", "0.5.17", "0.5.18"),
        ("2026-08-20", "0.5.18", "0.5.19"), ("2026-09-04", "0.5.19", "0.5.20"),
        ("2026-09-18", "0.5.20", "0.5.21"), ("2026-10-01", "0.5.21", "0.5.22"),
        ("2026-10-15", "0.5.22", "0.5.23"),
    ],
)  # fmt: skip
def test_build_of_a_day_is_the_next_release(day: str, label: str, next_label: str) -> None:
    day_after = date.fromisoformat(day) + timedelta(days=1)
    assert rules_for(f"main {day}")[0].label == label
    assert rules_for(f"main {day_after}")[0].label == next_label


@pytest.mark.parametrize(
    ("version", "notes"),
    [
        ("0.5.23", ()),
        ("0.5.10", ()),
        (None, ("no SGLang version given: planned as 0.5.23",)),
        ("0.4.9", ("releases before 0.5.10 were not read: 0.4.9 is planned as 0.5.10",)),
        ("0.5.40", ("0.5.40 is newer than the newest release read: planned as 0.5.23",)),
        ("main 2026-05-22", ("version 'main 2026-05-22' is read by its date as 0.5.12",)),
        ("custom", ("version 'custom' names no release: planned as 0.5.23",)),
    ],
)
def test_assumptions_about_the_release_are_noted(
    version: str | None, notes: tuple[str, ...]
) -> None:
    assert rules_for(version)[1] == notes


def test_release_between_two_rows_has_the_older_rules() -> None:
    older, newer = rules_for("0.5.20")[0], rules_for("0.5.21")[0]
    assert (older.label, older.small_card_chunk, newer.small_card_chunk) == ("0.5.20", 2048, 4096)
    assert rules_for("0.5.12")[0].verify_reserve == "all_requests_first"
    assert rules_for("0.5.13")[0].verify_reserve == "joint"
    assert rules_for("0.5.9")[0].prefill_graphs == "opt_in"
    assert rules_for("0.5.10")[0].prefill_graphs == "piecewise"
    assert rules_for("0.5.15")[0].prefill_graphs == "breakable"


def test_stages_are_known_for_the_release_that_was_read() -> None:
    newest, older = rules_for("0.5.23")[0], rules_for("0.5.22")[0]
    assert runs_in_stages("LlamaForCausalLM", newest)
    assert not runs_in_stages("LlamaForCausalLM", older)
    assert not runs_in_stages("Qwen3NextForCausalLM", newest)
    assert no_stages("Qwen3NextForCausalLM", newest)
    assert not no_stages("Qwen3NextForCausalLM", older)
    # An architecture in neither list is neither known to run nor known to be refused.
    assert not runs_in_stages("NovelForCausalLM", newest)
    assert not no_stages("NovelForCausalLM", newest)
