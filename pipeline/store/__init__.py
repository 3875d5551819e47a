"""Files wherever they are, on a disk or in an object store: written whole, locked, appended."""
