"""Write a tiny model that thinks and answers, whatever it is asked. Run in SGLang's environment.

usage: make_model.py FOLDER

A Qwen3 whose layers add nothing to what flows through them: the next token depends on the last one
alone, by a table. Lengths are random, so that stop and length, the thinking's end and the usage can
be tested on real answers. The tokenizer knows bytes and the table's words.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER = 512, 2, 4, 32, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# from → to, with chances; the prompt ends with a line feed
TABLE = {
    "\n": {"<think>": 1.0},
    "<think>": {" weighing": 1.0},
    " weighing": {" it": 1.0},
    " it": {" once": 0.5, " twice": 0.5},
    " once": {" more": 1.0},
    " twice": {" more": 1.0},
    " more": {" weighing": 0.8, "</think>": 0.2},
    "</think>": {"\n\n": 1.0},
    "\n\n": {"Yes": 1.0},
    "Yes": {" indeed": 1.0},
    " indeed": {" indeed": 0.6, "!": 0.4},
    "!": {"<|im_end|>": 1.0},
    "<|im_end|>": {"\n": 1.0},
}
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "\n{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
CERTAIN = 30.0  # logits of the table's words over all others


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder)
    size = math.ceil(len(ids) / 64) * 64
    write_config(folder, size, end=ids["<|im_end|>"])
    save_file(weights(ids, size), folder / "model.safetensors", metadata={"format": "pt"})
    print(f"a model of {len(ids)} tokens in {folder}")


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Bytes and the table's words, by their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    words = [word for word in TABLE if word not in SPECIAL]
    words += [word for chances in TABLE.values() for word in chances if word not in SPECIAL]
    tokenizer.add_tokens(
        [AddedToken(word, normalized=False) for word in dict.fromkeys(words) if len(word) > 1]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    whole.save_pretrained(folder)
    return (
        {word: whole.encode(word, add_special_tokens=False)[0] for word in known(words)}
        | {word: whole.convert_tokens_to_ids(word) for word in SPECIAL}
        | {f"byte {n}": n for n in range(len(alphabet))}
    )


def known(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))


def weights(ids: dict[str, int], size: int) -> dict[str, torch.Tensor]:
    found = {**words_and_table(ids, size), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.{name}": one for name, one in idle_layer().items()}
    return {name: one.to(torch.bfloat16).contiguous() for name, one in found.items()}


def words_and_table(
    ids: dict[str, int], size: int, table: dict[str, dict[str, float]] = TABLE
) -> dict[str, torch.Tensor]:
    """Each token is a direction of its own; the head reads the table off it."""
    embed = torch.zeros(size, HIDDEN)
    embed[:, :size] = torch.eye(size)[:, :HIDDEN]
    head = torch.zeros(size, HIDDEN)
    for number in range(size):
        # A token of no row goes on as a line feed does.
        head[ids["<think>"], number] = CERTAIN / math.sqrt(HIDDEN)
    for word, chances in table.items():
        head[:, ids[word]] = 0.0
        for following, chance in chances.items():
            head[ids[following], ids[word]] = (CERTAIN + math.log(chance)) / math.sqrt(HIDDEN)
    return {"model.embed_tokens.weight": embed, "lm_head.weight": head}


def idle_layer() -> dict[str, torch.Tensor]:
    """A layer whose two outputs are nothing."""
    width = HEADS * HEAD_DIM
    return {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": torch.randn(width, HIDDEN) * 0.02,
        "self_attn.k_proj.weight": torch.randn(width, HIDDEN) * 0.02,
        "self_attn.v_proj.weight": torch.randn(width, HIDDEN) * 0.02,
        "self_attn.o_proj.weight": torch.zeros(HIDDEN, width),
        "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        "mlp.gate_proj.weight": torch.randn(INNER, HIDDEN) * 0.02,
        "mlp.up_proj.weight": torch.randn(INNER, HIDDEN) * 0.02,
        "mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
    }


def write_config(folder: Path, size: int, *, end: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_generation(folder, end=end)


def write_generation(folder: Path, *, end: int) -> None:
    generation = {"eos_token_id": end, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
