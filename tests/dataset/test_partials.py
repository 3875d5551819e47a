"""Files of interrupted rows: which rows of a session are continued, and when a file goes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.dataset import partials as partials_module
from pipeline.dataset.partials import BegunRows, Partials
from pipeline.store.folder import LocalFolder
from pipeline.store.journal import RowName
from schemas.begun import BegunRow
from schemas.partial import PartialTurn, TokenIds

ROW = BegunRow(row_id="q0", sample_index=0, content_hash="h", started_at_s=1.0)


def begun(number: int, num_tokens: int) -> BegunRow:
    so_far = PartialTurn(
        prompt_token_ids=TokenIds("i", [1]),
        completion_token_ids=TokenIds("i", [2] * num_tokens),
        reasoning_tokens=None,
        is_thinking=False,
        duration_s=1.0,
    )
    return replace(ROW, row_id=f"q{number}", so_far=so_far)


def partials(folder: Path, settings: str = "a", run_id: str = "r") -> Partials:
    return Partials(folder=LocalFolder(folder), run_id=run_id, settings=settings)


def by_number(names: Mapping[RowName, int]) -> dict[int, int]:
    """Translate the names of a session with rows 0 to 9."""
    return {int(row[1:]): value for (row, _), value in names.items() if int(row[1:]) < 10}


def rows_of_session(store: Partials, done: set[int], log: list[str]) -> BegunRows:
    return BegunRows(
        partials=store, by_number=by_number, is_open=lambda row: row not in done, log=log.append
    )


def test_open_rows_are_found_with_their_file_and_read_by_their_names(tmp_path: Path) -> None:
    store, log = partials(tmp_path), list[str]()
    assert store.keep("s", "w0", [begun(1, 3), begun(2, 5), begun(77, 9)]) == 3
    rows = rows_of_session(store, {2}, log)
    assert rows.load() == {1}
    assert rows.files_of([0, 1, 3]) == ((1, "begun-s-w0-000.jsonl"),)
    assert log == ["event=partials_found file=partials/begun-s-w0-000.jsonl rows=1 tokens=3"]
    assert store.rows_of("begun-s-w0-000.jsonl", {("q1", 0)}) == {("q1", 0): begun(1, 3)}


def test_row_is_continued_from_the_file_that_has_the_most_of_it(tmp_path: Path) -> None:
    store = partials(tmp_path)
    store.keep("s", "w0", [begun(1, 3), begun(2, 9)])
    store.keep("s", "w1", [begun(1, 4), begun(2, 8)])
    rows = rows_of_session(store, set(), [])
    rows.load()
    assert dict(rows.files_of([1, 2])) == {1: "begun-s-w1-000.jsonl", 2: "begun-s-w0-000.jsonl"}


def test_rows_of_a_worker_are_found_when_it_ends(tmp_path: Path) -> None:
    store = partials(tmp_path)
    rows = rows_of_session(store, set(), [])
    store.keep("s", "w1", [begun(1, 3)])
    store.keep("s", "w11", [begun(2, 3)])
    assert rows.load("w1") == {1}
    assert rows.files_of([1, 2]) == ((1, "begun-s-w1-000.jsonl"),)


def test_file_goes_when_none_of_its_rows_is_to_be_continued(tmp_path: Path) -> None:
    store, done = partials(tmp_path), {1}
    store.keep("s", "w0", [begun(1, 3)])
    store.keep("s", "w1", [begun(2, 3)])
    rows_of_session(store, done, []).load()
    assert store.names() == ["begun-s-w1-000.jsonl"]
    rows_of_session(store, {1, 2}, []).load()
    assert store.names() == []


@pytest.mark.parametrize("other", [{"settings": "b"}, {"run_id": "r2"}])
def test_rows_of_other_settings_or_another_run_are_dropped_and_reported(
    tmp_path: Path, other: dict[str, str]
) -> None:
    store, log = partials(tmp_path, **other), list[str]()
    partials(tmp_path).keep("s", "w0", [begun(1, 3)])
    rows = rows_of_session(store, set(), log)
    assert rows.load() == frozenset()
    assert rows.files_of([1]) == ()
    assert [line.partition(" ")[0] for line in log] == ["event=partials_dropped"]
    assert store.rows_of("begun-s-w0-000.jsonl", {("q1", 0)}) == {}
    assert store.names() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_id": "r", "settings": "a", "rows": [1]}'])
def test_file_that_is_none_of_ours_is_dropped_and_reported(tmp_path: Path, text: str) -> None:
    store, log = partials(tmp_path), list[str]()
    folder = tmp_path / "partials"
    folder.mkdir()
    (folder / "begun-s-w0-000.jsonl").write_text(text)
    (folder / "notes.txt").write_text("mine")
    assert rows_of_session(store, set(), log).load() == frozenset()
    assert len(log) == 1
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_damaged_row_and_a_file_that_is_gone_cost_their_rows_only(tmp_path: Path) -> None:
    store = partials(tmp_path)
    store.keep("s", "w0", [begun(1, 3), begun(2, 2)])
    path = tmp_path / "partials" / "begun-s-w0-000.jsonl"
    head, first, second = path.read_text().splitlines()
    path.write_text("\n".join([head, first[:40], second, ""]))
    wanted = {("q1", 0), ("q2", 0)}
    assert store.rows_of("begun-s-w0-000.jsonl", wanted) == {("q2", 0): begun(2, 2)}
    path.unlink()
    assert store.rows_of("begun-s-w0-000.jsonl", wanted) == {}


def test_rows_with_the_most_tokens_are_kept_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(begun(1, 30).to_json()) + len(begun(2, 90).to_json())
    monkeypatch.setattr(partials_module, "_MOST_BYTES", size)
    store = partials(tmp_path)
    assert store.keep("s", "w0", [begun(1, 30), begun(3, 20), begun(2, 90)]) == 2
    assert store.tokens_of("begun-s-w0-000.jsonl") == {("q2", 0): 90, ("q1", 0): 30}


def test_kill_during_the_write_leaves_no_file_and_the_next_session_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = partials(tmp_path)

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            store.keep("s", "w0", [begun(1, 3)])
    assert store.names() == []
    assert len(list((tmp_path / "partials").iterdir())) == 1
    rows_of_session(store, set(), []).load()
    assert not list((tmp_path / "partials").iterdir())


def test_rows_are_written_in_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials_module, "_FILE_BYTES", 2 * len(begun(1, 9).to_json()))
    store, log = partials(tmp_path), list[str]()
    assert store.keep("s", "w-1", [begun(number, 9) for number in range(5)]) == 5
    assert store.names() == [f"begun-s-w-1-{number:03d}.jsonl" for number in range(3)]
    rows = rows_of_session(store, set(), log)
    assert rows.load("w-1") == {0, 1, 2, 3, 4}
    assert rows.load("w") == frozenset()


def test_nothing_is_written_without_rows(tmp_path: Path) -> None:
    assert partials(tmp_path).keep("s", "w0", []) == 0
    assert not partials(tmp_path).names()
