"""Files and sub-folders of an output folder that have each other's place."""

from pathlib import Path

import pytest

from pipeline.errors import ResumeError
from pipeline.store.folder import LocalFolder
from pipeline.store.layout import check_layout
from pipeline.store.run_folder import FILES, FOLDERS


def test_folder_with_every_file_and_sub_folder_is_right(tmp_path: Path) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name in FILES:
        (tmp_path / name).touch()
    (tmp_path / "notes").mkdir()
    check_layout(LocalFolder(tmp_path))


@pytest.mark.parametrize("name", sorted(FILES))
def test_folder_where_a_file_belongs_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ResumeError, match=f"{name} is a folder, expected a file; move it away"):
        check_layout(LocalFolder(tmp_path))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_file_or_link_to_nothing_where_a_folder_belongs_is_reported(
    tmp_path: Path, name: str
) -> None:
    for make in (Path.touch, lambda path: path.symlink_to("/nowhere")):
        make(tmp_path / name)
        with pytest.raises(ResumeError, match=f"{name} is not a folder; move it away"):
            check_layout(LocalFolder(tmp_path))
        (tmp_path / name).unlink()
