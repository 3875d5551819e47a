"""Days and dollars of a run, with their bands, and how they are printed."""
