"""A stand-in for SGLang: a process with SGLang's flags, log lines, API and metrics. stdlib only.

usage: standin_sglang.py --model-path M --port P --api-key K [any flag of sglang.launch_server]

It has a memory model of its own, coarser than the planner's: a card, weights, a cost a token and a
cost a request. STANDIN is a JSON object that tells it what to do:

    card_gib, weights_gib, draft_gib, token_kib, request_mib, context_gib   its memory
    fail: {"at": stage, "as": wording, "times": n}   die at start | load | draft | pool | capture
    old: true            the wording of old releases
    oom_above: n         out of memory once more than n requests run
    hang_after: n        no token after n answers, while the health page stays well
    die_after: n         the scheduler dies after n answers, the HTTP server lives on
    mtp_fault_after: n   an assertion in speculative decoding fails after n answers, with MTP alone
    kill_on: text        the scheduler dies of a prompt that holds this text
    leak_mib: n          each answer costs so much, until memory runs out
    slow_s: s            each answer takes so long
    load_s: s            and the start so much longer
    silent: true         a start that says nothing and does nothing
    template_tokens: n   the chat template adds so many to each prompt
    starts: path         a file that counts the starts, so that a fault can be of the first ones
    token_s: s           answers are generated token by token, in this time each; the model's folder
                         has the tokenizer of `word_tokenizer.py`
    together: n          with it, no request but the first, which tries the engine, gets a token
                         before n others are there
    tokenizer: folder    another folder with that tokenizer
    ignores_ids: true    a release that does not know `input_ids`
    runs_on: true        the last token of an answer comes with an abort only
"""

import argparse
import json
import os
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "card_gib": 94.97,
    "weights_gib": 50.96,
    "draft_gib": 5.53,
    "token_kib": 64.0,
    "request_mib": 734.0,
    "context_gib": 0.8,
    "release": "0.5.23",
    "old": False,
    "slow_s": 0.0,
}
USAGE = "usage: launch_server.py [-h] --model-path MODEL_PATH [--host HOST] [--port PORT]"


class State:
    """State of the process."""

    def __init__(self, script: dict[str, Any], flags: argparse.Namespace) -> None:
        self.script, self.flags = script, flags
        self.lock = threading.Lock()
        self.running = 0
        self.answers = 0
        self.tokens = 0
        self.leaked_gib = 0.0
        self.has_hung = False
        self.scheduler_lives = True
        self.is_up = False
        self.pool_tokens = 0
        self.effective = 0
        self.slack_gib = 0.0
        self.model: WordModel | None = None
        if "token_s" in script:
            self.model = WordModel(script.get("tokenizer", flags.model_path))
        self.begun = 0
        self.aborts = 0
        self.aborted = threading.Condition()


class WordModel:
    """A model whose next token follows from all tokens before it, and from nothing else.

    An answer has 40 to 79 tokens, half of them thinking.
    """

    def __init__(self, folder: str) -> None:
        values = json.loads((Path(folder) / "tokenizer.json").read_text())
        self.number: dict[str, int] = values["model"]["vocab"]
        self.word = {number: word for word, number in self.number.items()}

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        words = " ".join(str(message["content"]) for message in messages).split()
        return [*map(self._id, words), self.number["<assistant>"]]

    def _id(self, word: str) -> int:
        return self.number.get(word) or self.number[f"w{zlib.crc32(word.encode()) % 200}"]

    def next_token(self, ids: list[int]) -> int:
        start = len(ids) - ids[::-1].index(self.number["<assistant>"])
        place, drawn = len(ids) - start, zlib.crc32(repr(ids[:start]).encode())
        length = 40 + drawn % 40
        if place == length - 1:
            return self.number["<eos>"]
        if place == length // 2:
            return self.number["</think>"]
        return self.number[f"w{(drawn + 31 * place) % 200}"]

    def text(self, ids: list[int]) -> str:
        words = [self.word[one] for one in ids]
        return " ".join(word for word in words if word not in ("<assistant>", "<eos>"))


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} TP0] {text}", flush=True)


def say_plain(text: str) -> None:
    print(text, flush=True)


# -- the start


