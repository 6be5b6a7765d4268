#!/usr/bin/env python3
"""Compiles the products of some weight types in several ways. ab.py compares them on a device.

    bench/gpu/variants.py OUT                 # OUT/TYPE.VARIANT.cubin, for sm_90a
    bench/gpu/variants.py OUT --arch sm_121a
    bench/gpu/variants.py --check             # whether every change still finds its place in the sources

Needs NVRTC 13, in the folder KVASIR_CUDA_LIBRARIES or on the loader's path. Needs no GPU.
"""
import argparse
import ctypes
import glob
import os
import pathlib
import re
import sys

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "kernels/cuda/src"
# For prompts: one block per multiprocessor instead of two. A thread has twice the registers, and holds the next
# weights while it multiplies with the current ones.
ONE_BLOCK = [
    ("PRODUCT_KERNEL(mul_128, STAGED_TOKENS, 2,", "PRODUCT_KERNEL(mul_128, STAGED_TOKENS, 1,"),
    ("    bring(1);\n", "    bring(1);\n    Fragments f;\n    f.load(tile, 0, g, q);\n"),
    ("            Fragments f;\n"
     "            f.load(tile + (u64)(block / UNIT_BLOCKS) * UNIT_BYTES, block % UNIT_BLOCKS, g, q);\n",
     "            u32 next = min(block + 1, blocks - 1);\n"
     "            Fragments now = f;\n"
     "            f.load(tile + (u64)(next / UNIT_BLOCKS) * UNIT_BYTES, next % UNIT_BLOCKS, g, q);\n"),
    ("add_block<32>(f, g,", "add_block<32>(now, g,"),
]
# Without the prefetches of weights into the L2 cache.
NO_PREFETCH = [
    ('asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at + LINE * thread));', ";"),
]
# For prompts: the end of a segment by a count instead of a remainder. Fewer instructions, one more register.
COUNTED = [
    ("    Sums<32> sums = {}, total = {};\n", "    u32 left = p.segment * UNIT_BLOCKS;\n    Sums<32> sums = {}, total = {};\n"),
    ("            if ((block + 1) % (p.segment * UNIT_BLOCKS) == 0) end_segment();\n",
     "            if (--left == 0) end_segment(), left = p.segment * UNIT_BLOCKS;\n"),
]
VARIANTS = {"base": [], "one_block": ONE_BLOCK, "no_prefetch": NO_PREFETCH, "counted": COUNTED}
# BITS, LEVELS, OFFSET and SCALING, as in kernels/cuda/src/source/matmul.rs.
TYPES = {"q4_k": ("4", "PLAIN", "0", "SUPER_MIN"), "q6_k": ("6", "PLAIN", "32", "SIXTEENTHS"), "mxfp4": ("4", "E2M1", "0", "E8M0")}


def read(name):
    return (SOURCES / name).read_text()


def source(ty, changes):
    """Returns the source of a type's products with changes applied. Exits if a change does not match the
    source.
    """
    bits, levels, offset, scaling = TYPES[ty]
    text = "".join(read(f"matmul/{name}") for name in ["format.cuh", "product.cuh", "exact.cuh", "quantised.cu"])
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"the products' sources have no {old!r} any more")
        text = text.replace(old, new)
    head = f"#define NAME(kernel) {ty}_##kernel\n#define BITS {bits}\n#define LEVELS {levels}\n#define OFFSET {offset}\n" \
           f"#define SCALING {scaling}\n"
    return head + text


class Compiler:
    def __init__(self):
        folder = os.environ.get("KVASIR_CUDA_LIBRARIES", "")
        for builtins in glob.glob(os.path.join(folder, "libnvrtc-builtins.so.13*")) if folder else []:
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.nvrtc = ctypes.CDLL(os.path.join(folder, "libnvrtc.so.13"))

    def bytes(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(self.nvrtc, f"nvrtcGet{what}")(program, data)
        return data.raw

    def compile(self, name, text, arch):
        """Returns the CUBIN and the compiler's log."""
        headers = ["prelude.cuh", "math.cuh", "rows.cuh"]
        texts = (ctypes.c_char_p * len(headers))(*[read(header).encode() for header in headers])
        names = (ctypes.c_char_p * len(headers))(*[header.encode() for header in headers])
        program = ctypes.c_void_p()
        if self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names) != 0:
            raise SystemExit(f"{name}: NVRTC takes no source")
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-default-device", b"--ptxas-options=-v"]
        status = self.nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.bytes(program, "ProgramLog").rstrip(b"\0").decode()
        if status != 0:
            raise SystemExit(f"{name} does not compile for {arch}: {log}")
        return self.bytes(program, "CUBIN"), log


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    sources = {(ty, variant): source(ty, changes) for ty in TYPES for variant, changes in VARIANTS.items()}
    if args.check:
        return
    if args.out is None:
        parser.error("a folder to write to is missing")
    args.out.mkdir(parents=True, exist_ok=True)
    compiler = Compiler()
    for (ty, variant), text in sources.items():
        code, log = compiler.compile(f"{ty}.{variant}", text, args.arch)
        (args.out / f"{ty}.{variant}.cubin").write_bytes(code)
        spilled = max((int(n) for n in re.findall(r"(\d+) bytes spill stores", log)), default=0)
        print(ty, variant, "registers", *re.findall(r"Used (\d+) registers", log), "spills up to", spilled, "bytes")


if __name__ == "__main__":
    sys.exit(main())
