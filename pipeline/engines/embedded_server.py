"""Serve a GGUF file with llama.cpp in this process. Run as a script.

usage: embedded_server.py MODEL_FILE ALIAS CONTEXT_LENGTH MAX_RUNNING_REQUESTS THREADS ADDRESS_FILE

Listens on a free port of loopback and writes its address to ADDRESS_FILE. Requests need the key in
ENGINE_API_KEY.
"""

import os
import signal
import sys
from pathlib import Path

import xllamacpp


def main(argv: list[str]) -> int:
    model_file, alias, context_length, running, threads, address_file = argv
    params = xllamacpp.CommonParams()
    params.model.path = model_file
    params.model_alias = {alias}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [os.environ.pop("ENGINE_API_KEY")]
    # llama.cpp divides one context among its slots.
    params.n_ctx = int(context_length) * int(running)
    params.n_parallel = int(running)
    params.cpuparams.n_threads = int(threads)
    params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    temporary = Path(address_file + ".tmp")
    temporary.write_text(server.listening_address)
    temporary.rename(address_file)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # The server's threads do not end by themselves, and have nothing to save.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
