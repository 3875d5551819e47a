"""Rows of a benchmark: their prompts, how long each answer takes, and what it contains.

A row's id decides its delay and its answer, so that every client meets the same work.
"""

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ID_CHARACTERS = 10
# Spread of the answers' times; the rows of a real run differ by more.
_SIGMA = 0.6
_NUM_BODIES = 64
_PROMPT_TOKENS = 60
_END_TOKEN = 151_645
_TAKES = 4096
_BATCH_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Size of a run against stand-in servers."""

    num_rows: int
    num_servers: int
    in_flight: int
    """Requests in flight per server."""
    median_s: float
    """Median time of an answer; 0 for servers that answer at once."""
    prompt_characters: int = 200
    answer_tokens: int = 600

    @property
    def most_in_flight(self) -> int:
        return self.num_servers * self.in_flight


def row_id(number: int) -> str:
    return f"row-{number:06d}"


def delays(median_s: float) -> list[float]:
    """Times of answers, one for each residue of a row's number."""
    if not median_s:
        return [0.0]
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((n + 0.5) / _TAKES) for n in range(_TAKES)]
    random.Random(7).shuffle(quantiles)
    return [median_s * 2.718281828 ** (_SIGMA * quantile) for quantile in quantiles]


def bodies(answer_tokens: int) -> list[tuple[bytes, bytes]]:
    """Chat completions as SGLang sends them, split where the row's id goes."""
    chance = random.Random(11)
    return [_body(chance, answer_tokens) for _ in range(_NUM_BODIES)]


def _body(chance: random.Random, answer_tokens: int) -> tuple[bytes, bytes]:
    words = _words(chance)
    half = max(1, answer_tokens // 2)
    reasoning, answer = (_prose(chance, words, half) for _ in range(2))
    ids = [*(chance.randrange(150_000) for _ in range(answer_tokens - 1)), _END_TOKEN]
    message = {
        "role": "assistant",
        "content": f"{'@' * ID_CHARACTERS} {answer}",
        "reasoning_content": reasoning,
        "tool_calls": None,
        "prompt_token_ids": [chance.randrange(150_000) for _ in range(_PROMPT_TOKENS)],
        "response_token_ids": ids,
    }
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": _PROMPT_TOKENS,
            "total_tokens": _PROMPT_TOKENS + answer_tokens,
            "completion_tokens": answer_tokens,
            "reasoning_tokens": half,
        },
    }
    head, _, tail = json.dumps(body, separators=(",", ":")).partition("@" * ID_CHARACTERS)
    return head.encode(), tail.encode()


def _words(chance: random.Random) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(5000)]


def _prose(chance: random.Random, words: list[str], num_tokens: int) -> str:
    """Write sentences; a token is about four characters."""
    pieces, left = [], 4 * num_tokens
    while left > 0:
        sentence = " ".join(chance.choices(words, k=14)).capitalize() + "."
        pieces.append(sentence[:left] if left < len(sentence) else sentence)
        left -= len(sentence) + 1
    return " ".join(pieces)


def write_prompts(path: Path, load: Workload) -> None:
    """Write prompts that begin with their row's id."""
    chance = random.Random(3)
    words = _words(chance)
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, load.num_rows, _BATCH_ROWS):
            ids = [row_id(n) for n in range(start, min(start + _BATCH_ROWS, load.num_rows))]
            prompts = [f"{i} {_prose(chance, words, load.prompt_characters // 4)}" for i in ids]
            writer.write_table(pa.table({"id": ids, "prompt": prompts}, schema=schema))
