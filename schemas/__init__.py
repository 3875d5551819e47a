"""Records that cross a disk, a process or a person. Nothing here acts."""
