"""A tokenizer of whole words, as `tokenizer.json`, for the stand-in SGLang and its clients.

Words are separated by spaces. `</think>` is a word like any other, as in Qwen3's tokenizer;
`<assistant>`, which ends a prompt, and `<eos>` are special.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

NUM_WORDS = 200
SPECIAL = ("<assistant>", "<eos>")


def write_word_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` into a model's folder."""
    words = ["<unk>", "</think>", *(f"w{number}" for number in range(NUM_WORDS))]
    vocabulary = {word: number for number, word in enumerate([*words, *SPECIAL])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
