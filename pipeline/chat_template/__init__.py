"""A model's chat template: where it is, what it renders, and the facts found by rendering it."""
