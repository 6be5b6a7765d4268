#!/usr/bin/env python3
"""Measures prefill, decode at depth and batched decode of llama.cpp through its C API (package
llama-cpp-python).

The tests and the JSON are those of `kvasir bench`. Variants: default; weights not repacked; flash attention
on or off; one KV buffer for all sequences or one for each. Run it with the interpreter of the environment
that `setup_peers.sh` makes.
"""
import argparse
import ctypes
import json
import statistics
import sys
import time

import llama_cpp as ll

BATCH_DEPTH = 128
BATCH = 2048
UBATCH = 512
WARM_UP_TOKENS = 64
FLASH = {"auto": -1, "off": 0, "on": 1}


def numbers(text):
    return [int(part) for part in text.split(",") if part]


class Model:
    """Loaded weights."""

    def __init__(self, path, repack):
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self.handle = ll.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            sys.exit(f"llama.cpp cannot load {path}")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.handle))


class Context:
    """A KV cache for as many sequences as a test needs. A larger one would slow down every test."""

    def __init__(self, model, args, sequences, tokens):
        self.model = model
        params = ll.llama_context_default_params()
        # A separate buffer per sequence is n_ctx / sequences long, in units of 256.
        room = (tokens + 255) // 256 * 256
        params.n_ctx = room * sequences
        params.n_batch = BATCH
        params.n_ubatch = UBATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = args.threads
        params.flash_attn_type = FLASH[args.flash]
        params.kv_unified = args.unified or sequences == 1
        # Layers with a sliding window keep only the window, as in llama-server.
        params.swa_full = False
        self.handle = ll.llama_init_from_model(model.handle, params)
        if not self.handle:
            sys.exit("llama.cpp cannot create a context")
        self.memory = ll.llama_get_memory(self.handle)
        self.batch = ll.llama_batch_init(BATCH, 0, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ll.llama_batch_free(self.batch)
        ll.llama_free(self.handle)

    def forget(self):
        ll.llama_memory_clear(self.memory, False)

    def rewind(self, sequences, position):
        """Truncates each sequence to `position` tokens. Computes them again if a recurrent state cannot be
        truncated.
        """
        if position > 0 and all(ll.llama_memory_seq_rm(self.memory, s, position, -1) for s in range(sequences)):
            return
        self.forget()
        for sequence in range(sequences):
            self.prefill(sequence, position)

    def run(self, rows):
        """Decodes `rows`: (sequence, position, wants logits). Returns the seconds of the computation alone.
        """
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, logits) in enumerate(rows):
            batch.token[i] = (i * 7919 + position * 13 + 11) % self.model.vocab
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        start = time.perf_counter()
        code = ll.llama_decode(self.handle, batch)
        ll.llama_synchronize(self.handle)
        took = time.perf_counter() - start
        if code != 0:
            sys.exit(f"llama_decode answered {code}")
        return took

    def prefill(self, sequence, tokens):
        took = 0.0
        for start in range(0, tokens, BATCH):
            end = min(tokens, start + BATCH)
            took += self.run([(sequence, p, p == tokens - 1) for p in range(start, end)])
        return took

    def decode(self, sequences, position, steps):
        """Returns seconds without sampling. Kvasir's figure includes sampling."""
        return sum(self.run([(s, position + step, True) for s in range(sequences)]) for step in range(steps))


def measure(args):
    model = Model(args.model, not args.no_repack)
    rows = []

    def add(test, tokens, batch, rates):
        middle = statistics.median(rates)
        rows.append({"test": test, "tokens": tokens, "batch": batch, "tps": middle,
                     "spread": (max(rates) - min(rates)) / middle})

    for tokens in args.prefill:
        with Context(model, args, 1, tokens) as context:
            context.prefill(0, min(tokens, WARM_UP_TOKENS))
            rates = []
            for _ in range(args.repeat):
                context.forget()
                rates.append(tokens / context.prefill(0, tokens))
        add("prefill", tokens, 1, rates)
    tests = [("decode", depth, 1) for depth in args.depth] + [("batch", BATCH_DEPTH, b) for b in args.batch]
    for test, depth, batch in tests if args.decode else []:
        with Context(model, args, batch, depth + args.decode) as context:
            for sequence in range(batch):
                context.prefill(sequence, depth)
            context.decode(batch, depth, min(args.decode, 4))
            rates = []
            for _ in range(args.repeat):
                context.rewind(batch, depth)
                rates.append(args.decode * batch / context.decode(batch, depth, args.decode))
        add(test, depth, batch, rates)
    print(json.dumps({"model": args.model, "threads": args.threads, "version": ll.__version__, "rows": rows}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-p", "--prefill", type=numbers, default=[512, 2048])
    parser.add_argument("-n", "--decode", type=int, default=128)
    parser.add_argument("-d", "--depth", type=numbers, default=[0])
    parser.add_argument("-b", "--batch", type=numbers, default=[])
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-r", "--repeat", type=int, default=3)
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--flash", choices=FLASH, default="auto")
    parser.add_argument("--unified", action="store_true", help="batched decode from one KV buffer")
    args = parser.parse_args()
    # Disables the library's log, so that the output consists of the report alone.
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    measure(args)


if __name__ == "__main__":
    main()
