"""Layout: the files and sub-folders of an output folder have the kind that their names promise.

A file where a sub-folder belongs, or the reverse, comes from another program or a damaged disk.
Each writer and reader would meet it with an error of its own, so it is reported at the start.
"""

from pipeline.errors import ResumeError
from pipeline.store.folder import Folder
from pipeline.store.run_folder import FILES, FOLDERS


def check_layout(folder: Folder) -> None:
    """Raise ResumeError, which names all that has the wrong kind."""
    if folder.is_remote:
        # A store has no folders: a key and keys below it do not exclude each other.
        return
    names, sub_folders = set(folder.names()), set(folder.folder_names())
    faults = [
        *(f"{folder.place(name)} is a folder, expected a file" for name in FILES & sub_folders),
        *(f"{folder.place(name)} is not a folder" for name in FOLDERS & names - sub_folders),
    ]
    if faults:
        raise ResumeError(f"output.folder: {'; '.join(sorted(faults))}; move it away")