def parsed(argv: list[str], script: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_server.py", usage=USAGE, allow_abbrev=False)
    add = parser.add_argument
    for name in (
        "--model-path",
        "--host",
        "--api-key",
        "--served-model-name",
        "--reasoning-parser",
    ):
        add(name)
    add("--port", type=int, required=True)
    add("--mem-fraction-static", type=float, default=0.85)
    add("--max-running-requests", type=int)
    add("--context-length", type=int, default=32768)
    add("--tp-size", type=int, default=1)
    add("--chunked-prefill-size", type=int, default=8192)
    add("--speculative-algorithm")
    for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
        add(f"--speculative-{name}", type=int)
    newer = {"--mamba-radix-cache-strategy", "--cuda-graph-max-bs-decode"}
    older = {"--mamba-scheduler-strategy", "--cuda-graph-max-bs"}
    for name in older if script["old"] else newer:
        add(name)
    for name in ("--enable-metrics", "--disable-radix-cache", "--trust-remote-code",
                 "--disable-custom-all-reduce"):  # fmt: skip
        add(name, action="store_true")
    return parser.parse_args(argv)


def start(state: State) -> None:
    """The launch, line by line, with a memory model of its own."""
    script, flags = state.script, state.flags
    total, old = script["card_gib"], script["old"]
    free = total - script["context_gib"] - script.get("others_gib", 0.0)
    die_if_told(state, "start", free)
    say("Init torch distributed begin." if old else "Init parallel begin.")
    say(f"Load weight begin. avail mem={free:.2f} GB")
    time.sleep(script.get("load_s", 0.0))
    before = free
    weights = script["weights_gib"] / flags.tp_size
    die_if_told(state, "load", free)
    if weights > free:
        out_of_memory(state, 2.0, max(free, 0.1))
    free -= weights
    say(loaded("Qwen3_5ForConditionalGeneration", free, weights, old))
    if flags.speculative_algorithm:
        say(f"Load weight begin. avail mem={free:.2f} GB")
        die_if_told(state, "draft", free)
        if script["draft_gib"] > free:
            out_of_memory(state, 1.02, free)
        free -= script["draft_gib"]
        say(loaded("Qwen3_5ForCausalLMMTP", free, script["draft_gib"], old))
    die_if_told(state, "pool", free)
    size_pools(state, before, free)


def loaded(kind: str, free: float, used: float, old: bool) -> str:
    took = "" if old else "elapsed=1.00 s, "
    return f"Load weight end. {took}type={kind}, avail mem={free:.2f} GB, mem usage={used:.2f} GB."


def size_pools(state: State, before: float, free: float) -> None:
    script, flags = state.script, state.flags
    rest = free - before * (1 - flags.mem_fraction_static)
    asked = flags.max_running_requests or 48
    draft_tokens = flags.speculative_num_draft_tokens or 0
    each = script["request_mib"] / 1024 * (1 + draft_tokens / 5)
    state.effective = min(asked, int(rest / 2 / each)) if rest > 0 else 0
    state.pool_tokens = int((rest - state.effective * each) * 2**20 / script["token_kib"])
    if rest <= 0 or state.pool_tokens <= 0 or state.effective <= 0:
        fail(state, not_enough(state, rest))
    say(f"KV Cache is allocated. #tokens: {state.pool_tokens}, K size: {rest / 2:.2f} GB")
    state.slack_gib = before * (1 - flags.mem_fraction_static)
    say(f"Memory pool end. avail mem={state.slack_gib:.2f} GB")
    name = "cuda graph" if script["old"] else "target decode CUDA graph"
    say(f"Capture {name} begin. avail mem={state.slack_gib:.2f} GB")
    die_if_told(state, "capture", state.slack_gib)
    need = script.get("graphs_gib", 2.0)
    if need > state.slack_gib:
        capture_failed(state, need)
    state.slack_gib -= need
    say(f"Capture {name} end. mem usage={need:.2f} GB. avail mem={state.slack_gib:.2f} GB.")
    say(
        f"max_total_num_tokens={state.pool_tokens}, chunked_prefill_size="
        f"{flags.chunked_prefill_size}, max_prefill_tokens=16384, max_running_requests="
        f"{state.effective}, context_len={flags.context_length}"
    )


# -- failures


def die_if_told(state: State, stage: str, free: float) -> None:
    order = state.script.get("fail")
    if not order or order["at"] != stage or order.get("times", 10**6) < starts_so_far(state):
        return
    text = order["as"]
    if text == "oom":
        out_of_memory(state, 1.5, min(free, 0.4))
    if text == "capture":
        capture_failed(state, 2.78)
    if text == "kill":
        os.kill(os.getpid(), 9)
    fail(state, text)


def starts_so_far(state: State) -> int:
    path = state.script.get("starts")
    return len(Path(path).read_text().splitlines()) if path else 1


def not_enough(state: State, rest: float) -> str:
    if rest <= 0 and not state.script["old"]:
        fraction = state.flags.mem_fraction_static
        return (
            f"ValueError: Loaded weights leave no GPU memory for the KV cache under "
            f"--mem-fraction-static={fraction}. Raise --mem-fraction-static above 0.600"
        )
    return "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


def oom_text(state: State, tried: float, free: float) -> str:
    total = state.script["card_gib"]
    if state.script["old"]:
        return (
            f"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB "
            f"(GPU 0; {total:.2f} GiB total capacity; 90.00 GiB already allocated; {free:.2f} GiB "
            f"free; 91.00 GiB reserved in total by PyTorch)"
        )
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has "
        f"a total capacity of {total:.2f} GiB of which {free:.2f} GiB is free. Including "
        f"non-PyTorch memory, this process has {total - free:.2f} GiB memory in use."
    )


