"""An endpoint that answers with faults, as a process of its own, so that it can be killed.

usage: python -m tests.chaos.endpoint PORT SEED LOG

LOG gets the question of each good answer: one that is there twice is work repeated.
"""

import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.fakes.scripted_server import Reply, ScriptedServer, answer, last_text, serving

# Shares of the faults among the answers; none of them says that a row is at fault.
FAULTS: dict[str, tuple[float, Reply]] = {
    "error": (0.03, Reply(status=500, body=b'{"error": {"message": "no luck"}}')),
    "busy": (0.02, Reply(status=429, headers=(("retry-after", "1"),))),
    "overloaded": (0.02, Reply(status=503)),
    "garbled": (0.01, Reply(body=b'{"object": "chat.comp')),
    "empty": (0.01, Reply(body=b"")),
    "cut": (0.02, Reply(body=b"{" + b" " * 400 + b"}", cut=True)),
}
_SHORTEST_S, _LONGEST_S = 0.1, 0.6


def main(port: int, seed: int, log: Path) -> None:
    chance = random.Random(seed)

    def script(request: dict[str, Any], number: int) -> Reply:
        drawn = chance.random()
        for share, fault in FAULTS.values():
            if drawn < share:
                return fault
            drawn -= share
        with log.open("a") as lines:
            lines.write(f"{last_text(request)}\n")
        body = answer(request, number).body
        return Reply(body=body, delay_s=chance.uniform(_SHORTEST_S, _LONGEST_S))

    with serving(ScriptedServer(script=script, keeps_requests=False), port):
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
