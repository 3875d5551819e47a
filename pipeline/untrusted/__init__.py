"""Parsing of what others wrote: one door, one error."""
