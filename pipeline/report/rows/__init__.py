"""Rows of a run, summed up and drawn for the page in one pass over the parts."""
