"""The folder of temporary files belongs to this user alone."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.store.own_folder import (
    is_private,
    keep_private,
    make_private,
    own_temporary_folder,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"regenerate-{os.getuid()}"


def test_folder_is_made_for_this_user_alone_and_found_again(place: Path) -> None:
    assert own_temporary_folder() == place
    assert place.stat().st_mode & 0o777 == 0o700
    assert own_temporary_folder() == place


def a_link(place: Path) -> None:
    place.symlink_to(place.parent)


def a_dangling_link(place: Path) -> None:
    place.symlink_to(place.parent / "nowhere")


def a_file(place: Path) -> None:
    place.touch()


def an_open_folder(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (a_link, "found a link"),
        (a_dangling_link, "found a link"),
        (a_file, "found a file"),
        (an_open_folder, "found a folder that others may write into (mode 0777)"),
    ],
)
def test_name_that_somebody_has_taken_is_refused(
    place: Path, taken: Callable[[Path], None], found: str
) -> None:
    place.parent.mkdir()
    taken(place)
    with pytest.raises(ConfigError, match=re.escape(f"{place}: {found}; expected a folder of")):
        own_temporary_folder()


def test_folder_of_another_user_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = os.getuid(), os.getuid() + 1
    own_temporary_folder().rename(place.with_name(f"regenerate-{other}"))
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(ConfigError, match=f"found a folder of user {own}; expected a folder of"):
        own_temporary_folder()


def test_private_folder_and_what_is_made_afterwards_are_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = tmp_path / "above" / "run"
        folder.mkdir(parents=True)
        assert not is_private(folder)
        keep_private()
        make_private(folder)
        assert is_private(folder)
        (folder / "staging").mkdir()
        (folder / "staging" / "rows").write_text("rows")
        modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))]
        assert modes == [0o700, 0o700, 0o600]
    finally:
        os.umask(before)


def test_folder_that_does_not_exist_is_not_private(tmp_path: Path) -> None:
    assert not is_private(tmp_path / "none")
