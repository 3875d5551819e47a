"""Rows on their way through a run: sources, prompts, parts, and what is done."""
