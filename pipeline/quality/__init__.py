"""Checks of what a model writes: flags, the canary and a diagnosis of what went wrong."""
