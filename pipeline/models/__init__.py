"""Facts of a model, read from its files: config, tensors, formats, tokenizer, how it thinks."""
