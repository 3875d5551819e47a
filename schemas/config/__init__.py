"""The run file: its sections, with all keys, types, bounds and defaults, and its reader."""
