"""Rows on their way in and out: sources, prompts, parts, history and exports."""
