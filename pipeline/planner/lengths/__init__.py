"""Lengths of completions, learned while some of them still run."""
