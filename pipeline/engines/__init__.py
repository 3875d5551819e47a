"""Engines: how one is launched, watched, recovered and asked for a completion."""
