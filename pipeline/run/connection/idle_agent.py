"""Take the place of an agent of Ray that a private Ray does not use. Run as a script; stdlib only.

usage: idle_agent.py SESSION_DIR PORT_NAME [PORT_NAME ...]

A raylet starts its agents, waits until each has written its ports to files of the session, and
ends with them. This one writes -1, which Ray's agents write for a service that is not in use, and
lives as long as the raylet.
"""

import os
import sys
import time
from pathlib import Path

_POLL_S = 0.5


def main(session_dir: str, port_names: list[str]) -> int:
    raylet = os.getppid()
    for name in port_names:
        path = Path(session_dir, f"{name}_{os.environ['RAY_NODE_ID']}")
        new = path.with_name(f"{path.name}.new")
        new.write_text("-1")
        new.replace(path)
    while os.getppid() == raylet:
        time.sleep(_POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
