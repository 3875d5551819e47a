"""Files that are written for the user to begin with: a first run file and its schema."""
