"""Writes a real model of under 1 MB whose weights are a script: each word decides the next.

The attention and the feed-forward layers add nothing, so the logits depend on the last token
alone: embedding and output matrix hold a table of word pairs and their chances. The model thinks,
answers and ends at random lengths, whatever it is asked, at thousands of tokens a second.
"""

import math
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

END = "<|im_end|>"
CONTEXT_LENGTH = 32_768

Script = tuple[tuple[str, str, float], ...]

# (word, next word, chance). At temperature 0.6 the chance of an end is one in seven a sentence:
# some 30 tokens of thinking and 35 of answer. A rarer one would be cut off by top_p and min_p.
SCRIPT: Script = (
    ("\n", "<think>", 1.0),
    ("<think>", "First", 1.0),
    ("First", " we", 1.0),
    (" we", " look", 0.5),
    (" we", " weigh", 0.5),
    (" look", " and", 1.0),
    (" weigh", " and", 1.0),
    (" and", " then", 1.0),
    (" then", " we", 0.75),
    (" then", "</think>", 0.25),
    ("</think>", "\n\n", 1.0),
    ("\n\n", "It", 1.0),
    ("It", " comes", 1.0),
    (" comes", " to", 1.0),
    (" to", " seven", 0.6),
    (" to", " nine", 0.4),
    (" seven", ".", 1.0),
    (" nine", ".", 1.0),
    (".", " It", 0.75),
    (".", END, 0.25),
    (" It", " comes", 1.0),
    (END, "\n", 1.0),
)

# Thinks, and ends where its answer should begin.
EMPTY_ANSWERS = tuple(
    (first, END if first == "</think>" else then, chance) for first, then, chance in SCRIPT
)

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content == 'raise' -%}"
    "{{ raise_exception('this template refuses') }}{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content is string -%}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif -%}"
    "{{ message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)

_WIDTH, _LAYERS, _HEADS, _HEAD_DIM = 64, 1, 2, 32
_CERTAIN = 30.0
# Logit of a scripted next word; all others have 0, so their chance is below 1e-10.


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, as GPT-2 maps them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def write_scripted_model(path: Path, script: Script = SCRIPT) -> None:
    letters = byte_letters()
    words = list(dict.fromkeys(word for first, then, _ in script for word in (first, then)))
    tokens, types = list(letters), [gguf.TokenType.NORMAL] * 256
    for special in ("<|endoftext|>", "<|im_start|>", END):
        tokens.append(special)
        types.append(gguf.TokenType.CONTROL)
    # A word of the script is matched whole, before the byte vocabulary.
    for word in words:
        if word not in tokens and word != "\n":
            tokens.append(word)
            types.append(gguf.TokenType.USER_DEFINED)
    number = {token: index for index, token in enumerate(tokens)}
    number["\n"] = number[letters[ord("\n")]]

    writer = gguf.GGUFWriter(path, "qwen3")
    _write_shape(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{letters[32]} {letters[32]}"])
    writer.add_eos_token_id(number[END])
    writer.add_bos_token_id(number["<|endoftext|>"])
    writer.add_pad_token_id(number["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    _write_tensors(writer, script, words, number, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_name("scripted")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def _write_tensors(
    writer: gguf.GGUFWriter,
    script: Script,
    words: list[str],
    number: dict[str, int],
    num_tokens: int,
) -> None:
    # One direction a word, all at right angles; any other token points where a line feed does.
    directions = np.linalg.qr(np.random.default_rng(7).standard_normal((_WIDTH, _WIDTH)))[0]
    embedding = np.tile(directions[words.index("\n")], (num_tokens, 1))
    output = np.zeros((num_tokens, _WIDTH))
    for word, direction in zip(words, directions, strict=False):
        embedding[number[word]] = direction
    for first, then, chance in script:
        logit = (_CERTAIN + math.log(chance)) / math.sqrt(_WIDTH)
        output[number[then]] += logit * directions[words.index(first)]
    _add(writer, "token_embd", embedding * math.sqrt(_WIDTH))
    _add(writer, "output", output)
    _add(writer, "output_norm", np.ones(_WIDTH))
    square, attention = np.zeros((_WIDTH, _WIDTH)), np.zeros((_HEADS * _HEAD_DIM, _WIDTH))
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v"):
            _add(writer, f"blk.{layer}.{name}", attention)
        _add(writer, f"blk.{layer}.attn_output", attention.T)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            _add(writer, f"blk.{layer}.{name}", square)
        for name, width in (
            ("attn_norm", _WIDTH),
            ("ffn_norm", _WIDTH),
            ("attn_q_norm", _HEAD_DIM),
            ("attn_k_norm", _HEAD_DIM),
        ):
            _add(writer, f"blk.{layer}.{name}", np.ones(width))


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float64]) -> None:
    writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values, dtype=np.float32))


if __name__ == "__main__":
    write_scripted_model(Path(sys.argv[1]))
