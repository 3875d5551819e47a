"""The door to the files: whole or not at all, one winner, cut-off lines left out."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from pipeline.store.folder import LocalFolder


def test_written_file_holds_the_bytes_and_leaves_no_other_name(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("a.bin", b"one")
    folder.write_whole("a.bin", b"two")
    assert folder.read("a.bin") == b"two"
    assert folder.names() == ["a.bin"]
    assert folder.size_bytes("a.bin") == 3


def test_write_that_breaks_off_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("a.bin", b"old")

    def no_space(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("pipeline.store.folder.os.fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        folder.write_whole("a.bin", b"new and longer")
    assert folder.read("a.bin") == b"old"


def test_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    versions = [bytes([number]) * 50_000 for number in range(40)]
    folder.write_whole("a.bin", versions[0])

    def write_all() -> None:
        for data in versions:
            folder.write_whole("a.bin", data)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        seen = []
        while not writing.done():
            seen.append(folder.read("a.bin"))
        writing.result()
    assert {len(data) for data in seen} == {50_000}
    assert all(len(set(data)) == 1 for data in seen)


def test_one_of_many_creates_the_file(tmp_path: Path) -> None:
    folder, together = LocalFolder(tmp_path), Barrier(8)

    def create(number: int) -> bool:
        together.wait()
        return folder.create("lock", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert folder.read("lock") == b"%d" % won.index(True)
    assert folder.names() == ["lock"]


def test_file_that_is_there_is_not_created(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert folder.create("lock", b"first")
    assert not folder.create("lock", b"second")
    assert folder.read("lock") == b"first"


def test_file_that_appears_at_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write_bytes = LocalFolder(tmp_path), Path.write_bytes

    def with_a_rival(path: Path, data: bytes) -> int:
        monkeypatch.undo()
        assert folder.create("lock", b"rival")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", with_a_rival)
    assert not folder.create("lock", b"ours")
    assert folder.read("lock") == b"rival"
    assert folder.names() == ["lock"]


def test_appended_lines_are_read_in_order(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    for line in (b"one\n", "zwölf\n".encode(), b"\n", b"three\n"):
        folder.append_line("lines", line)
    assert list(folder.read_lines("lines")) == [b"one", "zwölf".encode(), b"", b"three"]


def test_lines_appended_at_once_are_not_mixed(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    lines = [bytes([65 + number]) * 10_000 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda line: folder.append_line("lines", line + b"\n"), lines))
    assert sorted(folder.read_lines("lines")) == lines


def test_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.append_line("lines", b"one\n")
    folder.append_line("lines", b"tw")
    assert list(folder.read_lines("lines")) == [b"one"]


def test_line_after_a_cut_off_one_stands_alone_once_that_is_ended(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.append_line("lines", b"tw")
    folder.end_last_line("lines")
    folder.append_line("lines", b"three\n")
    assert list(folder.read_lines("lines")) == [b"tw", b"three"]


def test_ending_the_last_line_adds_nothing_to_whole_empty_or_absent_files(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.append_line("whole", b"one\n")
    folder.write_whole("empty", b"")
    for name in ("whole", "empty", "absent"):
        folder.end_last_line(name)
    assert folder.read("whole") == b"one\n"
    assert folder.read("empty") == b""
    assert not folder.exists("absent")


def test_lines_of_a_missing_file_are_none(tmp_path: Path) -> None:
    assert list(LocalFolder(tmp_path).read_lines("absent")) == []


def test_names_are_sorted_and_none_for_a_missing_folder(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.make("sub/inner")
    for name in ("b", "a", ".hidden"):
        folder.write_whole(f"sub/{name}", b"")
    assert folder.names("sub") == [".hidden", "a", "b", "inner"]
    assert folder.names("absent") == []


def test_moved_file_replaces_the_one_that_stood_there(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.make("to")
    folder.write_whole("to/a", b"old")
    folder.write_whole("a", b"new")
    folder.move("a", "to/a")
    assert folder.read("to/a") == b"new"
    assert not folder.exists("a")


def test_removing_what_is_not_there_is_no_fault(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("a", b"")
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == []
