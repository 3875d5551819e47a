"""The input: which files it has, and their rows, whatever their format."""
