#!/usr/bin/env python3
"""Runs a llama-server from the package xllamacpp, for tests by hand of the client in this crate.

`pip install xllamacpp`, then `python3 llama_server.py MODEL.gguf PORT [SECONDS]`. The server ends with this
process, or after that many seconds.
"""

import sys
import time

import xllamacpp


def main():
    model, port = sys.argv[1], int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 3600.0
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_ctx = 4096
    params.n_parallel = 2
    params.warmup = False
    params.endpoint_slots = True
    params.endpoint_metrics = True
    # Prompts of other tenants must not come back from host memory.
    params.cache_ram_mib = 0
    # Repacked weights have crashed on CPUs with AMX.
    params.no_extra_bufts = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    time.sleep(seconds)


main()
