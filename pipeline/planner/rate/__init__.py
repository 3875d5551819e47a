"""Tokens per second of a launch: step time, running requests, search and ranking."""
