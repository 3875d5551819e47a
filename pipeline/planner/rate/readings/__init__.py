"""Public readings of tokens/s, and what they say about a launch that nobody measured."""
