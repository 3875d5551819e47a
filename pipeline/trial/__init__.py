"""Trial: which launch plans to run side by side at a job's start, and which to keep. Pure."""
