"""The chat template and the special tokens of a GGUF file, read from its metadata alone."""

from pathlib import Path

from pipeline.models.gguf_file import gguf_metadata

# Special tokens as templates call them: as the metadata calls their ids.
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TEMPLATE, _TOKENS = "tokenizer.chat_template", "tokenizer.ggml.tokens"


def gguf_chat_template(path: Path) -> tuple[str, dict[str, str]] | None:
    """Return the chat template and special tokens; None for a file without a template.

    Raises ConfigError for a file that cannot be read as GGUF.
    """
    values = gguf_metadata(path, {_TEMPLATE, _TOKENS, *_SPECIAL.values()})
    template, tokens = values.get(_TEMPLATE), values.get(_TOKENS)
    if not isinstance(template, str):
        return None
    special = {}
    for name, key in _SPECIAL.items():
        number = values.get(key)
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            special[name] = str(tokens[number])
    return template, special
