#!/usr/bin/env python3
"""Prefill, decode at depth and batched decode of llama.cpp through its C API (package llama-cpp-python).

The same tests as `kvasir bench`, the same JSON. Variants: default, weights not repacked, flash attention on or off.
"""
import argparse
import ctypes
import json
import os
import statistics
import sys
import time

import llama_cpp as ll

BATCH_DEPTH = 128


def numbers(text):
    return [int(part) for part in text.split(",") if part]


class Engine:
    """One loaded model with one context."""

    def __init__(self, path, threads, context, sequences, repack, flash, ubatch=512):
        model = ll.llama_model_default_params()
        model.n_gpu_layers = 0
        if hasattr(model, "use_extra_bufts"):
            model.use_extra_bufts = repack
        self.model = ll.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = ll.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = max(2048, sequences)
        params.n_ubatch = ubatch
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1 if flash else 0
        else:
            params.flash_attn = flash
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp cannot create a context")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(max(2048, sequences), 0, 1)

    def close(self):
        ll.llama_batch_free(self.batch)
        ll.llama_free(self.context)
        ll.llama_model_free(self.model)

    def forget(self):
        ll.llama_memory_clear(ll.llama_get_memory(self.context), False)

    def trim(self, position):
        memory = ll.llama_get_memory(self.context)
        ll.llama_memory_seq_rm(memory, -1, position, -1)

    def run(self, rows):
        """rows: (sequence, position, wants logits)"""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, logits) in enumerate(rows):
            batch.token[i] = (i * 7919 + position * 13 + 11) % self.vocab
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        code = ll.llama_decode(self.context, batch)
        if code != 0:
            sys.exit(f"llama_decode answered {code}")

    def prefill(self, sequences, tokens):
        for sequence in range(sequences):
            for start in range(0, tokens, 2048):
                end = min(tokens, start + 2048)
                self.run([(sequence, p, p == tokens - 1) for p in range(start, end)])

    def argmax(self, row):
        logits = ll.llama_get_logits_ith(self.context, row)
        values = (ctypes.c_float * self.vocab).from_address(ctypes.addressof(logits.contents))
        return values[0]


def measure(args):
    depth = max(args.depth) + args.decode
    widest = max([1] + args.batch)
    context = max(max(args.prefill, default=1), depth, widest * (BATCH_DEPTH + args.decode)) + 64
    engine = Engine(args.model, args.threads, context, widest, not args.no_repack, args.flash)
    rows = []

    def add(test, tokens, batch, rates):
        middle = statistics.median(rates)
        rows.append({"test": test, "tokens": tokens, "batch": batch, "tps": middle,
                     "spread": (max(rates) - min(rates)) / middle})

    for tokens in args.prefill:
        rates = []
        for turn in range(args.repeat + 1):
            engine.forget()
            start = time.perf_counter()
            engine.prefill(1, tokens)
            engine.argmax(-1)
            if turn:
                rates.append(tokens / (time.perf_counter() - start))
        add("prefill", tokens, 1, rates)
    tests = [("decode", d, 1) for d in args.depth] + [("batch", BATCH_DEPTH, b) for b in args.batch]
    for test, tokens, batch in tests if args.decode else []:
        engine.forget()
        engine.prefill(batch, tokens) if tokens else None
        rates = []
        for turn in range(args.repeat + 1):
            engine.trim(tokens)
            start = time.perf_counter()
            for step in range(args.decode):
                engine.run([(sequence, tokens + step, True) for sequence in range(batch)])
                engine.argmax(-1)
            if turn:
                rates.append(args.decode * batch / (time.perf_counter() - start))
        add(test, tokens, batch, rates)
    engine.close()
    print(json.dumps({"model": args.model, "threads": args.threads, "version": ll.__version__, "rows": rows}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-p", "--prefill", type=numbers, default=[512, 2048])
    parser.add_argument("-n", "--decode", type=int, default=128)
    parser.add_argument("-d", "--depth", type=numbers, default=[0])
    parser.add_argument("-b", "--batch", type=numbers, default=[])
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-r", "--repeat", type=int, default=3)
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--flash", action="store_true")
    args = parser.parse_args()
    # The library talks on stdout and stderr; the report is the only thing a caller should read.
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    measure(args)


if __name__ == "__main__":
    main()
