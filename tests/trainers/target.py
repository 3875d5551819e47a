"""Serve a target model whose answers are scripted and whose tokens are a real tokenizer's.

usage: python target.py TOKENIZER

Prints its port. Prompts are rendered by the chat template, as transformers does it. Pages:
`/v1/models`; `/v1/chat/completions` with token ids, as SGLang returns them; and
`/v1/chat/completions/render`, the page of vLLM that speculators asks.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import AutoTokenizer

END = "<|im_end|>"


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])


def rendered(body: dict, *, opens: bool) -> list[int]:
    messages = [{**message} for message in body["messages"]]
    for message in messages:
        # vLLM parses arguments before it renders.
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [parsed(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return TOKENIZER.apply_chat_template(
        messages,
        tools=body.get("tools"),
        add_generation_prompt=opens,
        tokenize=True,
        return_dict=False,
        **(body.get("chat_template_kwargs") or {}),
    )


def parsed(call: dict) -> dict:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def completed(body: dict) -> dict:
    prompt = rendered(body, opens=True)
    asked = body["messages"][-1]["content"]
    thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking") is not False
    reasoning = f"Someone asks: {asked}. I weigh both sides." if thinks else None
    answer = f"I say {asked.upper()} — naïve, 真的 🙂.\n\n- one\n- two"
    opening = f"<think>\n{reasoning}\n</think>\n\n" if thinks else ""
    ids = TOKENIZER.encode(f"{opening}{answer}{END}", add_special_tokens=False)
    finish = "stop"
    if "cut" in asked:
        # Three tokens into the end, as at a limit of tokens.
        ids, finish = ids[:-4], "length"
        answer = TOKENIZER.decode(ids).removeprefix(opening)
    message = {"role": "assistant", "content": answer, "reasoning_content": reasoning}
    return {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": finish,
                "token_ids": ids,
                "prompt_token_ids": prompt,
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "target", "max_model_len": 8192}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/render"):
            ids = rendered(body, opens=body["add_generation_prompt"])
            self.reply({"token_ids": ids[: body.get("truncate_prompt_tokens")]})
        else:
            self.reply(completed(body))

    def reply(self, values: dict) -> None:
        data = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None: ...


if __name__ == "__main__":
    main()
