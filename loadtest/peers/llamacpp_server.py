"""Serve one GGUF file with llama.cpp's own HTTP server.

    python llamacpp_server.py MODEL.gguf PORT --threads N --slots N --context N --ubatch N

Runs in a peer's environment, so it imports nothing of Tandem. The context is per slot, in tokens.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--ubatch", type=int, required=True)
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {"peer"}
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context
    params.n_ubatch = args.ubatch
    params.kv_unified = False  # one buffer for all makes each sequence attend over the cells of all others
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        del server


if __name__ == "__main__":
    main()