def out_of_memory(state: State, tried: float, free: float) -> None:
    fail(state, oom_text(state, tried, free))


def capture_failed(state: State, tried: float) -> None:
    text = oom_text(state, tried, state.slack_gib or 1.6).partition(": ")[2]
    fail(state, f"Exception: Capture cuda graph failed: {text}\nPossible solutions:")


def fail(state: State, text: str) -> None:
    """Fail as a scheduler does: print its traceback, then the parent's message."""
    if text.startswith(("usage", "launch_server.py: error")):
        say_plain(text)
        os._exit(2)
    say("Scheduler hit an exception: Traceback (most recent call last):")
    say_plain('  File "/x/sglang/srt/managers/scheduler.py", line 6358, in run_scheduler_process')
    say_plain(f"{text}\n")
    say_plain(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] Received sigquit from a child process.")
    say_plain(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] kill_process_tree called: parent_pid=1")
    os._exit(1)


# -- serving


class Handler(BaseHTTPRequestHandler):
    """The OpenAI API, /server_info and /metrics."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/metrics":
            self.send(200, metrics(state).encode(), "text/plain; version=0.0.4")
        elif self.path.startswith("/health"):
            self.send(200, b"")
        elif not self.is_allowed():
            self.send(401, b'{"error": "Unauthorized"}')
        elif self.path == "/v1/models":
            facts = {"id": "m", "max_model_len": state.flags.context_length}
            self.send_json(200, {"data": [facts]})
        elif self.path in ("/server_info", "/get_server_info") and not (
            state.script["old"] and self.path == "/server_info"
        ):
            self.send_json(200, server_info(state))
        else:
            self.send(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.is_allowed():
            self.send(401, b'{"error": "Unauthorized"}')
        elif self.path == "/abort_request":
            abort_all(self.state)
            self.send(200, b"")
        elif self.state.model is not None:
            self.send_json(*written(self.state, self.state.model, body))
        else:
            self.send_json(*answer(self.state, body))

    def is_allowed(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.state.flags.api_key}"

    def send_json(self, status: int, values: dict[str, Any]) -> None:
        self.send(status, json.dumps(values).encode())

    def send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answer(state: State, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    script = state.script
    prompt = str(body["messages"][-1]["content"])
    words = len(prompt.split()) + script.get("template_tokens", 0)
    if words + body["max_tokens"] > state.flags.context_length:
        return 400, {"message": f"The input ({words} tokens) is longer than the context length"}
    with state.lock:
        state.running += 1
        running = state.running
    try:
        if running == 1:
            say(f"Prefill batch, #new-seq: 1, #new-token: {words}, #running-req: 0, #queue-req: 0")
        serve_faults(state, prompt, running)
        time.sleep(script["slow_s"])
        with state.lock:
            state.answers += 1
            state.tokens += 3
            after = state.answers
        if after % 40 == 1:
            say(f"Decode batch, #running-req: {running}, #token: {after * 3}, #queue-req: 0")
    finally:
        with state.lock:
            state.running -= 1
    message = {
        "role": "assistant",
        "content": f"\n\nanswer to {prompt}",
        "reasoning_content": "thinking",
        "prompt_token_ids": list(range(words)),
        "response_token_ids": [1, 2, 3],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": words, "completion_tokens": 3, "reasoning_tokens": 1}
    return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}


# -- answers token by token, which can be aborted and continued


def abort_all(state: State) -> None:
    with state.aborted:
        state.aborts += 1
        state.aborted.notify_all()


def written(state: State, model: WordModel, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    prompt_ids = body.get("input_ids") if not state.script.get("ignores_ids") else None
    prompt_ids = prompt_ids or model.prompt_ids(body["messages"])
    with state.lock:
        state.running += 1
    try:
        ids, finish = generate(state, model, prompt_ids, body["max_tokens"])
    finally:
        with state.lock:
            state.running -= 1
            state.answers += 1
    end = model.number["</think>"]
    reasoning = ids.index(end) + 1 if end in ids else len(ids)
    before, _, after = model.text(ids).partition("</think>")
    message = {"role": "assistant", "content": after, "reasoning_content": before or None}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "prompt_token_ids": prompt_ids,
        "response_token_ids": ids,
    }
    usage = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(ids),
        "reasoning_tokens": reasoning,
    }
    return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}


def generate(
    state: State, model: WordModel, prompt_ids: list[int], most: int
) -> tuple[list[int], str]:
    """As the scheduler does: an abort lets one more step run, whose token it does not check."""
    ids: list[int] = []
    began = state.aborts
    with state.aborted:
        state.begun += 1
        state.aborted.notify_all()
        least = state.script.get("together", 0) if state.answers else 0
        # The first one counts too.
        state.aborted.wait_for(lambda: state.begun > least or state.aborts > began)
    while True:
        token = model.next_token([*prompt_ids, *ids])
        is_held = state.script.get("runs_on") and token == model.number["<eos>"]
        with state.aborted:
            wait_s = 3600 if is_held else state.script["token_s"]
            state.aborted.wait_for(lambda: state.aborts > began, wait_s)
        ids.append(token)
        with state.lock:
            state.tokens += 1
        if state.aborts > began:
            return ids, "abort"
        if ids[-1] == model.number["<eos>"]:
            return ids, "stop"
        if len(ids) >= most:
            return ids, "length"


def serve_faults(state: State, prompt: str, running: int) -> None:
    """Whatever STANDIN tells to go wrong while serving."""
    script = state.script
    if not state.scheduler_lives:
        time.sleep(3600)
    if running > script.get("oom_above", 10**6):
        out_of_memory(state, 3.77, 0.9)
    if state.flags.speculative_algorithm and state.answers >= script.get("mtp_fault_after", 10**9):
        frame = 'File "/x/sglang/srt/speculative/eagle_worker_v2.py", line 1002, in verify'
        fail(state, f"  {frame}\n    assert pt == batch.input_ids.numel()\nAssertionError")
    if script.get("kill_on", "\0") in prompt:
        scheduler_dies(state)
    first_starts = starts_so_far(state) <= script.get("fault_starts", 10**6)
    state.leaked_gib += script.get("leak_mib", 0) / 1024
    if first_starts and state.leaked_gib > state.slack_gib:
        out_of_memory(state, 0.25, 0.1)
    if first_starts and state.answers >= script.get("die_after", 10**9):
        scheduler_dies(state)
    if first_starts and state.answers >= script.get("hang_after", 10**9):
        state.has_hung = True
    if state.has_hung:
        time.sleep(3600)


def scheduler_dies(state: State) -> None:
    """The scheduler is killed; the HTTP server lives a moment longer and answers nothing."""
    state.scheduler_lives = False
    say_plain("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT")
    time.sleep(state.script.get("linger_s", 0.3))
    say_plain("kill_process_tree called: parent_pid=1, include_parent=True, pid=1")
    os._exit(1)


def server_info(state: State) -> dict[str, Any]:
    inner: dict[str, Any] = {"last_gen_throughput": 1.0}
    if not state.script["old"]:
        inner["effective_max_running_requests_per_dp"] = state.effective
    asked = state.flags.max_running_requests
    return {
        "version": state.script["release"],
        "max_running_requests": asked,
        "max_total_num_tokens": state.pool_tokens,
        "internal_states": [inner],
    }


def metrics(state: State) -> str:
    labels = '{engine_type="unified",model_name="m",tp_rank="0"}'
    values = {
        "num_running_reqs": state.running,
        "num_queue_reqs": 0,
        "token_usage": 0.1,
        "realtime_tokens_total": state.tokens,
        "generation_tokens_total": state.tokens,
    }
    return "".join(f"sglang:{name}{labels} {float(value)}\n" for name, value in values.items())


class Server(ThreadingHTTPServer):
    """A server that many clients may connect to at once."""

    # The base class's 5 make the others wait for a second.
    request_queue_size = 128


def main(argv: list[str]) -> int:
    script = {**DEFAULTS, **json.loads(os.environ.get("STANDIN", "{}"))}
    if "starts" in script:
        with Path(script["starts"]).open("a") as file:
            file.write(f"{time.time()} {' '.join(argv)}\n")
    if script.get("silent"):
        time.sleep(3600)
    flags = parsed(argv, script)
    state = State(script, flags)
    start(state)
    Handler.state = state
    server = Server(("127.0.0.1", flags.port), Handler)
    say_plain("The server is fired up and ready to roll!")
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
