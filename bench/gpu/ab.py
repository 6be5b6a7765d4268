#!/usr/bin/env python3
"""Compares variants of the product kernels on a GPU.

Reads the variants that variants.py compiled. Prints one line of JSON for each: the time of a launch, the
share of the copy bandwidth, and whether the bits equal those of `base`. Needs CuPy. Exits with 1 if a
variant's bits differ.

    bench/gpu/ab.py FOLDER --seconds 50
"""
import argparse
import json
import pathlib
import sys
import time

import cupy as cp
import numpy as np

# Bytes of a unit (32 rows of 256 columns) in device memory. See kernels/cuda/src/pack.rs.
UNIT_BYTES = {"q4_k": 4608, "q6_k": 6720, "mxfp4": 4352}
UNIT_ROWS, UNIT_COLS = 32, 256
SHAPES = [(14336, 4096), (4096, 4096), (4096, 14336)]
# BLOCK_TOKENS: tokens of one block of each kernel. PLAN: pairs of a number of tokens and the kernel to run.
BLOCK_TOKENS = {"mul_1": 1, "mul_4": 4, "mul_8": 8, "mul_32": 32, "mul_128": 128}
PLAN = [(1, "mul_1"), (4, "mul_4"), (8, "mul_8"), (32, "mul_32"), (64, "mul_32"), (64, "mul_128"), (128, "mul_32"),
        (128, "mul_128"), (512, "mul_32"), (512, "mul_128"), (2048, "mul_128")]
MOST_TOKENS = 2048
# Each matrix is copied until all copies together exceed any cache.
SPREAD_BYTES = 400 << 20
COPY_BYTES = 1 << 29
RUNS = 3
MAX_SEGMENTS = 8
u32, u64, f32 = np.uint32, np.uint64, np.float32


class Bench:
    def __init__(self):
        self.stream = cp.cuda.Stream(non_blocking=True)
        to, of = cp.zeros(COPY_BYTES, cp.uint8), cp.ones(COPY_BYTES, cp.uint8)
        copy = lambda: cp.cuda.runtime.memcpyAsync(to.data.ptr, of.data.ptr, COPY_BYTES, 3, self.stream.ptr)  # noqa: E731
        self.copies = 2 * COPY_BYTES / self.timed(copy)

    def timed(self, work):
        """Seconds of the launches of `work`, recorded as a graph: the median of RUNS runs after one warm-up
        run.
        """
        with self.stream:
            work()
            self.stream.synchronize()
            self.stream.begin_capture()
            work()
            graph = self.stream.end_capture()
            seconds = []
            for _ in range(RUNS + 1):
                begin, end = cp.cuda.Event(), cp.cuda.Event()
                begin.record(self.stream)
                graph.launch(self.stream)
                end.record(self.stream)
                end.synchronize()
                seconds.append(cp.cuda.get_elapsed_time(begin, end) * 1e-3)
        return sorted(seconds[1:])[RUNS // 2]


def activations(rng, cols):
    """Random rows of 8-bit blocks in the layout of kernels/cuda/src/rowwise.cu: 32 values, scale, scaled sum,
    sums.
    """
    blocks = cols // 32
    rows = np.zeros((MOST_TOKENS, blocks, 48), np.uint8)
    quants = rng.integers(-127, 128, (MOST_TOKENS, blocks, 32), np.int8)
    scale = rng.random((MOST_TOKENS, blocks), np.float32) * f32(0.01)
    halves = quants.reshape(MOST_TOKENS, blocks, 2, 16).astype(np.int32).sum(-1)
    total = halves.sum(-1)
    rows[..., :32] = quants.view(np.uint8)
    rows[..., 32:36] = scale[..., None].view(np.uint8)
    rows[..., 36:40] = (scale * total.astype(np.float32))[..., None].view(np.uint8)
    rows[..., 40:44] = (-total).astype(np.int32)[..., None].view(np.uint8)
    rows[..., 44:48] = (-halves).astype(np.int16).view(np.uint8).reshape(MOST_TOKENS, blocks, 4)
    return cp.asarray(rows)


def compare(bench, ty, modules, shape, until):
    """Prints one line for each variant and number of tokens. Returns the number of lines with other bits than
    `base`.
    """
    rows, cols = shape
    rng = np.random.default_rng(1)
    units = cols // UNIT_COLS
    tile, segment = units * UNIT_BYTES[ty], -(-units // MAX_SEGMENTS)
    size = rows // UNIT_ROWS * tile
    copies = max(2, min(64, SPREAD_BYTES // size))
    weights = cp.tile(cp.asarray(np.frombuffer(rng.bytes(size), np.uint8) & 0xbf), copies)
    x, out, other = activations(rng, cols), cp.empty((MOST_TOKENS, rows), cp.float32), 0
    for tokens, name in PLAN:
        base = None
        for variant, module in modules.items():
            if time.monotonic() > until:
                return other
            kernel = module.get_function(f"{ty}_{name}")
            if name == "mul_128":
                grid, threads = (-(-tokens // 128), -(-(rows // UNIT_ROWS) // 2), 1), 256
            else:
                grid, threads = (-(-tokens // BLOCK_TOKENS[name]), rows // UNIT_ROWS, 1), 32 * -(-units // segment)

            def launch(copy, kernel=kernel, grid=grid, threads=threads, tokens=tokens):
                none = [u64(0), u32(0), f32(0), u64(0), u32(0), u64(0), u32(0)]
                matrix = [u64(weights.data.ptr + copy * size), u32(rows), f32(1), u64(0), u32(0), u64(out.data.ptr), u32(rows)]
                shared = [u32(tile), u64(0), u64(0), u64(0), u64(x.data.ptr), u32(1), u32(tokens), u32(cols), u32(segment)]
                kernel(grid, (threads,), tuple(matrix + none + none + shared))

            runs = copies if tokens <= 64 else 2
            out.fill(float("nan"))
            cp.cuda.Device().synchronize()
            seconds = bench.timed(lambda: [launch(copy) for copy in range(runs)]) / runs
            bits = out[:tokens].get().view(np.uint32)
            base = bits if base is None else base
            same = bool((bits == base).all()) and not bool(np.isnan(bits.view(np.float32)).any())
            other += not same
            print(json.dumps({"type": ty, "rows": rows, "cols": cols, "tokens": tokens, "kernel": name, "variant": variant,
                              "us": seconds * 1e6, "of_copy": size / seconds / bench.copies,
                              "tera": 2e-12 * rows * cols * tokens / seconds, "same_bits": same}), flush=True)
    return other


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    until, bench, other = time.monotonic() + args.seconds, Bench(), 0
    for ty in UNIT_BYTES:
        names = sorted((path.name.split(".")[1] for path in args.folder.glob(f"{ty}.*.cubin")), key=lambda name: (name != "base", name))
        modules = {name: cp.RawModule(path=str(args.folder / f"{ty}.{name}.cubin")) for name in names}
        for shape in SHAPES if modules else []:
            other += compare(bench, ty, modules, shape, until)
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
