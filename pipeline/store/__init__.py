"""Folders on a disk or in an object store: atomic writes, appended lines, and the driver's lock."""
