"""Course of a run: its records, when it worked and when it paused, and series over time."""
