"""Token counts of conversations, by the model's own tokenizer where it is available.

Nothing is downloaded: a GGUF file contains its tokenizer, a model folder or the local hub cache may
have `tokenizer.json`. Otherwise the count is an approximation and says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pipeline.errors import ConfigError
from pipeline.models.gguf_file import gguf_metadata
from pipeline.untrusted.parsing import UnreadableError, bytes_of, guarded, reason
from schemas.prompt import TEMPLATE_TOKENS_PER_MESSAGE, Message

# assumed: English and CJK text both have 3.5 to 4.5 UTF-8 bytes per token with vocabularies of 50k
# tokens and more
# assumed: ten times the largest that is published
_MOST_TOKENIZER_BYTES = 512 << 20
_BYTES_PER_TOKEN = 4

_GGUF, _GGUF_NAMES = "tokenizer.ggml.", ("model", "pre", "tokens", "token_type", "merges")

# llama.cpp's token types, include/llama.h
_CONTROL, _USER_DEFINED = 3, 4

# The pre-tokenizer in tokenizer.json of the Qwen2 and Qwen3 repositories
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """Counts the tokens of conversations; `method` names the way, for people."""

    method: str
    is_exact: bool
    count_text: Callable[[str], int]

    def count(self, messages: Sequence[Message]) -> int:
        """Count the tokens of the texts, and an assumed few per message for the chat template."""
        texts = sum(self.count_text(text) for message in messages for text in message.texts)
        return texts + TEMPLATE_TOKENS_PER_MESSAGE * len(messages)


def gguf_token_counter(path: Path) -> TokenCounter:
    """Return the counter of a GGUF file's tokenizer; an approximation for kinds unknown here."""
    tokenizer = _gguf_tokenizer(path)
    return _exact(tokenizer, path.name) if tokenizer else approximate_token_counter()


def model_token_counter(model: str) -> TokenCounter:
    """Return the counter of `tokenizer.json` in a folder or the hub cache, or an approximation."""
    path = _tokenizer_path(model)
    if path is None:
        return approximate_token_counter()
    tokenizer = _tokenizer_in(path)
    # The file may switch both on, and the count would include them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _exact(tokenizer, model)


def model_text_decoder(model: str) -> Callable[[Sequence[Sequence[int]]], list[str]] | None:
    """Return a decoder from lists of token ids to texts without special tokens, on all cores.

    Returns None where no tokenizer is available.
    """
    path = _tokenizer_path(model)
    if path is None:
        return None
    tokenizer = _tokenizer_in(path)
    return lambda lists: tokenizer.decode_batch(list(lists), skip_special_tokens=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTexts:
    """Texts of token ids, and ids of texts, by a model's own tokenizer."""

    ids: Callable[[str], list[int]]
    text: Callable[[Sequence[int]], str]
    """Return the text without special tokens."""
    whole_text: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]


def model_token_texts(model: str) -> TokenTexts | None:
    """Read the tokenizer of a model's folder or the hub cache; None where neither has one."""
    path = _tokenizer_path(model)
    if path is None:
        return None
    tokenizer = _tokenizer_in(path)
    tokenizer.no_truncation()
    added = tokenizer.get_added_tokens_decoder()
    return TokenTexts(
        ids=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        text=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        whole_text=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        special_ids=frozenset(number for number, token in added.items() if token.special),
    )


def _tokenizer_path(model: str) -> Path | None:
    local = Path(model) / "tokenizer.json"
    return local if local.is_file() else _cached_tokenizer(model)


def _cached_tokenizer(model: str) -> Path | None:
    if model.count("/") != 1:
        return None
    # Its import would slow the start of every command.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:
        # A name that only the server knows
        return None
    return Path(cached) if isinstance(cached, str) else None


def _tokenizer_in(path: Path) -> Tokenizer:
    try:
        data = bytes_of(path, most=_MOST_TOKENIZER_BYTES)
        return guarded(lambda: Tokenizer.from_buffer(data))
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"model: cannot read {path}: {reason(error)}") from None


def approximate_token_counter() -> TokenCounter:
    return TokenCounter(
        method=f"approximated: {_BYTES_PER_TOKEN} UTF-8 bytes per token",
        is_exact=False,
        count_text=lambda text: -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN),
    )


def _exact(tokenizer: Tokenizer, name: str) -> TokenCounter:
    return TokenCounter(
        method=f"tokenizer of {name}",
        is_exact=True,
        count_text=lambda text: _count(tokenizer, name, text),
    )


def _count(tokenizer: Tokenizer, name: str, text: str) -> int:
    try:
        return len(guarded(lambda: tokenizer.encode(text, add_special_tokens=False)).ids)
    except UnreadableError as error:
        raise ConfigError(f"model: the tokenizer of {name} fails: {error}") from None


def _gguf_tokenizer(path: Path) -> Tokenizer | None:
    values: Mapping[str, Any] = gguf_metadata(path, {f"{_GGUF}{name}" for name in _GGUF_NAMES})
    kind, before, tokens, types, joins = (values.get(f"{_GGUF}{name}") for name in _GGUF_NAMES)
    words = _word_splitter(str(before))
    if kind != "gpt2" or words is None or not (tokens and types and joins):
        return None
    merges = [tuple(merge.split(" ", 1)) for merge in joins]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    known = [(a, b) for a, b in merges if {a, b, a + b} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known))
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    whole = zip(tokens, types, strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in whole
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _word_splitter(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Return the pre-tokenizer that llama.cpp calls `name`, for the vocabularies used here."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":
        split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    return None
