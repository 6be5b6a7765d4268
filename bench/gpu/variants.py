#!/usr/bin/env python3
"""Compiles the products of some weight types in several ways. ab.py compares them on a device.

    bench/gpu/variants.py OUT                 # OUT/TYPE.VARIANT.cubin, for sm_90
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
# For prompts: two blocks per multiprocessor instead of one. A thread has half the registers, so some formats
# spill.
OCCUPANCY = [
    ("PRODUCT_KERNEL(mul_128, STAGED_TOKENS, 1,", "PRODUCT_KERNEL(mul_128, STAGED_TOKENS, 2,"),
    ("    Fragments f;\n    f.load(tile, 0, g, q);\n#pragma unroll 1", "#pragma unroll 1"),
    ("            Fragments now = f;\n"
     "            f.load(tile + (u64)(next / UNIT_BLOCKS) * UNIT_BYTES, next % UNIT_BLOCKS, g, q);",
     "            Fragments now;\n"
     "            now.load(tile + (u64)(block / UNIT_BLOCKS) * UNIT_BYTES, block % UNIT_BLOCKS, g, q);"),
]
# Prefetches weights into the L2 cache, the unit after the next one.
AHEAD = """template <class P> __device__ __forceinline__ void ahead(const P &p, const u8 *tile, u32 u, u32 end) {
    if (u >= end) return;
    for (u32 at = 128 * p.lane(); at < UNIT_BYTES; at += 4096)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(tile + (u64)u * UNIT_BYTES + at));
}
// Activations of 8 bits.
"""
ASK = "        if (u == first) ahead(p, tile, u + 1, end);\n        ahead(p, tile, u + 2, end);\n"
PREFETCH = [
    ("// Activations of 8 bits.\n", AHEAD),
    ("        Unit<Words> unit(tile", ASK + "        Unit<Words> unit(tile"),
    ("#pragma unroll 1\n        for (int j = 0; j < UNIT_BLOCKS && u",
     ASK + "#pragma unroll 1\n        for (int j = 0; j < UNIT_BLOCKS && u"),
    ("            if (block >= blocks) break;\n",
     "            if (block >= blocks) break;\n"
     "            if (block % UNIT_BLOCKS == 0) ahead(p, tile, block / UNIT_BLOCKS + 1, units);\n"),
]
VARIANTS = {"base": [], "occupancy": OCCUPANCY, "prefetch": PREFETCH, "both": OCCUPANCY + PREFETCH}
# BITS, LEVELS, OFFSET and SCALING, as in kernels/cuda/src/source/matmul.rs.
TYPES = {"q4_k": ("4", "PLAIN", "0", "SUPER_MIN"), "q6_k": ("6", "PLAIN", "32", "SIXTEENTHS"), "mxfp4": ("4", "E2M1", "0", "E8M0")}


def read(name):
    return (SOURCES / name).read_text()


def source(ty, changes):
    """Returns the source of a type's products with changes applied. Exits if a change does not match the
    source.
    """
    bits, levels, offset, scaling = TYPES[ty]
    text = read("matmul/quantised.cu")
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"matmul/quantised.cu has no {old!r} any more")
        text = text.replace(old, new)
    head = f"#define NAME(kernel) {ty}_##kernel\n#define BITS {bits}\n#define LEVELS {levels}\n#define OFFSET {offset}\n" \
           f"#define SCALING {scaling}\n"
    return head + read("matmul/format.cuh") + read("matmul/product.cuh") + text


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
        headers = ["prelude.cuh", "math.cuh"]
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
    parser.add_argument("--arch", default="sm_90")
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
