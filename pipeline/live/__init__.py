"""Estimates of a run while it goes on, from engine counters to the time left."""
